"""`petiole demo --vision` judges the answers that it prints."""

from __future__ import annotations

import pytest

from petiole.tasks.commands.demos.vision import is_right

SHAPES = "a black square, a red circle"


@pytest.mark.parametrize(
    ("answered", "true", "right"),
    [
        ("3", "3", True),
        ("There are 3.", "3", True),
        ("13", "3", False),
        ("13 points", "3 points", False),
        ("a red circle, a black square", SHAPES, True),
        ("a red square, a black circle", SHAPES, False),
        ("Black", "black", True),
        ("", "black", False),
    ],
)
def test_an_answer_is_right_if_it_has_all_that_is_true(answered: str, true: str, right: bool) -> None:
    assert is_right(answered, true) is right
