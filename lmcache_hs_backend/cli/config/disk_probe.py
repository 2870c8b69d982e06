"""How fast is the disk under a cold path? One file of 64 MB, written, made durable, and read back.

Writes a temporary file in the cold path, under a name that a later start would clear away, and removes it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time

from lmcache_hs_backend.cli.console import CommandError
from lmcache_hs_backend.config import TieredConfig

PROBE_BYTES = 64 << 20
_BLOCK = 2 << 20


def probe_disk(config: TieredConfig) -> dict[str, float | bool]:
    """``o_direct``, ``write_bytes_per_sec``, ``read_bytes_per_sec``. Raises CommandError when the disk refuses."""
    path = os.path.join(config.cold_path, f".probe.{os.getpid()}.0.tmp")
    try:
        os.makedirs(config.cold_path, config.cold_dir_mode, exist_ok=True)
        direct = _takes_direct(path)
        flags = os.O_DIRECT if direct else 0
        with mmap.mmap(-1, _BLOCK) as block:  # page-aligned, as O_DIRECT wants it
            block.write(os.urandom(4096) * (_BLOCK // 4096))
            write = _timed(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, block, writing=True)
            read = _timed(path, os.O_RDONLY | flags, block, writing=False)
    except OSError as error:
        raise CommandError(f"the disk of {config.cold_path} cannot be probed: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return {"o_direct": direct, "write_bytes_per_sec": PROBE_BYTES / write, "read_bytes_per_sec": PROBE_BYTES / read}


def _takes_direct(path: str) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o600)
    except OSError:
        return False
    os.close(fd)
    os.unlink(path)
    return True


def _timed(path: str, flags: int, block: mmap.mmap, *, writing: bool) -> float:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        if not writing:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # without O_DIRECT it would come from memory
        started = time.monotonic()
        for offset in range(0, PROBE_BYTES, _BLOCK):
            if writing:
                os.pwrite(fd, block, offset)
            else:
                os.preadv(fd, [block], offset)
        if writing:
            os.fdatasync(fd)
        return max(time.monotonic() - started, 1e-9)
    finally:
        os.close(fd)
