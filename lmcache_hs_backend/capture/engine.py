"""vLLM in this process, and the processes that it starts, with the connector. Only this module imports vLLM."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from lmcache_hs_backend.capture.capture_settings import CaptureError, Settings
from lmcache_hs_backend.capture.vllm_backends import Outcome, Request

_ASK_SEC = 0.7  # Ctrl-C ends within two seconds in all
_KILL_SEC = 0.3


class Engine:
    """vLLM's ``LLM``, driven step by step."""

    def __init__(self, settings: Settings, stopped: str) -> None:
        """Loads the model: up to minutes. ``stopped``: what to say when Ctrl-C ends that. Raises CaptureError."""
        os.environ.setdefault("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "120")  # else vLLM kills a worker after 5
        os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # standard output is for the result
        try:
            from vllm import LLM, SamplingParams
        except ImportError as error:
            raise CaptureError(
                f"vLLM is not installed beside this package ({error}); scripts/vllm_env.sh makes an environment, "
                f"--server URL uses a running server, --dry-run needs none"
            ) from None
        arguments = {**settings.engine_arguments(), **parse_words(settings.vllm_words)}
        self._sampling_params = SamplingParams
        self._sampling = settings.sampling
        self._requests: dict[str, Request] = {}
        try:
            with _ends_at_once(stopped):
                self._engine = LLM(**arguments).llm_engine
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise CaptureError(f"vLLM does not start: {str(error).strip()[:2000]}") from None
        self.max_model_len: int = self._engine.model_config.max_model_len
        self._most = 4 * self._engine.vllm_config.scheduler_config.max_num_seqs

    @property
    def running(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def room(self) -> int:
        """Requests that it takes now: enough that its batch is never short of any."""
        return int(self._most) - len(self._requests)

    def submit(self, request: Request) -> None:
        """Queue a request."""
        extra = {"kv_transfer_params": request.transfer_params} if request.record else None
        sampling = self._sampling_params(**{**self._sampling, "max_tokens": request.max_tokens}, extra_args=extra)
        self._engine.add_request(request.row_id, {"prompt_token_ids": request.token_ids}, sampling)
        self._requests[request.row_id] = request

    def wait(self) -> list[Outcome]:
        """One step of the model."""
        try:
            outputs = self._engine.step()
        except RuntimeError as error:  # vLLM's EngineDeadError is one
            raise CaptureError(f"vLLM's engine ended: {error}; its log above says why") from None
        ended = []
        for output in outputs:
            if output.finished and (request := self._requests.pop(output.request_id, None)) is not None:
                tokens = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
                ended.append(Outcome(request, tokens, None, output.kv_transfer_params))
        return ended

    def close(self) -> None:
        """End vLLM, which brings everything to disk."""
        self._engine.engine_core.shutdown()

    def abandon(self) -> None:
        """End every process below this one."""
        end_children()


@contextlib.contextmanager
def _ends_at_once(text: str) -> Iterator[None]:
    """Let Ctrl-C end this process and those below it, with ``text``.

    vLLM, while it starts, would wait for minutes: its poll for the engine does not let KeyboardInterrupt through.
    """

    def end(number: int, frame: object) -> None:
        end_children()
        print(text, file=sys.stderr, flush=True)
        os._exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_children() -> None:
    """Ask the processes below this one to end, and kill those that do not at once. Chunks are whole or not there."""
    import psutil  # vLLM needs it as well

    children: list[Any] = []
    for ask, seconds in ((signal.SIGTERM, _ASK_SEC), (signal.SIGKILL, _KILL_SEC)):
        # Looked up each time: a process that is starting makes others meanwhile.
        children = list({*children, *psutil.Process().children(recursive=True)})
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.send_signal(ask)
        _, children = psutil.wait_procs(children, timeout=seconds)


def parse_words(words: Sequence[str]) -> dict[str, Any]:
    """Arguments of ``LLM`` from words of vLLM's own command line. Only what the words say. Raises CaptureError."""
    if not words:
        return {}
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="vLLM (behind --)", add_help=False))
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    try:
        given: dict[str, Any] = vars(parser.parse_args(list(words)))
    except SystemExit:  # it has said what is wrong
        raise CaptureError(f"vLLM does not take these arguments: {' '.join(words)}") from None
    taken = {"model", "speculative_config", "kv_transfer_config"} & given.keys()
    if taken:
        raise CaptureError(f"{', '.join(sorted(taken))} cannot stand behind --: the capture itself sets it")
    return given
