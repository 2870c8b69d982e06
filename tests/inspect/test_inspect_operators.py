"""What operators meet: no home, the one bad chunk, the quarantine, units, narrow terminals, metrics that are off."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lmcache_hs_backend.cli.config import verdict
from lmcache_hs_backend.cli.console import path_text
from lmcache_hs_backend.config import ADVANCED, GIB
from tests.inspect.test_inspect_config import PREFIX, good, judge
from tests.inspect.test_inspect_program import on_a_terminal
from tests.support.cold_paths import CHUNK, add_prompt, namespace, tokens_of
from tests.support.inspecting import blocking, environment, fails, inspect, inspect_json

SIZE = 8192  # of one chunk file here


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


class TestNoHome:
    #: No HOME, and a user that the password file does not know.
    CODE = """
import os, sys
os.environ.pop("HOME", None)
os.environ["XDG_CACHE_HOME"] = sys.argv[1]
os.path.expanduser = lambda path: path
from lmcache_hs_backend.cli.inspect import main
sys.exit(main(sys.argv[2:]))
"""

    def run(self, cache: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", self.CODE, cache, *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment(**env))

    @pytest.mark.parametrize("cache", ["", "relative/cache"])
    def test_check_config_asks_for_cold_path(self, tmp_path: Path, cache: str) -> None:
        values = good(tmp_path / "cold")
        del values["extra_config"][f"{PREFIX}cold_path"]
        (tmp_path / "lmcache.yaml").write_text(yaml.safe_dump(values))
        env = blocking(tmp_path / "blocker", "lmcache")
        done = self.run(cache, "check-config", str(tmp_path / "lmcache.yaml"), "--format", "json", **env)
        assert done.returncode == 1
        [problem] = json.loads(done.stdout)["problems"]
        assert problem["key"] == f"extra_config['{PREFIX}cold_path']"
        assert "set cold_path" in problem["text"]

    def test_a_command_without_a_path_says_so_in_one_line(self) -> None:
        done = self.run("", "list")
        assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
        assert "set cold_path" in done.stderr


class TestCheckConfig:
    def warnings(self, folder: Path, changes: dict[str, object], **env: str) -> dict[str, str]:
        values = good(folder / "cold")
        values["extra_config"] |= {PREFIX + name: value for name, value in changes.items()}
        (folder / "lmcache.yaml").write_text(yaml.safe_dump(values))
        found = judge(folder / "lmcache.yaml", True, **env)
        assert found.loads
        return {each.key: each.text for each in found.warnings}

    def test_a_relative_path_is_a_warning(self, tmp_path: Path) -> None:
        assert (
            "relative path" in self.warnings(tmp_path, {"cold_path": "some/hs"})[f"extra_config['{PREFIX}cold_path']"]
        )

    def test_a_mount_that_is_missing_is_a_warning(self, tmp_path: Path) -> None:
        text = self.warnings(tmp_path, {"cold_path": "/no-such-nvme/hs"})[f"extra_config['{PREFIX}cold_path']"]
        assert "would be created on the root filesystem" in text

    def test_a_mount_of_fstab_that_is_missing_is_a_warning_also_where_its_directory_is_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if tmp_path.stat().st_dev != Path("/").stat().st_dev:
            pytest.skip("temporary files are not on the root filesystem here")
        key = f"extra_config['{PREFIX}cold_path']"
        assert key not in self.warnings(tmp_path, {})
        fstab = tmp_path / "fstab"
        fstab.write_text(f"# <what> <where>\n/dev/nvme0n1 {tmp_path} xfs defaults 0 0\n")
        monkeypatch.setattr(verdict, "_FSTAB", str(fstab))
        assert f"nothing is mounted at or below {tmp_path}" in self.warnings(tmp_path, {})[key]
        (tmp_path / "cold").mkdir()
        assert f"{tmp_path / 'cold'} is on the root filesystem" in self.warnings(tmp_path, {})[key]

    @pytest.mark.parametrize("name", ["max_cold_size", "min_free_disk"])
    def test_a_limit_above_the_free_space_is_a_warning(self, tmp_path: Path, name: str) -> None:
        disk = shutil.disk_usage(tmp_path)
        text = self.warnings(tmp_path, {name: (disk.free + disk.total) / 2 / GIB})[f"extra_config['{PREFIX}{name}']"]
        assert f"GB are free at {tmp_path}" in text

    def test_a_limit_a_little_above_the_disk_is_a_warning_as_the_plugin_cuts_it_down(self, tmp_path: Path) -> None:
        total = shutil.disk_usage(tmp_path).total / GIB
        text = self.warnings(tmp_path, {"max_cold_size": 1.05 * total})[f"extra_config['{PREFIX}max_cold_size']"]
        assert "GB are used" in text

    def test_a_variable_that_nothing_reads_is_a_warning(self, tmp_path: Path) -> None:
        ours, typo = "LMCACHE_STORAGE_PLUGIN_HS_TIERED_COLD_PATH", "LMCACHE_LOCAL_CPUS"
        read_elsewhere = ("LMCACHE_LOG_LEVEL", "LMCACHE_RESP_PASSWORD", "LMCACHE_EC_CHUNK_SIZE")
        found = self.warnings(tmp_path, {}, **dict.fromkeys((ours, typo, *read_elsewhere), "1"))
        assert "nothing reads it" in found[ours]
        assert "nothing reads it" in found[typo]
        assert not set(read_elsewhere) & set(found)

    def test_the_row_of_a_wrong_value_shows_it(self, tmp_path: Path) -> None:
        values = good(tmp_path / "cold")
        values["extra_config"][f"{PREFIX}max_cold_size"] = "200GB"
        (tmp_path / "lmcache.yaml").write_text(yaml.safe_dump(values))
        found = judge(tmp_path / "lmcache.yaml", True)
        assert not found.loads
        [row] = [each for each in found.settings if each.name == "max_cold_size"]
        assert (row.value, row.source) == ("'200GB' is wrong", str(tmp_path / "lmcache.yaml"))

    def test_the_row_is_marked_of_a_path_a_limit_and_a_setting_of_lmcache_too(self, tmp_path: Path) -> None:
        values = good(Path("/dev/null/x")) | {"enable_hidden_state_cache": "yes", "max_hidden_state_cpu_size": "2GB"}
        (tmp_path / "lmcache.yaml").write_text(yaml.safe_dump(values))
        shown = {row.name: row.value for row in judge(tmp_path / "lmcache.yaml", True).settings}
        assert shown["cold_path"] == "'/dev/null/x' is wrong"
        assert shown["enable_hidden_state_cache"] == "False is wrong"
        assert shown["max_hidden_state_cpu_size"] == "None is wrong"
        values["extra_config"] |= {f"{PREFIX}cold_path": str(tmp_path), f"{PREFIX}max_cold_size": 10**9}
        (tmp_path / "lmcache.yaml").write_text(yaml.safe_dump(values))
        shown = {row.name: row.value for row in judge(tmp_path / "lmcache.yaml", True).settings}
        assert shown["max_cold_size"] == "1000000000 is wrong"

    def test_advanced_settings_have_a_table_of_their_own_here_and_in_the_manual(self, tmp_path: Path) -> None:
        (tmp_path / "lmcache.yaml").write_text(yaml.safe_dump(good(tmp_path / "cold")))
        printed = inspect(
            "check-config", tmp_path / "lmcache.yaml", env=blocking(tmp_path / "blocker", "lmcache")
        ).stdout
        before, after = printed.split("\nadvanced ")
        assert all(f"\n{name} " in after and f"\n{name} " not in before for name in ADVANCED)
        assert "\nmax_cold_size " in before
        manual = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "settings.md").read_text()
        section = manual.split("## Advanced\n")[1].split("\n## ")[0]
        assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == ADVANCED


class TestRemoving:
    def test_named_chunks_go_by_hash_or_by_file_damaged_ones_too(self, cold: Path) -> None:
        prompt = add_prompt(namespace(cold), tokens_of(4 * CHUNK))
        prompt.files[1].write_bytes(b"no header any more")
        result = inspect_json("rm", cold, prompt.hashes[0], prompt.files[1].name, "--yes")
        assert result["deleted_files"] == 2
        assert set(cold.rglob("*.safetensors")) == {prompt.files[2], prompt.files[3]}

    def test_a_name_of_none_or_of_several_deletes_nothing(self, cold: Path) -> None:
        add_prompt(namespace(cold), tokens_of(40 * CHUNK))
        assert "no chunks in" in fails("rm", cold, "zzz", "--yes")
        assert "CHUNK is empty" in fails("rm", cold, "", "--yes")
        assert "not both" in fails("rm", cold, "abc", "--all", "--yes")
        assert len(list(cold.rglob("*.safetensors"))) == 40

    def test_nothing_matches_is_said_with_what_there_is(self, cold: Path) -> None:
        add_prompt(namespace(cold), tokens_of(CHUNK))
        assert "nothing matches; models here: org/test-model" in inspect("rm", cold, "--model", "other", "--yes").stdout

    def test_the_quarantine_can_be_emptied(self, cold: Path) -> None:
        directory = namespace(cold)
        files = add_prompt(directory, tokens_of(CHUNK)).files
        (directory / "quarantine").mkdir()
        (directory / "quarantine" / "bad.safetensors").write_bytes(bytes(10))
        assert inspect_json("gc", cold, "--quarantine", "--yes")["deleted_bytes"] == 10
        assert list(cold.rglob("*.safetensors")) == files

    @pytest.mark.parametrize("text", ["8KB", "0.0078125 MB", "8192b"])
    def test_sizes_have_units(self, cold: Path, text: str) -> None:
        add_prompt(namespace(cold), tokens_of(3 * CHUNK))
        assert inspect_json("gc", cold, "--max-size", text, "--dry-run")["files"] == 2


class TestForeignFiles:
    def test_beside_namespaces_they_are_found_and_counted(self, cold: Path, tmp_path: Path) -> None:
        add_prompt(namespace(cold), tokens_of(CHUNK))
        (cold / "huge.tar").write_bytes(bytes(1000))
        (cold / "someone" / "data").mkdir(parents=True)
        (cold / "someone" / "data" / "model.bin").write_bytes(bytes(500))
        result = inspect_json("verify", cold, status=1)
        assert [(each["kind"], each["path"]) for each in result["problems"]] == [
            ("foreign", str(cold / "huge.tar")), ("foreign", str(cold / "someone")),
        ]  # fmt: skip
        assert inspect_json("stats", cold)["foreign"]["bytes"] == 1500
        assert "not ours: 2 beside the namespaces, 1.46 KB: huge.tar, someone" in inspect("stats", cold).stdout
        inspect("report", cold, "--out", tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        assert "2 foreign beside the namespaces" in page
        assert 'class="verdict open"' in page, "not green"

    def test_the_page_names_its_host_and_what_it_does_not_speak_for(self, cold: Path, tmp_path: Path) -> None:
        directory = namespace(cold)
        add_prompt(directory, tokens_of(CHUNK))
        (directory / "quarantine").mkdir()
        (directory / "quarantine" / "bad.safetensors").write_bytes(bytes(10))
        (namespace(cold, "org/newer") / "namespace.json").write_text("{}")
        inspect("report", cold, "--out", tmp_path / "page.html")
        page = (tmp_path / "page.html").read_text()
        import socket

        assert f"on {socket.gethostname()}" in page
        assert "1 files in quarantine" in page
        assert "left out: " in page
        assert 'class="verdict open"' in page


def test_show_takes_the_order_of_every_other_command_too(cold: Path) -> None:
    prompt = add_prompt(namespace(cold), tokens_of(CHUNK))
    assert inspect_json("show", cold, prompt.hashes[0])["chunk_hash"] == prompt.hashes[0]


def test_a_damaged_header_is_one_short_line(cold: Path) -> None:
    [path] = add_prompt(namespace(cold), tokens_of(CHUNK)).files
    data = bytearray(path.read_bytes())
    data[30] = 0xFF
    path.write_bytes(data)
    [problem] = inspect_json("verify", cold, status=1)["problems"]
    assert problem["detail"] == "not a chunk's header: not UTF-8 at byte 22"


def test_stats_prints_what_is_on_disk_when_the_metrics_are_off(cold: Path) -> None:
    add_prompt(namespace(cold), tokens_of(CHUNK))
    done = inspect("stats", cold, "--metrics", "http://127.0.0.1:9/metrics")
    assert done.returncode == 1
    assert "1 chunks, 64 tokens" in done.stdout
    assert "cannot be read" in done.stderr


def test_narrow_terminals_keep_models_apart(cold: Path) -> None:
    names = [namespace(cold, f"org/a-model-with-a-long-name-{number}") for number in (1, 2)]
    for number, directory in enumerate(names):
        add_prompt(directory, tokens_of(CHUNK), model=f"org/a-model-with-a-long-name-{number + 1}")
    shown = on_a_terminal("stats", cold, columns=60, NO_COLOR="1")
    assert all(directory.name in shown for directory in names)


def test_extract_says_its_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmcache_hs_backend.cli.extract", "--version"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split()[0]) == (0, "lmcache-hs-extract")


@pytest.mark.parametrize(("option", "value"), [("--limit", "0"), ("--min-tokens", "many"), ("--val-fraction", "1")])
def test_a_wrong_value_is_one_line_and_status_1_for_extract_too(option: str, value: str) -> None:
    command = [sys.executable, "-m", "lmcache_hs_backend.cli.extract", "cold", "--out", "x", "--format", "specforge"]
    done = subprocess.run([*command, option, value], capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert f"{option} is {value}, but must be" in done.stderr


class TestNarrowTerminals:
    """Of 60 columns: no line is longer, no path is broken, and models stay apart."""

    @pytest.fixture
    def models(self, cold: Path) -> list[Path]:
        """Two namespaces with a damaged file each."""
        names = [f"org/a-model-with-a-rather-long-name-{number}" for number in (1, 2)]
        found = [namespace(cold, name) for name in names]
        for directory, model in zip(found, names, strict=True):
            [path] = add_prompt(directory, tokens_of(CHUNK), model=model).files
            path.write_bytes(path.read_bytes()[:-1])
            add_prompt(directory, tokens_of(CHUNK, 1), model=model)
        return found

    @pytest.mark.parametrize("command", [("verify",), ("rm", "--all", "--dry-run"), ("list",)])
    def test_models_stay_apart(self, cold: Path, models: list[Path], command: tuple[str, ...]) -> None:
        shown = on_a_terminal(command[0], cold, *command[1:], columns=60, NO_COLOR="1")
        lines = [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) for line in re.split(r"[\r\n]+", shown)]
        assert max(map(len, lines)) <= 60
        assert str(cold) not in shown, "relative"
        for directory in models:
            digest = directory.name[-8:]
            assert any(digest in line for line in lines), (digest, lines)

    def test_a_path_is_cut_where_it_may_be(self) -> None:
        name = "0123456789abcdef0123456789abcdef.safetensors"
        path = f"/nvme/hs/a-model-0123456789ab/01/{name}"
        assert path_text(path, "/nvme/hs", None) == path
        assert path_text(path, "/nvme/hs", 80) == f"a-model-0123456789ab/01/{name}"
        assert path_text(path, "/nvme/hs", 40) == "a-model-0123456789ab/01/0123456789ab…"
        assert path_text(path, "/nvme/hs", 30) == "a-model-…89ab/01/0123456789ab…"
        assert path_text("/elsewhere/x", "/nvme/hs", 30) == "/elsewhere/x"
