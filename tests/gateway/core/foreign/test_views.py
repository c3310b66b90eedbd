"""How many pixels pictures have, as vLLM's clients say it."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.gateway.core.foreign import spellings
from petiole.gateway.openai import conversation
from petiole.tasks.errors import InvalidRequest

URL = "data:image/png;base64,aGk="


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"max_pixels": 9000}, {"max_pixels": 9000}),
        ({"fps": 2}, {"fps": 2}),
        ({"min_pixels": None, "size": None}, {}),
        ({"size": {"shortest_edge": 5, "longest_edge": 7}}, {"min_pixels": 5, "max_pixels": 7}),
        ({"size": {"longest_edge": 7}, "max_pixels": 6}, {"max_pixels": 6}),
    ],
)
def test_options_of_a_processor_are_a_view(given: dict[str, Any], expected: dict[str, int]) -> None:
    assert spellings.view(given) == expected


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"fps": 0}, "fps"),
        ({"num_frames": 2}, "num_frames"),
        ({"size": 448}, "size"),
        ({"size": {"height": 448}}, "size.height"),
        ({"max_pixels": "9000"}, "max_pixels"),
        ({"min_pixels": 0}, "min_pixels"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels"),
    ],
)
def test_others_are_refused_by_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        spellings.view(given)
    assert refused.value.field == f"mm_processor_kwargs.{field}"


def test_a_picture_says_it_before_the_request_does() -> None:
    own = {"type": "image_url", "image_url": {"url": URL, "max_pixels": 4000}, "min_pixels": 2000}
    usual = {"type": "image_url", "image_url": {"url": URL, "detail": "low"}}
    [message] = conversation.messages([{"role": "user", "content": [own, usual]}], view={"max_pixels": 9000})
    expected = [{"min_pixels": 2000, "max_pixels": 4000}, {"max_pixels": 9000, "detail": "low"}]
    assert message["content"] == [{"type": "image_url", "image_url": {"url": URL, **one}} for one in expected]


def test_a_picture_that_says_what_cannot_be_is_refused_by_field() -> None:
    bad = {"type": "image_url", "image_url": {"url": URL, "max_pixels": 0}}
    with pytest.raises(InvalidRequest) as refused:
        conversation.messages([{"role": "user", "content": [bad]}])
    assert refused.value.field == "messages[0].content[0].image_url.max_pixels"
