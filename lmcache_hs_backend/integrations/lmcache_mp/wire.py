"""The messages between clients and the server: checked as they are decoded, over a Unix socket.

A message is its length (4 bytes, little-endian) and a msgpack body; file descriptors of shared memory travel with it.
Rows never do: they are in shared memory, and messages name their places. Whatever
comes in has been checked for types and limits when ``receive`` returns it; whether a place lies within its memory, the
owner of the memory checks.

A call has one reply, with two exceptions. To a store, the server replies with ``copies`` first, whenever it has slots
for a part of the rows: the client copies those, sends ``Copied``, and waits for the next reply. To a retrieve of rows
that are all in RAM it replies with ``copies`` too; the client copies, and the call ends with ``Copied``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

import msgspec

#: Both sides compare it first.
VERSION = 2
#: Token ids of 2²⁴ tokens, and as much again.
_MAX_BODY = 1 << 28
_MAX_FDS = 16
_LENGTH = struct.Struct("<I")

_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
_LayerIdx = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_LayerIdxs = Annotated[list[_LayerIdx], msgspec.Meta(max_length=1024)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 44)]
_HiddenDim = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
MAX_NAME = 1024
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME)]
_Salt = Annotated[str, msgspec.Meta(max_length=128)]
_MAX_IDS = 8 << 24
_Ids = Annotated[bytes, msgspec.Meta(max_length=_MAX_IDS)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=86400)]
MAX_SECONDS = 86400.0


class LayerRows(msgspec.Struct):
    """Rows of one layer that a client has: ``[num_tokens, hidden_dim]`` of ``dtype``."""

    layer_idx: _LayerIdx
    num_tokens: _Count
    hidden_dim: _HiddenDim
    dtype: _Name


class HotRun(msgspec.Struct, array_like=True):
    """Rows of a layer in the hot tier: ``[num_tokens, hidden_dim]`` of ``dtype`` (a safetensors name) at ``offset``.

    They are the ones from ``row`` on of what the client stores or retrieves.
    """

    layer_idx: _LayerIdx
    row: _Count
    num_tokens: _Count
    offset: _Bytes
    hidden_dim: _HiddenDim
    dtype: _Name


class SegmentPlace(msgspec.Struct):
    """Rows of a result, ``[num_tokens, hidden_dim]`` of ``dtype``, at ``offset`` of a segment of shared memory.

    ``segment``: they are numbered as the server has sent them, from 1.
    """

    layer_idx: _LayerIdx
    segment: _Count
    offset: _Bytes
    num_tokens: _Count
    hidden_dim: _HiddenDim
    dtype: _Name


#: Results that the client has no more use for: segment and offset of each.
_Released = Annotated[list[tuple[_Count, _Bytes]], msgspec.Meta(max_length=1 << 20)]
_Places = Annotated[list[SegmentPlace], msgspec.Meta(max_length=1024)]


class Call(msgspec.Struct, tag_field="op", kw_only=True):
    """What every request has."""

    released: _Released = []


class HelloCall(Call, tag="hello", kw_only=True):
    """The first message of a connection: whose rows it is about."""

    version: int
    model: _Name
    model_revision: str
    kv_dtype: _Name
    world_size: _Count
    worker_id: _Count


class StoreCall(Call, tag="store", kw_only=True):
    """``layers``: what the client has, from ``token_offset`` on. Its reply is the count."""

    ids: _Ids
    token_offset: _Count
    layers: Annotated[list[LayerRows], msgspec.Meta(max_length=1024)]
    salt: _Salt = ""


class Copied(Call, tag="copied", kw_only=True):
    """The ``copies`` that the server has sent are made."""


class RetrieveCall(Call, tag="retrieve", kw_only=True):
    """Its reply are places or copies. ``dtype``: of the result; None: as the rows are kept."""

    ids: _Ids
    layer_idxs: _LayerIdxs
    dtype: _Name | None
    salt: _Salt = ""


class CoverageCall(Call, tag="coverage", kw_only=True):
    """Its reply is a token position."""

    ids: _Ids
    layer_idxs: _LayerIdxs
    salt: _Salt = ""


class PrefetchCall(Call, tag="prefetch", kw_only=True):
    """Its reply is empty. ``layer_idxs``: None stands for all."""

    ids: _Ids
    layer_idxs: _LayerIdxs | None
    salt: _Salt = ""


class ChunksCall(Call, tag="chunks", kw_only=True):
    """Its reply are the chunks of a prompt."""

    ids: _Ids
    salt: _Salt = ""


class HasCall(Call, tag="has", kw_only=True):
    """Its reply is 1 if a tier holds the layer of a chunk."""

    key: _Name
    layer_idx: _LayerIdx


class DropCall(Call, tag="drop", kw_only=True):
    """Its reply is 1 if the chunk was there."""

    key: _Name


class LengthCall(Call, tag="length", kw_only=True):
    """Its reply is how many chunks there are, and as ``chunk_size`` how many tokens each has."""


class FlushCall(Call, tag="flush", kw_only=True):
    """Its reply is how many chunks still are dirty after ``timeout`` seconds at most."""

    timeout: _Seconds


class ClearCall(Call, tag="clear", kw_only=True):
    """Its reply is how many chunks there were."""


class StatsCall(Call, tag="stats", kw_only=True):
    """Its reply are the figures of the store."""


AnyCall = (
    HelloCall
    | StoreCall
    | Copied
    | RetrieveCall
    | CoverageCall
    | PrefetchCall
    | ChunksCall
    | HasCall
    | DropCall
    | LengthCall
    | FlushCall
    | ClearCall
    | StatsCall
)


class WireReply(msgspec.Struct, kw_only=True):
    """The answer to a call.

    ``error``: a wrong argument (``is_argument``), or trouble of the server. ``segments``: sizes of shared memory whose
    descriptors come with the message: the hot tier with the answer to hello, later new memory of results.

    ``copies``: what the client is to copy now.
    """

    count: int = 0
    chunk_size: int = 0
    copies: list[HotRun] = []
    rows: _Places = []
    chunks: list[tuple[_Count, _Count, _Name]] = []
    figures: dict[str, int | float | str | bool] = {}
    segments: Annotated[list[_Bytes], msgspec.Meta(max_length=_MAX_FDS)] = []
    error: str = ""
    is_argument: bool = False


_encoder = msgspec.msgpack.Encoder()
_calls: msgspec.msgpack.Decoder[AnyCall] = msgspec.msgpack.Decoder(AnyCall)
_replies = msgspec.msgpack.Decoder(WireReply)
M = TypeVar("M")


class BrokenMessage(ConnectionError):
    """The other side does not speak this protocol, or has been cut off in the middle of a message."""


def socket_name(url: str) -> str:
    """The name of the server's socket, in Linux's abstract namespace: from the port of LMCache's own.

    Args:
        url: Of LMCache's server: ``tcp://host:port``, ``grpc://host:port`` or ``host:port``.

    Raises:
        ValueError: No port can be read from it.
    """
    parts = urlsplit(url if "://" in url else f"tcp://{url}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in ("tcp", "grpc") or port is None:
        raise ValueError(
            f"url is {url!r}, but must be tcp://host:port or grpc://host:port of the LMCache server on this machine; "
            "for another kind of address, give the socket that the server has logged as socket="
        )
    return name_for_port(port)


def name_for_port(port: int) -> str:
    """The name of the socket of a server whose LMCache listens on ``port``."""
    return f"\0lmcache-hs-{port}"


def send(sock: socket.socket, message: msgspec.Struct, fds: list[int]) -> None:
    """Send one message. Raises OSError, TimeoutError included."""
    body = _encoder.encode(message)
    frame = _LENGTH.pack(len(body)) + body
    sent = socket.send_fds(sock, [frame], fds) if fds else sock.send(frame)
    if sent < len(frame):
        sock.sendall(memoryview(frame)[sent:])


def check(call: AnyCall) -> None:
    """Raise ValueError for a call that breaks a limit: the server would end the connection, and others suffer."""
    ids = getattr(call, "ids", b"")
    if len(ids) > _MAX_IDS:
        raise ValueError(f"{len(ids) // 8} token ids, but a call takes at most {_MAX_IDS // 8}")
    small = msgspec.structs.replace(call, ids=b"") if ids else call
    try:
        _calls.decode(_encoder.encode(small))
    except (msgspec.MsgspecError, TypeError, OverflowError) as error:  # what cannot be written, and what cannot be read
        raise ValueError(f"LMCache's server does not take this: {error}") from None


def receive_call(sock: socket.socket) -> tuple[AnyCall, list[int]]:
    """The next request and the descriptors that came with it, the caller's to close. Raises OSError, BrokenMessage."""
    return _receive(sock, _calls, None)


