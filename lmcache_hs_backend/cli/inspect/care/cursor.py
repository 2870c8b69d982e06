"""Where ``verify`` has come to, kept in a file, so that the next run goes on from there.

The file is one line of JSON outside the cold path. It is written when a run's findings have been printed, so a run that
was interrupted is read again; and deleted when everything has been read, so the next run begins anew.
"""

from __future__ import annotations

import contextlib
import json
import os

from lmcache_hs_backend.cli.console import CommandError
from lmcache_hs_backend.cli.inspect.care.verifier import FilePlace
from lmcache_hs_backend.format.reader import STATES


def load(path: str, cold_path: str) -> FilePlace | None:
    """The place in a cursor file, None where there is no file. Raises CommandError for one that is of no use."""
    if os.path.realpath(path).startswith(os.path.realpath(cold_path) + os.sep):
        raise CommandError(
            f"--cursor {path} lies in the cold path, where it would be a foreign file; name one elsewhere"
        )
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        place = (str(record["namespace"]), STATES.index(record["state"]), str(record["name"]))
        of = record["cold_path"]
    except FileNotFoundError:
        if os.path.isdir(os.path.dirname(os.path.abspath(path))):
            return None
        raise CommandError(f"--cursor {path} cannot be written: there is no such directory") from None
    except OSError as error:
        raise CommandError(f"--cursor {path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise CommandError(f"--cursor {path} is no cursor of verify; delete it to begin anew") from None
    if of != cold_path:
        raise CommandError(f"--cursor {path} is of {of}, not of {cold_path}; delete it to begin anew")
    return place


def save(path: str, cold_path: str, place: FilePlace | None) -> None:
    """Keep a place; None deletes the file. Raises CommandError."""
    try:
        if place is None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        label, state, name = place
        temporary = f"{path}.{os.getpid()}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            record = {"cold_path": cold_path, "namespace": label, "state": STATES[state], "name": name}
            file.write(json.dumps(record) + "\n")
        os.replace(temporary, path)
    except OSError as error:
        raise CommandError(f"--cursor {path} cannot be written: {error.strerror}") from None
