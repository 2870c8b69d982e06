"""The parts of an extraction as tasks on a Ray cluster: one for each, run again where its node is lost.

Ray starts processes and brings them the command line, no more: rows go from where they are to the output folder, which
every node must see at the same path, with this package installed.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable

from lmcache_hs_backend.cli.console import CommandError
from lmcache_hs_backend.dataset.errors import DatasetError
from lmcache_hs_backend.dataset.export import Progress

_PARTS_PER_CPU = 4
_RETRIES = 10  # of a task whose process or node is lost; what it has written stays


def run_tasks(
    args: argparse.Namespace, write_part: Callable[[argparse.Namespace], Progress], say: Callable[[str], None]
) -> None:
    """Write all parts. Raises CommandError where there is no Ray, DatasetError where a part cannot be written."""
    try:
        import ray
    except ImportError:
        raise CommandError("--ray needs ray, which is not installed: pip install 'lmcache-hs-backend[ray]'") from None
    ours = not ray.is_initialized()
    if ours:
        _connect(args.ray)
    try:
        cpus = int(ray.cluster_resources().get("CPU", 1))
        of = args.ray_parts or _PARTS_PER_CPU * cpus
        say(f"{of} parts on Ray: {len(ray.nodes())} nodes, {cpus} CPUs")
        task = ray.remote(num_cpus=args.workers, max_retries=_RETRIES)(_task)
        waiting = {}
        for number in range(1, of + 1):
            of_part = copy.copy(args)
            of_part.part, of_part.quiet = (number, of), True
            waiting[task.remote(write_part, of_part, os.getcwd())] = number
        published = rejected = 0
        while waiting:
            done, _ = ray.wait(list(waiting))
            number = waiting.pop(done[0])
            try:
                trouble, progress = ray.get(done[0])
            except ray.exceptions.RayError as error:
                raise CommandError(f"part {number} of {of} was lost: {' '.join(str(error).split())[:300]}") from None
            if trouble:
                raise DatasetError(f"part {number} of {of}: {trouble}")
            published, rejected = published + progress.published, rejected + progress.rejected
            say(f"{of - len(waiting)} of {of} parts, {published} samples, {rejected} rejected")
    finally:
        if ours:
            ray.shutdown()


def _connect(address: str) -> None:
    """``auto``: the cluster that runs on this machine, or else a new one here."""
    import ray

    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        ray.init(address=address, **quiet)
    except ConnectionError as error:
        if address != "auto":
            raise CommandError(f"--ray {address}: {' '.join(str(error).split())[:300]}") from None
        ray.init(include_dashboard=False, **quiet)


def _task(
    write_part: Callable[[argparse.Namespace], Progress], args: argparse.Namespace, folder: str
) -> tuple[str, Progress]:
    """In a process of Ray's. What is wrong with the data comes back as text, so that it is not tried again."""
    try:
        os.chdir(folder)  # relative paths mean what they mean on the command line
        return "", write_part(args)
    except (DatasetError, OSError) as error:
        return str(error), Progress(0)
