"""``lmcache-hs-inspect stats``: how much of what is in a cold path."""

from __future__ import annotations

import argparse
import bisect
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
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
from lmcache_hs_backend.cli.inspect.nodes import MergedForest, NamespaceForest, Node, merge, node_of
from lmcache_hs_backend.cli.inspect.opened_paths import Sources, add_path_arguments, open_paths
from lmcache_hs_backend.cli.inspect.stream import ChunkStreams, ReadableChunk, skipped_text
from lmcache_hs_backend.format.layout import QUARANTINE, files_in
from lmcache_hs_backend.format.namespace import NamespaceDirectory, in_use
from lmcache_hs_backend.format.reader import ColdTierReader

HELP = "count chunks, tokens and bytes by namespace, model and layer"
EXAMPLE = """\
The dedup factor is the tokens of all sequences, each with a copy of its own, divided by the tokens that are stored.
With --metrics, the running engine's own counters are added, from LMCache's /metrics: worker i serves it on port
7000 + i when internal_api_server_enabled is true.

Of several cold paths and URLs, there is a line for each, and a sum in which a chunk counts once, however many of them
have it; bytes are those of all files.

examples:
  lmcache-hs-inspect stats --config lmcache.yaml
  lmcache-hs-inspect stats /mnt/nvme/hs --metrics http://localhost:7000/metrics
  lmcache-hs-inspect stats /data/node1/hs /data/node2/hs s3://my-bucket/hs
"""

