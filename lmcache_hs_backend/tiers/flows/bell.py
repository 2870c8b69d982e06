"""Waiting that an exception from outside can end at any moment without harm.

``threading.Condition.wait`` cannot: interrupted where it takes the lock back, it returns without the lock, and the
``with`` around it then gives up a lock that another thread may have taken. ``Event`` and ``Future`` wait with it. Here
nobody holds a lock while waiting, and nothing that an interrupted thread leaves behind stops another one.
"""

from __future__ import annotations

import time
from _thread import LockType, allocate_lock
from collections import deque
from collections.abc import Callable

#: A ring may be lost with the thread that was to give it, so a waiter looks again this often.
_LOOK_AGAIN_SEC = 0.05

#: A promise that is kept by the next ring.
Ticket = LockType


class Bell:
    """Wakes all threads that wait. What they wait for is theirs to look at, before and after, and again in time."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._tickets: deque[Ticket] = deque()

    def ticket(self) -> Ticket:
        """Every ring from now on ends the wait for this ticket. Take it only to wait for it."""
        ticket = allocate_lock()
        ticket.acquire()
        self._tickets.append(ticket)
        return ticket

    def wait(self, ticket: Ticket, timeout: float) -> None:
        """Wait for a ring since the ticket was taken, ``timeout`` seconds at most. No lock may be held."""
        if not ticket.acquire(timeout=max(0.0, timeout)):
            self._give_back(ticket)

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait until ``condition()`` holds, until ``deadline`` (monotonic) at most. Returns whether it does."""
        while not condition():
            ticket = self.ticket()
            rest = deadline - time.monotonic()
            if rest <= 0 or condition():
                self._give_back(ticket)
                return condition()
            self.wait(ticket, min(rest, _LOOK_AGAIN_SEC))
        return True

    def ring(self) -> None:
        """Wake everybody. From any thread, with locks held or not."""
        while True:
            try:
                ticket = self._tickets.popleft()
            except IndexError:
                return
            ticket.release()

    def _give_back(self, ticket: Ticket) -> None:
        try:
            self._tickets.remove(ticket)
        except ValueError:  # it has rung just now
            return


class Latch:
    """``threading.Event``, to be set once, that an exception from outside cannot leave locked."""

    def __init__(self) -> None:
        """Not set."""
        self._bell = Bell()
        self._set = False

    def set(self) -> None:
        """Let everybody go on who waits, and who will."""
        self._set = True
        self._bell.ring()

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._set

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, ``timeout`` seconds at most. Returns whether it is."""
        return self._bell.wait_for(self.is_set, time.monotonic() + timeout)
