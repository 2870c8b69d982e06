"""The quickstart: real prompts through a real LMCache engine with two tiers, every row compared, then a restart.

Started by quickstart.sh. This process computes the prompts, stores KV and hidden states, retrieves them, and has
LMCache evict KV. Then it ends its engine and starts this file once more, as a second process, which finds the chunk
files first without KV and then with it. Both build their engine from the file that LMCACHE_CONFIG_FILE names, as
LMCache itself reads it.

Every disagreement is kept as a sentence that says which prompt, layer and row; one is enough to exit with status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lmcache.v1.config import load_engine_config_with_overrides
from lmcache.v1.metadata import LMCacheMetadata
from quickstart_model import (
    KV_HEAD,
    KV_HEADS,
    KV_LAYERS,
    KV_PAIR,
    LAYERS,
    MODEL_NAME,
    Essay,
    Model,
    Prompt,
    load_prompts,
    read_essays,
    save_prompts,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from lmcache_hs_backend import ColdTierReader, TieredHiddenStateStore
from lmcache_hs_backend.integrations.lmcache.tier_backends import HiddenStateKey

try:
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
except ImportError:  # 0.5.7 has moved the in-process engine
    from lmcache.inprocess.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.inprocess.v1.gpu_connector.mock_gpu_connector import MockGPUConnector

ROOT = Path(__file__).resolve().parent.parent
TEXTS = Path(__file__).resolve().parent / "quickstart_texts"
MARKER = ".made-by-quickstart"
ENGINE = "quickstart"
PLUGIN = "hs_tiered"
MIN_TOKENS = 20_000
DROP_SECONDS = 30.0

#: What the table shows of stats(): by how much these counters went up during a phase, …
COUNTERS = ("stored_chunks", "hits_hot", "hits_cold", "demoted", "promoted", "kv_gone_deleted")
#: … and these gauges at its end. Before them come the phase's own figures.
GAUGES = ("hot_chunks", "cold_chunks", "unconfirmed_chunks", "hot_bytes", "cold_bytes")
OWN = ("prompts", "tokens", "rows compared", "KV compared", "mismatches", "dropped from hot", "dropped from cold")

#: Loggers of LMCache that warn of what is normal here: no vLLM, no controller, and a KV pool that has to evict.
QUIET = ("token_database", "storage_backend", "storage_backend.local_cpu_backend", "memory_management")

console = Console(highlight=False, markup=False)


@dataclass
class Phase:
    """One step of the job: its figures, and whatever was not as it has to be."""

    name: str
    figures: dict[str, float] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)

    def add(self, figure: str, count: int) -> None:
        self.figures[figure] = self.figures.get(figure, 0) + count

    def expect(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self.mismatches.append(f"{self.name}: {otherwise}")


class CpuConnector(MockGPUConnector):
    """Moves KV between LMCache's memory and a CPU tensor ``[2, layers, tokens, width]`` given as ``kv``.

    An inference engine's connector does the same with its paged KV cache on the GPU.
    """

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **given: Any) -> None:
        for item, start, end in zip(memory_objs, starts, ends, strict=True):
            item.tensor.copy_(given["kv"][:, :, start:end])

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **given: Any) -> None:
        for item, start, end in zip(memory_objs, starts, ends, strict=True):
            given["kv"][:, :, start:end] = item.tensor


class Session:
    """One engine and its hidden-state store, and what every phase does with them."""

    def __init__(self, cold_path: Path) -> None:
        _quieten_lmcache()
        config: Any = load_engine_config_with_overrides()
        # Whatever the file says: trying one's own file must not touch one's own cold tier.
        config.extra_config = {**(config.extra_config or {}), f"storage_plugin.{PLUGIN}.cold_path": str(cold_path)}
        metadata = LMCacheMetadata(
            model_name=MODEL_NAME,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=(KV_LAYERS, KV_PAIR, config.chunk_size, KV_HEADS, KV_HEAD),
            role="worker",
            chunk_size=config.chunk_size,
        )
        self.cold_path = cold_path
        self.phases: list[Phase] = []
        self.engine: Any = LMCacheEngineBuilder.get_or_create(
            ENGINE, config, metadata, CpuConnector(metadata.kv_shape), lambda tensor, _: tensor, lambda item, _: item
        )
        self.engine.post_init()
        self.store: Any = self.engine.hidden_state_store
        if not isinstance(self.store, TieredHiddenStateStore):
            self.close()
            raise SystemExit("quickstart: LMCache did not load the plugin; its log above says why")

    def close(self) -> None:
        """The end of a server: everything is written, the files stay."""
        LMCacheEngineBuilder.destroy(ENGINE)

    @contextlib.contextmanager
    def phase(self, name: str, what: str, steps: int) -> Iterator[tuple[Phase, Callable[[str], None]]]:
        """A step of the job, and a function that moves its progress bar on."""
        phase = Phase(name)
        before, started = self.store.stats(), time.monotonic()
        columns = (TextColumn("{task.description:<50.50}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(what, total=steps)
            yield phase, lambda doing: progress.update(task, advance=1, description=f"{what}: {doing}")
            progress.update(task, completed=steps, description=what)
        after = self.store.stats()
        phase.figures |= {counter: after[counter] - before[counter] for counter in COUNTERS}
        phase.figures |= {gauge: after[gauge] for gauge in GAUGES}
        phase.figures["seconds"] = time.monotonic() - started
        trouble = [
            f"{name} is {after[name]}" for name in after if name.startswith(("drops_", "errors_")) and after[name]
        ]
        phase.expect(not trouble, f"{', '.join(trouble)}: rows were lost")
        self.phases.append(phase)

    # -- KV ------------------------------------------------------------------------------------------------

    def chunks(self, prompt: Prompt) -> list[tuple[int, Any]]:
        """Where each chunk of a prompt ends, and the key of its KV."""
        return [(end, key) for _, end, key in self.engine.token_database.process_tokens(tokens=prompt.tokens)]

    def store_kv(self, prompt: Prompt) -> None:
        """Store the KV that is not there yet, as an inference engine does after computing a prompt."""
        chunk_size = self.engine.metadata.chunk_size
        cached = self.engine.lookup(prompt.tokens) // chunk_size * chunk_size
        mask = torch.arange(len(prompt.tokens)) >= cached
        self.engine.store(torch.tensor(prompt.tokens), mask=mask, kv=prompt.kv)

    def has_kv(self, key: Any) -> bool:
        """Whether LMCache holds the KV of a chunk."""
        return self.engine.storage_manager.contains(key) is not None

    def prefix(self, prompt: Prompt, is_there: Callable[[Any], bool]) -> int:
        """Tokens of the longest prefix whose chunks are all there."""
        tokens = 0
        for end, key in self.chunks(prompt):
            if not is_there(key):
                break
            tokens = end
        return tokens

    def check_kv(self, phase: Phase, prompt: Prompt, tokens: int) -> None:
        """Retrieve KV; that of the first ``tokens``, and no more, must come, equal to the model's."""
        computed = prompt.kv
        kv = torch.zeros_like(computed)
        count = int(self.engine.retrieve(torch.tensor(prompt.tokens), kv=kv).sum())
        phase.add("KV compared", count)
        phase.expect(count == tokens, f"{prompt.name}: KV of {count} tokens came back, not of {tokens}")
        equal = torch.equal(kv[:, :, :count], computed[:, :, :count])
        phase.expect(equal, f"{prompt.name}: the KV that came back differs from what was stored")

    # -- hidden states -------------------------------------------------------------------------------------

    def tiers_of(self, key: Any) -> tuple[bool, bool]:
        """Whether the hot tier, and whether the cold tier, holds any layer of a chunk."""
        plugin = self.engine.storage_manager.storage_backends[PLUGIN]
        layers = [HiddenStateKey(key, layer) for layer in LAYERS]
        return any(map(plugin.hot.contains, layers)), any(map(plugin.cold.contains, layers))

    def check(self, phase: Phase, prompt: Prompt, tokens: int) -> None:
        """Retrieve all layers; the first ``tokens`` rows, and no more, must come, equal to the model's."""
        served = self.store.retrieve_layers(prompt.tokens, LAYERS)
        phase.add("prompts", 1)
        phase.add("tokens", len(prompt.tokens))
        for layer in LAYERS:
            computed = prompt.rows(layer).float()
            rows = served.get(layer, computed[:0])
            where = f"{prompt.name}, layer {layer}"
            phase.expect(len(rows) == tokens, f"{where}: {len(rows)} rows came back, not {tokens}")
            wrong = (rows != computed[: len(rows)]).any(dim=1).nonzero().flatten().tolist()
            phase.add("rows compared", len(rows))
            if wrong:
                phase.expect(False, f"{where}: {len(wrong)} of {len(rows)} rows differ, the first is row {wrong[0]}")


