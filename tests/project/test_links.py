"""Markdown: every relative link leads to a file and a heading that exist, and every path in the text to a file."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from tests.support.site import REPOSITORY

PACKAGES = ("gateway", "gpu_worker", "cache", "tasks", "petiole", "tests", "bench", "training")
LINK = re.compile(r"!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```", re.M | re.S)


def pages() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.md"], cwd=REPOSITORY, capture_output=True, text=True
    )
    if listed.returncode:  # no checkout: an unpacked source distribution
        return sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.rglob("*.md"))
    return listed.stdout.split()


def prose(page: Path) -> str:
    return CODE.sub("", page.read_text())


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors that GitHub gives to a page's headings."""
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#+ +(.*?) *$", prose(page), re.M):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return frozenset(names)


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


def missing_paths(page: Path) -> list[str]:
    named = re.findall(rf"`((?:{'|'.join(PACKAGES)})/[\w./-]*\w)/?`", prose(page))
    named = [path for path in named if not re.search("[A-Z]{2}", path)]  # NAME stands for any name
    return [path for path in named if not (REPOSITORY / path).exists()]


@pytest.mark.parametrize("page", pages())
def test_links_and_paths_lead_somewhere(page: str) -> None:
    path = REPOSITORY / page
    assert (broken_links(path), missing_paths(path)) == ([], [])


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n## `Names` of it\n\n## Twice\n\n## Twice\n\n"
        "[a](#names-of-it) [b](#twice-1) [c](page.md#a-page) [d](https://example.org/none) `tests/project`\n"
        "[e](#names) [f](none.md) [g](page.md#twice-2) `cache/none.py`\n```\n[h](none.md)\n```\n"
    )
    assert broken_links(page) == ["#names", "none.md", "page.md#twice-2"]
    assert missing_paths(page) == ["cache/none.py"]
