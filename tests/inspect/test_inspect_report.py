"""``lmcache-hs-inspect report`` writes one page that is whole, shows what is there, and fetches nothing."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from lmcache_hs_backend.format import chunk_file
from tests.support.cold_paths import CHUNK, HIDDEN, add_prompt, file_bytes, namespace, tokens_of
from tests.support.inspecting import blocking, fails, inspect, inspect_json

SVG = "{http://www.w3.org/2000/svg}"
XLINK = "{http://www.w3.org/1999/xlink}"


@pytest.fixture
def cold(tmp_path: Path) -> Path:
    return tmp_path / "cold"


def replace_rows(path: Path, rows: dict[int, torch.Tensor]) -> None:
    """Put other rows into a chunk's file, checksums and all."""
    header = chunk_file.read_header(chunk_file.FileLayer(), str(path))
    path.write_bytes(file_bytes(header.meta, header.token_ids, rows))


class Page(html.parser.HTMLParser):
    """What is in a page: its text, its charts, everything that would be fetched, and tags left open."""

    VOID = ("meta", "link", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.charts = [ElementTree.fromstring(svg) for svg in re.findall(r"<figure.*?</figure>", text, re.DOTALL)]

    @staticmethod
    def drawn(chart: ElementTree.Element, colour: int) -> list[list[tuple[float, float]]]:
        """The corners of everything in a chart that has the colour of a series: areas, bands, lines."""
        paths = list(chart.iter(f"{SVG}path"))
        referred_to = {path.attrib["id"]: path.attrib["d"] for path in paths if "id" in path.attrib}
        shapes = [(path, path.attrib["d"], 0.0, 0.0) for path in paths if "id" not in path.attrib]
        for use in chart.iter(f"{SVG}use"):
            outline = referred_to[use.attrib[f"{XLINK}href"].removeprefix("#")]
            shapes.append((use, outline, float(use.attrib["x"]), float(use.attrib["y"])))
        return [
            [(float(x) + left, float(y) + top) for x, y in re.findall(r"[ML] (\S+) (\S+)", outline)]
            for shape, outline, left, top in shapes
            if f"var(--s{colour})" in shape.attrib.get("style", "")
        ]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "data", "action")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def report(cold: Path, tmp_path: Path, *options: str) -> tuple[Page, dict]:
    out = tmp_path / "report.html"
    result = inspect_json("report", cold, "--out", out, *options)
    return Page(out.read_text()), result


def test_the_page_is_whole_and_fetches_nothing(cold: Path, tmp_path: Path) -> None:
    directory = namespace(cold)
    add_prompt(directory, tokens_of(6 * CHUNK), layers=(0, 7))
    add_prompt(directory, tokens_of(CHUNK, 2), layers=(0, 7), created_at="2026-02-02T03:04:05Z")
    add_prompt(namespace(cold, "org/other"), tokens_of(CHUNK), model="org/other")
    page, result = report(cold, tmp_path)
    assert page.open == []
    assert page.fetched == ["data:,"]
    assert "script" not in page.tags
    assert len(page.charts) == 4 + 2  # growth, models, ages, sizes, and norms for two models
    for word in ("first stored (UTC)", "org/other", "dedup factor", "layer 7", "None: no NaN", "01-15"):
        assert word in page.words
    assert (result["sampled"], result["anomalies"]) == (8, [])
    assert [path.name for path in tmp_path.glob("report*")] == ["report.html"]


def test_norms_are_those_of_the_rows(cold: Path, tmp_path: Path) -> None:
    prompt = add_prompt(namespace(cold), tokens_of(CHUNK))
    _, result = report(cold, tmp_path)
    [layer] = result["layers"]
    norms = prompt.rows[0][0].float().norm(dim=1)
    by_position = {each["position"]: each for each in layer["norms_by_position"]}
    assert list(by_position) == [0, 1, 2, 4, 8, 16, 32]
    assert by_position[0]["median"] == pytest.approx(norms[0].item(), rel=1e-5)
    assert by_position[32]["median"] == pytest.approx(norms[32:].quantile(0.5).item(), rel=1e-5)


def test_anomalies_are_found(cold: Path, tmp_path: Path) -> None:
    directory = namespace(cold)
    hashes = {}
    for seed, spoil in enumerate(("nan", "zero", "constant")):
        prompt = add_prompt(directory, tokens_of(CHUNK, seed), layers=(0, 1))
        [hashes[spoil]] = prompt.hashes
        rows = {0: prompt.rows[0][0].clone(), 1: torch.full((CHUNK, HIDDEN), 3.0)}
        if spoil == "nan":
            rows[0][3, 5] = float("nan")
        else:
            rows[0][:4] = 0.0 if spoil == "zero" else 1.5
        replace_rows(prompt.files[0], rows)
    page, result = report(cold, tmp_path)
    found = {(each["layer"], each["what"]) for each in result["anomalies"]}
    first = inspect_json("list", cold)["chunks"][0]["chunk_hash"]
    assert found == {
        (0, f"1 of 192 sampled rows hold values that are not finite, the first in chunk {hashes['nan']}"),
        (0, f"4 of 192 sampled rows are all zeros, the first in chunk {hashes['zero']}"),
        (0, f"4 of 192 sampled rows are constant, the first in chunk {hashes['constant']}"),
        (1, "dead layer: no sampled row varies"),
        (1, f"192 of 192 sampled rows are constant, the first in chunk {first}"),
    }
    assert "dead layer" in page.words
    assert "layer 1: dead layer" in inspect("report", cold, "--out", tmp_path / "again.html").stdout