def files_on_disk(cold_path: Path) -> set[str]:
    """The keys of the chunks that have a readable file, seen from outside, as any other program would."""
    chunks = ColdTierReader(str(cold_path)).chunks()
    return {chunk.header.meta.key for chunk in chunks if chunk.header is not None}


# -- the first process ---------------------------------------------------------------------------------------


def run(data: Path) -> list[Phase]:
    """Compute, store, retrieve, evict. Leaves chunk files in ``data/cold``, the model's results in ``computed``."""
    with console.status("loading SmolLM2-135M-Instruct"):
        model = Model()
    essays = read_essays(TEXTS)
    session = Session(data / "cold")
    try:
        prompts = _store(session, model, essays)
        _retrieve(session, prompts)
        _evict(session, model, essays, prompts)
    finally:
        session.close()
    save_prompts(prompts, data / "computed")
    return session.phases


def _store(session: Session, model: Model, essays: Sequence[Essay]) -> list[Prompt]:
    """KV first, then the four layers: rows whose KV was not there when they came are kept, but not yet trusted."""
    prompts: list[Prompt] = []
    known: set[str] = set()
    steps = sum(len(essay.questions) for essay in essays)
    with session.phase("store", "compute and store", steps) as (phase, advance):
        for prompt in (prompt for essay in essays for prompt in model.ask(essay)):
            session.store_kv(prompt)
            counted = session.store.stats()["stored_chunks"]
            stored = session.store.store_layers(prompt.tokens, {layer: prompt.rows(layer) for layer in LAYERS})
            new = {key.to_string() for _, key in session.chunks(prompt)} - known
            held, added = len(session.chunks(prompt)), session.store.stats()["stored_chunks"] - counted
            phase.expect(stored == held, f"{prompt.name}: {stored} chunks are held, not {held}")
            phase.expect(added == len(new), f"{prompt.name}: {added} chunks were new, not {len(new)}")
            phase.add("prompts", 1)
            phase.add("tokens", len(prompt.tokens))
            known |= new
            prompts.append(prompt)
            advance(prompt.name)
        unwritten = session.store.flush(60)
        phase.expect(unwritten == 0, f"{unwritten} chunks could not be written")
    tokens, demoted = phase.figures["tokens"], phase.figures["demoted"]
    phase.expect(tokens >= MIN_TOKENS, f"the prompts have {tokens} tokens, fewer than {MIN_TOKENS}")
    phase.expect(demoted > len(known) / 2, f"only {demoted} of {len(known)} chunks were demoted: the hot tier is large")
    phase.expect(files_on_disk(session.cold_path) == known, "the files on disk are not those of the chunks stored")
    return prompts


