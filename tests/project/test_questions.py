"""Fifty questions of users: the first result of a search answers each, or leads there with one click.

A document of the index is a section of a page, as on the site, whose `site/search.json` is taken where `make docs`
has written it. BM25 ranks them, over words without endings, with titles counted more. The site's own ranking is
JavaScript, which this test does not run.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from dataclasses import dataclass
from functools import cache

import pytest

from docs.site import DOCS, INDEX
from tests.support.site import REPOSITORY

QUESTIONS: dict[str, str] = tomllib.loads((REPOSITORY / "tests/project/questions.toml").read_text())
TITLE, K, B = 4, 1.2, 0.6
"""How often the words of a title count; BM25's two numbers."""
STOP = {*"a an and as at by for from in is it my of on or per s that the to when with".split()}  # noqa: SIM905
TAG = re.compile(r"<[^>]*>")
HUMPS = re.compile(r"\b[A-Za-z]?[a-z0-9]*\b|(?<=[a-z])(?=[A-Z])")
"""Words without humps, and the places between a word's humps: what is left are the humps of `WorkerLostError`."""
ENDINGS = re.compile(r"(?:ings?|ers?|ed|es|s|ion|e)$")


@dataclass(frozen=True)
class Section:
    page: str
    title: str
    text: str


def words(text: str) -> list[str]:
    found = [*re.findall(r"[a-z0-9]+", text.lower()), *re.findall(r"[a-z]{3,}", HUMPS.sub(" ", text).lower())]
    return [ENDINGS.sub("", word) if len(word) > 4 else word for word in found if word not in STOP]


@cache
def sections() -> list[Section]:
    if (built := REPOSITORY / "site" / "search.json").exists():
        items = json.loads(built.read_text())["items"]
        found = [Section(page_of(item["location"]), item["title"], TAG.sub(" ", item["text"])) for item in items]
        return [section for section in found if section.page != "api.md"]
    return [
        Section(page.name, title.strip("# "), text)
        for page in sorted(DOCS.glob("*.md"))
        for part in re.split(r"^(?=#+ )", page.read_text(), flags=re.M)
        for title, _, text in [part.partition("\n")]
    ]


def page_of(location: str) -> str:
    return f"{location.partition('#')[0].strip('/')}.md" if location.strip("/").partition("#")[0] else INDEX


@cache
def counted() -> list[Counter[str]]:
    return [Counter(words(section.title) * TITLE + words(section.text)) for section in sections()]


def first_result(question: str) -> Section:
    documents = counted()
    mean = sum(document.total() for document in documents) / len(documents)
    asked = set(words(question))
    rarity = {word: sum(word in document for document in documents) for word in asked}

    def score(document: Counter[str]) -> float:
        length = 1 - B + B * document.total() / mean
        return sum(
            math.log(1 + (len(documents) - rarity[word] + 0.5) / (rarity[word] + 0.5))
            * document[word]
            * (K + 1)
            / (document[word] + K * length)
            for word in asked
        )

    return max(zip(sections(), documents, strict=True), key=lambda pair: score(pair[1]))[0]


def one_click(section: Section) -> set[str]:
    """The pages that its page links to."""
    return {section.page, *re.findall(r"\]\(([\w-]+\.md)", (DOCS / section.page).read_text())}


def test_fifty_questions_are_asked() -> None:
    assert len(QUESTIONS) == 50
    assert {page for page in QUESTIONS.values() if not (DOCS / page).exists()} == set()


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_first_result_answers_or_leads_there(question: str) -> None:
    found = first_result(question)
    assert QUESTIONS[question] in one_click(found), f"{found.page}: {found.title}"


def test_most_are_answered_at_once() -> None:
    answered = [question for question, page in QUESTIONS.items() if first_result(question).page == page]
    assert len(answered) >= 38, sorted(QUESTIONS.keys() - set(answered))
