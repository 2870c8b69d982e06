"""What the command-line tools share: where output goes, how it looks, and how a program ends.

In the manner of LMCache's own command line: ``--format terminal|json``, ``--output PATH``, ``-q``; exit
status 1 on an error, 130 on Ctrl-C. Results go to standard output, progress and errors to standard
error. Plain text where there is no terminal; no colours where NO_COLOR is set. Nothing here is about chunks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from lmcache_hs_backend.cli import exit_status

#: Wide enough that nothing is ever wrapped or cut where there is no terminal.
_UNLIMITED = 100_000


class CommandError(Exception):
    """The command cannot do what it was asked. The text is one line for the user; exit status 1."""


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--format``, ``--output`` and ``--quiet``, as every LMCache command has them."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--format", choices=("terminal", "json"), default="terminal", help="how to print (default: terminal)"
    )
    group.add_argument("--output", metavar="PATH", help="also save what is printed to PATH, in the same format")
    group.add_argument("-q", "--quiet", action="store_true", help="print nothing; the exit status and --output remain")


def run(program: str, main: Callable[[], int]) -> int:
    """Call ``main``, and print at most one line on standard error, whatever it raises.

    Args:
        program: The command's name, for that line.
        main: What to run; it gives an exit status.

    Returns:
        The exit status: that of ``main``; 1 on an error; 130 on Ctrl-C; 141 when the reader of a pipe has gone.
    """
    # torch says this once where NumPy is not installed; we do not need it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    try:
        status = main()
        sys.stdout.flush()
    except CommandError as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return exit_status.ERROR
    except BrokenPipeError:  # `... | head` has ended
        _drop_standard_output()
        return exit_status.PIPE_CLOSED
    except OSError as error:  # a disk that fails, a directory that may not be read
        print(f"{program}: error: {error}", file=sys.stderr)
        return exit_status.ERROR
    except KeyboardInterrupt:
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
        return exit_status.INTERRUPTED
    return status


def _drop_standard_output() -> None:
    """Flushing at exit would raise about the broken pipe again, so standard output goes nowhere from here on."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


class Output:
    """Where a command's results go: standard output, the file of ``--output``, both or neither.

    A context manager. The file of ``--output`` is written under a temporary name, and renamed at the end of a command
    that did not fail; entering raises CommandError when it cannot be written.

    Attributes:
        json: Whether ``--format json`` was given.
        quiet: Whether ``--quiet`` was given: nothing goes to standard output.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.json = args.format == "json"
        self.quiet: bool = args.quiet
        self._path: str | None = args.output
        self._file: TextIO | None = None
        self._sinks: list[Console] = []
        if not self.quiet:
            terminal = sys.stdout.isatty()
            self._sinks.append(_console(sys.stdout, None if terminal else _UNLIMITED))

    def __enter__(self) -> Output:
        if self._path is not None:
            try:
                self._file = open(self._temporary, "x", encoding="utf-8")  # closed in __exit__
                self._sinks.append(Console(file=self._file, width=_UNLIMITED, color_system=None, **_PLAIN))
            except OSError as error:
                raise CommandError(f"--output {self._path} cannot be written: {error.strerror}") from None
            except BaseException:  # Ctrl-C, perhaps before open() has returned: the command has not begun
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._temporary)
                raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self._file is None or self._path is None:
            return
        self._file.close()
        if kind is None:
            os.replace(self._temporary, self._path)
        else:
            os.unlink(self._temporary)

    @property
    def _temporary(self) -> str:
        return f"{self._path}.{os.getpid()}.tmp"

    @property
    def width(self) -> int | None:
        """Columns of the terminal that is written to; None where lines may be as long as they like."""
        if self._file is None and self._sinks and self._sinks[0].is_terminal:
            return self._sinks[0].width
        return None

    def show(self, renderable: RenderableType, style: str | None = None) -> None:
        """Print a text, or something that rich can render, and a newline."""
        for sink in self._sinks:
            sink.print(renderable, style=style)

    def write(self, text: str) -> None:
        """Print text as it is, without rich: fast enough for hundreds of thousands of lines."""
        for sink in self._sinks:
            sink.file.write(text)

    def flush(self) -> None:
        """Write out what is buffered."""
        for sink in self._sinks:
            sink.file.flush()

    def dump(self, value: Any) -> None:
        """Print a value as JSON."""
        self.write(json.dumps(value, indent=2) + "\n")

    def line(self, text: str, style: str | None = None) -> None:
        """Print one line, cut at the terminal's width."""
        for sink in self._sinks:
            sink.print(Text(text), style=style, no_wrap=True, overflow="ellipsis", crop=True)

    def listed(self, parts: Sequence[str], indent: str = "", style: str | None = None, separator: str = ",") -> None:
        """Print parts with commas between them; a terminal's line ends between two parts, never within one."""
        line = ""
        for number, part in enumerate(parts):
            text = part + (separator if number + 1 < len(parts) else "")
            if self.width is not None and line and len(f"{indent}{line} {text}") > self.width:
                self.show(indent + line, style=style)
                line = text
            else:
                line = f"{line} {text}" if line else text
        self.show(indent + line, style=style)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table. Where the terminal is too narrow, each row is a block: its first cell, then names and values.

        Rows that share the first cell stand below one.

        Args:
            columns: Their names; ``>`` before a name aligns the column to the right.
            rows: As many cells in each as there are columns.
        """
        names = [column.lstrip(">") for column in columns]
        cells = [max(map(len, (name, *column))) for name, column in zip(names, zip(*rows, strict=True), strict=False)]
        if self.width is not None and sum(cells) + 2 * len(cells) - 2 > self.width:
            above = None
            for first, *rest in rows:
                if first != above:
                    self.line(first, style="bold")
                above = first
                self.listed([f"{name} {value}" for name, value in zip(names[1:], rest, strict=True)], indent="  ")
            return
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for column, name in zip(columns, names, strict=True):
            right = column.startswith(">")
            table.add_column(name, justify="right" if right else "left", header_style="bold")
        for row in rows:
            table.add_row(*row)
        self.show(table)

    @contextlib.contextmanager
    def progress(self, what: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
        """A progress bar on standard error, where that is a terminal and there is anything to do.

        Args:
            what: What is being done, in front of the bar.
            total: How many steps, or bytes, there are.
            in_bytes: Whether ``total`` counts bytes.

        Yields:
            A function that advances the bar by a number of steps or bytes.
        """
        if not total or self.quiet or not sys.stderr.isatty():
            yield lambda amount: None
            return
        from rich import progress as bars  # takes a tenth of a second, and most runs show none

        count = bars.DownloadColumn() if in_bytes else bars.MofNCompleteColumn()
        columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), count, bars.TimeRemainingColumn())
        with bars.Progress(*columns, console=_console(sys.stderr, None), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda amount: bar.advance(task, amount)


_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "emoji": False}


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to ``run``: rich would end the program with status 1, which means a finding."""
        raise BrokenPipeError


