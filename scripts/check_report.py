"""Opens the report of ``lmcache-hs-inspect`` in a real browser and checks what it shows.

    scripts/check_report.sh                     sets up what this needs, and runs it

Makes a cold path with something of everything in it, has the installed program write its report and its
``stats``, and compares: every figure and table on the page, every chart, the anomalies. On a desk, on a
phone, in the dark and on paper; the browser must fetch nothing and complain of nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import Browser, Page, sync_playwright

from lmcache_hs_backend.format import chunk_file
from tests.support.cold_paths import CHUNK, add_prompt, file_bytes, namespace, tokens_of

PROGRAM = str(Path(sys.executable).parent / "lmcache-hs-inspect")
THINKER, TALKER = "org/thinker-8b", "org/talker-1b"
LIMIT_GB = 0.125
HIDDEN = {THINKER: 160, TALKER: 96}


# -- something of everything ---------------------------------------------------------------------------


def make(cold: Path) -> None:
    """Two models, one on two ranks; shared prefixes; an archive, a quarantine, a half-written file, bad rows."""
    now = datetime.now(timezone.utc)
    thinker = [namespace(cold, THINKER, world_size=2, worker_id=rank) for rank in range(2)]
    talker = namespace(cold, TALKER, chunk_size=CHUNK)
    for number in range(40):
        day = 18 * (1 - (1 - number / 40) ** 2)
        shared = tokens_of(4 * CHUNK, number // 8) + tokens_of(2 * CHUNK, 100 + number // 3)
        tokens = shared + tokens_of((3 + number % 9) * CHUNK + number, 1000 + number)
        created = now - timedelta(days=20 - day)
        used = created + (now - created) * (number % 5 / 5)
        for rank, directory in enumerate(thinker):
            put(directory, tokens, (-1, 7, 15, 31), THINKER, created, used, 10 * number + rank)
        put(talker, tokens[: (5 + number % 4) * CHUNK], (-1, 3), TALKER, created, used, number)
    put(thinker[0] / "archive", tokens_of(6 * CHUNK, 7), (-1, 7, 15, 31), THINKER, now - timedelta(days=3), now, 3)

    files = sorted(thinker[0].glob("??/*.safetensors"))
    (thinker[0] / "quarantine").mkdir()
    shutil.move(files[0], thinker[0] / "quarantine" / f"{files[0].stem}.0.checksum.safetensors")
    files[1].write_bytes(files[1].read_bytes()[:-100])  # half-written
    spoil(files[2], 7, lambda rows: rows[3:5].fill_(math.nan))
    spoil(files[3], 15, lambda rows: rows[:4].fill_(1.5))
    for path in talker.glob("??/*.safetensors"):
        spoil(path, -1, lambda rows: rows.fill_(0.25))  # a dead layer


def put(
    directory: Path,
    tokens: list[int],
    layers: tuple[int, ...],
    model: str,
    created: datetime,
    used: datetime,
    seed: int,
) -> None:
    """A prompt whose rows look like a model's: the first token stands out, later layers are larger."""
    written = {path: path.stat().st_mtime for path in directory.glob("??/*.safetensors")}
    stamp = created.strftime("%Y-%m-%dT%H:%M:%SZ")
    prompt = add_prompt(
        directory, tokens, layers=layers, hidden=HIDDEN[model], model=model, created_at=stamp, seed=seed
    )  # fmt: skip
    for number, path in enumerate(prompt.files):
        if path in written:
            continue
        header = chunk_file.read_header(chunk_file.FileLayer(), str(path))
        rows = {}
        for idx, tensor in prompt.rows[number].items():
            position = torch.arange(number * CHUNK, number * CHUNK + len(tensor)).unsqueeze(1)
            size = (2 + max(idx, 0) / 4) * (1 + 0.06 * torch.log2(position + 1)) * torch.where(position == 0, 9.0, 1.0)
            rows[idx] = (tensor.float() * size).to(tensor.dtype)
        path.write_bytes(file_bytes(header.meta, header.token_ids, rows))
        os.utime(path, (used.timestamp(), used.timestamp()))


