"""How the pages are written: no word that says nothing, none that a reader must read twice, and not too many."""

from __future__ import annotations

import re

import pytest

from tests.project.test_links import pages, prose
from tests.support.site import REPOSITORY

BANNED = (
    *("leverage", "leverages", "utilize", "utilizes", "seamless", "seamlessly", "blazing", "effortless", "robust"),
    *("in order to", "it should be noted", "please note", "needless to say", "state of the art", "cutting-edge"),
    *("so many", "due to the fact"),
)

PAGES = [page for page in pages() if page == "README.md" or page.startswith("docs/")]
MOST_WORDS, MOST_LINES = 35_000, 300
"""Of all pages together, as `wc -w` counts; of each page."""


@pytest.mark.parametrize("page", PAGES)
def test_no_banned_words(page: str) -> None:
    text = re.sub(r"`[^`]*`", "", " ".join(prose(REPOSITORY / page).lower().split()))
    assert [word for word in BANNED if re.search(rf"\b{word}\b", text)] == []


def test_the_pages_are_short() -> None:
    texts = {page: (REPOSITORY / page).read_text() for page in PAGES}
    assert [page for page, text in texts.items() if text.count("\n") > MOST_LINES] == []
    assert sum(len(text.split()) for text in texts.values()) <= MOST_WORDS