def _retrieve(session: Session, prompts: Sequence[Prompt]) -> None:
    """Everything comes back whole, from RAM or disk."""
    with session.phase("retrieve", "retrieve and compare", len(prompts)) as (phase, advance):
        for prompt in prompts:
            session.check_kv(phase, prompt, len(prompt.tokens))
            session.check(phase, prompt, len(prompt.tokens))
            advance(prompt.name)
    for hits in ("hits_hot", "hits_cold"):
        phase.expect(phase.figures[hits] > 0, f"{hits} is 0: one of the tiers has served nothing")


def _evict(session: Session, model: Model, essays: Sequence[Essay], prompts: Sequence[Prompt]) -> None:
    """New KV pushes old KV out of LMCache, which tells nobody: both tiers have to notice, and drop those chunks."""
    victims = prompts[: len(essays[0].questions)]
    paragraphs = [paragraph for essay in reversed(essays) for paragraph in essay.paragraphs[1:]]
    steps = len(victims) + len(paragraphs) + len(prompts)
    with session.phase("evict", "KV is evicted", steps) as (phase, advance):
        for prompt in victims:  # so that there is something to drop from RAM as well
            session.check(phase, prompt, len(prompt.tokens))
            advance(prompt.name)
        before = {key: session.tiers_of(key) for prompt in prompts for _, key in session.chunks(prompt)}
        doomed = {key for prompt in victims for _, key in session.chunks(prompt)}
        for paragraph in paragraphs:  # as prompts of their own
            if not any(map(session.has_kv, doomed)):
                break
            session.store_kv(model.read("paragraph", paragraph))
            advance("new KV comes in")
        phase.expect(not any(map(session.has_kv, doomed)), "LMCache still has KV of the first essay")
        gone = {key for key in before if not session.has_kv(key)}
        for prompt in prompts:
            session.check(phase, prompt, session.prefix(prompt, lambda key: key not in gone))
            advance(prompt.name)
        _see_dropped(session, phase, gone)
        kept = set(before) - gone
        phase.expect(all(any(session.tiers_of(key)) for key in kept), "a chunk was dropped though its KV is there")
    for number, tier in enumerate(("hot", "cold")):
        phase.figures[f"dropped from {tier}"] = dropped = sum(before[key][number] for key in gone)
        phase.expect(dropped > 0, f"there was nothing in the {tier} tier to be dropped")


