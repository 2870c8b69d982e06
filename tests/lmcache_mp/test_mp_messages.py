"""What a client sends is hostile until it is checked: nothing it says crashes the server or reaches other memory."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Iterator

import pytest

pytest.importorskip("lmcache")

import msgspec

from lmcache_hs_backend.integrations.lmcache_mp import wire
from lmcache_hs_backend.integrations.lmcache_mp.shared_memory import Segment
from tests.support.mp_server import MODEL, MpServer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HELLO = {
    "op": "hello", "version": wire.VERSION, "model": MODEL, "model_revision": "", "kv_dtype": "bfloat16",
    "world_size": 1, "worker_id": 0,
}  # fmt: skip
IDS = bytes(8 * 256)
PLACE = {"layer_idx": 0, "segment": 0, "offset": 0, "num_tokens": 256, "hidden_dim": 16, "dtype": "bfloat16"}


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
        {"op": "store", "ids": IDS, "token_offset": -1, "rows": []},
        {"op": "store", "ids": IDS, "token_offset": 0, "rows": [{**PLACE, "offset": -4096}]},
        {"op": "store", "ids": IDS, "token_offset": 0, "rows": [{**PLACE, "hidden_dim": 0}]},
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
        {"op": "store", "ids": IDS, "token_offset": 0, "rows": [PLACE]},  # no staging memory yet
        {"op": "retrieve", "ids": b"12345", "layer_idxs": [0], "dtype": None},
        {"op": "retrieve", "ids": IDS, "layer_idxs": [0], "dtype": "int8"},
        {"op": "coverage", "ids": struct.pack("<q", -1) * 256, "layer_idxs": [0]},
        {"op": "stats", "staging": 4096},  # without a descriptor
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


@pytest.mark.parametrize(
    "place",
    [
        {**PLACE, "offset": 1 << 20},
        {**PLACE, "offset": 64},
        {**PLACE, "num_tokens": 1 << 24, "hidden_dim": 1 << 24},
        {**PLACE, "dtype": "int64"},
        {**PLACE, "num_tokens": 0},
        {**PLACE, "num_tokens": 255},
    ],
)
def test_rows_outside_the_staging_memory_are_refused(peer: Peer, place: object) -> None:
    peer.says(HELLO)
    segment, fd = Segment.create(1 << 20)
    reply = peer.says({"op": "store", "ids": IDS, "token_offset": 0, "rows": [place], "staging": 1 << 20}, [fd])
    os.close(fd)
    assert reply is not None
    assert reply["is_argument"], segment
    assert reply["count"] == 0


def test_memory_that_could_be_cut_is_refused(peer: Peer) -> None:
    peer.says(HELLO)
    unsealed = os.memfd_create("unsealed")
    os.ftruncate(unsealed, 1 << 20)
    with tempfile.TemporaryFile() as file:
        file.truncate(1 << 20)
        for fd in (unsealed, file.fileno(), os.open("/dev/zero", os.O_RDWR), os.open("/", os.O_RDONLY)):
            reply = peer.says({"op": "stats", "staging": 1 << 20}, [fd])
            assert reply is not None
            assert reply["is_argument"]
    sealed, fd = Segment.create(1 << 20)
    reply = peer.says({"op": "stats", "staging": 1 << 30}, [fd])  # larger than it is
    assert reply is not None
    assert reply["is_argument"], sealed
    reply = peer.says({"op": "stats", "staging": 1 << 20}, [fd] * 3)
    assert reply is not None
    assert reply["is_argument"]