def _console(file: TextIO, width: int | None) -> Console:
    return _Console(file=file, width=width, **_PLAIN)


def confirm(question: str) -> bool:
    """Ask a question on the terminal.

    Returns:
        Whether the answer was ``y`` or ``yes``.

    Raises:
        CommandError: Standard input is no terminal.
    """
    if not sys.stdin.isatty():
        raise CommandError(f"{question} There is no terminal to ask on: say --yes to go on, or --dry-run to look")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


# -- how things are written ------------------------------------------------------------------------------


def shortened(text: str, width: int | None) -> str:
    """Text cut in the middle to so many columns: what differs is mostly at its ends."""
    if width is None or len(text) <= width:
        return text
    front = max(width, 3) // 2
    return f"{text[:front]}…{text[len(text) - (max(width, 3) - front - 1) :]}"


def path_text(path: str, root: str, width: int | None) -> str:
    """A path as a terminal of so many columns shows it: relative to ``root``, and no longer than ``width``.

    The name of a chunk's file is cut before its namespace is, to its first 12 digits, which are enough to name it to
    ``show`` and ``rm``. Without a width (a pipe, a file) the path is left whole.
    """
    if width is None:
        return path
    relative = os.path.relpath(path, root) if path.startswith(root.rstrip("/") + "/") else path
    folder, name = os.path.split(relative)
    if len(relative) > width and folder and len(name) > 13:
        name = name[:12] + "…"
    return os.path.join(shortened(folder, max(8, width - len(name) - 1)), name) if folder else shortened(name, width)


def printable(text: str) -> str:
    """Text from a file, with every character escaped that is not printable: it could move the cursor, or worse."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def bytes_text(count: float) -> str:
    """A size in units of 1024, as LMCache counts GB: ``1.50 GB``."""
    if abs(count) < 1024:
        return f"{count:.0f} B"
    units = iter(("KB", "MB", "GB", "TB"))
    unit = ""
    while abs(count) >= 1024 and unit != "TB":
        count /= 1024
        unit = next(units)
    return f"{count:.2f} {unit}" if abs(count) < 100 else f"{count:.0f} {unit}"


def duration_text(seconds: float) -> str:
    """Roughly how long: ``5 s``, ``3 min``, ``2.5 h``, ``4 d``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def time_text(time_ns: int) -> str:
    """A point in time, UTC: ``2026-01-31T12:00:00Z``."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_ns // 1_000_000_000))