def _see_dropped(session: Session, phase: Phase, gone: set[Any]) -> None:
    """Files are deleted behind, and chunks that nobody asks for are found by the idle pass: within seconds."""
    names = {key.to_string() for key in gone}
    deadline = time.monotonic() + DROP_SECONDS
    while True:
        held = [key for key in gone if any(session.tiers_of(key))]
        files = names & files_on_disk(session.cold_path)
        if not (held or files) or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    phase.expect(not held, f"{len(held)} chunks are still in a tier, though their KV is gone")
    phase.expect(not files, f"{len(files)} chunks still have a file, though their KV is gone")


# -- the second process --------------------------------------------------------------------------------------


def restart(data: Path) -> list[Phase]:
    """What the first process has left is recovered, hidden while its KV is away, and served when that is back."""
    prompts = load_prompts(data / "computed")
    found = files_on_disk(data / "cold")
    session = Session(data / "cold")
    try:
        with session.phase("hidden", "recovered, no KV yet", len(prompts)) as (phase, advance):
            phase.expect(session.store.tiers.wait_recovered(60), "the files were not read within 60 s")
            for prompt in prompts:
                session.check(phase, prompt, 0)
                advance(prompt.name)
        phase.expect(bool(found), "the first process has left no files")
        for gauge in ("unconfirmed_chunks", "cold_chunks"):
            phase.expect(phase.figures[gauge] == len(found), f"{gauge} is {phase.figures[gauge]}, not {len(found)}")
        phase.expect(files_on_disk(session.cold_path) == found, "files were deleted because their KV was not there yet")
        _serve_recovered(session, prompts, found)
    finally:
        session.close()
    return session.phases


def _serve_recovered(session: Session, prompts: Sequence[Prompt], found: set[str]) -> None:
    """The prompts are computed again, so their KV is back, and what was recovered of them is served as it is.

    Where that is not all, since chunks were dropped before the restart, the rows are stored once more as well.
    """
    here = set(found)
    recovered = 0

    def is_here(key: Any) -> bool:
        return key.to_string() in here

    with session.phase("served", "recovered, KV is back", len(prompts)) as (phase, advance):
        for prompt in prompts:
            tokens = session.prefix(prompt, is_here)
            session.store_kv(prompt)
            session.check_kv(phase, prompt, len(prompt.tokens))
            session.check(phase, prompt, tokens)
            recovered += session.prefix(prompt, lambda key: key.to_string() in found)
            if tokens < len(prompt.tokens):
                session.store.store_layers(prompt.tokens, {layer: prompt.rows(layer) for layer in LAYERS})
                session.check(phase, prompt, len(prompt.tokens))
                here.update(key.to_string() for _, key in session.chunks(prompt))
            advance(prompt.name)
        phase.expect(session.store.flush(60) == 0, "not all chunks could be written")
    phase.expect(recovered > 0, "no recovered row was served")
    unconfirmed = phase.figures["unconfirmed_chunks"]
    phase.expect(unconfirmed == 0, f"unconfirmed_chunks is {unconfirmed}, though all KV is back")


# -- around them ---------------------------------------------------------------------------------------------


def prepare(data: Path) -> None:
    """Empty the data directory, if it is one of ours."""
    if data.exists() and any(data.iterdir()):
        if not (data / MARKER).exists():
            raise SystemExit(f"quickstart: --data {data} is not empty and not from a quickstart; name a new directory")
        shutil.rmtree(data)
    data.mkdir(parents=True, exist_ok=True)
    (data / MARKER).touch()


