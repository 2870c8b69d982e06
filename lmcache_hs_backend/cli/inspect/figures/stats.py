"""``lmcache-hs-inspect stats``: how much of what is in a cold path."""

from __future__ import annotations

import argparse
import bisect
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from lmcache_hs_backend.cli import exit_status
from lmcache_hs_backend.cli.console import (
    CommandError,
    Output,
    add_output_options,
    bytes_text,
    duration_text,
    printable,
)
from lmcache_hs_backend.cli.inspect.nodes import NamespaceForest, Node, node_of
from lmcache_hs_backend.cli.inspect.selection import OpenedColdPath, add_path_arguments, open_path
from lmcache_hs_backend.cli.inspect.stream import ChunkStream, ReadableChunk, skipped_text
from lmcache_hs_backend.format.layout import QUARANTINE, files_in
from lmcache_hs_backend.format.namespace import NamespaceDirectory, in_use
from lmcache_hs_backend.format.reader import ColdTierReader

HELP = "count chunks, tokens and bytes by namespace, model and layer"
EXAMPLE = """\
The dedup factor is the tokens of all sequences, each with a copy of its own, divided by the tokens that are stored.
With --metrics, the running engine's own counters are added, from LMCache's /metrics: worker i serves it on port
7000 + i when internal_api_server_enabled is true.

examples:
  lmcache-hs-inspect stats --config lmcache.yaml
  lmcache-hs-inspect stats /mnt/nvme/hs --metrics http://localhost:7000/metrics
"""