def test_rows_of_zeros_and_a_single_moment_can_be_drawn(cold: Path, tmp_path: Path) -> None:
    prompt = add_prompt(namespace(cold), tokens_of(CHUNK))
    page, _ = report(cold, tmp_path)
    [corners] = page.drawn(page.charts[0], 0)
    assert max(x for x, _ in corners) - min(x for x, _ in corners) > 50
    replace_rows(prompt.files[0], {0: torch.zeros(CHUNK, HIDDEN)})
    page, _ = report(cold, tmp_path)
    assert "Nothing to show." in page.words
    assert "64 of 64 sampled rows are all zeros" in page.words


def test_the_largest_rows_that_are_finite_can_be_drawn(cold: Path, tmp_path: Path) -> None:
    prompt = add_prompt(namespace(cold), tokens_of(CHUNK))
    rows = torch.randn(CHUNK, HIDDEN) * 1e-38
    rows[0] = torch.finfo(torch.float32).max
    replace_rows(prompt.files[0], {0: rows})
    page, result = report(cold, tmp_path)
    assert result["layers"][0]["norms_by_position"][0]["median"] == pytest.approx(3.4028e38 * HIDDEN**0.5, rel=1e-3)
    drawn = page.drawn(page.charts[-1], 0)
    assert [len(shape) for shape in drawn if len(shape) == 7] == [7], "the line of medians"
    assert all(0 <= x <= 460 and 0 <= y <= 250 for shape in drawn for x, y in shape)


def test_more_layers_than_colours_are_shared_out_among_charts(cold: Path, tmp_path: Path) -> None:
    add_prompt(namespace(cold), tokens_of(CHUNK), layers=range(8))
    page, _ = report(cold, tmp_path)
    legends = [[span for span in chart.iter("span") if "layer" in (span[0].tail or "")] for chart in page.charts[4:]]
    assert [len(legend) for legend in legends] == [6, 2]


def test_the_sample_is_as_large_as_asked(cold: Path, tmp_path: Path) -> None:
    add_prompt(namespace(cold), tokens_of(30 * CHUNK))
    assert report(cold, tmp_path, "--sample", "7")[1]["sampled"] == 7
    page, result = report(cold, tmp_path, "--sample", "0")
    assert (result["sampled"], page.open) == (0, [])


def test_names_from_files_are_text_and_nothing_else(cold: Path, tmp_path: Path) -> None:
    model = "<script>alert(1)</script>&\"'\x1b[2J"
    add_prompt(namespace(cold, model), tokens_of(CHUNK), model=model, created_at="<b>never</b>")
    page, _ = report(cold, tmp_path)
    assert "script" not in page.tags
    assert "<script>alert(1)</script>&\"'\\x1b[2J" in page.words


def test_trouble_is_one_line(cold: Path, tmp_path: Path) -> None:
    namespace(cold)
    assert "cannot be written" in fails("report", cold, "--out", "/nowhere/report.html")
    assert "--sample is -1" in fails("report", cold, "--sample", "-1")
    page, _ = report(cold, tmp_path)  # a cold path without a chunk
    assert "Nothing to show." in page.words


def test_what_is_missing_to_make_it_is_one_line_before_anything_is_read(cold: Path, tmp_path: Path) -> None:
    for missing, named in (
        (("jinja2",), "Jinja2, which is"),
        (("jinja2", "matplotlib"), "Jinja2 and matplotlib, which are"),
    ):
        env = blocking(tmp_path / "blocker", *missing)
        line = fails("report", tmp_path / "no-such-path", "--out", tmp_path / "page.html", env=env)
        assert f"report needs {named} not installed: pip install 'lmcache-hs-backend[report]'" in line


def test_the_template_is_data_of_the_package() -> None:
    """What is not named in pyproject.toml is in no wheel; scripts/smoke_wheel.sh makes a report with one."""
    root = Path(__file__).resolve().parents[2]
    found = re.search(r"^lmcache_hs_backend = (\[.*\])$", (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    declared = {path for pattern in json.loads(found[1]) for path in (root / "lmcache_hs_backend").glob(pattern)}
    package = root / "lmcache_hs_backend"
    others = {path for path in package.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert declared == others


def test_a_table_that_is_wider_than_a_phone_says_so(cold: Path, tmp_path: Path) -> None:
    add_prompt(namespace(cold), tokens_of(CHUNK))
    page, _ = report(cold, tmp_path)
    assert page.words.count("swipe for more columns") == page.tags.count("table") == 2


def test_a_chart_has_round_ticks_that_say_where_it_is() -> None:
    from lmcache_hs_backend.cli.inspect.figures import charts

    def ticks(svg: str) -> list[str]:
        return re.findall(r">([^<>]+)</text>", svg)

    day = 86400
    for seconds, expected in ((7200, "22:30"), (3 * day, "11-15"), (30 * day, "12-01"), (300 * day, "2024-04")):
        grown = charts.areas({"model": [(1_700_000_000, 5 << 20), (1_700_000_000 + seconds, 9 << 20)]})
        assert expected in ticks(grown), ticks(grown)
        assert {"0 B", "5 MB", "10 MB"} <= {*ticks(grown)}
    assert ticks(charts.lines([[charts.Spread(0, 4.1, 4.2, 4.3)]])) == ["0", "2", "5"]
    wide = charts.lines([[charts.Spread(0, 4.1, 4.2, 4.3), charts.Spread(8, 900, 950, 970)]])
    assert [tick for tick in ticks(wide) if tick.startswith("1")] == ["1", "10", "100", "1,000"]
