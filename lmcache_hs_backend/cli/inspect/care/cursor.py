"""Where ``verify`` has come to, kept in a file, so that the next run goes on from there.

The file is one line of JSON outside the cold paths, with a place in each. It is written when a run's findings have been
printed, so a run that was interrupted is read again; and deleted when everything has been read, so the next run begins
anew.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Mapping
from typing import Any

from lmcache_hs_backend.cli.console import CommandError
from lmcache_hs_backend.cli.inspect.care.verifier import FilePlace
from lmcache_hs_backend.format.reader import STATES
from lmcache_hs_backend.format.url_files import is_url


def load(path: str, cold_paths: Collection[str]) -> dict[str, FilePlace]:
    """The places in a cursor file, by cold path; none where there is no file, or where nothing was read yet.

    Raises CommandError for a file that is of no use for these cold paths.
    """
    for cold_path in cold_paths:
        if not is_url(cold_path) and os.path.realpath(path).startswith(os.path.realpath(cold_path) + os.sep):
            raise CommandError(
                f"--cursor {path} lies in the cold path, where it would be a foreign file; name one elsewhere"
            )
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        places: dict[str, Any] = record["cold_paths"] if "cold_paths" in record else {record["cold_path"]: record}
        result = {str(of): _place(place) for of, place in places.items() if place is not None}
    except FileNotFoundError:
        if os.path.isdir(os.path.dirname(os.path.abspath(path))):
            return {}
        raise CommandError(f"--cursor {path} cannot be written: there is no such directory") from None
    except OSError as error:
        raise CommandError(f"--cursor {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CommandError(f"--cursor {path} is no cursor of verify; delete it to begin anew") from None
    if {*places} != {*cold_paths}:
        of, named = ", ".join(places), ", ".join(cold_paths)
        raise CommandError(f"--cursor {path} is of {of}, not of {named}; delete it to begin anew")
    return result


def save(path: str, places: Mapping[str, FilePlace | None]) -> None:
    """Keep a place in each of the cold paths; without any the file is deleted. Raises CommandError."""
    try:
        if not any(places.values()):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        record: dict[str, Any] = {"cold_paths": {cold_path: _record(place) for cold_path, place in places.items()}}
        if len(places) == 1:
            [(cold_path, place)] = places.items()
            record = {"cold_path": cold_path, **(_record(place) or {})}
        temporary = f"{path}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise CommandError(f"--cursor {path} cannot be written: {error.strerror}") from None


def _place(record: dict[str, Any]) -> FilePlace:
    """Raises ValueError, KeyError or TypeError."""
    return str(record["namespace"]), STATES.index(record["state"]), str(record["name"])


def _record(place: FilePlace | None) -> dict[str, str] | None:
    if place is None:
        return None
    label, state, name = place
    return {"namespace": label, "state": STATES[state], "name": name}
