"""``lmcache-hs-inspect check-config`` says what LMCache would make of a configuration."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_hs_backend.cli.config import check_config
from lmcache_hs_backend.cli.config.verdict import Verdict, check
from lmcache_hs_backend.cli.inspect import main
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.integrations.lmcache import lmcache_loader, lmcache_settings
from lmcache_hs_backend.integrations.lmcache.lmcache_settings import LoadError
from tests.support.inspecting import blocking, environment, inspect, inspect_json

PREFIX = "storage_plugin.hs_tiered."


def good(cold_path: Path) -> dict[str, Any]:
    return {
        "storage_plugins": ["hs_tiered"],
        "enable_hidden_state_cache": True,
        "extra_config": {
            f"{PREFIX}module_path": "lmcache_hs_backend",
            f"{PREFIX}class_name": "HSTieredBackend",
            f"{PREFIX}cold_path": str(cold_path),
            f"{PREFIX}max_cold_size": 1,
        },
    }


@contextlib.contextmanager
def lmcache(installed: bool, **env: str) -> Iterator[None]:
    """LMCache is there, or seems not to be. Its loader runs in this process, which imports it once for all tests."""

    def run(command: list[str], env: dict[str, str], **_: Any) -> subprocess.CompletedProcess[str]:
        path = command[command.index(lmcache_settings._LOADER) + 1 :]
        return subprocess.CompletedProcess(
            command, 0, yaml.safe_dump(lmcache_loader.load(path[0] if path else None)), ""
        )

    found = lmcache_settings.lmcache_directory() if installed else None
    with (
        mock.patch.dict(os.environ, environment(**env), clear=True),
        mock.patch.object(lmcache_settings, "lmcache_directory", return_value=found),
        mock.patch.object(check_config, "lmcache_directory", return_value=found),
        mock.patch.object(subprocess, "run", run),
    ):
        yield


def judge(path: Path | None, installed: bool, **env: str) -> Verdict:
    """The verdict, with or without LMCache."""
    with lmcache(installed, **env):
        return check(str(path) if path else None)


class Case:
    """A configuration file that starts out right."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "lmcache.yaml"
        self.cold_path = folder / "cold"
        self.values = good(self.cold_path)
        self.extra = self.values["extra_config"]

    def save(self) -> Path:
        self.path.write_text(yaml.safe_dump(self.values))
        return self.path

    def wrong_keys(self, *, only_lmcache_knows: bool = False, **env: str) -> list[str]:
        """The keys that check-config blames, where LMCache is installed and where it is not."""
        with_lmcache, without = (judge(self.save(), by_lmcache, **env) for by_lmcache in (True, False))
        found = [problem.key for problem in with_lmcache.problems]
        assert found
        assert with_lmcache.loads is False
        if not only_lmcache_knows:
            assert found == [problem.key for problem in without.problems]
        return found

    def warnings(self, **env: str) -> dict[str, str]:
        """What check-config warns of, by key, where LMCache is installed."""
        return {warning.key: warning.text for warning in judge(self.save(), True, **env).warnings}


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path)


