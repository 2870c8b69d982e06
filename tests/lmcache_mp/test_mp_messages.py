"""What a client sends is hostile until it is checked: nothing it says crashes the server or reaches other memory."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("lmcache")

import msgspec

from lmcache_hs_backend.integrations.lmcache_mp import HiddenStateClient, wire
from lmcache_hs_backend.integrations.lmcache_mp.client_copies import ClientCopies
from lmcache_hs_backend.integrations.lmcache_mp.hot_memory import HotMemory
from lmcache_hs_backend.integrations.lmcache_mp.results import ClientResults
from lmcache_hs_backend.integrations.lmcache_mp.shared_memory import Segment
from tests.support.mp_server import MODEL, MpServer
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HELLO = {
    "op": "hello", "version": wire.VERSION, "model": MODEL, "model_revision": "", "kv_dtype": "bfloat16",
    "world_size": 1, "worker_id": 0,
}  # fmt: skip
IDS = bytes(8 * 256)
LAYER = {"layer_idx": 0, "num_tokens": 256, "hidden_dim": 16, "dtype": "bfloat16"}
STORE = {"op": "store", "ids": IDS, "token_offset": 0, "layers": [LAYER]}


class Peer:
    """A client that says what it likes."""

    def __init__(self, server: MpServer) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(wire.name_for_port(server.port))

    def says(self, message: object, fds: list[int] | None = None) -> dict[str, object] | None:
        """The reply; None when the connection was closed instead."""
        body = msgspec.msgpack.encode(message)
        return self.sends(struct.pack("<I", len(body)) + body, fds)

    def sends(self, frame: bytes, fds: list[int] | None = None) -> dict[str, object] | None:
        try:
            socket.send_fds(self.socket, [frame], fds or [])
            head = self.socket.recv(4, socket.MSG_WAITALL)
            if len(head) < 4:
                return None
            reply: dict[str, object] = msgspec.msgpack.decode(
                self.socket.recv(struct.unpack("<I", head)[0], socket.MSG_WAITALL)
            )
        except ConnectionError:
            return None
        return reply


@pytest.fixture
def peer(shared_server: MpServer) -> Iterator[Peer]:
    peer = Peer(shared_server)
    yield peer
    peer.socket.close()
    # Whatever it said, the server goes on.
    after = Peer(shared_server)
    reply = after.says(HELLO)
    assert reply is not None
    assert not reply["error"]
    after.socket.close()


@pytest.mark.parametrize(
    "message",
    [
        {"op": "eval", "code": "1"},
        {},
        [1, 2],
        "text",
        {**HELLO, "model": ""},
        {**HELLO, "world_size": -1},
        {"op": "retrieve", "ids": "text", "layer_idxs": [0], "dtype": None},
        {"op": "retrieve", "ids": IDS, "layer_idxs": [2**63], "dtype": None},
        {"op": "retrieve", "ids": IDS, "layer_idxs": [0] * 5000, "dtype": None},
        {**STORE, "token_offset": -1},
        {**STORE, "layers": [{**LAYER, "num_tokens": -1}]},
        {**STORE, "layers": [{**LAYER, "hidden_dim": 0}]},
        {**STORE, "layers": [LAYER] * 2000},
        {"op": "flush", "timeout": -1},
        {"op": "flush", "timeout": "long"},
    ],
)
def test_what_is_no_message_ends_the_connection(peer: Peer, message: object) -> None:
    assert peer.says(message) is None


@pytest.mark.parametrize("frame", [b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"\xc1\xc1\xc1", struct.pack("<I", 0)])
def test_what_is_no_frame_ends_the_connection(peer: Peer, frame: bytes) -> None:
    assert peer.sends(frame) is None


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"op": "stats"}, "hello"),
        ({**HELLO, "version": 999}, "version"),
        ({**HELLO, "model": "a@b"}, "@"),
    ],
)
def test_what_may_not_be_said_first_is_refused_in_words(peer: Peer, message: object, said: str) -> None:
    reply = peer.says(message)
    assert reply is not None
    assert said in str(reply["error"])


@pytest.mark.parametrize(
    "message",
    [
        {**STORE, "layers": []},
        {**STORE, "layers": [{**LAYER, "num_tokens": 255}]},
        {**STORE, "layers": [{**LAYER, "dtype": "int64"}]},
        {**STORE, "layers": [{**LAYER, "dtype": "float64"}]},
        {**STORE, "layers": [LAYER, LAYER]},
        {"op": "retrieve", "ids": b"12345", "layer_idxs": [0], "dtype": None},
        {"op": "retrieve", "ids": IDS, "layer_idxs": [0], "dtype": "int8"},
        {"op": "coverage", "ids": struct.pack("<q", -1) * 256, "layer_idxs": [0]},
    ],
)
def test_what_makes_no_sense_is_an_error_and_the_connection_stays(peer: Peer, message: object) -> None:
    peer.says(HELLO)
    reply = peer.says(message)
    assert reply is not None
    assert reply["is_argument"]
    reply = peer.says({"op": "stats", "released": [(9, 4096), (0, 0), (1 << 20, 1 << 40)]})
    assert reply is not None
    assert not reply["error"]


def test_rows_that_can_never_fit_are_not_stored(peer: Peer) -> None:
    peer.says(HELLO)
    reply = peer.says({**STORE, "layers": [{**LAYER, "num_tokens": 1 << 24, "hidden_dim": 1 << 24}]})
    assert reply is not None
    assert (reply["count"], reply["error"]) == (0, "")


def test_descriptors_that_a_client_sends_are_closed(shared_server: MpServer, peer: Peer) -> None:
    assert shared_server.process is not None
    held = Path(f"/proc/{shared_server.process.pid}/fd")
    peer.says(HELLO)
    before = len(list(held.iterdir()))
    with tempfile.TemporaryFile() as file:
        for _ in range(20):
            reply = peer.says({"op": "stats"}, [file.fileno()] * 3)
            assert reply is not None
    assert len(list(held.iterdir())) < before + 20  # the server opens some of its own now and then


def test_a_client_maps_no_memory_that_could_be_cut() -> None:
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 1 << 20)
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 20)
        for fd in (unsealed, file.fileno(), os.open("/dev/zero", os.O_RDWR), os.open("/", os.O_RDONLY)):
            with pytest.raises(ValueError, match="shared"):
                Segment(fd, 1 << 20)
    sealed, fd = Segment.create(1 << 20, "test")
    with pytest.raises(ValueError, match="announced"):
        Segment(fd, 1 << 30)  # larger than it is
    assert Segment(fd, 1 << 20).nbytes == sealed.nbytes


# -- slots that are lent to a client ---------------------------------------------------------------------------


class Worker:
    """A client that stores step by step: it is lent slots, and says when it is done."""

    def __init__(self, server: MpServer, model: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(wire.name_for_port(server.port))
        wire.send(self.socket, wire.HelloCall(**{**{k: v for k, v in HELLO.items() if k != "op"}, "model": model}), [])
        reply, fds = wire.receive_reply(self.socket, time.monotonic() + 60)
        self.hot = HotMemory(fds[0], reply.segments[0])
        wire.close_all(fds)

    def asks(self, call: wire.AnyCall) -> wire.WireReply:
        wire.send(self.socket, call, [])
        return wire.receive_reply(self.socket, time.monotonic() + 60)[0]

    def stores(self, ids: bytes) -> wire.WireReply:
        layers = [wire.LayerRows(0, len(ids) // 8, 16, "bfloat16")]
        return self.asks(wire.StoreCall(ids=ids, token_offset=0, layers=layers))


def ids_of(chunks: int, seed: int) -> bytes:
    return torch.randint(0, 50_000, (256 * chunks,), generator=torch.Generator().manual_seed(seed)).numpy().tobytes()


def test_lent_slots_are_used_for_nothing_else_until_the_client_is_gone(shared_server: MpServer) -> None:
    slow, other = Worker(shared_server, "org/lent"), shared_server.client(model="org/lent")
    copies = slow.stores(ids_of(4, 1)).copies
    assert sum(run.num_tokens for run in copies) == 4 * 256
    lent = other.stats()["hot_bytes"]
    assert lent == 4 * 256 * 16 * 2
    prompts = {seed: torch.frombuffer(bytearray(ids_of(4, seed)), dtype=torch.int64) for seed in range(2, 12)}
    rows = {seed: torch.full((4 * 256, 16), float(seed)) for seed in prompts}
    for seed, prompt in prompts.items():
        assert other.store_hidden_states(prompt, rows[seed]) == 4
    assert other.clear() == 40  # what is lent is not there yet, and stays lent
    wait_until(lambda: other.stats()["hot_bytes"] == lent)  # a write that has begun keeps its slots until it is over
    for seed, prompt in prompts.items():
        assert other.store_hidden_states(prompt, rows[seed]) == 4
    slow.hot.copy_in({0: torch.full((4 * 256, 16), -1.0).bfloat16()}, copies)  # at last
    for seed, prompt in prompts.items():
        found = other.retrieve_hidden_states(prompt)
        assert found is not None
        assert torch.equal(found, rows[seed])
    assert slow.asks(wire.Copied()).count == 0  # it began before the store was cleared
    stored = other.stats()["hot_bytes"]
    slow.stores(ids_of(4, 1))
    assert other.stats()["hot_bytes"] == stored + lent
    slow.socket.close()
    wait_until(lambda: other.stats()["hot_bytes"] == stored)
    assert other.coverage(torch.frombuffer(bytearray(ids_of(4, 1)), dtype=torch.int64)) == 0
    other.clear()
    other.close()


def test_a_client_that_breaks_off_keeps_its_slots_until_its_end_is_closed(shared_server: MpServer) -> None:
    odd, other = Worker(shared_server, "org/odd"), shared_server.client(model="org/odd")
    assert odd.stores(ids_of(2, 1)).copies
    lent = other.stats()["hot_bytes"]
    with pytest.raises(wire.BrokenMessage):
        odd.asks(wire.StatsCall())  # in the middle of a store: that is the end of the connection
    assert other.stats()["hot_bytes"] == lent > 0  # but it may still be writing
    odd.socket.close()
    wait_until(lambda: other.stats()["hot_bytes"] == 0)
    other.close()


def test_copied_without_copies_ends_the_connection(peer: Peer) -> None:
    peer.says(HELLO)
    assert peer.says({"op": "copied"}) is None


def test_a_server_that_closes_does_not_take_slots_back() -> None:
    """The end of a connection proves nothing when it is the server's own doing."""
    ours, theirs = socket.socketpair()
    copies = ClientCopies(ours, lambda: True)
    ours.shutdown(socket.SHUT_RDWR)
    with pytest.raises(ConnectionAbortedError):
        copies.await_end()
    theirs.close()
    ours.close()


