"""Points and boxes are read from text while it is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from petiole.gpu_worker import InvalidRequest
from petiole.gpu_worker.preparation.skills import FoundInText, constraint_of, located_text
from petiole.gpu_worker.request.skills import SkillCall
from petiole.gpu_worker.text import Tokenizer
from tests.support.tokenizers import byte_level


def written(entries: list[dict[str, Any]]) -> list[int]:
    return list(byte_level().encode(json.dumps(entries, ensure_ascii=False), add_special_tokens=False).ids)


BOXES = [{"bbox_2d": [0, 250, 500, 1000], "label": "a car"}, {"bbox_2d": [900, 20, 100, 10], "label": "a car"}]
FOUND = [
    {"x_min": 0.0, "y_min": 0.25, "x_max": 0.5, "y_max": 1.0},
    {"x_min": 0.1, "y_min": 0.01, "x_max": 0.9, "y_max": 0.02},
]


def test_each_box_as_soon_as_it_is_complete() -> None:
    state = FoundInText("detect", (1000, 1000), Tokenizer(byte_level()))
    items = [state.consume_step(token) for token in written(BOXES)]
    assert [item for item in items if item] == FOUND
    assert items.index(FOUND[0]) < len(items) // 2
    assert state.finalize() == {"objects": FOUND}


def test_a_copy_goes_on_alone() -> None:
    state, ids = FoundInText("detect", (1000, 1000), Tokenizer(byte_level())), written(BOXES)
    for token in ids[: len(ids) // 2]:
        state.consume_step(token)
    copy = state.fork()
    for token in ids[len(ids) // 2 :]:
        copy.consume_step(token)
    assert len(state.items) == 1
    assert copy.finalize() == {"objects": FOUND}


def test_pixels_of_the_resized_picture() -> None:
    state = FoundInText("point", (320, 80), Tokenizer(byte_level()))
    for token in written([{"point_2d": [80, 40], "label": "x"}, {"point_2d": [999, 80], "label": "x"}]):
        state.consume_step(token)
    assert state.finalize() == {"points": [{"x": 0.25, "y": 0.5}, {"x": 1.0, "y": 1.0}]}


def test_a_label_is_no_box() -> None:
    label = 'a "bbox_2d": [1, 2, 3, 4] car'
    state = FoundInText("detect", (1000, 1000), Tokenizer(byte_level()))
    for token in written([{"bbox_2d": [0, 250, 500, 1000], "label": label}]):
        state.consume_step(token)
    assert state.finalize() == {"objects": FOUND[:1]}


def test_an_output_that_ends_early_has_what_is_complete() -> None:
    state = FoundInText("detect", (1000, 1000), Tokenizer(byte_level()))
    for token in written(BOXES)[:-20]:
        state.consume_step(token)
    assert state.finalize()["objects"] == FOUND[:1]


def test_the_object_is_in_the_question_and_in_the_schema() -> None:
    call = SkillCall("detect", {"object": 'red "car"', "max_objects": 3})
    assert 'Locate every "red \\"car\\"" in this image.' in located_text(call)
    schema = constraint_of(call, (1000, 1000)).value
    assert schema["maxItems"] == 3
    assert schema["items"]["properties"]["label"] == {"const": 'red "car"'}
    assert schema["items"]["properties"]["bbox_2d"]["items"]["maximum"] == 1000


@pytest.mark.parametrize(
    ("options", "field"),
    [({"object": " "}, "object"), ({"object": "car", "max_objects": 0}, "max_objects"), ({}, "object")],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint_of(SkillCall("point", options), (1000, 1000))
    assert caught.value.field == field
