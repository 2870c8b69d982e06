"""How fast is the disk under a cold path? One file of 64 MB, written, made durable, and read back.

Writes a temporary file in the cold path, under a name that a later start would clear away, and removes it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable

from lmcache_hs_backend.cli.console import CommandError
from lmcache_hs_backend.config import TieredConfig
from lmcache_hs_backend.format.chunk_file import FileLayer, direct_refusal
from lmcache_hs_backend.format.layout import temporary_name

PROBE_BYTES = 64 << 20
_BLOCK = 2 << 20


def probe_disk(config: TieredConfig) -> dict[str, float | bool]:
    """Measure, with O_DIRECT where the disk takes it.

    Returns:
        ``o_direct``, ``write_bytes_per_sec`` and ``read_bytes_per_sec``.

    Raises:
        CommandError: The disk refuses.
    """
    path = os.path.join(config.cold_path, temporary_name("probe"))
    try:
        os.makedirs(config.cold_path, config.cold_dir_mode, exist_ok=True)
        direct = direct_refusal(FileLayer(), config.cold_path) is None
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        fd = os.open(path, flags, 0o600)
        try:
            with mmap.mmap(-1, _BLOCK) as block:  # page-aligned, as O_DIRECT wants it
                block.write(os.urandom(4096) * (_BLOCK // 4096))
                write = _timed(lambda offset: os.pwrite(fd, block, offset), lambda: os.fdatasync(fd))
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # without O_DIRECT it would come from memory
                read = _timed(lambda offset: os.preadv(fd, [block], offset))
        finally:
            os.close(fd)
    except OSError as error:
        raise CommandError(f"the disk of {config.cold_path} cannot be probed: {error}") from None
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    return {"o_direct": direct, "write_bytes_per_sec": PROBE_BYTES / write, "read_bytes_per_sec": PROBE_BYTES / read}


def _timed(move: Callable[[int], int], finish: Callable[[], None] = lambda: None) -> float:
    """Seconds that it takes to move every block of the file."""
    started = time.monotonic()
    for offset in range(0, PROBE_BYTES, _BLOCK):
        move(offset)
    finish()
    return max(time.monotonic() - started, 1e-9)
