"""How the pages are written: no word that says nothing, none that a reader must read twice, and not too many."""

from __future__ import annotations

import re

import pytest

from docs.site import INDEX, kinds
from tests.project.test_links import pages, prose
from tests.support.site import REPOSITORY

BANNED = (
    *("leverage", "leverages", "utilize", "utilizes", "seamless", "seamlessly", "blazing", "effortless", "robust"),
    *("in order to", "it should be noted", "please note", "needless to say", "state of the art", "cutting-edge"),
    *("so many", "due to the fact"),
)

PAGES = [page for page in pages() if page == "README.md" or page.startswith("docs/")]
MOST_LINES = 300
"""The longest page."""
MOST_WORDS = {"README": 900, "Tutorial": 2_500, "Reference": 22_000}
"""The most words of a kind of pages (docs/zensical.toml), as `wc -w` counts."""
MOST_IN_ALL = 38_000
"""The most words that users read to learn and to look up, without runbooks and texts of docstrings."""


@pytest.mark.parametrize("page", PAGES)
def test_no_banned_words(page: str) -> None:
    text = re.sub(r"`[^`]*`", "", " ".join(prose(REPOSITORY / page).lower().split()))
    assert [word for word in BANNED if re.search(rf"\b{word}\b", text)] == []


def test_the_pages_are_short() -> None:
    assert [page for page in PAGES if (REPOSITORY / page).read_text().count("\n") > MOST_LINES] == []


def test_each_kind_of_page_has_its_measure() -> None:
    words = {kind: sum(words_of(page) for page in found) for kind, found in pages_by_kind().items()}
    assert {kind: words[kind] for kind, most in MOST_WORDS.items() if words[kind] > most} == {}
    assert sum(count for kind, count in words.items() if kind != "Runbooks") <= MOST_IN_ALL, words


def test_every_page_has_a_place_in_the_site() -> None:
    placed = [page for found in pages_by_kind().values() for page in found]
    assert sorted(placed) == sorted(PAGES)


def pages_by_kind() -> dict[str, list[str]]:
    """By kind, its pages. The page of the Python names is not a file: it comes from docstrings."""
    found = {
        kind: [f"docs/{INDEX if page == 'index.md' else page}" for page in names if page != "api.md"]
        for kind, names in kinds().items()
    }
    return {"README": ["README.md"], **found}


def words_of(page: str) -> int:
    return len((REPOSITORY / page).read_text().split())
