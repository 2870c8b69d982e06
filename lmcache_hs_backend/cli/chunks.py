"""The chunks of a cold path, one after the other, as all sub-commands go through them.

Streams: names are scanned folder by folder, headers read as they are asked for, so that a million chunks
take no more memory than one, and the first comes at once. Folders are shared out among processes, because
most of the work is Python's; the disk reads ahead meanwhile: some files are opened before their turn, and
announced to the kernel. Also the options that say which cold path, and which chunks of it.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
import os
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, timezone
from typing import Any, NamedTuple, TypeVar

import xxhash

from lmcache_hs_backend.cli.coldpath import (
    ColdPath,
    Found,
    Head,
    Named,
    Namespace,
    NotAColdPath,
    Unreadable,
    chunk_name,
    folders,
    open_chunk,
    read_head_of,
    read_parts_of,
    scan,
)
from lmcache_hs_backend.cli.console import CommandError, printable, time_text
from lmcache_hs_backend.cli.parallel import in_processes
from lmcache_hs_backend.config import ConfigError, TieredConfig, default_cold_path

STATES = ("cold", "archived")

#: So many files are open at a time; a header has seldom more bytes than are asked for in advance.
_AHEAD = 64
_HEADER_BYTES = 8192


class Chunk(NamedTuple):
    """A chunk file, its header read."""

    file: Found
    namespace: Namespace
    state: str  # one of STATES
    head: Head

    @property
    def dtype(self) -> str | list[str]:
        """torch's name; one for each layer where they differ."""
        return _one_or_all([layer.dtype_name for layer in self.head.layers])

    @property
    def hidden_dim(self) -> int | list[int]:
        return _one_or_all([layer.hidden_dim for layer in self.head.layers])

    def record(self) -> dict[str, Any]:
        """The chunk as ``list --format json`` shows it."""
        head = self.head
        return {
            "key": head.key,
            "chunk_hash": head.chunk_hash,
            "parent": head.parent,
            "namespace": self.namespace.label,
            "model": head.model,
            "worker_id": self.namespace.worker_id,
            "start": head.start,
            "num_tokens": head.num_tokens,
            "layers": [layer.layer_idx for layer in head.layers],
            "dtype": self.dtype,
            "hidden_dim": self.hidden_dim,
            "bytes": self.file.size,
            "path": self.file.path,
            "created_at": head.created_at,
            "accessed_at": time_text(self.file.mtime_ns),
            "state": self.state,
        }


_V = TypeVar("_V", str, int)


def _one_or_all(values: list[_V]) -> _V | list[_V]:
    return values[0] if len(set(values)) == 1 else values


Test = Callable[[Chunk], bool]


class Chunks:
    """Goes through a cold path. What cannot be read is counted in ``skipped``, by reason, a directory as one.

    ``refused``: the directories among them that ``places`` has met: namespace, path, why.
    """

    def __init__(self, cold_path: ColdPath, namespaces: list[Namespace], states: tuple[str, ...] = STATES) -> None:
        self.cold_path = cold_path
        self.namespaces = namespaces
        self.skipped: Counter[str] = Counter()
        self.refused: list[tuple[Namespace, str, str]] = []
        self._states = states

    def places(self) -> Iterator[Place]:
        """Where there are chunk files, by their names alone."""
        for folder in self._folders():
            try:
                yield from folder.places()
            except OSError as error:
                self._refuse(folder.namespace, folder.path, error)

    def read(self) -> Iterator[Chunk]:
        """Every chunk that can be read, in the order of the directories, without its token ids."""
        for chunk in in_processes(_read_folder, list(self._folders())):
            if isinstance(chunk, Chunk):
                yield chunk
            else:
                self.skipped[chunk] += 1

    def _folders(self) -> Iterator[_Folder]:
        for namespace in self.namespaces:
            for state in self._states:
                root = namespace.root(state)
                try:
                    paths = folders(root)
                except OSError as error:
                    self._refuse(namespace, root, error)
                    continue
                for path in paths:
                    yield _Folder(namespace, state, path)

    def _refuse(self, namespace: Namespace, path: str, error: OSError) -> None:
        self.refused.append((namespace, path, str(error.strerror)))
        self.skipped["unreadable"] += 1


def skipped_text(skipped: Mapping[str, int]) -> str:
    """``2 skipped (size 1, vanished 1)``."""
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(skipped.items()))
    return f"{sum(skipped.values()):,} skipped ({reasons})"


class Place(NamedTuple):
    """Where a chunk file lies."""

    namespace: Namespace
    state: str
    file: Named


