"""Every Python and YAML block of the documentation runs or loads, and every JSON argument in a command parses.

A page's Python blocks run in their order and share their names, in an empty directory, as pasted. Names that a reader
is expected to have (an engine, a cold path, token ids) are given by ``GIVEN``; nothing else is.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from lmcache_hs_backend.config import TieredConfig, hot_tier_bytes, plugin_names

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs/tutorial/first-steps.md"
PAGES = sorted(path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if path.name != "CHANGELOG.md")


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """The fenced blocks of a page in one of some languages: line in the page, and text."""
    found = []
    for token in MarkdownIt().parse(page.read_text()):
        if token.type == "fence" and token.info.strip() in languages and token.map is not None:
            found.append((token.map[0] + 1, token.content))
    return found


def having(*languages: str) -> list[Any]:
    pages = [page for page in PAGES if blocks(page, *languages)]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


# -- what a reader is expected to have -----------------------------------------------------------------------


def engine_and_rows(request: pytest.FixtureRequest) -> dict[str, Any]:
    from tests.support.engines import CHUNK, rows_of, tokens_of

    engine = request.getfixturevalue("start")()
    token_ids = tokens_of(4)
    engine.store_both(token_ids, rows_of(4 * CHUNK))  # with their KV, without which nothing is served
    rows = rows_of(4 * CHUNK)
    return {"engine": engine.engine, "token_ids": token_ids, "rows": rows, "rows24": rows * 2}


def a_chunk_file(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"path": next(a_cold_path(request).rglob("*.safetensors"))}


def a_cold_path(request: pytest.FixtureRequest) -> Path:
    import torch

    from lmcache_hs_backend import TieredStore

    path: Path = request.getfixturevalue("tmp_path") / ".cache/lmcache-hs"
    capture = {"layer_ids": "vllm", "num_layers": 30, "last_layer": "pre-norm"}
    with TieredStore.open(path, model="m", hot_size=0.01, max_cold_size=1, min_free_disk=0, capture=capture) as store:
        for number in range(3):
            rows = torch.randn(300, 16).bfloat16()
            store.store(*store.prompt([number, *range(299)]), {idx: rows + idx for idx in (2, 15, 27, 30)})
    return path


def cold_path_at_home(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The pages write ``~/.cache/lmcache-hs``."""
    home = a_cold_path(request).parents[1]
    request.getfixturevalue("monkeypatch").setenv("HOME", str(home))
    return {}


def a_server(request: pytest.FixtureRequest) -> dict[str, Any]:
    """LMCache's MP server with our module."""
    from tests.support.mp_server import MpServer

    tmp_path = request.getfixturevalue("tmp_path")
    server = MpServer(tmp_path / "mp-cold", tmp_path / "mp-log")
    request.addfinalizer(server.stop)
    server.start()
    return {"url": server.url}


def engine_and_server(request: pytest.FixtureRequest) -> dict[str, Any]:
    return engine_and_rows(request) | a_server(request)


GIVEN: dict[str, Callable[[pytest.FixtureRequest], dict[str, Any]]] = {
    "README.md": engine_and_rows,
    "docs/reference/chunk-file.md": a_chunk_file,
    "docs/how-to/extract.md": cold_path_at_home,
    "docs/how-to/mp-mode.md": a_server,
    "docs/how-to/consumers.md": engine_and_server,
}


# -- the tests -----------------------------------------------------------------------------------------------


def test_there_are_examples() -> None:
    assert {"README.md", *GIVEN} <= {str(page.values[0].relative_to(ROOT)) for page in having("python")}
    assert having("yaml")


