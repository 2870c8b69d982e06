"""What mkdocs has to know about this repository: pages and files that are outside docs/.

README.md is the site's front page, and CONTRIBUTING, SECURITY and CHANGELOG are pages of it, so that they are written
once. Links between pages are those that work in the repository; here they are made to work on the site. A link to
another file of the repository takes that file along.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
#: Pages outside docs/: path in the repository → path on the site.
PAGES = {
    "README.md": "index.md",
    **{name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md", "CHANGELOG.md")},
}

_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages, and every file outside docs/ that some page links to."""
    for path, site_path in PAGES.items():
        files.append(File.generated(config, site_path, content=(ROOT / path).read_text()))
    for page in [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages() if not file.generated_by)]:
        for _, target, _ in _LINK.findall((ROOT / page).read_text()):
            found = _in_repository(page, target)
            if found is None or _on_site(found) != f"files/{found}" or not (ROOT / found).is_file():
                continue
            if files.get_file_from_path(_on_site(found)) is None:
                files.append(File.generated(config, _on_site(found), abs_src_path=str(ROOT / found)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links that work in the repository into links that work on the site."""
    site_path = page.file.src_uri
    source = next((path for path, other in PAGES.items() if other == site_path), f"docs/{site_path}")

    def turned(match: re.Match[str]) -> str:
        found = _in_repository(source, match[2])
        if found is None:
            return match[0]
        return match[1] + os.path.relpath(_on_site(found), os.path.dirname(site_path) or ".") + match[3]

    # Code is left as it is.
    parts, done = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(turned, markdown[done : fence.start()]), fence[0]]
        done = fence.end()
    return "".join([*parts, _LINK.sub(turned, markdown[done:])])


def _in_repository(page: str, target: str) -> str | None:
    """The path in the repository that a page's link means, None for an address elsewhere."""
    if ":" in target:
        return None
    return os.path.normpath(os.path.join(os.path.dirname(page), target))


def _on_site(path: str) -> str:
    if path in PAGES:
        return PAGES[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"files/{path}"
