"""Every link in the documentation leads somewhere: files exist, and headings have the anchor that is named.

Needs no network: addresses outside the repository are only looked at for their form.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs both make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower()).strip()
        found.add(plain.replace(" ", "-"))
    return found


def links(page: Path) -> list[str]:
    # A link's text may be code, so only code that holds a whole link is taken out.
    text = _CODE.sub(lambda match: "" if "](" in match[0] else match[0], page.read_text())
    return _LINK.findall(text)


def test_there_are_links_to_check() -> None:
    assert len(PAGES) > 10
    assert sum(len(links(page)) for page in PAGES) > 30


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        parts = urlsplit(link)
        if parts.scheme:
            assert parts.scheme == "https", f"{link}: only https"
            assert "." in parts.netloc, link
            continue
        target = (page.parent / parts.path).resolve() if parts.path else page
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        assert target.exists(), f"{link}: there is no {target.relative_to(ROOT)}"
        if parts.fragment:
            assert parts.fragment in anchors(target), f"{link}: {target.name} has no such heading"


def test_every_page_is_reachable_from_the_readme() -> None:
    reached, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in links(page):
            path = urlsplit(link).path
            if path.endswith(".md") and not urlsplit(link).scheme:
                waiting.append((page.parent / path).resolve())
    assert set((ROOT / "docs").rglob("*.md")) <= reached


def test_the_sites_navigation_has_every_page() -> None:
    def paths(entry: object) -> list[str]:
        if isinstance(entry, dict):
            return [path for value in entry.values() for path in paths(value)]
        if isinstance(entry, list):
            return [path for value in entry for path in paths(value)]
        return [str(entry)]

    listed = paths(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert len(listed) == len(set(listed))
    assert set(listed) == pages | {"index.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md"}


def test_every_public_name_is_in_the_api_reference() -> None:
    import lmcache_hs_backend

    text = (ROOT / "docs/reference/api.md").read_text()
    for name in [*lmcache_hs_backend.__all__, "HSTieredConnector"]:
        if not name.startswith("__"):
            assert re.search(rf"^::: lmcache_hs_backend[\w.]*\b{name}$|members: \[.*\b{name}\b", text, re.MULTILINE), (
                name
            )