@pytest.mark.engine
@pytest.mark.parametrize("page", having("python"))
def test_python_runs_as_pasted(page: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    name = str(page.relative_to(ROOT))
    given = GIVEN[name](request) if name in GIVEN else {}
    names: dict[str, Any] = {"__name__": "__main__"}
    request.getfixturevalue("monkeypatch").chdir(tmp_path)
    for line, text in blocks(page, "python"):
        code = compile("\n" * line + text, str(page), "exec")  # so that a traceback names the page's own line
        names.update(given)  # a block before this one may have used a name for something else
        exec(code, names)


def test_the_readmes_store_prints_what_it_says_also_when_it_is_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = next(text for _, text in blocks(ROOT / "README.md", "python") if "TieredStore" in text)
    code = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(code) <= 10
    printed = []
    for _ in range(2):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(text, {})
        printed.append(out.getvalue())
    assert printed == ["True\n2 0\n", "True\n0 2\n"]


def test_the_first_steps_print_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of the tutorial in its order, commands too, and each output as it stands below its block."""
    pytest.importorskip("datasets", reason="needs the extra 'extract'")
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    names: dict[str, Any] = {"__name__": "__main__"}
    printed, compared = "", 0
    fences = [token for token in MarkdownIt().parse(TUTORIAL.read_text()) if token.type == "fence"]
    for token in fences:
        if token.info == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(token.content, names)
            printed = out.getvalue()
        elif token.info == "sh":
            program, *arguments = shlex.split(token.content)
            command = [
                sys.executable,
                "-m",
                f"lmcache_hs_backend.cli.{program.removeprefix('lmcache-hs-')}",
                *arguments,
            ]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            printed = done.stdout + done.stderr
        else:
            shown = [line.rstrip() for line in token.content.splitlines()]
            assert [line for line in shown if line not in [line.rstrip() for line in printed.splitlines()]] == []
            compared += 1
    assert compared >= 6


@pytest.mark.parametrize("page", having("yaml"))
def test_yaml_loads_and_settings_of_ours_are_valid(page: Path) -> None:
    for line, text in blocks(page, "yaml"):
        loaded = yaml.safe_load(text)
        assert loaded, f"{page.name}, line {line}"
        extra = loaded.get("extra_config") if isinstance(loaded, dict) else None
        if extra is None:
            continue
        for plugin in loaded.get("storage_plugins", ["hs_tiered"]):
            TieredConfig.from_extra_config(extra, plugin)
        if "storage_plugins" in loaded:
            assert plugin_names(extra, "lmcache_hs_backend", "HSTieredBackend") == loaded["storage_plugins"]
            hot_tier_bytes(loaded["max_hidden_state_cpu_size"])


@pytest.mark.engine
@pytest.mark.parametrize("page", having("yaml"))
def test_keys_of_lmcache_yaml_are_lmcaches(page: Path) -> None:
    from lmcache.v1.config import LMCacheEngineConfig

    known = LMCacheEngineConfig.from_defaults()
    for line, text in blocks(page, "yaml"):
        if text.startswith("# lmcache.yaml"):
            for key in yaml.safe_load(text):
                assert hasattr(known, key), f"{page.name}, line {line}: LMCache has no {key}"


@pytest.mark.engine
def test_the_readmes_yaml_has_twelve_lines_and_loads_in_a_real_engine(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    """Only the sizes and the place are others here: /nvme, 200 GB and 4 GB are not everywhere."""
    from lmcache.v1.config import LMCacheEngineConfig

    ((_, text),) = blocks(ROOT / "README.md", "yaml")
    assert len([line for line in text.splitlines() if not line.startswith("#")]) <= 12
    loaded = yaml.safe_load(text)
    changed = {
        "max_local_cpu_size": 0.1, "max_hidden_state_cpu_size": 0.1, "local_disk": f"file://{tmp_path}/kv/",
        "max_local_disk_size": 0.1,
    }  # fmt: skip
    assert set(changed) <= set(loaded)
    extra = loaded["extra_config"]
    extra |= {
        "storage_plugin.hs_tiered.cold_path": str(tmp_path / "cold"),
        "storage_plugin.hs_tiered.max_cold_size": 1,
    }
    path = tmp_path / "lmcache.yaml"
    path.write_text(yaml.safe_dump(loaded | changed))
    engine = start(config=LMCacheEngineConfig.from_file(str(path)))
    assert type(engine.engine.hidden_state_store).__name__ == "TieredHiddenStateStore"


@pytest.mark.parametrize("page", having("sh", "json", "jsonl"))
def test_json_in_commands_and_blocks_parses(page: Path) -> None:
    for _, text in blocks(page, "json"):
        json.loads(text)
    for line, text in blocks(page, "sh"):
        words = shlex.split(text.replace("\\\n", " "), comments=True)
        for option, value in itertools.pairwise(words):
            if option in ("--kv-transfer-config", "--speculative-config"):
                assert isinstance(json.loads(value), dict), f"{page.name}, line {line}"


def test_connectors_that_commands_name_can_be_imported() -> None:
    named = set()
    for page in PAGES:
        for text in re.findall(r"--kv-transfer-config\s+\\?\s*'([^']+)'", page.read_text()):
            config = json.loads(text)
            named.add((config["kv_connector"], config.get("kv_connector_module_path", "")))
            for child in config.get("kv_connector_extra_config", {}).get("connectors", ()):
                named.add((child["kv_connector"], child.get("kv_connector_module_path", "")))
    assert {
        ("LMCacheConnectorV1Dynamic", "lmcache.integration.vllm.lmcache_connector_v1"),
        ("HSTieredConnector", "lmcache_hs_backend.integrations.vllm.connector"),
    } <= named
    factory = pytest.importorskip("vllm.distributed.kv_transfer.kv_connector.factory", reason="needs vLLM")
    vllm_config = pytest.importorskip("vllm.config")
    for connector, module in sorted(named):
        if module.startswith("lmcache."):
            pytest.importorskip("lmcache", reason="needs LMCache beside vLLM")
        config = vllm_config.KVTransferConfig(
            kv_connector=connector, kv_connector_module_path=module or None, kv_role="kv_both"
        )
        found = factory.KVConnectorFactory.get_connector_class(config)
        assert found.__name__ == connector