def spoil(path: Path, layer: int, change: Any) -> None:
    """Change the rows of one layer in place, checksum and all."""
    from safetensors.torch import load_file

    info = path.stat()
    header = chunk_file.read_header(chunk_file.FileLayer(), str(path))
    rows = {spec.layer_idx: load_file(path)[f"layer.{spec.layer_idx}"] for spec in header.layout.layers}
    change(rows[layer])
    path.write_bytes(file_bytes(header.meta, header.token_ids, rows))
    os.utime(path, ns=(info.st_mtime_ns, info.st_mtime_ns))


# -- what the page shows ---------------------------------------------------------------------------------

#: Everything a reader sees, as data: headings with their figures, tables, bars, charts.
_READ = """() => {
  const text = node => node.textContent.trim();
  const size = node => { const box = node.getBoundingClientRect(); return [box.width, box.height]; };
  return {
    figures: Object.fromEntries([...document.querySelectorAll('.figures li')].map(
      li => [text(li).slice(text(li.querySelector('b')).length), text(li.querySelector('b'))])),
    tables: [...document.querySelectorAll('table')].map(
      table => [...table.querySelectorAll('tbody tr')].map(row => [...row.cells].map(text))),
    bars: Object.fromEntries([...document.querySelectorAll('figure:has(.bars)')].map(figure => [
      text(figure.querySelector('figcaption')),
      [...figure.querySelectorAll('.bars .bar')].map(bar => [
        text(bar.parentElement.previousElementSibling), text(bar.parentElement.nextElementSibling), size(bar)[0],
        size(bar.parentElement)[0]])])),
    charts: [...document.querySelectorAll('figure:has(.chart)')].map(figure => ({
      title: text(figure.querySelector('figcaption')),
      legend: [...figure.querySelectorAll('.legend span')].map(text),
      ticks: [...figure.querySelectorAll('.chart text')].map(text),
      marks: [...figure.querySelectorAll(
        '.chart path[style*="--s"]:not(defs *), .chart use[style*="fill: var(--s"]:not([style*="stroke"])')].map(size),
    })),
    anomalies: [...document.querySelectorAll('.verdict .anomalies li')].map(text),
    unseen: [...document.querySelectorAll('.verdict .unseen li')].map(text),
  };
}"""

#: The smallest type of a page, its width, and texts that reach over its edge or over each other in a chart.
_LOOK = """() => {
  const shown = node => node.getBoundingClientRect();
  const edge = document.documentElement.clientWidth;
  const leaves = [...document.querySelectorAll('body *')].filter(node => !node.closest('title') &&
    [...node.childNodes].some(child => child.nodeType === 3 && child.data.trim()));
  const type = node => parseFloat(getComputedStyle(node).fontSize) *
    (node.closest('.chart') ? node.closest('.chart').getBoundingClientRect().width / 460 : 1);
  const clipped = leaves.filter(node => shown(node).right > edge + 1 && !node.closest('.scroll'));
  const cut = [...document.querySelectorAll('.scroll')].filter(
    node => node.scrollWidth > node.clientWidth + 1 || shown(node).right > edge + 1);
  const overlaps = [];
  for (const chart of document.querySelectorAll('.chart')) {
    const boxes = [...chart.querySelectorAll('text')].map(node => [node.textContent, shown(node)]);
    boxes.forEach(([a, p], i) => boxes.slice(i + 1).forEach(([b, q]) => {
      if (p.left < q.right && q.left < p.right && p.top < q.bottom - 2 && q.top < p.bottom - 2) overlaps.push([a, b]);
    }));
  }
  const light = colour => {
    const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map(value => value / 255).map(
      value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = light(getComputedStyle(document.body).backgroundColor);
  const contrast = colour => { const other = light(colour);
    return (Math.max(ground, other) + 0.05) / (Math.min(ground, other) + 0.05); };
  const ink = node => getComputedStyle(node)[node.closest('.chart') ? 'fill' : 'color'];
  const marks = [...document.querySelectorAll(
    '.bar, .legend i, .chart path[style*="--s"]:not(defs *), .chart use')].filter(node =>
    node.style.fillOpacity === '' && !node.style.fill.includes('--line'));
  const paint = node => node.closest('.chart') ?
    getComputedStyle(node)[node.style.fill === 'none' ? 'stroke' : 'fill'] : getComputedStyle(node).backgroundColor;
  const hints = [...document.querySelectorAll('.scroll')].map(
    node => node.scrollWidth > node.clientWidth + 1 ? shown(node.previousElementSibling).height > 0 : true);
  return {
    width: document.documentElement.scrollWidth, edge, ground, hints,
    smallest: Math.min(...leaves.map(type)),
    clipped: clipped.map(node => node.textContent), cut: cut.map(node => node.textContent.slice(0, 40)), overlaps,
    contrast: Math.min(...leaves.map(node => contrast(ink(node)))),
    marks: Math.min(...marks.map(node => contrast(paint(node)))),
  };
}"""