def test_what_the_server_would_not_read_is_refused_before_it_is_sent() -> None:
    with pytest.raises(ValueError, match="world_size"):
        HiddenStateClient("tcp://127.0.0.1:1", model=MODEL, world_size=-1)
    client = HiddenStateClient("tcp://127.0.0.1:1", model=MODEL)  # where no server is
    with pytest.raises(ValueError, match=r"128.*salt"):
        client.store_hidden_states([1] * 256, torch.zeros(256, 16), cache_salt="s" * 129)
    assert client.store_hidden_states([1] * 256, torch.zeros(256, 16), cache_salt="s" * 128) == 0
    client.close()


def test_memory_of_a_result_that_a_late_read_still_writes_is_not_given_out_again() -> None:
    """A call that times out may return while an I/O thread copies one of its chunks."""
    results = ClientResults(64 << 20, copies=None)
    results.begin()
    late = results.rows(4, 4096, torch.float32)  # as PendingReads keeps it
    place = late.data_ptr()
    assert results.hand_over({}) == []
    results.begin()
    again = results.rows(4, 4096, torch.float32)
    assert again.data_ptr() != place
    [given] = results.hand_over({0: again})
    results.release([(given.segment, given.offset)])
    other, at = results.rows(4, 4096, torch.float32), again.data_ptr()
    assert other.data_ptr() not in (place, at), "the client is done with it, the server is not"
    del late, again
    assert {results.rows(4, 4096, torch.float32).data_ptr() for _ in range(1)} <= {place, at}
    results.close()
