"""The values that options take: numbers with limits, sizes, times. Each function here is an argparse ``type``.

A wrong value is one line that names the option, the value and what is allowed, with exit status 1, like every other
error; wrong usage (an unknown option or command) is argparse's, with exit status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any, NoReturn

import yaml

from lmcache_hs_backend.cli.console import CommandError

#: What argparse says of a value, ours and its own (``invalid int value: 'x'``), with the option's long name.
_WRONG_VALUE = re.compile(r"argument (?:\S+/)?(\S+): (is .*|.*: not a .*)", re.DOTALL)
_INVALID = re.compile(r"argument (?:\S+/)?(-\S+): invalid (?:choice|\w+ value): (.*)", re.DOTALL)
_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+(?:e-?[0-9]+)?|[0-9.]+e-?[0-9]+)\s*([a-zA-Z]*)\s*")

_TIME_UNITS = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZE_UNITS = {"": 1 << 30, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose errors about values are as above."""

    def error(self, message: str) -> NoReturn:
        """End with argparse's usage message, or raise CommandError for a wrong value."""
        wrong = _WRONG_VALUE.fullmatch(message)
        if wrong is not None:
            raise CommandError(f"{wrong[1]} {wrong[2]}")
        invalid = _INVALID.fullmatch(message)
        if invalid is not None:
            raise CommandError(f"{invalid[1]} cannot be {invalid[2]}")
        super().error(message)


def _wrong(text: str, allowed: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"is {text}, but must be {allowed}")


def at_least(low: int) -> Callable[[str], int]:
    """A parser of whole numbers from ``low`` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if number < low:
            raise _wrong(text, f"{'a whole number, ' if not text.lstrip('-').isdigit() else ''}at least {low}")
        return number

    return parse


def fraction(text: str) -> float:
    """Parses a number from 0 to below 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < 1:
        raise _wrong(text, "at least 0 and below 1")
    return number


def share(text: str) -> float:
    """Parses a share, above 0 and at most 1: ``0.1`` or ``10%``."""
    try:
        number = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        number = 0.0
    if not 0 < number <= 1:
        raise _wrong(text, "a share such as 10% or 0.1, above 0 and at most 1")
    return number


def size(text: str) -> int:
    """Parses a size: a number of GB (1024³ bytes, as LMCache counts) or with a unit: ``50``, ``500MB``, ``1.5 TB``.

    Returns:
        Bytes.
    """
    match = _AMOUNT.fullmatch(text)
    unit = match[2].lower().removesuffix("ib").removesuffix("b") if match is not None else "?"
    if match is not None and match[2].lower() == "b":
        unit = "b"
    if match is None or unit not in _SIZE_UNITS:
        raise _wrong(text, "at least 0, in GB or with a unit: 50, 500MB, 1.5TB")
    return int(float(match[1]) * _SIZE_UNITS[unit])


def duration(text: str) -> float:
    """Parses a time with a unit: ``90s``, ``30min``, ``12h``, ``7d``.

    Returns:
        Seconds.
    """
    match = _AMOUNT.fullmatch(text)
    if match is None or match[2] not in _TIME_UNITS:
        raise _wrong(text, "a time such as 90s, 30min, 12h or 7d")
    return float(match[1]) * _TIME_UNITS[match[2]]


def shared_options(text: str) -> dict[str, Any]:
    """obstore's options for a URL: a JSON table, or a file with one, which may be LMCache's own configuration."""
    value: Any = text
    if not text.lstrip().startswith("{"):
        try:
            with open(os.path.expanduser(text), encoding="utf-8") as file:
                value = yaml.safe_load(file)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise argparse.ArgumentTypeError(f"is {text}, which cannot be read: {error}") from None
        if isinstance(value, dict) and isinstance(value.get("extra_config"), dict):
            found = [each for key, each in value["extra_config"].items() if key.endswith(".shared_options")]
            value = found[0] if found else {}
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    if not isinstance(value, dict):
        raise _wrong(text, """a table such as '{"endpoint": "http://host:9000"}', or a JSON or YAML file with one""")
    return value


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """``--shared-options``."""
    parser.add_argument(
        "--shared-options", metavar="JSON|FILE", type=shared_options,
        help="options of a URL, as in the setting shared_options: a JSON table, or a file with it or with LMCache's "
        "configuration. Keys, regions and endpoints also come from AWS_*, GOOGLE_* and AZURE_* variables",
    )  # fmt: skip


def seconds(text: str) -> float:
    """Seconds above 0: ``600``, or a time with a unit as in ``duration``."""
    try:
        value = duration(text if text.strip()[-1:].isalpha() else f"{text}s")
    except argparse.ArgumentTypeError:
        value = 0.0
    if value <= 0:
        raise _wrong(text, "above 0, in seconds or with a unit: 600, 30min, 2h")
    return value


def sample(text: str) -> int | float:
    """How many: a whole number from 1 on, or a share above 0 as a float, from ``5%``."""
    if text.endswith("%"):
        try:
            percent = float(text[:-1])
        except ValueError:
            percent = 0.0
        if 0 < percent <= 100:
            return percent / 100
    elif text.isdecimal() and int(text) > 0:
        return int(text)
    raise _wrong(text, "a number of chunks from 1 on, or a share of them: 500, 5%")


def moment(text: str) -> int:
    """Parses a point in time: a date (UTC unless it says otherwise), or how long ago it was, as ``duration`` has it.

    Returns:
        Nanoseconds since the epoch.
    """
    if not text:  # an unset variable in a script; to take it for "all" would be fatal for rm
        raise argparse.ArgumentTypeError("is empty")
    try:
        return time.time_ns() - int(duration(text) * 1e9)
    except argparse.ArgumentTypeError:
        pass
    try:
        parsed = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: not a time such as 30min, 12h, 7d or 2026-01-31T12:00") from None
    if parsed.tzinfo is None:
        parsed = parsed.replace(tzinfo=timezone.utc)
    return int(parsed.timestamp() * 1e9)


def not_empty(text: str) -> str:
    """Parses any text that is not empty: an empty one is an unset variable in a script."""
    if not text:
        raise argparse.ArgumentTypeError("is empty")
    return text