class Checks:
    """What was looked at, and how it came out."""

    def __init__(self) -> None:
        self.failed = 0

    def hold(self, what: str, condition: bool, detail: Any = "") -> None:
        self.failed += not condition
        print(f"{'ok    ' if condition else 'FAILED'} {what}{'' if condition else f': {detail}'}")

    def equal(self, what: str, shown: Any, expected: Any) -> None:
        self.hold(what, shown == expected, f"the page shows {shown!r}, stats says {expected!r}")


def size_text(count: float) -> str:
    """As the program writes sizes; written again here, so that the two are held against each other."""
    unit = 0
    while count >= 1024 and unit < 4:
        count, unit = count / 1024, unit + 1
    if not unit:
        return f"{count:.0f} B"
    return f"{count:.2f} {' KMGT'[unit]}B" if count < 100 else f"{count:.0f} {' KMGT'[unit]}B"


def compare(checks: Checks, page: dict[str, Any], stats: dict[str, Any], report: dict[str, Any]) -> None:
    """The page against ``stats --format json`` and ``report --format json``."""
    total = stats["total"]
    used = (total["bytes"] + total["quarantined_bytes"]) / stats["limit_bytes"]
    expected = {
        "chunks": f"{total['chunks']:,}",
        "tokens": f"{total['tokens']:,}",
        "on disk": size_text(total["bytes"]),
        "sequences": f"{total['sequences']:,}",
        "dedup factor": f"{total['dedup_factor']:.2f}",
        "chunks archived": f"{total['archived_chunks']:,}",
        "files in quarantine": f"{total['quarantined_files']:,}",
        "could not be read": f"{sum(stats['skipped'].values()):,}",
        f"of the limit of {size_text(stats['limit_bytes'])}": f"{used:.1%}",
    }
    shown = {name: value for name, value in page["figures"].items() if name != "free on that disk"}
    checks.equal("the figures at the top are those of stats", shown, expected)
    checks.hold("they are not empty", all(value not in ("0", "-", "1.00") for value in shown.values()), shown)
    namespaces, layers = page["tables"]
    checks.equal(
        "the table of namespaces is that of stats",
        namespaces,
        [
            [
                n["namespace"], n["model"], "yes" if n["in_use"] else "no", f"{n['chunks']:,}", f"{n['tokens']:,}",
                size_text(n["bytes"]), f"{n['sequences']:,}", f"{n['sequence_tokens']:,}", f"{n['dedup_factor']:.2f}",
            ]
            for n in stats["namespaces"]
        ],
    )  # fmt: skip
    checks.equal(
        "the table of layers is that of stats",
        layers,
        [
            [
                n["namespace"], each["dtype"], str(each["layer"]), str(each["hidden_dim"]), f"{each['chunks']:,}",
                f"{each['tokens']:,}", size_text(each["bytes"]),
            ]
            for n in stats["namespaces"]
            for each in n["layers"]
        ],
    )  # fmt: skip
    expected_bars = {
        "Bytes by model": [(m["model"], m["bytes"], size_text(m["bytes"])) for m in stats["models"]],
        "Chunks by last use": [(None, n, f"{n:,}") for n in stats["age_sec"]["histogram"].values()],
        "Chunks by size of file": [(None, n, f"{n:,}") for n in stats["chunk_bytes"]["histogram"].values()],
    }
    checks.equal("there is a chart of bars for models, ages and sizes", set(page["bars"]), set(expected_bars))
    for title, wanted in expected_bars.items():
        bars = page["bars"].get(title, [])
        checks.equal(f"bars, {title}: figures", [bar[1] for bar in bars], [text for _, _, text in wanted])
        checks.equal(
            f"bars, {title}: names",
            [b[0] for b, w in zip(bars, wanted, strict=True) if w[0]],
            [w[0] for w in wanted if w[0]],
        )
        most = max(value for _, value, _ in wanted)
        right = all(abs(bar[2] / bar[3] - w[1] / most) < 0.01 for bar, w in zip(bars, wanted, strict=True))
        checks.hold(f"bars, {title}: as long as their values", right, bars)
    models = [model["model"] for model in stats["models"]]
    titles = ["Bytes by the time they were first stored (UTC)", *(f"Norm of the rows, {model}" for model in models)]
    checks.equal(
        "there is a chart of growth, and one of norms for each model", [c["title"] for c in page["charts"]], titles
    )
    for chart in page["charts"]:
        checks.hold(f"{chart['title']}: marks are visible", all(w > 20 for w, _ in chart["marks"]), chart["marks"])
        checks.hold(f"{chart['title']}: axes have figures", len(chart["ticks"]) >= 5, chart["ticks"])
    checks.equal("growth: every model is in the legend", page["charts"][0]["legend"], models)
    drawn = [name for chart in page["charts"][1:] for name in chart["legend"]]
    checks.equal("norms: every layer is in a legend", drawn, [f"layer {layer['layer']}" for layer in report["layers"]])
    named = [f"{a['model']}, layer {a['layer']}: {a['what']}" for a in report["anomalies"]]
    checks.equal("anomalies are those of the report's JSON", page["anomalies"], named)
    unseen = [
        f"{total['quarantined_files']} files in quarantine, {size_text(total['quarantined_bytes'])}",
        "1 files or directories could not be read (size 1)",
    ]
    checks.equal("what the page does not speak for is named", page["unseen"], unseen)
    for model, layer, word in (
        (THINKER, 7, "not finite"), (THINKER, 15, "constant"), (TALKER, -1, "dead layer"),
    ):  # fmt: skip
        found = any(a.startswith(f"{model}, layer {layer}: ") and word in a for a in page["anomalies"])
        checks.hold(f"what was put in is named: {model}, layer {layer}, {word}", found, page["anomalies"])


