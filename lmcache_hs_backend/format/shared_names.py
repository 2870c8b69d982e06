"""Names of a shared tier: they come from the content, so every rank, node and hash seed finds the same object.

::

    <shared_url>/v1/<namespace>/namespace.json
                               /<hh>/<32 hex>.safetensors

A bucket looks like a cold path. An object is a chunk file whose key fields are not those of one process: its
``chunk_hash`` and ``parent`` are prefix digests, its key has no worker, and its ``capture`` names the model's revision.
Nothing here does I/O.
"""

from __future__ import annotations

import json
import re

import xxhash

from lmcache_hs_backend.chunk import ChunkMeta, chunk_name
from lmcache_hs_backend.format.layout import SUFFIX
from lmcache_hs_backend.format.namespace import NamespaceId

VERSION_FOLDER = "v1"
REVISION = "model_revision"

_OBJECT = re.compile(r"(?:.*/)?([0-9a-f]{2})/([0-9a-f]{32})" + re.escape(SUFFIX))


def shared_namespace(ident: NamespaceId) -> NamespaceId:
    """What must be equal for rows to be shared: model, revision, KV dtype and chunk size; no rank and no hash."""
    return NamespaceId(
        model=ident.model, model_revision=ident.model_revision, kv_dtype=ident.kv_dtype, chunk_size=ident.chunk_size
    )


def namespace_folder(ident: NamespaceId) -> str:
    """Where the objects of a (shared) namespace are, below the URL."""
    return f"{VERSION_FOLDER}/{ident.directory}"


def object_path(folder: str, name: bytes) -> str:
    """Where the object of a chunk is, below the URL."""
    text = name.hex()
    return f"{folder}/{text[:2]}/{text}{SUFFIX}"


def object_name(path: str) -> bytes | None:
    """The chunk that an object of this path holds; None for a path that is no chunk's."""
    match = _OBJECT.fullmatch(path)
    return bytes.fromhex(match[2]) if match is not None and match[2].startswith(match[1]) else None


def tags(key: str, model: str) -> str:
    """The tags at the end of a key ``model@world@worker@hash@dtype[@tag…]``; they keep tenants apart."""
    rest = key[len(model) + 1 :] if key.startswith(f"{model}@") else key.partition("@")[2]
    return "@".join(rest.split("@")[4:])


def content_name(prefix: bytes, num_tokens: int, of_tags: str) -> bytes:
    """16 bytes that stand for a chunk's content: all tokens up to its end, how many are its own, and its tags."""
    return xxhash.xxh3_128_digest(prefix + num_tokens.to_bytes(8, "little") + of_tags.encode("utf-8", "surrogatepass"))


def shared_meta(meta: ChunkMeta, ident: NamespaceId, parent: bytes) -> ChunkMeta:
    """A chunk's metadata as an object carries it. ``parent``: prefix digest of the chunk before; empty for none."""
    of_tags = tags(meta.key, ident.model)
    key = f"{ident.model}@1@0@{meta.prefix.hex()}@{ident.kv_dtype}" + (f"@{of_tags}" if of_tags else "")
    try:
        capture = json.loads(meta.capture)
    except (ValueError, RecursionError):
        capture = {}
    capture = {**(capture if isinstance(capture, dict) else {}), REVISION: ident.model_revision}
    return meta._replace(
        key=key, chunk_hash=meta.prefix.hex(), parent=parent.hex(), model=ident.model,
        capture=json.dumps(capture, sort_keys=True),
    )  # fmt: skip


def is_name_of(meta: ChunkMeta, name: bytes) -> bool:
    """Whether a file or object of this name may hold this chunk: named by its full key, or as a shared one."""
    if chunk_name(meta.key) == name:
        return True
    if not meta.key.startswith(f"{meta.model}@1@0@{meta.prefix.hex()}@"):
        return False
    return content_name(meta.prefix, meta.num_tokens, tags(meta.key, meta.model)) == name


def revision(meta: ChunkMeta) -> str:
    """The model's revision that an object names; empty when it names none."""
    try:
        named = json.loads(meta.capture)[REVISION]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return named if isinstance(named, str) else ""