def restart_in_second_process(data: Path) -> list[Phase]:
    """Start this file again on what is on disk, and read what it found."""
    report = data / "restart.json"
    command = [sys.executable, __file__, "--restart", str(report), "--data", str(data)]
    status = subprocess.run(command, check=False).returncode
    if status:
        return [Phase("restart", mismatches=[f"restart: the second process ended with status {status}"])]
    return [Phase(**found) for found in json.loads(report.read_text())]


def list_chunks(cold_path: Path, served: Phase) -> Phase:
    """What the command-line tool says is on disk. It must agree with the figures that the last phase ended with."""
    phase = Phase("inspect")
    command = [str(Path(sys.executable).parent / "lmcache-hs-inspect"), "list", str(cold_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    console.print(f"\n$ lmcache-hs-inspect list {cold_path}", soft_wrap=True)
    for line in [*lines[:9], f"… {len(lines) - 10} more", lines[-1]]:
        console.print(line, no_wrap=True, overflow="crop")
    report = subprocess.run([*command, "--format", "json"], capture_output=True, text=True, check=True).stdout
    summary = json.loads(report)["summary"]
    for name in ("chunks", "bytes"):
        figure = served.figures.get(f"cold_{name}", 0)
        phase.expect(
            summary[name] == figure, f"lmcache-hs-inspect finds {summary[name]} {name}, the store {figure:.0f}"
        )
    return phase


def show(phases: Sequence[Phase]) -> None:
    """The table: a column for each phase."""
    table = Table(title="\nper phase: its own figures, counters of stats(), gauges of stats() at its end")
    table.add_column("")
    for phase in phases:
        table.add_column(phase.name, justify="right")
    for row in (*OWN, *COUNTERS, *GAUGES, "seconds"):
        values = [len(phase.mismatches) if row == "mismatches" else phase.figures.get(row, 0) for phase in phases]
        section = row in (OWN[-1], COUNTERS[-1], GAUGES[-1])
        table.add_row(row, *(_figure(row, value) for value in values), end_section=section)
    console.print(table)


def _figure(row: str, value: float) -> str:
    if row.endswith("bytes"):
        return f"{value / 2**20:.1f} MiB"
    return f"{value:.1f}" if row == "seconds" else f"{value:,.0f}"


class _ConsoleHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        console.print(f"{record.levelname} {record.name}: {record.getMessage()}", soft_wrap=True)


def _show_plugin_log() -> None:
    """The plugin's INFO lines, whatever LMCACHE_LOG_LEVEL says; its warnings come through LMCache's own log."""
    handler = _ConsoleHandler()
    handler.addFilter(lambda record: record.levelno == logging.INFO)
    for module in ("integrations.lmcache.backend", "tiers.flows.recover", "tiered"):
        logger = logging.getLogger(f"lmcache_hs_backend.{module}")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)


def _quieten_lmcache() -> None:
    for module in QUIET:
        for package in ("lmcache.v1", "lmcache.inprocess.v1"):
            logging.getLogger(f"{package}.{module}").setLevel(logging.ERROR)


def main() -> int:
    parser = argparse.ArgumentParser(description="Started by scripts/quickstart.sh, whose --help says what it does.")
    parser.add_argument("--data", type=Path, default=ROOT / "quickstart-data", metavar="DIR", help="see there")
    parser.add_argument("--restart", type=Path, metavar="REPORT", help="be the second process (the script's own use)")
    args = parser.parse_args()
    if "LMCACHE_CONFIG_FILE" not in os.environ:
        parser.error("LMCACHE_CONFIG_FILE is not set; start scripts/quickstart.sh, which sets it")
    _show_plugin_log()
    data = args.data.resolve()
    if args.restart:
        args.restart.write_text(json.dumps([vars(phase) for phase in restart(data)]))
        return 0
    started = time.monotonic()
    prepare(data)
    phases = run(data)
    console.print("the engine has ended; a second process starts on its files")
    phases += restart_in_second_process(data)
    listing = list_chunks(data / "cold", phases[-1])
    show(phases)
    mismatches = [mismatch for phase in (*phases, listing) for mismatch in phase.mismatches]
    for mismatch in mismatches:
        console.print(f"MISMATCH {mismatch}", style="bold red", soft_wrap=True)
    compared = sum(phase.figures.get("rows compared", 0) for phase in phases)
    verdict = f"{len(mismatches)} mismatch(es)" if mismatches else "all as the model computed them"
    console.print(f"{compared:,.0f} rows compared in {time.monotonic() - started:.0f} s: {verdict}")
    return 1 if mismatches else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