def look(checks: Checks, page: Page, where: str, *, smallest: float, scrolling_tables: bool, dark: bool) -> None:
    """Legible, nothing cut off, nothing on top of something else."""
    seen = page.evaluate(_LOOK)
    checks.hold(f"{where}: no sideways scrolling", seen["width"] <= seen["edge"], seen)
    checks.hold(f"{where}: no text over the edge", not seen["clipped"], seen["clipped"])
    checks.hold(f"{where}: no labels on top of each other", not seen["overlaps"], seen["overlaps"])
    checks.hold(f"{where}: smallest type {seen['smallest']:.1f} px", seen["smallest"] >= smallest, smallest)
    checks.hold(f"{where}: contrast of text {seen['contrast']:.1f}, at least 4.5", seen["contrast"] >= 4.5, seen)
    checks.hold(f"{where}: contrast of marks {seen['marks']:.1f}, at least 3", seen["marks"] >= 3, seen)
    checks.hold(f"{where}: the ground is {'dark' if dark else 'light'}", (seen["ground"] < 0.2) == dark, seen["ground"])
    if scrolling_tables:
        checks.hold(
            f"{where}: a table that is cut off says that it scrolls", all(seen["hints"]) and bool(seen["cut"]), seen
        )
    else:
        checks.hold(f"{where}: tables are shown whole", not seen["cut"], seen["cut"])


