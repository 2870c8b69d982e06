"""Which job an I/O thread gets next."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_hs_backend.tiers.state.jobs import FileJob, JobQueue


@dataclass(eq=False)
class Read(FileJob):
    """A read of a call."""

    name: bytes
    turn: str

    def __post_init__(self) -> None:
        self.is_read = True


def started(queue: JobQueue) -> list[bytes]:
    """The names of all jobs that wait for no other, in the order in which threads get them."""
    names = []
    while (job := queue.start(0.0)) is not None:
        names.append(job.name)
    return names


def test_reads_of_one_call_come_in_the_order_in_which_they_were_submitted() -> None:
    queue = JobQueue()
    names = [bytes([number]) for number in range(20)]
    for name in names:
        queue.submit(Read(name, "long"))
    assert queue.queued_reads == queue.ready == 20
    assert started(queue) == names
    assert queue.queued_reads == 0


def test_a_call_with_one_read_does_not_wait_for_the_thousands_of_another() -> None:
    queue = JobQueue()
    for number in range(1000):
        queue.submit(Read(b"long %d" % number, "long"))
    queue.submit(Read(b"short", "short"))
    queue.submit(Read(b"middle 0", "middle"))
    queue.submit(Read(b"middle 1", "middle"))
    assert started(queue)[:6] == [b"long 0", b"short", b"middle 0", b"long 1", b"middle 1", b"long 2"]
    assert queue.queued_reads == 0


def test_a_read_that_waits_for_its_name_keeps_its_turn() -> None:
    queue = JobQueue()
    queue.submit(Read(b"same", "first"))
    queue.submit(Read(b"same", "second"))
    queue.submit(Read(b"other", "first"))
    assert started(queue) == [b"same", b"other"]
    queue.finish(b"same")
    assert started(queue) == [b"same"]