class TestVerdict:
    def test_a_right_configuration_loads_and_nothing_is_created(self, case: Case) -> None:
        result = inspect_json("check-config", case.save())
        assert (result["loads"], result["plugin"], result["problems"]) == (True, "hs_tiered", [])
        assert not case.cold_path.exists()

    def test_it_says_so_in_words_too(self, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
        with lmcache(True):
            assert main(["check-config", str(case.save())]) == 0
            assert capsys.readouterr().out.splitlines()[-1] == "the plugin would load, as 'hs_tiered'"
            case.extra[f"{PREFIX}max_cold_size"] = -1
            assert main(["check-config", str(case.save())]) == 1
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == f"the plugin would not work: wrong key: extra_config['{PREFIX}max_cold_size']"

    def test_every_setting_is_shown_with_its_source(self, case: Case) -> None:
        case.extra[f"{PREFIX}io_threads"] = 8
        shown = {row.name: row for row in judge(case.save(), True).settings}
        assert set(TieredConfig.__dataclass_fields__) <= set(shown)
        assert (shown["io_threads"].value, shown["io_threads"].source) == (8, str(case.path))
        assert shown["promote"].source == "default"
        for installed in (True, False):
            by_env = judge(case.path, installed, LMCACHE_MAX_HIDDEN_STATE_CPU_SIZE="3.5")
            shown = {row.name: row for row in by_env.settings}
            assert shown["max_hidden_state_cpu_size"].value == 3.5
            assert shown["max_hidden_state_cpu_size"].source == "LMCACHE_MAX_HIDDEN_STATE_CPU_SIZE"

    def test_any_plugin_name_will_do(self, case: Case) -> None:
        case.values["extra_config"] = {key.replace("hs_tiered", "mine"): v for key, v in case.extra.items()}
        case.values["storage_plugins"] = "other, mine"
        for installed in (True, False):
            verdict = judge(case.save(), installed)
            assert (verdict.loads, verdict.plugin) == (True, "mine")

    def test_the_environment_alone_will_do(self, case: Case) -> None:
        env = {
            "LMCACHE_STORAGE_PLUGINS": "hs_tiered",
            "LMCACHE_ENABLE_HIDDEN_STATE_CACHE": "True",
            "LMCACHE_EXTRA_CONFIG": json.dumps(case.extra),
        }
        for installed in (True, False):
            assert judge(None, installed, **env).loads is True
            assert judge(None, installed).loads is False

    def test_the_file_of_the_environment_is_used(self, case: Case) -> None:
        for installed in (True, False):
            assert judge(None, installed, LMCACHE_CONFIG_FILE=str(case.save())).loads is True


class TestWrongKeys:
    def test_not_listed(self, case: Case) -> None:
        del case.values["storage_plugins"]
        assert case.wrong_keys() == ["storage_plugins"]
        case.values["storage_plugins"] = ["hs_tierd"]
        assert case.wrong_keys() == ["storage_plugins"]

    def test_misspelt_top_level_key(self, case: Case) -> None:
        case.values["storage_plugin"] = case.values.pop("storage_plugins")
        assert case.wrong_keys() == ["storage_plugins"]
        assert "storage_plugin" in case.warnings()

    def test_no_extra_config(self, case: Case) -> None:
        del case.values["extra_config"]
        assert case.wrong_keys() == ["extra_config"]

    @pytest.mark.parametrize("key", ["module_path", "class_name"])
    @pytest.mark.parametrize("value", [None, "", "lmcache_hs_backnd"])
    def test_what_lmcache_finds_the_class_by(self, case: Case, key: str, value: str | None) -> None:
        case.extra[PREFIX + key] = value
        assert case.wrong_keys() == [f"extra_config['{PREFIX}{key}']"]
        del case.extra[PREFIX + key]
        assert case.wrong_keys() == [f"extra_config['{PREFIX}{key}']"]

    def test_a_module_of_ours_without_the_class(self, case: Case) -> None:
        case.extra[f"{PREFIX}module_path"] = "lmcache_hs_backend.tiered"
        assert case.wrong_keys() == [f"extra_config['{PREFIX}module_path']"]
        case.extra[f"{PREFIX}module_path"] = "lmcache_hs_backend.integrations.lmcache.backend"
        assert judge(case.save(), True).loads is True

    def test_nested_tables_instead_of_flat_keys(self, case: Case) -> None:
        case.values["extra_config"] = {"storage_plugin": {"hs_tiered": {"module_path": "lmcache_hs_backend"}}}
        assert case.wrong_keys() == [f"extra_config['{PREFIX}module_path']"]
        assert "not nested tables" in judge(case.path, True).problems[0].text

    def test_plugin_keys_outside_extra_config(self, case: Case) -> None:
        case.values[f"{PREFIX}cold_path"] = "/tmp"
        assert "belongs under extra_config" in case.warnings()[f"{PREFIX}cold_path"]

    def test_extra_config_of_the_environment_replaces_the_files(self, case: Case) -> None:
        env = {"LMCACHE_EXTRA_CONFIG": json.dumps({f"{PREFIX}max_cold_size": 5})}
        assert case.wrong_keys(**env) == [f"extra_config['{PREFIX}module_path']"]
        [problem] = judge(case.path, True, **env).problems
        assert "LMCACHE_EXTRA_CONFIG replaces the whole extra_config" in problem.text

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("max_cold_size", 0), ("max_cold_size", "much"), ("max_cold_size", 10**9),
            ("min_free_disk", 10**9), ("io_threads", 2.5),
            ("on_kv_gone", "keep"), ("cold_dir_mode", "0070"), ("cold_path", ""), ("cold_path", "/dev/null"),
            ("cold_path", "/dev/null/below"), ("no_such_setting", 1),
        ],
    )  # fmt: skip
    def test_our_settings(self, case: Case, key: str, value: Any) -> None:
        case.extra[PREFIX + key] = value
        assert case.wrong_keys() == [f"extra_config['{PREFIX}{key}']"]

    @pytest.mark.parametrize(
        ("key", "why"),
        [
            ("max_cold_size", "nothing reads it"),
            ("hs_tiered.max_cold_size", "nothing reads it"),
            ("storage_plugin.hs_tier.max_cold_size", "storage_plugins does not list 'hs_tier'"),
        ],
    )
    def test_a_setting_that_nothing_reads_is_a_warning(self, case: Case, key: str, why: str) -> None:
        case.extra[key] = 200
        text = case.warnings()[f"extra_config['{key}']"]
        assert why in text
        assert f"{PREFIX}max_cold_size" in text

    def test_more_memory_than_there_is_is_a_warning(self, case: Case) -> None:
        case.values["max_hidden_state_cpu_size"] = 10**6
        assert "GB of memory" in case.warnings()["max_hidden_state_cpu_size"]

    def test_a_filesystem_without_room_for_files_is_the_paths_fault(self, case: Case) -> None:
        case.extra[PREFIX + "cold_path"] = "/proc/x"
        assert case.wrong_keys() == [f"extra_config['{PREFIX}cold_path']"]

    def test_several_at_once_are_all_named(self, case: Case) -> None:
        case.extra |= {f"{PREFIX}max_cold_size": -1, f"{PREFIX}io_treads": 3}
        case.values["enable_hidden_state_cache"] = False
        assert set(case.wrong_keys()) == {
            "enable_hidden_state_cache", f"extra_config['{PREFIX}max_cold_size']", f"extra_config['{PREFIX}io_treads']",
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("key", "changes"),
        [
            ("enable_hidden_state_cache", {"enable_hidden_state_cache": "yes"}),
            ("enable_blending", {"enable_blending": True}),
            ("max_hidden_state_cpu_size", {"max_hidden_state_cpu_size": 0}),
            ("max_hidden_state_cpu_size", {"max_hidden_state_cpu_size": "plenty"}),
            ("chunk_size", {"chunk_size": [1]}),
            ("storage_plugins", {"storage_plugins": 7}),
            ("storage_plugins", {"storage_plugins": [{"hs_tiered": 1}]}),
            ("extra_config", {"extra_config": [1]}),
            ("enable_p2p", {"enable_pd": True, "pd_role": "sender", "pd_buffer_size": 1, "pd_buffer_device": "cpu",
                            "enable_p2p": True, "enable_controller": True, "controller_pull_url": "u",
                            "controller_reply_url": "u", "lmcache_worker_ports": "1", "p2p_host": "h",
                            "p2p_init_ports": "1", "p2p_lookup_ports": "1", "transfer_channel": "nixl"}),
            ("local_cpu", {"enable_pd": True, "pd_role": "sender", "pd_buffer_size": 1, "pd_buffer_device": "cpu",
                           "local_cpu": False}),
        ],
    )  # fmt: skip
    def test_settings_of_lmcache(self, case: Case, key: str, changes: dict[str, Any]) -> None:
        case.values |= changes
        assert case.wrong_keys(only_lmcache_knows=key == "enable_p2p") == [key]

    @pytest.mark.parametrize("text", ["[1, 2]", "a: [", "just text", "\x00"])
    def test_a_file_that_is_no_table_of_settings(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "x.yaml"
        path.write_text(text)
        result = inspect_json("check-config", path, status=1)  # LMCache is not even asked
        assert str(path) in result["problems"][0]["text"]
        assert (
            str(tmp_path / "none") in inspect_json("check-config", tmp_path / "none", status=1)["problems"][0]["text"]
        )


class TestAdvice:
    def test_a_hash_seed_that_changes_is_a_warning(self, case: Case) -> None:
        assert "PYTHONHASHSEED" in case.warnings(PYTHONHASHSEED="random")
        assert "PYTHONHASHSEED" not in case.warnings(PYTHONHASHSEED="0")

    def test_kv_in_memory_only_is_a_warning(self, case: Case) -> None:
        assert "on_kv_gone" in case.warnings()
        case.extra[f"{PREFIX}on_kv_gone"] = "archive"
        assert "on_kv_gone" not in case.warnings()
        case.extra[f"{PREFIX}on_kv_gone"] = "delete"
        case.values |= {"local_disk": "/tmp", "max_local_disk_size": 1}
        assert "on_kv_gone" not in case.warnings()

    def test_the_disk_is_measured_when_asked(self, case: Case, tmp_path: Path) -> None:
        env = blocking(tmp_path / "blocker", "lmcache", "torch")
        disk = inspect_json("check-config", case.save(), "--probe-disk", env=env)["disk"]
        assert disk["write_bytes_per_sec"] > 0
        assert disk["read_bytes_per_sec"] > 0
        assert list(case.cold_path.iterdir()) == []
        assert "wrote" in inspect("check-config", case.path, "--probe-disk", env=env).stdout


def test_it_needs_neither_lmcache_nor_torch(case: Case, tmp_path: Path) -> None:
    env = blocking(tmp_path / "blocker", "lmcache", "vllm", "torch", "safetensors")
    result = inspect_json("check-config", case.save(), env=env)
    assert (result["loads"], result["lmcache_installed"]) == (True, False)


def test_without_lmcache_it_judges_what_is_ours_and_leaves_the_rest(case: Case, tmp_path: Path) -> None:
    env = blocking(tmp_path / "blocker", "lmcache", "torch")
    case.values |= {"enable_controller": True, "nixl_role": "sender", "blend_special_str": "#"}
    case.values["storage_plugin"] = case.values.pop("storage_plugins")
    result = inspect_json("check-config", case.save(), env=env | {"LMCACHE_NIXL_ROLE": "x"}, status=1)
    assert [problem["key"] for problem in result["problems"]] == ["storage_plugins"]
    warned = {warning["key"] for warning in result["warnings"]}
    assert "storage_plugin" in warned
    assert not warned & {"enable_controller", "nixl_role", "blend_special_str", "LMCACHE_NIXL_ROLE"}
    assert "LMCache is not installed here" in inspect("check-config", case.path, env=env).stdout


def test_an_lmcache_that_cannot_be_imported_is_the_problem(case: Case, tmp_path: Path) -> None:
    result = inspect_json("check-config", case.save(), env=blocking(tmp_path / "blocker", "requests"), status=1)
    [problem] = result["problems"]
    assert "its loader does not run: " in problem["text"]
    assert "requests" in problem["text"]


@pytest.mark.parametrize("installed", [True, False])
def test_credentials_are_never_shown(case: Case, capsys: pytest.CaptureFixture[str], installed: bool) -> None:
    options = {"aws_secret_access_key": "hunter2", "endpoint": "http://host"}
    assert "hunter2" not in repr(TieredConfig(cold_path="/x", shared_options=options))
    for value in (options, json.dumps(options), {"aws_secret_access_key": ["hunter2"]}, "hunter2"):
        case.extra[f"{PREFIX}shared_options"] = value
        for form in ("terminal", "json"):
            with lmcache(installed):
                main(["check-config", str(case.save()), "--format", form])
            printed = capsys.readouterr()
            assert "shared_options" in printed.out
            assert "hunter2" not in printed.out + printed.err
    with lmcache(installed, LMCACHE_EXTRA_CONFIG='{"x": "hunter2"'):
        main(["check-config"])
    printed = capsys.readouterr()
    assert "extra_config" in printed.out
    assert "hunter2" not in printed.out + printed.err


# -- against LMCache itself ------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers(-5, 300) | st.floats(-2, 9) | st.sampled_from(
    ["", "true", "False", "1", "0", "abc", "1,2, 3", "0.5", "file:///a/,/b", "'quoted'", '"q', "{}", '{"a": 1}', "[1]"]
)  # fmt: skip
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.just({}) | st.just({"a": 1})
NAMES = st.sampled_from([*lmcache_settings.SETTINGS, *lmcache_settings.ALIASES, "plugin_locations", "unknown"])
TEXTS = SCALARS.map(lambda value: "" if value is None else str(value).replace("\x00", ""))


