"""Exceptions that come from outside, at any moment: what Ctrl-C, an alarm or another thread raises in a call."""

from __future__ import annotations

import contextlib
import ctypes
import dis
import functools
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lmcache_hs_backend
from tests.support.threads import side_by_side


class Interrupt(BaseException):
    """Raised in a thread from outside."""


_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class InterruptedThread:
    """A thread that calls ``step`` again and again, and is interrupted in it at random moments.

    What ``step`` itself raises ends it, and is in ``problems``.
    """

    def __init__(self, step: Callable[[], Any], seed: int, longest_sec: float = 0.003) -> None:
        self.interrupts = 0
        self.problems: list[BaseException] = []
        self._step = step
        self._random = random.Random(seed)
        self._longest_sec = longest_sec
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def run(self, seconds: float) -> None:
        """Start it, interrupt it for so long, and have it end. Returns when it has."""
        until = time.monotonic() + seconds
        self._thread.start()
        while time.monotonic() < until and not self.problems:
            time.sleep(self._random.random() ** 3 * self._longest_sec)
            if not self._thread.is_alive():  # it was interrupted outside of the step
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            _raise_in(ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(Interrupt))
        self._stopping = True
        self._thread.join(30)
        if self._thread.is_alive():
            self.problems.append(AssertionError("a call has not returned"))

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._run_steps()
        except Interrupt:  # between two steps
            self.interrupts += 1

    def _run_steps(self) -> None:
        try:
            while not self._stopping and not self.problems:
                self._step()
        except Interrupt:
            self.interrupts += 1
        except BaseException as problem:
            self.problems.append(problem)


def run_interrupted(threads: Sequence[InterruptedThread], seconds: float) -> None:
    """Run them side by side, each interrupted for so long. Raises what one of their steps has raised."""
    # An interrupt within a ``__del__`` or a callback of the garbage collector goes to the first of these hooks, and a
    # second one while a thread deals with the first goes to the other, in the interrupted thread. pytest's own, in
    # Python, would be interrupted in turn, and fail the test.
    uncaught = deque[Any]()
    hooks = sys.unraisablehook, threading.excepthook
    sys.unraisablehook = threading.excepthook = uncaught.append
    try:
        side_by_side(lambda thread: thread.run(seconds), threads)
    finally:
        sys.unraisablehook, threading.excepthook = hooks
    problems = [problem for thread in threads for problem in thread.problems]
    problems += [found.exc_value for found in uncaught if found.exc_type is not Interrupt]
    if problems:
        raise problems[0]


#: After these the interpreter looks whether an exception from outside has come. (From Python 3.11 on.)
_LOOKS_AFTER = ("RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD")
_PACKAGE = str(Path(lmcache_hs_backend.__file__).parent)
_FILES = (_PACKAGE, threading.__file__, contextlib.__file__)
#: What only strict mode runs.
_LEFT_OUT = ("strict.py", "checking.py")


class InterruptAt:
    """For ``with``: raises Interrupt in this thread at the moment number ``at`` at which Python could do so.

    Counts the moments in this package and in the parts of the standard library that it waits with. One that is not
    reached does not come. Python looks for exceptions at the end of some instructions, and then it is in the block of
    that instruction; a trace function runs before the next one, so moments between which a block ends are left out:
    they would end, for example, a ``with`` without its ``__exit__``, which Python itself never does.
    """

    def __init__(self, at: int | None = None) -> None:
        """``at`` None only counts."""
        self.at = at
        self.count = 0
        self.where = ""
        self._before: dict[FrameType, int] = {}

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._begin)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        sys.settrace(None)
        self._before.clear()
        return kind is Interrupt

    def _begin(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if not file.startswith(_FILES) or file.endswith(_LEFT_OUT):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._look

    def _look(self, frame: FrameType, event: str, _: object) -> Callable[..., Any]:
        if event == "return":
            self._before.pop(frame, None)
        elif event == "opcode":
            before, now = self._before.get(frame), frame.f_lasti
            self._before[frame] = now
            names, blocks = _instructions(frame.f_code)
            if before is not None and names[before] in _LOOKS_AFTER and blocks(before) == blocks(now):
                self.count += 1
                if self.count == self.at:
                    self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                    raise Interrupt
        return self._look


@functools.cache
def _instructions(code: CodeType) -> tuple[dict[int, str], Callable[[int], tuple[int, int] | None]]:
    """The names of a function's instructions by their offset, and which block protects each."""
    names = {one.offset: one.opname for one in dis.get_instructions(code)}
    table = dis._parse_exception_table(code)  # type: ignore[attr-defined]

    @functools.cache
    def block(offset: int) -> tuple[int, int] | None:
        return next(((one.target, one.depth) for one in table if one.start <= offset < one.end), None)

    return names, block
