"""A Ray cluster of several node processes on this machine, of which some can be killed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

_ROOT = Path(__file__).resolve().parents[2]
_STORE_BYTES = 80 << 20  # the least that Ray takes


@contextlib.contextmanager
def ray_cluster(count: int) -> Iterator[tuple[str, list[Any], Callable[[Any], None]]]:
    """Its address, its nodes of one CPU each, and a function that kills one as a failing machine would."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
    path = os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")])
    # Its processes, and theirs, find the package; at Ray's own niceness of 15 they would starve on a busy machine.
    with mock.patch.dict(os.environ, PYTHONPATH=path, RAY_worker_niceness="0"):
        cluster = Cluster(initialize_head=True, head_node_args=head)
        nodes = [cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES) for _ in range(count)]
    try:
        yield cluster.address, nodes, lambda node: cluster.remove_node(node, allow_graceful=False)
    finally:
        cluster.shutdown()