def theirs(path: str | None) -> list[str]:
    """What LMCache loads, of the settings that are also known without it; empty when it does not start."""
    from lmcache.v1.config import load_engine_config_with_overrides

    try:
        return as_lines(load_engine_config_with_overrides(path).to_dict())
    except Exception:
        return []


def ours(path: str | None) -> list[str]:
    try:
        return as_lines(lmcache_settings.load(path, ask_lmcache=False).values)
    except LoadError:
        return []


def as_lines(values: dict[str, Any]) -> list[str]:
    """As text, because nan is not equal to itself, and 1 is equal to True."""
    return sorted(f"{name}: {values[name]!r}" for name in lmcache_settings.SETTINGS)


@pytest.fixture(scope="module", autouse=True)
def quiet_lmcache() -> Iterator[None]:
    with mock.patch.dict(os.environ, {"LMCACHE_LOG_LEVEL": "CRITICAL"}):
        import lmcache.v1.config  # noqa: F401 - it sets its log level when it is imported

        yield


def test_the_settings_and_defaults_are_lmcaches() -> None:
    from lmcache.v1 import config

    for name, (_, default) in lmcache_settings.SETTINGS.items():
        assert config._CONFIG_DEFINITIONS[name]["default"] == default, name
    for old, new in lmcache_settings.ALIASES.items():
        assert old in config._DEPRECATED_CONFIGS
        assert config._CONFIG_ALIASES[old] == new


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.none() | st.dictionaries(NAMES, VALUES, max_size=8), env=st.dictionaries(NAMES, TEXTS, max_size=4))
def test_what_is_loaded_without_lmcache_is_what_lmcache_loads(
    tmp_path: Path, file: dict[str, Any] | None, env: dict[str, str]
) -> None:
    path = None
    if file is not None:
        path = str(tmp_path / "lmcache.yaml")
        Path(path).write_text(yaml.safe_dump(file))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    variables = {lmcache_settings.variable(name): text for name, text in env.items()}
    with mock.patch.dict(os.environ, {**kept, **variables}, clear=True):
        loaded, expected = ours(path), theirs(path)
    if not expected and {"enable_p2p: True", "enable_pd: True"} & set(loaded):
        return  # only LMCache knows what else these two need
    assert loaded == expected


