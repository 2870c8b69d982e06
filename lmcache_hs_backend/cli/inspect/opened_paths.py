"""Which cold paths and URLs a command looks into: one, or several that are put together.

With several, rows say which they are from, and one that cannot be read costs only what is in it: it is named, the
others are shown, and the exit status says so. With one, everything is as if there could never be more.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.arguments import add_shared_options
from lmcache_hs_backend.cli.console import CommandError, Output, printable
from lmcache_hs_backend.config import ConfigError, TieredConfig, default_cold_path
from lmcache_hs_backend.format.chunk_file import FileLayer
from lmcache_hs_backend.format.chunk_sources import NotAColdPath, address_of
from lmcache_hs_backend.format.namespace import NamespaceDirectory
from lmcache_hs_backend.format.reader import ColdTierReader
from lmcache_hs_backend.format.url_files import UrlFiles, UrlOptions, is_url

_PATH_HELP = (
    "directory of the cold tier (default: that of --config, else of $LMCACHE_CONFIG_FILE, else the usual one), or the "
    "URL of a shared tier, as in shared_url"
)


def add_path_arguments(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    """``[COLD_PATH | --config FILE]``, or ``[COLD_PATH ... | --config FILE]``, and the options of a URL."""
    which = parser.add_mutually_exclusive_group()
    if several:
        # argparse knows by the default itself whether any was named beside --config.
        which.add_argument(
            "cold_path", metavar="COLD_PATH", nargs="*", default=(), help=f"{_PATH_HELP}; one or several"
        )
    else:
        which.add_argument("cold_path", metavar="COLD_PATH", nargs="?", help=_PATH_HELP)
    which.add_argument("--config", metavar="FILE", help="LMCache's YAML file, for its cold_path and its limit")
    add_shared_options(parser)


class OpenedColdPath(NamedTuple):
    """A cold path, and the settings by which it was found, if it was."""

    reader: ColdTierReader
    config: TieredConfig | None


def open_path(args: argparse.Namespace) -> OpenedColdPath:
    """The cold path that the arguments name, to be closed with the command (``args.at_end``). Raises CommandError.

    Says on standard error which directories are left out that look like namespaces.
    """
    opened = _open_one(args.cold_path, args)
    _note_left_out(opened.reader, args)
    return opened


def source_of(namespace: NamespaceDirectory) -> str:
    """The cold path or URL that a namespace was found in: a reader's ``cold_path``."""
    return namespace.directory.removesuffix(f"/{namespace.label}")


class Sources:
    """The cold paths and URLs of a command.

    Attributes:
        readers: Those that can be read, in the order in which they were named, each once.
        several: Whether there is more than one, or would be if all could be read: then rows say where they are from.
        not_read: Those that cannot be read, and why.
        config: The settings by which the only one was found, if it was.
        files: Opens the files of all of them.
    """

    def __init__(
        self,
        readers: Sequence[ColdTierReader],
        not_read: dict[str, str],
        config: TieredConfig | None,
        files: FileLayer,
    ) -> None:
        self.readers = readers
        self.not_read = not_read
        self.several = len(readers) + len(not_read) > 1
        self.config = config
        self.files = files
        self._numbers = {reader.cold_path: number for number, reader in enumerate(readers, 1)}

    @property
    def namespaces(self) -> list[NamespaceDirectory]:
        """Those of all sources."""
        return [namespace for reader in self.readers for namespace in reader.namespaces]

    def number(self, namespace: NamespaceDirectory) -> int:
        """Which of the sources a namespace is in, from 1."""
        return self._numbers[source_of(namespace)]

    def name(self, source: str, output: Output) -> str:
        """How rows call a source: by its number below ``legend`` on a terminal, in a pipe by its address."""
        return printable(source) if output.width is None else str(self._numbers[source])

    def legend(self, output: Output) -> None:
        """Say on a terminal which source has which number, where there are several."""
        if self.several and output.width is not None:
            for reader in self.readers:
                output.show(f"source {self._numbers[reader.cold_path]}: {printable(reader.cold_path)}")

    def head(self) -> dict[str, Any]:
        """What the JSON of a command begins with."""
        if not self.several:
            return {"cold_path": self.readers[0].cold_path}
        return {
            "cold_paths": [reader.cold_path for reader in self.readers],
            "not_read": [{"source": source, "why": why} for source, why in self.not_read.items()],
        }

    def row(self, namespace: NamespaceDirectory) -> dict[str, Any]:
        """What the JSON of a row has besides, where there are several."""
        return {"source": source_of(namespace)} if self.several else {}

    def missing(self) -> list[str]:
        """That some could not be read, as part of a command's last line."""
        named = len(self.readers) + len(self.not_read)
        return [f"{len(self.not_read)} of {named} sources could not be read"] if self.not_read else []

    def status(self, status: int) -> int:
        """The exit status of a command that would be ``status`` if all could have been read."""
        return exit_status.ERROR if self.not_read else status