def visit(checks: Checks, browser: Browser, path: Path, pictures: Path) -> dict[str, Any]:
    """Open the page in every way it is read; what it shows on a desk."""
    shown: dict[str, Any] = {}
    for where, width, height, dark in (
        ("desk", 1100, 900, False),
        ("phone", 390, 844, False),
        ("dark", 1100, 900, True),
    ):
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light",
            is_mobile=where == "phone", device_scale_factor=2 if where == "phone" else 1,
        )  # fmt: skip
        page = context.new_page()
        fetched: list[str] = []
        said: list[str] = []
        page.on("request", lambda request, fetched=fetched: fetched.append(request.url))
        page.on("console", lambda message, said=said: said.append(message.text))
        page.on("pageerror", lambda error, said=said: said.append(str(error)))
        page.goto(path.as_uri(), wait_until="networkidle")
        look(checks, page, where, smallest=10.0, scrolling_tables=where == "phone", dark=dark)
        if where == "desk":
            shown = page.evaluate(_READ)
            page.screenshot(path=pictures / "report.png", full_page=True)
        if where == "phone":
            page.screenshot(path=pictures / "report-phone.png")
        if where == "dark":  # paper is white whatever the screen is
            page.set_viewport_size({"width": 688, "height": 1000})  # A4 within its margins
            page.emulate_media(media="print")
            look(checks, page, "paper", smallest=9.0, scrolling_tables=False, dark=False)
            page.pdf(path=path.with_suffix(".pdf"), format="A4", prefer_css_page_size=True)
            checks.hold("paper: it can be printed", path.with_suffix(".pdf").stat().st_size > 10_000)
        checks.equal(
            f"{where}: nothing is fetched but the page", [u for u in fetched if u != "data:,"], [path.as_uri()]
        )
        checks.hold(f"{where}: the browser complains of nothing", not said, said)
        context.close()
    return shown


def program(*args: str) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")}
    done = subprocess.run([PROGRAM, *args, "--format", "json"], check=True, capture_output=True, text=True, env=env)
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where the cold path and the page go")
    parser.add_argument("--browser", required=True, help="the program of Chromium")
    parser.add_argument("--pictures", type=Path, required=True, help="where the screenshots go")
    args = parser.parse_args()
    cold, page = args.directory / "cold", args.directory / "report.html"
    shutil.rmtree(cold, ignore_errors=True)
    make(cold)
    config = args.directory / "lmcache.yaml"
    settings = {"module_path": "lmcache_hs_backend", "class_name": "HSTieredBackend", "cold_path": str(cold)}
    lines = [f"  storage_plugin.hs.{name}: {value}" for name, value in {**settings, "max_cold_size": LIMIT_GB}.items()]
    config.write_text("storage_plugins: [hs]\nextra_config:\n" + "\n".join(lines) + "\n")
    stats = program("stats", "--config", str(config))
    report = program("report", "--config", str(config), "--out", str(page), "--sample", "100000")
    checks = Checks()
    with sync_playwright() as playwright:
        # As root, Chromium has no sandbox; the page is our own. The rest keeps it from calling home.
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        browser = playwright.chromium.launch(executable_path=args.browser, args=flags)
        compare(checks, visit(checks, browser, page, args.pictures), stats, report)
        version = browser.version
        browser.close()
    print(f"{'all is well' if not checks.failed else f'{checks.failed} FAILED'} in Chromium {version}: {page}")
    return 1 if checks.failed else 0


if __name__ == "__main__":
    sys.exit(main())
