"""Hidden states in LMCache's MP mode, on the real ``lmcache server``: rows, faults of either side, KV that goes."""

from __future__ import annotations

import json
import os
import textwrap
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.waiting import wait_until

pytest.importorskip("lmcache")

from lmcache_hs_backend import ColdTierReader
from lmcache_hs_backend.chunk import token_bytes
from lmcache_hs_backend.integrations.lmcache_mp import HiddenStateClient
from lmcache_hs_backend.integrations.lmcache_mp.hot_memory import HotMemory
from tests.support.forked import PIPE, with_lmcache_server
from tests.support.mp_server import CHUNK, MODEL, MpServer
from tests.support.threads import side_by_side

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HIDDEN = 256


def tokens_of(chunks: float, seed: int) -> list[int]:
    ids = torch.randint(0, 50_000, (int(chunks * CHUNK),), generator=torch.Generator().manual_seed(seed))
    return [int(token) for token in ids]


def rows_of(num_tokens: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype)


def is_served(client: HiddenStateClient, tokens: list[int], rows: torch.Tensor) -> bool:
    found = client.retrieve_hidden_states(tokens)
    return found is not None and torch.equal(found, rows.float())


# -- rows ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_come_back_as_they_went(shared_server: MpServer, dtype: torch.dtype) -> None:
    client = shared_server.client()
    seed = 10 + [torch.bfloat16, torch.float16, torch.float32].index(dtype)
    tokens, rows = tokens_of(3.5, seed), rows_of(int(3.5 * CHUNK), seed, dtype)
    assert client.retrieve_hidden_states(tokens) is None
    assert client.store_hidden_states(tokens, rows) == 3  # whole chunks only, as the server's KV
    found = client.retrieve_hidden_states(torch.tensor(tokens))
    assert found is not None
    assert (found.dtype, found.is_contiguous()) == (torch.float32, True)
    assert torch.equal(found, rows[: 3 * CHUNK].float())
    native = client.retrieve_layers(tokens, [0], None)[0]
    assert native.dtype == dtype
    assert torch.equal(native, rows[: 3 * CHUNK])
    client.close()


def test_layers_offsets_coverage_and_counts(shared_server: MpServer) -> None:
    client = shared_server.client()
    tokens = tokens_of(4, 20)
    layers = {-1: rows_of(4 * CHUNK, 21), 0: rows_of(4 * CHUNK, 22), 24: rows_of(4 * CHUNK, 23)}
    assert client.store_layers(tokens[: 2 * CHUNK], {idx: rows[: 2 * CHUNK] for idx, rows in layers.items()}) == 2
    assert client.coverage(tokens, (-1, 0, 24)) == 2 * CHUNK
    assert client.store_layers(tokens, {idx: rows[2 * CHUNK :] for idx, rows in layers.items()}, 2 * CHUNK) == 2
    assert client.store_layers(tokens, layers) == 4  # held, whoever stored them
    assert client.coverage(tokens, (-1, 0, 24)) == 4 * CHUNK
    assert client.coverage(tokens, (7,)) == 0
    found = client.retrieve_layers(tokens, [24, -1, 0])
    assert all(torch.equal(found[idx], rows.float()) for idx, rows in layers.items())
    assert client.retrieve_layers(tokens, [0, 7]) == {}
    client.prefetch(tokens)
    assert client.flush(20) == 0
    assert client.stats()["stored_chunks"] >= 4
    client.close()


def test_chunks_by_their_keys(shared_server: MpServer) -> None:
    """The rest of upstream's interface; keys come from the server, which names chunks as it names their KV."""
    client = shared_server.client(model="org/keys")
    tokens, rows = tokens_of(2.5, 25), rows_of(int(2.5 * CHUNK), 26)
    assert (client.num_cached_chunks(), client.has_chunk("no@such@key")) == (0, False)
    assert client.store_hidden_states(tokens, rows, layer_idx=3) == 2
    chunks = client.chunks(tokens)
    assert [(start, end) for start, end, _ in chunks] == [(0, CHUNK), (CHUNK, 2 * CHUNK)]
    assert [key.split("@")[0] for _, _, key in chunks] == ["org/keys"] * 2
    assert client.chunks(tokens, cache_salt="alice") != chunks
    (_, _, first), (_, _, second) = chunks
    assert (client.has_chunk(first, 3), client.has_chunk(first), client.num_cached_chunks()) == (True, False, 2)
    assert client.drop_key(second)
    assert not client.drop_key(second)
    assert (client.has_chunk(second, 3), client.num_cached_chunks(), client.coverage(tokens, [3])) == (False, 1, CHUNK)
    assert client.clear() == 1
    client.close()