def receive_reply(sock: socket.socket, deadline: float) -> tuple[WireReply, list[int]]:
    """The reply, as ``receive_call``; TimeoutError at the deadline (monotonic)."""
    return _receive(sock, _replies, deadline)


def _receive(sock: socket.socket, decoder: msgspec.msgpack.Decoder[M], deadline: float | None) -> tuple[M, list[int]]:
    fds: list[int] = []
    try:
        body = _frame(sock, deadline, fds)
        return decoder.decode(body), fds
    except msgspec.DecodeError as error:  # ValidationError is one
        close_all(fds)
        raise BrokenMessage(f"not a message of this protocol: {error}") from None
    except BaseException:
        close_all(fds)
        raise


def _frame(sock: socket.socket, deadline: float | None, fds: list[int]) -> bytearray:
    """One frame's body; descriptors are appended as they come."""
    head = bytearray()
    while len(head) < _LENGTH.size:
        _set_timeout(sock, deadline)
        piece, received, _, _ = socket.recv_fds(sock, _LENGTH.size - len(head), _MAX_FDS)
        fds += received
        if not piece:
            raise BrokenMessage("the connection was closed")
        head += piece
    (size,) = _LENGTH.unpack(head)
    if size > _MAX_BODY:
        raise BrokenMessage(f"a message of {size} bytes")
    body = bytearray(size)
    view, done = memoryview(body), 0
    while done < size:
        _set_timeout(sock, deadline)
        count = sock.recv_into(view[done:])
        if not count:
            raise BrokenMessage("the connection was closed in the middle of a message")
        done += count
    return body


def _set_timeout(sock: socket.socket, deadline: float | None) -> None:
    if deadline is not None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)


def close_all(fds: list[int]) -> None:
    """Close descriptors that came with a message."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def same_user(sock: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, or as root."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return uid in (os.geteuid(), 0)
