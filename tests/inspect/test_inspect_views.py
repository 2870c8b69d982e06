"""``show``, ``tree`` and ``stats`` of ``lmcache-hs-inspect``: what one chunk, and what all of them, look like."""

from __future__ import annotations

import http.server
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import prometheus_client
import pytest

from lmcache_hs_backend.metrics import COUNTERS, GAUGES, HISTOGRAMS, Metrics
from lmcache_hs_backend.tiers.disk.owned_namespace import NamespaceLock
from tests.support.cold_paths import CHUNK, HIDDEN, Prompt, add_prompt, namespace, tokens_of
from tests.support.inspecting import blocking, fails, inspect, inspect_json


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


def family(directory: Path) -> list[Prompt]:
    """Three prompts: two chunks that all share, then one, then two each; 2 + 1 + 2 and so on."""
    shared = tokens_of(2 * CHUNK, 1)
    return [
        add_prompt(directory, shared + tokens_of(3 * CHUNK, 2), layers=(0, 5)),
        add_prompt(directory, shared + tokens_of(3 * CHUNK, 3), layers=(0, 5)),
        add_prompt(directory, shared + tokens_of(CHUNK + 10, 4), layers=(0, 5)),
    ]


class TestShow:
    def test_any_unique_beginning_of_hash_or_name_will_do(self, cold: Path) -> None:
        prompt = family(namespace(cold))[0]
        path = prompt.files[3]
        by_hash = inspect_json("show", prompt.hashes[3][:10], cold)
        assert by_hash["path"] == str(path)
        assert inspect_json("show", path.stem[:12], cold)["path"] == str(path)
        assert inspect_json("show", path.name, cold)["path"] == str(path)

    def test_a_beginning_of_several_or_of_none_is_one_line(self, cold: Path) -> None:
        family(namespace(cold))
        assert "9 chunks begin with" in fails("show", "", cold) or "chunks begin with" in fails("show", "", cold)
        assert "no chunk in" in fails("show", "zzzz", cold)

    def test_chain_and_branches(self, cold: Path) -> None:
        one, two, three = family(namespace(cold))
        shown = inspect_json("show", one.hashes[1], cold)
        assert [step["chunk_hash"] for step in shown["chain"]] == one.hashes[:2]
        assert shown["chain_is_complete"] is True
        assert {step["chunk_hash"] for step in shown["branches"]} == {p.hashes[2] for p in (one, two, three)}
        assert [step["chunks_below"] for step in shown["branches"]] == [3, 3, 2]
        one.files[0].unlink()
        assert inspect_json("show", one.hashes[1], cold)["chain_is_complete"] is False
        assert "the 64 tokens in front are not here" in inspect("show", one.hashes[1], cold).stdout

    def test_rows_are_described_layer_by_layer(self, cold: Path) -> None:
        prompt = add_prompt(namespace(cold), tokens_of(CHUNK), layers=(-1, 3))
        rows = prompt.rows[0][3].float()
        figures = {each["layer"]: each for each in inspect_json("show", prompt.hashes[0], cold)["layer_figures"]}
        assert set(figures) == {-1, 3}
        assert figures[3]["shape"] == [CHUNK, HIDDEN]
        assert figures[3]["mean"] == pytest.approx(rows.mean().item(), abs=1e-5)
        assert figures[3]["std"] == pytest.approx(rows.std(correction=0).item(), rel=1e-4)
        norms = rows.norm(dim=1)
        assert figures[3]["norm_quantiles"]["median"] == pytest.approx(norms.quantile(0.5).item(), rel=1e-4)
        assert figures[3]["norm_quantiles"]["max"] == pytest.approx(norms.max().item(), rel=1e-4)
        assert (figures[3]["non_finite"], figures[3]["checksum_ok"]) == (0, True)

    def test_values_that_are_not_finite_and_wrong_checksums_are_told(self, cold: Path) -> None:
        prompt = add_prompt(namespace(cold), tokens_of(CHUNK))
        data = bytearray(prompt.files[0].read_bytes())
        data[-2:] = b"\x80\x7f"  # bfloat16 infinity
        prompt.files[0].write_bytes(data)
        [figures] = inspect_json("show", prompt.hashes[0], cold, status=1)["layer_figures"]
        assert (figures["non_finite"], figures["checksum_ok"]) == (1, False)
        assert "WRONG" in inspect("show", prompt.hashes[0], cold).stdout

    def test_tokens_as_ids_or_as_text(self, cold: Path, tmp_path: Path) -> None:
        prompt = add_prompt(namespace(cold), list(range(CHUNK)))
        assert inspect_json("show", prompt.hashes[0], cold)["token_ids"] == list(range(CHUNK))
        assert "token ids: 0 1 2 3" in inspect("show", prompt.hashes[0], cold).stdout
        tokenizer(tmp_path)
        shown = inspect_json("show", prompt.hashes[0], cold, "--tokenizer", tmp_path)
        assert shown["text"].startswith("w0 w1 w2")
        assert "there is no tokenizer.json" in fails("show", prompt.hashes[0], cold, "--tokenizer", cold)


