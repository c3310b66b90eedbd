"""`classify` takes texts, or pairs in their place."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.contract.requests.embedding_tasks import ClassifyRequest
from petiole.contract.requests.validation import validate
from petiole.tasks.errors import InvalidRequest


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "texts: must be given, or pairs in its place, got neither"),
        ({"texts": ["a"], "pairs": [["a", "b"]]}, "texts: must be given, or pairs in its place, got both"),
        ({"pairs": [["a"]]}, r"pairs\[0\]: must have two texts, got 1 texts"),
        ({"pairs": [["a", ""]]}, r"pairs\[0\]\[1\]: must not be empty"),
    ],
)
def test_one_of_texts_and_pairs_is_given(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        validate(ClassifyRequest, given)


def test_a_pair_goes_to_the_engine_as_one_text() -> None:
    subject = validate(ClassifyRequest, {"pairs": [["a man sleeps", "somebody is awake"]]}).subject()
    assert subject["texts"] == [("a man sleeps", "somebody is awake")]
    assert subject["scoring"] == {"classes": True, "truncate": False, "field": "pairs"}
