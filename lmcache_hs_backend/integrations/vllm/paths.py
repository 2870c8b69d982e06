"""Where the file of a request may be: its default path, and the check of a path that a client asks for.

A path from a client is untrusted: it is used only inside the configured roots, with symbolic links resolved, and is
checked again when the file is written. It imports no vLLM.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import xxhash

LOCK = ".lock"
ERROR = ".error"

_SAFE_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:=-]{0,199}")


def default_path(directory: str, req_id: str) -> str:
    """``<request id>.safetensors``; an id that is not a plain file name (clients choose ids) is hashed."""
    if not _SAFE_ID.fullmatch(req_id):
        req_id = "request-" + xxhash.xxh3_128_hexdigest(req_id.encode("utf-8", "surrogatepass"))
    return os.path.join(directory, f"{req_id}.safetensors")


def confined(path: object, roots: Sequence[str]) -> bool:
    """Whether a file may be written at ``path``: absolute, in one of ``roots`` (resolved), and not a reserved name."""
    if not isinstance(path, str) or not os.path.isabs(path) or "\0" in path or path != os.path.normpath(path):
        return False
    directory, name = os.path.split(path)
    if name.startswith(".") or name.endswith((LOCK, ERROR)) or os.path.islink(path) or os.path.isdir(path):
        return False
    directory = os.path.realpath(directory)
    return any(os.path.commonpath([directory, root]) == root for root in roots)
