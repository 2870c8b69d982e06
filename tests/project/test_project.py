"""The project keeps its own rules: imports point one way, and the documentation says what the code does."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from lmcache_hs_backend import metrics
from lmcache_hs_backend.config import LOADER_KEYS, ConfigError, TieredConfig, hot_tier_bytes, plugin_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lmcache_hs_backend"

#: From the bottom up; a module may import from its own level and from those below.
LEVELS = [
    ["chunk", "config"],
    ["format"],
    ["arena", "metrics"],
    ["tiers"],
    ["tiered", "debug", "first_rank"],
    ["integrations", "capture", "dataset", "cli"],
]


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or path.name != "__init__.py"]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def level_of(module: str) -> int:
    part = module.split(".")[1]
    return next((number for number, names in enumerate(LEVELS) if part in names), 0)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    parts = path.relative_to(ROOT).with_suffix("").parts
    own = level_of(".".join(parts))
    names = imports(path)
    for name in names:
        if name.startswith("lmcache_hs_backend."):
            assert level_of(name) <= own, f"{path} imports {name}"
    for outside, allowed in (
        ("lmcache", "integrations/lmcache"),
        ("vllm", ("integrations/vllm", "capture/engine.py")),
        ("speculators", "integrations/speculators.py"),
    ):
        if any(name == outside or name.startswith(outside + ".") for name in names):
            assert str(path.relative_to(PACKAGE)).startswith(allowed), f"{path} imports {outside}"


def test_no_module_of_the_core_is_too_long_to_read() -> None:
    too_long = {
        str(path.relative_to(ROOT)): count for path in modules() if (count := len(path.read_text().splitlines())) > 560
    }
    assert not too_long


def test_the_package_works_without_lmcache() -> None:
    code = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("lmcache", "vllm"):
            raise ImportError(name)
sys.meta_path.insert(0, Absent())
import lmcache_hs_backend.tiered, lmcache_hs_backend.format.reader, lmcache_hs_backend.cli.inspect
from lmcache_hs_backend import ColdTierReader, TieredConfig
try:
    from lmcache_hs_backend import HSTieredBackend
except ImportError as error:
    print("absent:", error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("absent: lmcache")


# -- settings ----------------------------------------------------------------------------------------------


def settings_in_docs() -> dict[str, str]:
    text = (ROOT / "docs/reference/settings.md").read_text()
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text, re.MULTILINE))


def test_every_setting_is_documented_with_its_default() -> None:
    documented = settings_in_docs()
    fields = {field.name: field for field in dataclasses.fields(TieredConfig)}
    assert set(fields) <= set(documented)
    for name, field in fields.items():
        if field.default is dataclasses.MISSING or name == "model_revision":
            continue
        shown = documented[name]
        expected = field.default
        if name == "cold_dir_mode":
            assert int(shown, 8) == expected
        elif isinstance(expected, bool):
            assert shown == str(expected).lower()
        elif isinstance(expected, float | int):
            assert float(shown) == expected
        else:
            assert shown == expected


def test_the_complete_configuration_lists_every_setting_with_its_default() -> None:
    loaded = yaml.safe_load((ROOT / "configs/hs_tiered.yaml").read_text())
    prefix = "storage_plugin.hs_tiered."
    given = {key[len(prefix) :]: value for key, value in loaded["extra_config"].items()}
    assert plugin_names(loaded["extra_config"], "lmcache_hs_backend", "HSTieredBackend") == ["hs_tiered"]
    assert set(given) - set(LOADER_KEYS) == {f.name for f in dataclasses.fields(TieredConfig)} - {"model_revision"}
    made = TieredConfig.from_extra_config(loaded["extra_config"], "hs_tiered")
    assert made == dataclasses.replace(TieredConfig(), cold_path="/nvme/hs")


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("max_cold_size", 0, "above 0"),
        ("max_cold_size", -1, "above 0"),
        ("max_cold_size", "twenty", "a number"),
        ("max_cold_size", float("nan"), "a number"),
        ("max_cold_size", True, "a number"),
        ("min_free_disk", -0.5, "at least 0"),
        ("io_threads", 2.5, "a whole number"),
        ("io_threads", 1000, "at most 64"),
        ("clean_fraction", 1.5, "at most 1"),
        ("use_odirect", "maybe", "'auto' or 'on' or 'off'"),
        ("on_kv_gone", "keep", "'delete' or 'archive'"),
        ("on_locked", None, "'subdir' or 'error'"),
        ("promote", "yes please", "true or false"),
        ("cold_path", "", "the path of a directory"),
        ("cold_path", 7, "the path of a directory"),
        ("cold_dir_mode", 700, "an octal mode"),
        ("cold_dir_mode", "0500", "an octal mode"),
        ("model_revision", ["a"], "a text"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TieredConfig.from_extra_config({f"storage_plugin.mine.{name}": value}, "mine")
    text = str(raised.value)
    assert text.startswith(f"extra_config['storage_plugin.mine.{name}'] is {value!r}, but must be ")
    assert allowed in text


def test_an_unknown_key_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"'storage_plugin\.x\.max_cold_sise'\] is not a setting.*max_cold_size"):
        TieredConfig.from_extra_config({"storage_plugin.x.max_cold_sise": 1}, "x")


@pytest.mark.parametrize(
    ("value", "expected"), [("auto", "auto"), (True, "on"), (False, "off"), ("on", "on"), ("off", "off")]
)
def test_yaml_reads_a_bare_on_or_off_as_a_boolean_and_it_means_the_same(value: object, expected: str) -> None:
    assert TieredConfig.from_extra_config({"storage_plugin.x.use_odirect": value}, "x").use_odirect == expected


def test_lenient_values_that_lmcache_accepts_too() -> None:
    values = {"max_cold_size": "3", "promote": "True", "fsync": 1, "cold_dir_mode": "0750", "cold_path": "~/x"}
    made = TieredConfig.from_extra_config({f"storage_plugin.x.{k}": v for k, v in values.items()}, "x")
    assert (made.max_cold_size, made.promote, made.fsync, made.cold_dir_mode) == (3, True, True, 0o750)
    assert made.cold_path == os.path.expanduser("~/x")


@pytest.mark.parametrize("size", [0, -1, "much", None])
def test_a_hot_tier_of_no_size_is_an_error(size: object) -> None:
    with pytest.raises(ConfigError, match="max_hidden_state_cpu_size"):
        hot_tier_bytes(size)


def test_the_default_cold_path_is_in_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert TieredConfig().cold_path == "/somewhere/lmcache-hs"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert TieredConfig().cold_path == os.path.expanduser("~/.cache/lmcache-hs")


# -- figures -----------------------------------------------------------------------------------------------


def test_the_failure_modes_name_counters_that_exist() -> None:
    names = set(metrics.COUNTERS) | set(metrics.GAUGES) | {"drops_offline", "cold_state"}
    text = (ROOT / "docs/reference/failure-modes.md").read_text()
    for name in re.findall(r"`((?:drops|misses|errors)_\w+)`", text):
        assert name in names


def test_the_failure_modes_name_tests_that_exist() -> None:
    text = (ROOT / "docs/reference/failure-modes.md").read_text()
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    for name in re.findall(
        r"`(?:\w+\.py::)?(test_\w+?)(?:_?…)?`", (ROOT / "docs/reference/failure-modes.md").read_text()
    ):
        assert f"def {name}" in tests, name
    for name in re.findall(r"`(test_\w+\.py)", text):
        assert name in files, name


def test_the_operators_table_has_every_figure_in_its_own_words() -> None:
    text = (ROOT / "docs/reference/metrics.md").read_text()
    table = text.partition("<!-- figures -->\n")[2].partition("\n<!-- /figures -->")[0].splitlines()
    kinds = {"counter": metrics.COUNTERS, "gauge": metrics.GAUGES, "histogram": metrics.HISTOGRAMS}
    expected = [f"| `{name}` | {kind}: {doc} |" for kind, group in kinds.items() for name, doc in group.items()]
    assert table[2:] == expected


def test_no_file_name_and_no_class_name_is_there_twice_in_the_package() -> None:
    files = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__init__.py"]
    names = Counter(path.name for path in files)
    # A trainer's name: its format, and the integration that feeds it live.
    assert {name for name, count in names.items() if count > 1} <= {"speculators.py"}
    classes = Counter(
        node.name
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in classes.items() if count > 1] == []