class _Folder(NamedTuple):
    """One of the 256 directories of a namespace, or of its archive."""

    namespace: Namespace
    state: str
    path: str

    def places(self) -> Iterator[Place]:
        for file in scan(self.path):
            yield Place(self.namespace, self.state, file)


#: A file that is open, or why it is not, in one word.
_Opened = tuple[int, os.stat_result] | str


def look_at(place: Place) -> Chunk | str:
    """The chunk in a file, or why there is none, in one word."""
    return _read(place, _open(place), token_ids=True)


def _read_folder(folder: _Folder) -> Iterator[Chunk | str]:
    """``look_at`` for all that is there, in order, while the kernel already reads what comes next. The token ids
    have been checked and are left behind: those who need them read the one file again."""
    waiting: deque[tuple[Place, _Opened]] = deque()
    refused = False
    try:
        try:
            for place in folder.places():
                waiting.append((place, _open(place)))
                if len(waiting) > _AHEAD:
                    yield _read(*waiting.popleft())
        except OSError:  # of the directory; the files answer for themselves
            refused = True
        while waiting:
            yield _read(*waiting.popleft())
        if refused:
            yield "unreadable"
    finally:  # whoever asked may have seen enough
        for _, opened in waiting:
            if not isinstance(opened, str):
                os.close(opened[0])


def _open(place: Place) -> _Opened:
    try:
        fd, info = open_chunk(place.file.path)
    except Unreadable as why:
        return why.reason
    except FileNotFoundError:
        return "vanished"
    except OSError:
        return "unreadable"
    with contextlib.suppress(OSError):  # advice, no more: not every filesystem takes it
        os.posix_fadvise(fd, 0, _HEADER_BYTES, os.POSIX_FADV_WILLNEED)
    return fd, info


def _read(place: Place, opened: _Opened, *, token_ids: bool = False) -> Chunk | str:
    if isinstance(opened, str):
        return opened
    fd, info = opened
    try:
        head = read_head_of(fd, info.st_size) if token_ids else read_parts_of(fd, info.st_size)[0]
    except Unreadable as why:
        return why.reason
    except OSError:
        return "unreadable"
    finally:
        os.close(fd)
    if chunk_name(head.key) != place.file.name:
        return "key"
    found = Found(place.file.path, info.st_size, info.st_mtime_ns, place.file.name)
    return Chunk(found, place.namespace, place.state, head)


# -- which cold path -----------------------------------------------------------------------------------


def add_path_arguments(parser: argparse.ArgumentParser) -> None:
    """``[COLD_PATH | --config FILE]``."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "cold_path",
        metavar="COLD_PATH",
        nargs="?",
        help="directory of the cold tier (default: that of --config, else of $LMCACHE_CONFIG_FILE, else the usual one)",
    )
    which.add_argument("--config", metavar="FILE", help="LMCache's YAML file, for its cold_path and its limit")


class Where(NamedTuple):
    """A cold path, and the settings it was found by, if it was."""

    cold_path: ColdPath
    config: TieredConfig | None


def open_path(args: argparse.Namespace, *, tell: bool = True) -> Where:
    """The cold path that the arguments name. Raises CommandError.

    ``tell``: say on standard error which directories are left out that look like namespaces.
    """
    config = None
    path = args.cold_path
    if path is None and (args.config or os.environ.get("LMCACHE_CONFIG_FILE")):
        from lmcache_hs_backend.cli.lmcache_config import LoadError
        from lmcache_hs_backend.cli.plugin_check import cold_path_of

        try:
            config = cold_path_of(args.config)
        except (LoadError, ConfigError) as error:
            raise CommandError(str(error)) from None
        path = config.cold_path
    try:
        where = Where(ColdPath(path or default_cold_path()), config)
    except NotAColdPath as error:
        default = "" if path else " (the default; name a directory, or a configuration with --config)"
        raise CommandError(f"{error}{default}") from None
    if tell and not args.quiet:
        for why in where.cold_path.passed_over:
            print(f"note: left out: {printable(why)}", file=sys.stderr)
    return where


def namespaces_of(where: Where, prefix: str | None, option: str = "--namespace") -> list[Namespace]:
    """Those that begin as an option says, all without one. Raises CommandError when it is none."""
    found = [namespace for namespace in where.cold_path.namespaces if namespace.label.startswith(prefix or "")]
    if not found:
        raise CommandError(f"{option} {prefix}: there is none that begins so")
    return found


# -- which chunks --------------------------------------------------------------------------------------


def add_filter_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that choose chunks. All that are given must hold."""
    group = parser.add_argument_group("which chunks")
    group.add_argument("--model", metavar="GLOB", help="of models of this name (with * and ?), or last part of a name")
    group.add_argument("--namespace", metavar="PREFIX", help="of namespaces whose directory begins with PREFIX")
    group.add_argument("--layer", metavar="IDX", type=int, action="append", help="that have this layer (repeatable)")
    group.add_argument("--state", choices=STATES, help="in this state")
    group.add_argument("--since", metavar="TIME", help="used since: 90s, 12h, 7d ago, or 2026-01-31[T12:00] in UTC")
    group.add_argument("--before", metavar="TIME", help="not used since; as for --since")
    group.add_argument("--min-tokens", metavar="N", type=int, help="of at least N tokens")
    group.add_argument(
        "--prefix-of",
        metavar="TEXT",
        help="that a prompt with this text would use: needs --tokenizer, or give token ids: 1,2,3 or @FILE with them",
    )
    group.add_argument("--tokenizer", metavar="DIR", help="directory with a tokenizer.json")