_AGES = ((3600, "1 h"), (86400, "1 d"), (7 * 86400, "7 d"), (30 * 86400, "30 d"))
_SIZES = ((1 << 16, "64 KB"), (1 << 20, "1 MB"), (4 << 20, "4 MB"), (16 << 20, "16 MB"), (64 << 20, "64 MB"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``stats``."""
    add_path_arguments(parser)
    parser.add_argument("--metrics", metavar="URL", help="where a running engine serves its Prometheus metrics")
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Count, and print the figures; the exit status."""
    opened = open_path(args)
    figures = collect(opened)
    failed: CommandError | None = None
    if args.metrics:
        from lmcache_hs_backend.cli.inspect.figures.scrape import scrape

        try:
            figures["engine"] = scrape(args.metrics)
        except CommandError as error:  # what is on disk is worth knowing all the same
            failed, figures["engine"] = error, None
    with Output(args) as output:
        if output.json:
            output.dump(figures)
        else:
            _print(output, figures)
    if failed is not None:
        raise failed
    return exit_status.DONE


class _Tally:
    """What is counted of one namespace on the way."""

    def __init__(self, namespace: NamespaceDirectory) -> None:
        self.namespace = namespace
        self.nodes: list[Node] = []
        self.layers: dict[int, dict[str, Any]] = defaultdict(lambda: {"chunks": 0, "tokens": 0, "bytes": 0})

    def add(self, chunk: ReadableChunk) -> None:
        self.nodes.append(node_of(chunk))
        for layer in chunk.header.layout.layers:
            tally = self.layers[layer.layer_idx]
            tally["chunks"] += 1
            tally["tokens"] += chunk.header.meta.num_tokens
            tally["bytes"] += layer.nbytes(chunk.header.meta.num_tokens)
            tally.setdefault("dtype", layer.dtype_name)
            tally.setdefault("hidden_dim", layer.hidden_dim)


def collect(opened: OpenedColdPath, watch: Callable[[ReadableChunk], None] | None = None) -> dict[str, Any]:
    """All figures, as ``--format json`` shows them. ``watch`` is called with every chunk on the way."""
    reader = opened.reader
    chunks = ChunkStream(reader, reader.namespaces)
    tallies = {namespace.directory: _Tally(namespace) for namespace in chunks.namespaces}
    for chunk in chunks.read():
        tallies[chunk.namespace.directory].add(chunk)
        if watch is not None:
            watch(chunk)
    namespaces = [_namespace(tally) for tally in tallies.values()]
    disk = os.statvfs(reader.cold_path) if reader.source.is_local else None
    nodes = [node for tally in tallies.values() for node in tally.nodes]
    now = time.time_ns()
    return {
        "cold_path": reader.cold_path,
        "total": _total(namespaces),
        "namespaces": namespaces,
        "models": _models(namespaces),
        "age_sec": _distribution([max(0.0, (now - node.used_ns) / 1e9) for node in nodes], _AGES),
        "chunk_bytes": _distribution([node.nbytes for node in nodes], _SIZES),
        "limit_bytes": opened.config.max_cold_bytes if opened.config else None,
        "free_bytes": disk.f_bavail * disk.f_frsize if disk is not None else None,
        "disk_bytes": disk.f_blocks * disk.f_frsize if disk is not None else None,
        "skipped": dict(chunks.skipped),
        "left_out": [each.why for each in reader.left_out],
        "foreign": _foreign(reader),
    }


def _foreign(reader: ColdTierReader) -> dict[str, Any]:
    """What is beside the namespaces and is not ours."""
    known = {each.directory for each in reader.namespaces} | {each.directory for each in reader.left_out}
    found = [stray for stray in reader.source.strays_beside(known) if stray.kind == "foreign"]
    return {
        "count": len(found),
        "bytes": sum(stray.size for stray in found),
        "paths": [stray.path for stray in sorted(found, key=lambda stray: -stray.size)],
    }


def _namespace(tally: _Tally) -> dict[str, Any]:
    forest = NamespaceForest(tally.namespace, tally.nodes)
    archived = [node for node in tally.nodes if node.state == "archived"]
    quarantined = [file.size for file in files_in(os.path.join(tally.namespace.directory, QUARANTINE))]
    stored, sequence_tokens = forest.stored_tokens, forest.sequence_tokens
    return {
        "namespace": tally.namespace.label,
        "model": tally.namespace.model,
        "worker_id": tally.namespace.worker_id,
        "in_use": in_use(tally.namespace.directory),
        "chunks": len(tally.nodes),
        "tokens": stored,
        "bytes": sum(node.nbytes for node in tally.nodes),
        "sequences": sum(1 for _ in forest.ends()),
        "sequence_tokens": sequence_tokens,
        "dedup_factor": round(sequence_tokens / stored, 3) if stored else None,
        "archived_chunks": len(archived),
        "archived_bytes": sum(node.nbytes for node in archived),
        "quarantined_files": len(quarantined),
        "quarantined_bytes": sum(quarantined),
        "layers": [{"layer": idx, **tally.layers[idx]} for idx in sorted(tally.layers)],
    }


_SUMMED = (
    "chunks", "tokens", "bytes", "sequences", "sequence_tokens", "archived_chunks", "archived_bytes",
    "quarantined_files", "quarantined_bytes",
)  # fmt: skip


def _total(namespaces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {name: sum(each[name] for each in namespaces) for name in _SUMMED}
    total["dedup_factor"] = round(total["sequence_tokens"] / total["tokens"], 3) if total["tokens"] else None
    return total


def _models(namespaces: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    by_model: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in namespaces:
        by_model[each["model"]].append(each)
    return [{"model": model, **_total(group)} for model, group in sorted(by_model.items())]


def _distribution(values: list[float], bounds: Sequence[tuple[float, str]]) -> dict[str, Any]:
    """Quantiles, and how many values lie under each bound but not under the one before."""
    if not values:
        return {}
    values = sorted(values)
    quantiles = {
        name: round(values[min(len(values) - 1, int(q * len(values)))], 1)
        for name, q in (("min", 0.0), ("median", 0.5), ("p90", 0.9), ("max", 1.0))
    }
    counts, before = {}, 0
    for bound, name in bounds:
        reached = bisect.bisect_left(values, bound)
        counts[f"under {name}"] = reached - before
        before = reached
    counts["more"] = len(values) - before
    return {**quantiles, "histogram": counts}


# -- in words ------------------------------------------------------------------------------------------


def _print(output: Output, figures: dict[str, Any]) -> None:
    total = figures["total"]
    output.table(
        ("namespace", "in use", ">rank", ">chunks", ">tokens", ">bytes", ">sequences", ">dedup", ">archived", ">bad"),
        [
            (
                printable(each["namespace"]), "yes" if each["in_use"] else "no", str(each["worker_id"]),
                f"{each['chunks']:,}", f"{each['tokens']:,}", bytes_text(each["bytes"]), f"{each['sequences']:,}",
                _factor(each["dedup_factor"]), f"{each['archived_chunks']:,}", f"{each['quarantined_files']:,}",
            )
            for each in figures["namespaces"]
        ],
    )  # fmt: skip
    output.show("")
    output.table(
        ("namespace", ">layer", "dtype", ">hidden", ">chunks", ">tokens", ">bytes"),
        [
            (
                printable(each["namespace"]), str(layer["layer"]), layer["dtype"], str(layer["hidden_dim"]),
                f"{layer['chunks']:,}", f"{layer['tokens']:,}", bytes_text(layer["bytes"]),
            )
            for each in figures["namespaces"]
            for layer in each["layers"]
        ],
    )  # fmt: skip
    output.show("")
    for what, key, text in (("last used", "age_sec", duration_text), ("chunk size", "chunk_bytes", bytes_text)):
        spread = figures[key]
        if spread:
            counts = ", ".join(f"{name} {count:,}" for name, count in spread["histogram"].items() if count)
            median, longest = text(spread["median"]), text(spread["max"])
            ago = " ago" if key == "age_sec" else ""
            output.show(f"{what}: median {median}{ago}, at most {longest}{ago} ({counts})")
    output.show(f"quarantine: {total['quarantined_files']:,} files, {bytes_text(total['quarantined_bytes'])}")
    output.show(f"archive: {total['archived_chunks']:,} chunks, {bytes_text(total['archived_bytes'])}")
    if figures["free_bytes"] is not None:
        output.show(f"disk: {bytes_text(figures['free_bytes'])} free of {bytes_text(figures['disk_bytes'])}")
    if foreign := figures["foreign"]["count"]:
        names = ", ".join(printable(os.path.basename(path)) for path in figures["foreign"]["paths"][:3])
        dots = ", …" if foreign > 3 else ""
        output.show(
            f"not ours: {foreign:,} beside the namespaces, {bytes_text(figures['foreign']['bytes'])}: {names}{dots}"
        )
    for name, value in (figures.get("engine") or {}).items():
        output.show(f"engine: {name} {_figure_text(name, value)}")
    parts = [
        f"{total['chunks']:,} chunks, {total['tokens']:,} tokens, {bytes_text(total['bytes'])}",
        f"dedup factor {_factor(total['dedup_factor'])}",
    ]
    if figures["limit_bytes"]:
        used = total["bytes"] + total["quarantined_bytes"]
        parts.append(f"{used / figures['limit_bytes']:.1%} of the limit of {bytes_text(figures['limit_bytes'])}")
    if figures["skipped"]:
        parts.append(skipped_text(figures["skipped"]))
    output.listed(parts, style="bold")


def _figure_text(name: str, value: float) -> str:
    """A figure of the engine in the unit that its name says."""
    if "bytes" in name.split("_"):
        return bytes_text(value) + ("/s" if name.endswith("per_sec") else "")
    if name.endswith("_mean"):
        return f"{value * 1000:,.3g} ms"
    if name.endswith("_sum"):
        return duration_text(value)
    return f"{value:.1%}" if name.startswith("share_") else f"{value:,.6g}"


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