def open_paths(args: argparse.Namespace, *, notes: bool = True) -> Sources:
    """The cold paths that the arguments name, to be closed with the command. Raises CommandError when there is none.

    Of several, says on standard error which cannot be read, and which was named twice.

    ``notes``: say there, too, which directories are left out that look like namespaces.
    """
    if len(args.cold_path) < 2:
        opened = _open_one(args.cold_path[0] if args.cold_path else None, args)
        sources = Sources([opened.reader], {}, opened.config, opened.reader.files)
    else:
        sources = _open_several(args)
    for reader in sources.readers if notes else ():
        _note_left_out(reader, args)
    return sources


def _open_several(args: argparse.Namespace) -> Sources:
    if "" in args.cold_path:  # an unset variable in a script
        raise CommandError("COLD_PATH is empty")
    # One layer for all, as it has the threads and connections, and by it readers know that there is a client.
    urls = any(map(is_url, args.cold_path))
    files = UrlFiles(UrlOptions(args.shared_options or {})) if urls else FileLayer()
    args.at_end.callback(files.release)
    readers: dict[str, ColdTierReader] = {}
    not_read: dict[str, str] = {}
    for path in dict.fromkeys(args.cold_path):
        try:
            reader = ColdTierReader(path, files=files)
        except (NotAColdPath, ConfigError) as error:
            not_read[address_of(path)] = str(error)
            continue
        first = readers.setdefault(reader.place, reader)
        if first is not reader and not args.quiet:
            print(f"note: {printable(path)} was named before, as {printable(first.cold_path)}", file=sys.stderr)
    if not readers:
        raise CommandError("; ".join(not_read.values()))
    for why in not_read.values():
        print(f"error: {printable(why)}", file=sys.stderr)
    return Sources(list(readers.values()), not_read, None, files)


def _open_one(path: str | None, args: argparse.Namespace) -> OpenedColdPath:
    config = None
    if path is None and (args.config or os.environ.get("LMCACHE_CONFIG_FILE")):
        from lmcache_hs_backend.cli.config.verdict import cold_path_of
        from lmcache_hs_backend.integrations.lmcache.lmcache_settings import LoadError

        try:
            config = cold_path_of(args.config)
        except (LoadError, ConfigError) as error:
            raise CommandError(str(error)) from None
        path = config.cold_path
    try:
        reader = ColdTierReader(path or default_cold_path(), shared_options=args.shared_options)
        args.at_end.callback(reader.close)
        return OpenedColdPath(reader, config)
    except (NotAColdPath, ConfigError) as error:
        default = "" if path else " (the default; name a directory, or a configuration with --config)"
        raise CommandError(f"{error}{default}") from None


def _note_left_out(reader: ColdTierReader, args: argparse.Namespace) -> None:
    if args.quiet:
        return
    for left_out in reader.left_out:
        why = left_out.why
        if sys.stderr.isatty():  # narrow, perhaps
            why = why.replace(reader.cold_path + "/", "")
        print(f"note: left out: {printable(why)}", file=sys.stderr)