def choose(where: Where, args: argparse.Namespace) -> tuple[Chunks, Test]:
    """What the options choose: the chunks to look at, and the test they must pass. Raises CommandError."""
    for option in ("model", "namespace", "since", "before", "prefix_of"):
        if getattr(args, option) == "":  # an unset variable in a script; to take it for "all" would be fatal for rm
            raise CommandError(f"--{option.replace('_', '-')} is empty")
    namespaces = namespaces_of(where, args.namespace)
    states = (args.state,) if args.state else STATES
    tests: list[Test] = []
    if args.model is not None:
        tests.append(_by_model(args.model))
    if args.layer is not None:
        wanted = set(args.layer)
        tests.append(lambda chunk: wanted <= {layer.layer_idx for layer in chunk.head.layers})
    if args.since is not None:
        since = moment("--since", args.since)
        tests.append(lambda chunk: chunk.file.mtime_ns >= since)
    if args.before is not None:
        before = moment("--before", args.before)
        tests.append(lambda chunk: chunk.file.mtime_ns < before)
    if args.min_tokens is not None:
        least = args.min_tokens
        tests.append(lambda chunk: chunk.head.num_tokens >= least)
    if args.prefix_of is not None:
        tests.append(_by_prefix(_token_ids(args.prefix_of, args.tokenizer)))
    return Chunks(where.cold_path, namespaces, states), lambda chunk: all(test(chunk) for test in tests)


def _by_model(pattern: str) -> Test:
    def test(chunk: Chunk) -> bool:
        model = chunk.head.model
        return fnmatch.fnmatchcase(model, pattern) or fnmatch.fnmatchcase(model.rsplit("/", 1)[-1], pattern)

    return test


def _by_prefix(ids: array[int]) -> Test:
    """Chunks whose prefix digest is that of so many of these token ids."""
    digests: dict[int, bytes] = {}
    data = memoryview(ids.tobytes())

    def test(chunk: Chunk) -> bool:
        end = chunk.head.end
        if end > len(ids):
            return False
        if end not in digests:
            digests[end] = xxhash.xxh3_128_digest(data[: 8 * end])
        return digests[end] == chunk.head.prefix

    return test


def _token_ids(text: str, tokenizer: str | None) -> array[int]:
    if tokenizer is not None:
        return array("q", load_tokenizer(tokenizer).encode(text).ids)
    if text.startswith("@"):
        try:
            with open(text[1:], encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise CommandError(f"--prefix-of {text}: {error}") from None
    try:
        return array("q", [int(part) for part in text.strip().strip("[]").replace(",", " ").split()])
    except (ValueError, OverflowError):
        raise CommandError(
            "--prefix-of takes token ids such as 1,2,3, or a text together with --tokenizer DIR"
        ) from None


def load_tokenizer(directory: str) -> Any:
    """The tokenizer of a model's directory. Raises CommandError."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CommandError("--tokenizer needs the tokenizers package: pip install tokenizers") from None
    path = os.path.join(directory, "tokenizer.json")
    if not os.path.isfile(path):
        raise CommandError(f"--tokenizer {directory}: there is no tokenizer.json in it")
    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001 - the package raises plain Exception for whatever is wrong with the file
        raise CommandError(f"--tokenizer {directory}: {error}") from None


_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def moment(option: str, text: str) -> int:
    """A point in time in nanoseconds, from a date or from how long ago it was."""
    digits = "".join(itertools.takewhile(lambda char: char.isdigit() or char == ".", text))
    unit = text[len(digits) :].strip()
    if digits and unit in _UNITS:
        try:
            return time.time_ns() - int(float(digits) * _UNITS[unit] * 1e9)
        except ValueError:
            pass
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise CommandError(f"{option} {text}: not a time such as 30min, 12h, 7d or 2026-01-31T12:00") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return int(moment.timestamp() * 1e9)