def tokenizer(folder: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{number}": number for number in range(500)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "w0")).save(str(folder / "tokenizer.json"))


class TestTree:
    def test_shared_prefixes_are_branches(self, cold: Path) -> None:
        family(namespace(cold))
        [tree] = inspect_json("tree", cold)["trees"]
        [root] = tree["branches"]
        assert (root["start"], root["end"], root["chunks"], root["sequences"]) == (0, 2 * CHUNK, 2, 3)
        assert [(b["chunks"], b["end"]) for b in root["branches"]] == [
            (3, 5 * CHUNK), (3, 5 * CHUNK), (2, 3 * CHUNK + 10),
        ]  # fmt: skip

    def test_in_words_with_tokens_and_bytes(self, cold: Path, tmp_path: Path) -> None:
        family(namespace(cold))
        title, root, *branches = inspect("tree", cold).stdout.splitlines()
        assert "dedup factor 1.44" in title
        assert "tokens 0 to 128 (2 chunks" in root
        assert "shared by 3 sequences" in root
        assert [line[:6] for line in branches] == ["   ├─ ", "   ├─ ", "   └─ "]
        tokenizer(tmp_path)
        add_prompt(namespace(cold, "org/words"), list(range(CHUNK)), model="org/words")
        assert "'w0 w1 w2" in inspect("tree", cold, "--tokenizer", tmp_path, "--namespace", "words").stdout

    def test_depth_and_width_are_limited_and_the_rest_is_summed(self, cold: Path) -> None:
        family(namespace(cold))
        [tree] = inspect_json("tree", cold, "--width", "1")["trees"]
        more = tree["branches"][0]["more"]
        assert (more["branches"], more["sequences"], more["tokens"]) == (2, 2, 4 * CHUNK + CHUNK // CHUNK * 10)
        [tree] = inspect_json("tree", cold, "--depth", "1")["trees"]
        assert "branches" not in tree["branches"][0]
        assert tree["branches"][0]["more"]["sequences"] == 3
        assert "--depth is 0" in fails("tree", cold, "--depth", "0")

    def test_chains_without_their_beginning_are_marked(self, cold: Path) -> None:
        prompt = add_prompt(namespace(cold), tokens_of(4 * CHUNK))
        prompt.files[1].unlink()
        assert "parent not here" in inspect("tree", cold).stdout


class TestStats:
    def test_figures_by_namespace_model_and_layer(self, cold: Path) -> None:
        directory = namespace(cold)
        prompts = family(directory)
        add_prompt(directory / "archive", tokens_of(CHUNK, 9), layers=(0,))
        other = namespace(cold, "org/other")
        add_prompt(other, tokens_of(CHUNK), model="org/other", hidden=64)
        (directory / "quarantine").mkdir()
        (directory / "quarantine" / "bad").write_bytes(bytes(100))
        figures = inspect_json("stats", cold)
        by_name = {each["namespace"]: each for each in figures["namespaces"]}
        mine = by_name[directory.name]
        files = {path for prompt in prompts for path in prompt.files}
        assert mine["chunks"] == len(files) + 1 == 11
        assert mine["tokens"] == 10 * CHUNK + 10 - CHUNK + CHUNK
        assert mine["sequences"] == 4
        assert (mine["archived_chunks"], mine["quarantined_files"], mine["quarantined_bytes"]) == (1, 1, 100)
        layers = {layer["layer"]: layer for layer in mine["layers"]}
        assert (layers[0]["chunks"], layers[5]["chunks"]) == (11, 10)
        assert layers[5]["bytes"] == layers[5]["tokens"] * HIDDEN * 2
        assert by_name[other.name]["layers"][0]["hidden_dim"] == 64
        assert {each["model"] for each in figures["models"]} == {"org/test-model", "org/other"}
        assert figures["total"]["chunks"] == 12
        assert figures["total"]["bytes"] == sum(p.stat().st_size for p in cold.rglob("*.safetensors"))

    def test_the_dedup_factor_is_that_of_the_lengths(self, cold: Path) -> None:
        family(namespace(cold))
        stored = 2 * CHUNK + 3 * CHUNK + 3 * CHUNK + CHUNK + 10
        whole = 5 * CHUNK + 5 * CHUNK + 3 * CHUNK + 10
        assert inspect_json("stats", cold)["total"]["dedup_factor"] == round(whole / stored, 3)

    def test_ages_and_sizes_are_told(self, cold: Path) -> None:
        directory = namespace(cold)
        add_prompt(directory, tokens_of(3 * CHUNK), used_at=time.time() - 7200)
        add_prompt(directory, tokens_of(CHUNK, 2), used_at=time.time() - 10)
        figures = inspect_json("stats", cold)
        assert figures["age_sec"]["histogram"]["under 1 h"] == 1
        assert figures["age_sec"]["histogram"]["under 1 d"] == 3
        assert 7190 < figures["age_sec"]["max"] < 7300
        assert figures["chunk_bytes"]["max"] == 8192

    def test_the_disk_and_the_limit_are_told(self, cold: Path, tmp_path: Path) -> None:
        add_prompt(namespace(cold), tokens_of(4 * CHUNK))
        config = tmp_path / "lmcache.yaml"
        config.write_text(
            "storage_plugins: [hs]\nextra_config:\n"
            "  storage_plugin.hs.module_path: lmcache_hs_backend\n  storage_plugin.hs.class_name: HSTieredBackend\n"
            f"  storage_plugin.hs.cold_path: {cold}\n  storage_plugin.hs.max_cold_size: {1 / 4096}\n"
        )
        figures = inspect_json("stats", "--config", config)
        disk = os.statvfs(cold)
        assert figures["limit_bytes"] == 1 << 18
        assert figures["disk_bytes"] == disk.f_blocks * disk.f_frsize
        assert 0 < figures["free_bytes"] < figures["disk_bytes"]
        assert inspect("stats", "--config", config).stdout.endswith("12.5% of the limit of 256 KB\n")

    def test_a_namespace_in_use_is_seen_without_locking_it(self, cold: Path) -> None:
        directory = namespace(cold)
        add_prompt(directory, tokens_of(CHUNK))
        lock = NamespaceLock.take(str(directory))
        assert lock is not None
        try:
            assert inspect_json("stats", cold)["namespaces"][0]["in_use"] is True
        finally:
            lock.close()
        assert inspect_json("stats", cold)["namespaces"][0]["in_use"] is False

    def test_in_words(self, cold: Path) -> None:
        directory = namespace(cold)
        family(directory)
        os.truncate(next(iter(directory.rglob("*.safetensors"))), 50)
        lines = inspect("stats", cold).stdout.splitlines()
        assert lines[0].split()[:3] == ["namespace", "in", "use"]
        assert lines[-1].startswith("9 chunks, ")
        assert lines[-1].endswith("1 skipped (header 1)")

    def test_it_needs_neither_lmcache_nor_torch(self, cold: Path, tmp_path: Path) -> None:
        family(namespace(cold))
        env = blocking(tmp_path / "blocker", "lmcache", "vllm", "torch", "safetensors")
        assert inspect_json("stats", cold, env=env)["total"]["chunks"] == 10
        assert inspect_json("tree", cold, env=env)["trees"]


class TestMetrics:
    @pytest.fixture
    def server(self) -> Iterator[tuple[str, Metrics]]:
        metrics = Metrics({"model_name": f"test-{os.getpid()}-{time.time_ns()}"})
        httpd, thread = prometheus_client.start_http_server(0, "127.0.0.1")
        yield f"http://127.0.0.1:{httpd.server_port}/metrics", metrics
        httpd.shutdown()
        httpd.server_close()
        thread.join()

    def test_the_engines_counters_are_added(self, cold: Path, server: tuple[str, Metrics]) -> None:
        family(namespace(cold))
        url, metrics = server
        before = inspect_json("stats", cold, "--metrics", url)["engine"] if metrics_exist(url) else {}
        metrics.add("hits_hot", 30)
        metrics.add("hits_cold", 10)
        metrics.add("drops_bad_file", 2)
        metrics.observe("retrieve_seconds", 0.5)
        metrics.publish(dict.fromkeys(GAUGES, 7))
        engine = inspect_json("stats", cold, "--metrics", url)["engine"]
        assert engine["hits_hot"] - before.get("hits_hot", 0) == 30
        assert engine["drops_bad_file"] - before.get("drops_bad_file", 0) == 2
        assert 0 < engine["share_served_from_ram"] < 1
        assert engine["retrieve_seconds_mean"] > 0
        known = {*COUNTERS, *GAUGES, *(f"{name}_{part}" for name in HISTOGRAMS for part in ("sum", "count", "mean"))}
        assert set(engine) <= known | {"share_served_from_ram"}
        assert "engine: hits_hot" in inspect("stats", cold, "--metrics", url).stdout

    def test_what_is_no_engine_is_one_line(self, cold: Path) -> None:
        family(namespace(cold))
        assert "must begin with http" in fails("stats", cold, "--metrics", "file:///etc/passwd")
        assert "cannot be read" in fails("stats", cold, "--metrics", "http://127.0.0.1:9/metrics")
        for body, message in ((b"python_info 1\n", "no metric whose name begins"), (b"<html>", "does not serve")):

            class Handler(http.server.BaseHTTPRequestHandler):
                answer = body

                def do_GET(self) -> None:
                    self.send_response(200)
                    self.end_headers()
                    self.wfile.write(self.answer)

                def log_message(self, *args: object) -> None:
                    pass

            with http.server.HTTPServer(("127.0.0.1", 0), Handler) as httpd:
                thread = threading.Thread(target=httpd.serve_forever)
                thread.start()
                assert message in fails("stats", cold, "--metrics", f"http://127.0.0.1:{httpd.server_port}/")
                httpd.shutdown()
                thread.join()


def metrics_exist(url: str) -> bool:
    """Whether another test of this process has counted something already."""
    import urllib.request

    with urllib.request.urlopen(url) as answer:
        return b"lmcache:hs_hits_hot_total{" in answer.read()