def test_salted_prompts_are_kept_apart(shared_server: MpServer) -> None:
    client = shared_server.client()
    tokens, rows = tokens_of(2, 30), rows_of(2 * CHUNK, 31)
    assert client.store_hidden_states(tokens, rows, cache_salt="alice") == 2
    assert client.retrieve_hidden_states(tokens) is None
    assert client.retrieve_hidden_states(tokens, cache_salt="bob") is None
    found = client.retrieve_hidden_states(tokens, cache_salt="alice")
    assert found is not None
    assert torch.equal(found, rows.float())
    client.close()


def test_models_are_kept_apart(shared_server: MpServer) -> None:
    one, other = shared_server.client(), shared_server.client(model="org/another")
    tokens, rows = tokens_of(2, 40), rows_of(2 * CHUNK, 41)
    assert one.store_hidden_states(tokens, rows) == 2
    assert other.retrieve_hidden_states(tokens) is None
    assert len(shared_server.status()["stores"]) >= 2
    one.close()
    other.close()


def test_results_stay_as_they_are_while_others_come(shared_server: MpServer) -> None:
    """Their memory is recycled only when the last view is gone, also when the client is closed before that."""
    client = shared_server.client()
    prompts = {seed: (tokens_of(2, seed), rows_of(2 * CHUNK, seed)) for seed in range(50, 62)}
    for tokens, rows in prompts.values():
        assert client.store_hidden_states(tokens, rows) == 2
    kept = {seed: client.retrieve_hidden_states(tokens)[5:9] for seed, (tokens, _) in prompts.items()}  # type: ignore[index]
    for _ in range(3):
        for tokens, rows in prompts.values():
            assert is_served(client, tokens, rows)
    client.close()
    for seed, (_, rows) in prompts.items():
        assert torch.equal(kept[seed], rows[5:9].float())


def test_memory_of_results_is_recycled(shared_server: MpServer) -> None:
    client = shared_server.client()
    tokens, rows = tokens_of(16, 70), rows_of(16 * CHUNK, 71)  # 4 MiB as float32
    assert client.store_hidden_states(tokens, rows) == 16
    for _ in range(40):
        assert is_served(client, tokens, rows)
    assert client._channels._memory.idle_bytes <= 16 << 20
    client.close()


def test_rows_from_disk_come_in_memory_that_is_recycled(tmp_path: Path) -> None:
    """Without promotion every retrieve reads; the server puts the result where both processes see it."""
    with MpServer(tmp_path / "cold", tmp_path / "log", promote=False) as server:
        client = server.client(read_timeout_sec=60)
        tokens, layers = tokens_of(16, 75), {0: rows_of(16 * CHUNK, 76), 3: rows_of(16 * CHUNK, 77)}
        assert client.store_layers(tokens, layers) == 16
        assert client.flush(60) == 0
        server.stop()
        server.start()
        wait_until(lambda: client.coverage(tokens, [0, 3]) == len(tokens), 60)
        kept = client.retrieve_layers(tokens, [0])[0][7]
        for _ in range(20):
            found = client.retrieve_layers(tokens, [3, 0], None)
            assert all(torch.equal(found[idx], rows) for idx, rows in layers.items())
        assert torch.equal(kept, layers[0][7].float())
        assert client.stats()["hits_cold"] >= 20 * 16
        (channel,) = client._channels._idle
        assert 0 < sum(segment.nbytes for segment in channel._segments) <= 32 << 20
        client.close()