@pytest.mark.engine
class TestAgainstAnEngine:
    """The verdict is what a real engine then does."""

    @pytest.mark.parametrize(
        "change",
        [
            {},
            {"extra": {f"{PREFIX}max_cold_size": -1}},
            {"extra": {f"{PREFIX}class_name": "Nothing"}},
            {"extra": {f"{PREFIX}module_path": "lmcache_hs_backend.tiered"}},
            {"extra": {f"{PREFIX}module_path": "lmcache_hs_backend.integrations.lmcache.backend"}},
            {"extra": {f"{PREFIX}unknown": 1}},
            {"values": {"storage_plugins": ["other"]}},
            {"values": {"extra_config": None}},
            {"values": {"enable_hidden_state_cache": False}},
            {"env": {"LMCACHE_EXTRA_CONFIG": "{}"}},
        ],
    )
    def test_an_engine_does_what_was_said(self, case: Case, start: Any, change: dict[str, Any]) -> None:
        from lmcache.v1.config import load_engine_config_with_overrides

        case.values |= {"chunk_size": 64, "max_local_cpu_size": 0.02, "max_hidden_state_cpu_size": 0.01}
        case.extra |= change.get("extra", {})
        case.values |= change.get("values", {})
        env = change.get("env", {})
        said = judge(case.save(), True, **env).loads
        with mock.patch.dict(os.environ, env):
            config = load_engine_config_with_overrides(str(case.path))
        engine = start(config=config)
        assert (type(engine.store).__name__ == "TieredHiddenStateStore") is said