_AGES = ((3600, "1 h"), (86400, "1 d"), (7 * 86400, "7 d"), (30 * 86400, "30 d"))
_SIZES = ((1 << 16, "64 KB"), (1 << 20, "1 MB"), (4 << 20, "4 MB"), (16 << 20, "16 MB"), (64 << 20, "64 MB"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``stats``."""
    add_path_arguments(parser, several=True)
    parser.add_argument("--metrics", metavar="URL", help="where a running engine serves its Prometheus metrics")
    add_output_options(parser)


def execute(args: argparse.Namespace) -> int:
    """Count, and print the figures; the exit status."""
    sources = open_paths(args)
    figures = collect(sources)
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
            _print(output, figures, sources)
    if failed is not None:
        raise failed
    return sources.status(exit_status.DONE)


class _Tally:
    """What is counted of one namespace on the way."""

    def __init__(self, namespace: NamespaceDirectory, source: int = 0) -> None:
        """``source``: the number of the place that it is in, where there are several."""
        self.namespace = namespace
        self.source = source
        self.nodes: list[Node] = []
        self.layers: dict[int, dict[str, Any]] = defaultdict(lambda: {"chunks": 0, "tokens": 0, "bytes": 0})

    def add(self, chunk: ReadableChunk) -> None:
        self.nodes.append(node_of(chunk, self.source))
        for layer in chunk.header.layout.layers:
            tally = self.layers[layer.layer_idx]
            tally["chunks"] += 1
            tally["tokens"] += chunk.header.meta.num_tokens
            tally["bytes"] += layer.nbytes(chunk.header.meta.num_tokens)
            tally.setdefault("dtype", layer.dtype_name)
            tally.setdefault("hidden_dim", layer.hidden_dim)


def collect(sources: Sources, watch: Callable[[ReadableChunk], None] | None = None) -> dict[str, Any]:
    """All figures, as ``--format json`` shows them. ``watch`` is called with every chunk on the way."""
    chunks = ChunkStreams(sources.readers, sources.namespaces)
    tallies = {
        namespace.directory: _Tally(namespace, sources.number(namespace) if sources.several else 0)
        for namespace in chunks.namespaces
    }
    for chunk in chunks.read():
        tallies[chunk.namespace.directory].add(chunk)
        if watch is not None:
            watch(chunk)
    namespaces = [{**sources.row(tally.namespace), **_namespace(tally)} for tally in tallies.values()]
    nodes = [node for tally in tallies.values() for node in tally.nodes]
    now = time.time_ns()
    places = [_place(reader) for reader in sources.readers]
    figures = {
        **sources.head(),
        "total": _total(namespaces),
        "namespaces": namespaces,
        "models": _models(namespaces),
        "age_sec": _distribution([max(0.0, (now - node.used_ns) / 1e9) for node in nodes], _AGES),
        "chunk_bytes": _distribution([node.nbytes for node in nodes], _SIZES),
        "limit_bytes": sources.config.max_cold_bytes if sources.config else None,
        "free_bytes": places[0]["free_bytes"],
        "disk_bytes": places[0]["disk_bytes"],
        "skipped": dict(chunks.skipped),
        "left_out": [each.why for reader in sources.readers for each in reader.left_out],
        "foreign": _all_foreign([place["foreign"] for place in places]),
    }
    if sources.several:
        figures |= _put_together(sources, chunks, tallies, namespaces, places)
    return figures


def _put_together(
    sources: Sources,
    chunks: ChunkStreams,
    tallies: Mapping[str, _Tally],
    namespaces: Sequence[dict[str, Any]],
    places: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """What there is to say of several sources: figures of each, and sums in which a chunk counts once."""
    forests = merge(chunks.namespaces, {directory: tally.nodes for directory, tally in tallies.items()})
    of_model: dict[str, list[MergedForest]] = defaultdict(list)
    for forest in forests:
        of_model[forest.model].append(forest)
    return {
        "total": _merged_total(forests, namespaces),
        "models": [
            {"model": model, **_merged_total(of_model[model], [each for each in namespaces if each["model"] == model])}
            for model in sorted({each["model"] for each in namespaces})
        ],
        "sources": [
            {
                "source": reader.cold_path,
                **_total([each for each in namespaces if each["source"] == reader.cold_path]),
                **place,
                "skipped": dict(chunks.skipped_in(reader.cold_path)),
                "left_out": [each.why for each in reader.left_out],
            }
            for reader, place in zip(sources.readers, places, strict=True)
        ],
        "free_bytes": None,  # of each source: they may be on one disk
        "disk_bytes": None,
    }


def _merged_total(forests: Sequence[MergedForest], namespaces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """As ``_total``, with every chunk once; ``files`` counts the files. Bytes are those of all files."""
    total = _total(namespaces)
    files, total["chunks"] = total["chunks"], sum(len(forest.chunks) for forest in forests)
    total["tokens"] = sum(forest.stored_tokens for forest in forests)
    total["sequences"] = sum(1 for forest in forests for _ in forest.ends())
    total["sequence_tokens"] = sum(forest.sequence_tokens for forest in forests)
    total["dedup_factor"] = _dedup(total)
    return {"files": files, **total}


def _place(reader: ColdTierReader) -> dict[str, Any]:
    """Of the disk that a source is on, where it is on one, and what is beside its namespaces."""
    disk = os.statvfs(reader.cold_path) if reader.source.is_local else None
    return {
        "free_bytes": disk.f_bavail * disk.f_frsize if disk is not None else None,
        "disk_bytes": disk.f_blocks * disk.f_frsize if disk is not None else None,
        "foreign": _foreign(reader),
    }


def _all_foreign(each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if len(each) == 1:
        return each[0]
    return {
        "count": sum(foreign["count"] for foreign in each),
        "bytes": sum(foreign["bytes"] for foreign in each),
        "paths": [path for foreign in each for path in foreign["paths"]],
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
    total["dedup_factor"] = _dedup(total)
    return total


def _dedup(total: Mapping[str, Any]) -> float | None:
    return round(total["sequence_tokens"] / total["tokens"], 3) if total["tokens"] else None


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


def _print(output: Output, figures: dict[str, Any], sources: Sources) -> None:
    total = figures["total"]
    several = sources.several
    if several:
        _print_sources(output, figures, sources)
        output.show("")

    in_a_pipe = several and output.width is None  # else the source stands in front of the namespace, by its number

    def columns(*others: str) -> tuple[str, ...]:
        names = ("source", "namespace") if in_a_pipe else ("source: namespace",) if several else ("namespace",)
        return (*names, *others)

    def cells(each: dict[str, Any], *others: str) -> tuple[str, ...]:
        namespace = printable(each["namespace"])
        if not several:
            return (namespace, *others)
        source = sources.name(each["source"], output)
        return (source, namespace, *others) if in_a_pipe else (f"{source}: {namespace}", *others)

    output.table(
        columns("in use", ">rank", ">chunks", ">tokens", ">bytes", ">sequences", ">dedup", ">archived", ">bad"),
        [
            cells(
                each,
                "yes" if each["in_use"] else "no", str(each["worker_id"]),
                f"{each['chunks']:,}", f"{each['tokens']:,}", bytes_text(each["bytes"]), f"{each['sequences']:,}",
                _factor(each["dedup_factor"]), f"{each['archived_chunks']:,}", f"{each['quarantined_files']:,}",
            )
            for each in figures["namespaces"]
        ],
    )  # fmt: skip
    output.show("")
    output.table(
        columns(">layer", "dtype", ">hidden", ">chunks", ">tokens", ">bytes"),
        [
            cells(
                each,
                str(layer["layer"]), layer["dtype"], str(layer["hidden_dim"]),
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
    files = f" in {total['files']:,} files" if several else ""
    parts = [
        f"{total['chunks']:,} chunks{files}, {total['tokens']:,} tokens, {bytes_text(total['bytes'])}",
        f"dedup factor {_factor(total['dedup_factor'])}",
    ]
    if figures["limit_bytes"]:
        used = total["bytes"] + total["quarantined_bytes"]
        parts.append(f"{used / figures['limit_bytes']:.1%} of the limit of {bytes_text(figures['limit_bytes'])}")
    if figures["skipped"]:
        parts.append(skipped_text(figures["skipped"]))
    output.listed([*parts, *sources.missing()], style="bold")


def _print_sources(output: Output, figures: dict[str, Any], sources: Sources) -> None:
    """A line for each source, by which the rows of the other tables are to be understood, and one for all."""

    def cells(name: str, of: dict[str, Any], free: int | None) -> tuple[str, ...]:
        return (
            name, f"{of['chunks']:,}", f"{of['tokens']:,}", bytes_text(of["bytes"]), f"{of['sequences']:,}",
            _factor(of["dedup_factor"]), f"{of['archived_chunks']:,}", f"{of['quarantined_files']:,}",
            "-" if free is None else bytes_text(free),
        )  # fmt: skip

    def named(source: str) -> str:
        return sources.name(source, output) if output.width is None else f"{sources.name(source, output)}: {source}"

    output.table(
        ("source", ">chunks", ">tokens", ">bytes", ">sequences", ">dedup", ">archived", ">bad", ">free"),
        [
            *(cells(printable(named(each["source"])), each, each["free_bytes"]) for each in figures["sources"]),
            cells("all, each chunk once", figures["total"], None),
        ],
    )


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