WRONG: dict[str, Any] = {
    "rows that are too few": lambda client: client.store_hidden_states([1] * CHUNK, rows_of(CHUNK - 1, 0)),
    "rows of ints": lambda client: client.store_hidden_states([1] * CHUNK, torch.ones(CHUNK, 4, dtype=torch.int32)),
    "an offset beyond the prompt": lambda client: client.store_hidden_states(
        [1] * CHUNK, rows_of(CHUNK, 0), token_offset=CHUNK + 1
    ),
    "token ids that are text": lambda client: client.retrieve_hidden_states(["a"] * CHUNK),
    "token ids below 0": lambda client: client.retrieve_hidden_states([-1] * CHUNK),
    "a layer that is no int": lambda client: client.retrieve_hidden_states([1] * CHUNK, layer_idx="0"),
    "a key that is no text": lambda client: client.has_chunk(7),
    "no key": lambda client: client.drop_key(""),
    "a dtype that is no float": lambda client: client.retrieve_layers([1] * CHUNK, [0], torch.int8),
    "a salt that is too long": lambda client: client.store_hidden_states(
        [1] * CHUNK, rows_of(CHUNK, 0), cache_salt="s" * 129
    ),
    "a salt that is no text": lambda client: client.coverage([1] * CHUNK, cache_salt=None),
    "more layers than a call takes": lambda client: client.retrieve_layers([1] * CHUNK, range(1025)),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_is_a_value_error_and_changes_nothing(shared_server: MpServer, wrong: str) -> None:
    client = shared_server.client()
    before = client.stats()["stored_chunks"]
    with pytest.raises(ValueError):
        WRONG[wrong](client)
    assert client.stats()["stored_chunks"] == before
    client.close()


@pytest.mark.parametrize("url", ["ipc:///tmp/socket", "tcp://host", "", "http://host:80", "tcp://host:port"])
def test_an_address_without_a_port_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url"):
        HiddenStateClient(url, model=MODEL)


def test_eight_clients_at_once_get_their_own_rows(shared_server: MpServer, tmp_path: Path) -> None:
    """The burst: all share a system prompt, each stores and reads in its own process, again and again."""
    code = textwrap.dedent(f"""
        import sys, torch
        from tests.lmcache_mp.test_mp_mode import CHUNK, rows_of, tokens_of
        from lmcache_hs_backend.integrations.lmcache_mp import HiddenStateClient
        number = int(sys.argv[1])
        client = HiddenStateClient({shared_server.url!r}, model="org/burst", read_timeout_sec=60)
        for turn in range(4):
            tokens = tokens_of(2, 1) + tokens_of(2, 100 + number + 8 * turn)
            rows = torch.cat([rows_of(2 * CHUNK, 1), rows_of(2 * CHUNK, 100 + number + 8 * turn)])
            for layer in (-1, 0, 24):
                assert client.store_hidden_states(tokens, rows + layer, layer_idx=layer) == 4
            for _ in range(3):
                found = client.retrieve_layers(tokens, [24, 0, -1])
                assert set(found) == {{-1, 0, 24}}
                for layer, got in found.items():
                    assert torch.equal(got, (rows + layer).float()), (number, turn, layer)
        client.close()
    """)
    with (tmp_path / "errors").open("w+b") as errors:
        processes = [with_lmcache_server().start(code, number, stderr=errors) for number in range(8)]
        assert [process.wait(240) for process in processes] == [0] * 8, (tmp_path / "errors").read_text()[-3000:]


def test_threads_of_one_client_do_not_disturb_each_other(shared_server: MpServer) -> None:
    client = shared_server.client(read_timeout_sec=60)
    wrong: list[object] = []

    def work(number: int) -> None:
        tokens, rows = tokens_of(3, 200 + number), rows_of(3 * CHUNK, 200 + number)
        for _ in range(10):
            if client.store_hidden_states(tokens, rows) != 3 or not is_served(client, tokens, rows):
                wrong.append(number)

    side_by_side(work, range(6))
    assert not wrong
    client.close()


# -- KV that goes ----------------------------------------------------------------------------------------------


def test_kv_that_lmcache_deletes_takes_its_rows_along(shared_server: MpServer) -> None:
    client = shared_server.client()
    tokens, rows = tokens_of(4, 300), rows_of(4 * CHUNK, 301)
    assert shared_server.put_kv(tokens) == 4
    assert client.store_hidden_states(tokens, rows) == 4
    shared_server.delete_kv(tokens, [2])
    wait_until(lambda: client.coverage(tokens) == 2 * CHUNK)
    found = client.retrieve_hidden_states(tokens)
    assert found is not None
    assert torch.equal(found, rows[: 2 * CHUNK].float())
    assert client.stats()["kv_gone_deleted"] >= 1
    shared_server.put_kv(tokens)
    assert client.store_hidden_states(tokens, rows) == 4
    assert is_served(client, tokens, rows)
    client.close()


def test_kv_that_lmcache_evicts_takes_its_rows_along(shared_server: MpServer) -> None:
    """L1 of 0.1 GB: its own LRU evicts the oldest KV when more comes."""
    client = shared_server.client()
    tokens, rows = tokens_of(2, 310), rows_of(2 * CHUNK, 311)
    assert shared_server.put_kv(tokens, 1 << 20) == 2
    assert client.store_hidden_states(tokens, rows) == 2
    numbers = iter(range(320, 1000))

    def more() -> bool:
        shared_server.put_kv(tokens_of(8, next(numbers)), 2 << 20)
        return client.coverage(tokens) == 0

    wait_until(more, 60)
    assert client.retrieve_hidden_states(tokens) is None
    client.close()


def test_rows_whose_kv_was_never_seen_are_served(shared_server: MpServer) -> None:
    client = shared_server.client()
    tokens, rows, other = tokens_of(2, 330), rows_of(2 * CHUNK, 331), tokens_of(2, 332)
    assert client.store_hidden_states(tokens, rows) == 2
    shared_server.put_kv(other)
    assert client.store_hidden_states(other, rows) == 2
    shared_server.delete_kv(other, [0, 1])
    wait_until(lambda: client.coverage(other) == 0)
    assert is_served(client, tokens, rows)
    client.close()


def test_rows_stay_while_an_l2_adapter_holds_their_kv(tmp_path: Path) -> None:
    """LMCache's own file-system adapter: it gets each object in the background after it has come to L1."""
    kv = tmp_path / "kv"
    adapter = json.dumps({"type": "fs", "base_path": str(kv)})
    with MpServer(tmp_path / "cold", tmp_path / "log", ["--l2-adapter", adapter]) as server:
        client = server.client()
        tokens, rows, other = tokens_of(4, 340), rows_of(4 * CHUNK, 341), tokens_of(1, 342)
        assert server.put_kv(tokens + other) == 5
        assert server.put_kv(other) == 1
        wait_until(lambda: sum(path.is_file() and path.suffix != ".tmp" for path in kv.rglob("*")) >= 6)
        assert client.store_hidden_states(tokens, rows) == 4
        assert client.store_hidden_states(other, rows[:CHUNK]) == 1

        def both_gone() -> bool:  # events come in their order: so those of the first prompt have come through as well
            server.delete_kv(tokens, [0, 1, 2, 3])  # again, as long as the adapter has it locked
            server.delete_kv(other, [0])
            server.delete_kv_from_l2(other, [0])
            return client.coverage(other) == 0

        wait_until(both_gone)
        assert is_served(client, tokens, rows)
        server.delete_kv_from_l2(tokens, [2, 3])
        wait_until(lambda: client.coverage(tokens) == 2 * CHUNK)
        client.close()


def test_rows_whose_kv_is_gone_go_to_the_archive_and_can_be_extracted(tmp_path: Path) -> None:
    with MpServer(tmp_path / "cold", tmp_path / "log", on_kv_gone="archive", write_back_sec=0) as server:
        client = server.client()
        tokens, rows = tokens_of(3, 350), rows_of(3 * CHUNK, 351)
        assert server.put_kv(tokens) == 3
        assert client.store_layers(tokens, {2: rows, 9: rows}) == 3
        assert client.flush(20) == 0
        server.delete_kv(tokens, [0, 1, 2])
        wait_until(lambda: client.stats()["archived_chunks"] == 3)
        assert client.retrieve_layers(tokens, [2]) == {}
        client.close()
    chunks = sorted(ColdTierReader(str(tmp_path / "cold")).chunks(), key=lambda chunk: chunk.header.meta.start)  # type: ignore[union-attr]
    assert [chunk.state for chunk in chunks] == ["archived"] * 3
    assert b"".join(chunk.header.token_ids for chunk in chunks if chunk.header) == token_bytes(tokens)


# -- clients that die ------------------------------------------------------------------------------------------


def test_a_client_that_is_killed_in_the_middle_of_a_store_leaves_nothing(shared_server: MpServer) -> None:
    code = textwrap.dedent(f"""
        from tests.lmcache_mp.test_mp_mode import CHUNK, rows_of, tokens_of
        from lmcache_hs_backend.integrations.lmcache_mp import HiddenStateClient
        client = HiddenStateClient({shared_server.url!r}, model="org/killed", read_timeout_sec=60)
        tokens, rows = tokens_of(40, 1), rows_of(40 * CHUNK, 1)
        held = []
        print("stores", flush=True)
        while True:
            client.store_layers(tokens, {{layer: rows for layer in range(6)}})
            held = [client.retrieve_layers(tokens, range(6))]
            client.clear()
    """)
    survivor = shared_server.client()
    tokens, rows = tokens_of(2, 400), rows_of(2 * CHUNK, 401)
    assert survivor.store_hidden_states(tokens, rows) == 2
    assert shared_server.process is not None
    maps = Path(f"/proc/{shared_server.process.pid}/maps")
    for turn in range(3):
        process = with_lmcache_server().start(code, stdout=PIPE)
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
            time.sleep(0.3 + 0.17 * turn)  # in whatever it does then
            process.kill()
        wait_until(lambda: shared_server.status()["connections"] == 1)
        assert is_served(survivor, tokens, rows)
    wait_until(lambda: maps.read_text().count("memfd:lmcache-hs-result") <= 1)  # the survivor's
    again = shared_server.client(model="org/killed", read_timeout_sec=60)
    prompt = tokens_of(40, 1)
    found = again.retrieve_layers(prompt, range(6))
    assert all(torch.equal(got, rows_of(40 * CHUNK, 1)[: len(got)].float()) for got in found.values())
    again.close()
    survivor.close()


def test_a_forked_child_connects_anew(shared_server: MpServer) -> None:
    client = shared_server.client(read_timeout_sec=60)
    tokens, rows = tokens_of(2, 410), rows_of(2 * CHUNK, 411)
    assert client.store_hidden_states(tokens, rows) == 2
    child = os.fork()
    if not child:
        os._exit(0 if client.coverage(tokens) == 2 * CHUNK else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (channel,) = client._channels._idle  # which the child has not ended
    assert is_served(client, tokens, rows)
    assert client._channels._idle == [channel]
    client.close()


# -- a server that dies, stops or hangs ------------------------------------------------------------------------


def test_the_servers_restart_is_survived_and_its_rows_with_it(server: MpServer) -> None:
    client = server.client(read_timeout_sec=3)
    tokens, rows = tokens_of(4, 500), rows_of(4 * CHUNK, 501)
    assert client.store_hidden_states(tokens, rows) == 4
    kept = client.retrieve_hidden_states(tokens)
    assert client.flush(20) == 0
    server.stop()
    began = time.monotonic()
    assert client.retrieve_hidden_states(tokens) is None
    assert client.store_hidden_states(tokens, rows) == 0
    assert (client.coverage(tokens), client.flush(1), client.stats()) == (0, 0, {})
    client.prefetch(tokens)
    assert time.monotonic() - began < 1  # the connection says at once that it is gone
    server.start()
    wait_until(lambda: is_served(client, tokens, rows))
    assert kept is not None
    assert torch.equal(kept, rows.float())
    server.kill()
    assert client.retrieve_hidden_states(tokens) is None
    server.start()
    wait_until(lambda: is_served(client, tokens, rows))
    client.close()


def test_a_server_that_hangs_costs_one_timeout_and_never_a_wrong_row(server: MpServer) -> None:
    client = server.client(read_timeout_sec=1)
    first, second = tokens_of(2, 510), tokens_of(2, 511)
    rows, others = rows_of(2 * CHUNK, 512), rows_of(2 * CHUNK, 513)
    assert client.store_hidden_states(first, rows) == 2
    server.pause()
    began = time.monotonic()
    assert client.store_hidden_states(second, others) == 0  # the server will find this call when it goes on
    assert time.monotonic() - began < 2
    began = time.monotonic()
    for _ in range(20):
        assert client.retrieve_hidden_states(first) is None
    assert time.monotonic() - began < 1.5  # not 20 seconds
    server.resume()
    wait_until(lambda: is_served(client, first, rows))
    late = client.retrieve_hidden_states(second)
    assert late is None or torch.equal(late, others.float()[: len(late)])
    client.close()


def test_a_server_that_dies_leaves_no_memory_in_a_client_that_does_nothing(server: MpServer) -> None:
    client = server.client(read_timeout_sec=60)
    tokens, rows = tokens_of(2, 514), rows_of(2 * CHUNK, 515)
    assert client.store_hidden_states(tokens, rows) == 2
    (hot,) = client._channels._hot.values()
    gone = weakref.ref(hot)
    del hot
    server.kill()
    wait_until(lambda: gone() is None)
    client.close()


@pytest.mark.parametrize("copy", ["copy_in", "copy_out"])
def test_a_server_that_ends_while_a_client_copies(server: MpServer, monkeypatch: pytest.MonkeyPatch, copy: str) -> None:
    client = server.client(read_timeout_sec=60)
    tokens, rows = tokens_of(2, 516), rows_of(2 * CHUNK, 517)
    other, others = tokens_of(2, 518), rows_of(2 * CHUNK, 519)
    assert client.store_hidden_states(tokens, rows) == 2
    copies = getattr(HotMemory, copy)

    def copy_while_it_ends(*args: Any) -> Any:
        server.stop()
        return copies(*args)

    with monkeypatch.context() as patch:
        patch.setattr(HotMemory, copy, copy_while_it_ends)
        if copy == "copy_in":
            assert client.store_hidden_states(other, others) == 0
        else:
            assert client.retrieve_hidden_states(tokens) is None
    server.start()
    wait_until(lambda: is_served(client, tokens, rows), 60)
    late = client.retrieve_hidden_states(other)
    assert late is None or torch.equal(late, others.float()[: len(late)])
    client.close()


def test_a_client_may_be_there_before_its_server(tmp_path: Path) -> None:
    server = MpServer(tmp_path / "cold", tmp_path / "log")
    client = server.client()
    tokens, rows = tokens_of(2, 520), rows_of(2 * CHUNK, 521)
    assert client.retrieve_hidden_states(tokens) is None
    assert client.store_hidden_states(tokens, rows) == 0
    assert (client.chunks(tokens), client.num_cached_chunks(), client.has_chunk("k"), client.drop_key("k")) == (
        [], 0, False, False,
    )  # fmt: skip
    with server:
        assert client.store_hidden_states(tokens, rows) == 2
        assert is_served(client, tokens, rows)
    client.close()
    assert client.retrieve_hidden_states(tokens) is None


def test_rows_are_kept_in_ram_while_the_cold_path_cannot_be_used_and_written_when_it_can(tmp_path: Path) -> None:
    path, tokens, rows = tmp_path / "cold", tokens_of(2, 530), rows_of(2 * CHUNK, 531)
    path.write_text("")
    with MpServer(path, tmp_path / "log", write_back_sec=0) as server:
        client = server.client()
        assert client.store_hidden_states(tokens, rows) == 2
        assert is_served(client, tokens, rows)
        assert client.stats()["cold_state"] == "offline"
        assert f"config['cold_path'] of the server module is '{path}'" in server.log.read_text()
        path.unlink()
        wait_until(lambda: client.stats()["cold_chunks"] == 2, 90)
        assert client.stats()["cold_state"] == "online"
        client.close()


def test_where_the_cold_path_is_required_a_server_without_it_serves_no_rows_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with MpServer(tmp_path / "file", tmp_path / "log", require_cold=True) as server:
        client = server.client()
        tokens = tokens_of(2, 530)
        assert client.store_hidden_states(tokens, rows_of(2 * CHUNK, 531)) == 0
        assert client.retrieve_hidden_states(tokens) is None
        assert server.status()["stores"] == []
        said = f"a client is refused, and gets no hidden states: {MODEL}: config['cold_path'] of the server module is"
        assert server.log.read_text().count(said) == 1
        client.close()


def test_a_wrong_setting_is_named_and_the_server_does_not_start(tmp_path: Path) -> None:
    server = MpServer(tmp_path / "cold", tmp_path / "log", io_treads=4)
    with pytest.raises(AssertionError, match="io_treads"):
        server.start()
    assert "io_threads" in server.log.read_text()


def test_with_ranks_first_all_ranks_have_one_copy(tmp_path: Path) -> None:
    tokens, rows = tokens_of(3, 530), rows_of(3 * CHUNK, 531)
    with MpServer(tmp_path / "cold", tmp_path / "log", ranks="first", write_back_sec=0) as server:
        ranks = [server.client(world_size=2, worker_id=number) for number in range(2)]
        assert [client.store_hidden_states(tokens, rows) for client in ranks] == [3, 3]
        for client in ranks:
            assert is_served(client, tokens, rows)
        assert len(list((tmp_path / "cold").iterdir())) == 1
        wait_until(lambda: len(list((tmp_path / "cold").glob("*/??/*.safetensors"))) == 3)
        for client in ranks:
            client.close()
