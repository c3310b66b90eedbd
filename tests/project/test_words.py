"""How the pages are written: no word that says nothing, and none that a reader must read twice."""

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


@pytest.mark.parametrize("page", [page for page in pages() if page == "README.md" or page.startswith("docs/")])
def test_no_banned_words(page: str) -> None:
    text = re.sub(r"`[^`]*`", "", " ".join(prose(REPOSITORY / page).lower().split()))
    assert [word for word in BANNED if re.search(rf"\b{word}\b", text)] == []
