"""Skills of models whose chat template places images: a question, a caption or a search for things is a
conversation of one turn.

Of point and detect the output is a JSON list that must match a schema, and each entry is a point or a box as soon
as it is complete.

    [{"bbox_2d": [120, 300, 480, 910], "label": "car"}, ...]        left, top, right, bottom
    [{"point_2d": [300, 605], "label": "car"}, ...]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from petiole.gpu_worker.exceptions import InvalidRequest, require
from petiole.gpu_worker.request import Constraint
from petiole.gpu_worker.request.skills import SkillCall
from petiole.gpu_worker.text import Tokenizer

_CAPTIONS = {
    "short": "Describe this image in one short sentence.",
    "normal": "Describe this image.",
    "long": "Describe this image in detail.",
}
ANSWERS = {"query": "answer", "caption": "caption"}
"""By skill: the field of the result that has the text."""


def conversation_of(call: SkillCall, n_images: int, *, finds: bool) -> list[Mapping[str, Any]]:
    """The messages of a call. finds: whether the model has learnt where things are. Raises InvalidRequest."""
    known = (*ANSWERS, *(LOCATING if finds else ()))
    require(call.name in known, "skill", f"must be one that this model has: {', '.join(known)}", call.name)
    if call.name != "query":
        require(n_images == 1, "image", f"{call.name} takes one image", f"{n_images} images")
    pictures: list[dict[str, Any]] = [{"type": "image"}] * n_images
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": _text_of(call)}]}]


def without_thought(prompt: str) -> str:
    """The prompt with an empty thought where its end begins one, as templates of models that always think do."""
    begun = prompt.rstrip()
    return f"{begun}\n\n</think>\n\n" if begun.endswith("<think>") else prompt


def _text_of(call: SkillCall) -> str:
    if call.name in LOCATING:
        return located_text(call)
    if call.name == "caption":
        length = call.options.get("length", "normal")
        known = isinstance(length, str) and length in _CAPTIONS
        require(known, "length", f"must be one of {', '.join(_CAPTIONS)}", length)
        return _CAPTIONS[str(length)]
    reasoning, given = call.options.get("reasoning", False), call.options.get("question")
    require(reasoning is False, "reasoning", "must be false: this model's skills do not reason", reasoning)
    if not isinstance(given, str) or not given.strip():
        raise InvalidRequest("question", "must be text that is not empty", given)
    return given


MOST_OBJECTS = 1000
_NUMBERS = {"point": 2, "detect": 4}
_KEYS = {"point": "point_2d", "detect": "bbox_2d"}
_RESULTS = {"point": ("points", ("x", "y")), "detect": ("objects", ("x_min", "y_min", "x_max", "y_max"))}
_TEXTS = {
    "point": "Locate every {} in this image by a point inside. Report the points in JSON format: {}",
    "detect": "Locate every {} in this image. Report the bounding boxes in JSON format: {}",
}
LOCATING = tuple(_TEXTS)


def located_text(call: SkillCall) -> str:
    """What the model is asked. Raises InvalidRequest."""
    example = {_KEYS[call.name]: ["..."], "label": _object(call)}
    return _TEXTS[call.name].format(json.dumps(_object(call), ensure_ascii=False), f"[{_written(example)}]")


def constraint_of(call: SkillCall, whole: tuple[int, int]) -> Constraint:
    """whole: what the width and the height of the picture are in the output. Raises InvalidRequest."""
    most, n = call.options.get("max_objects", 50), _NUMBERS[call.name]
    known = type(most) is int and 1 <= most <= MOST_OBJECTS
    require(known, "max_objects", f"must be a whole number from 1 to {MOST_OBJECTS}", most)
    numbers = {"type": "integer", "minimum": 0, "maximum": max(whole)}
    key = _KEYS[call.name]
    entry = {
        "type": "object",
        "properties": {
            key: {"type": "array", "items": numbers, "minItems": n, "maxItems": n},
            "label": {"const": _object(call)},
        },
        "required": [key, "label"],
        "additionalProperties": False,
    }
    return Constraint("json_schema", {"type": "array", "items": entry, "maxItems": most})


@dataclass(slots=True)
class FoundInText:
    """A `SkillState` that reads points or boxes, as shares of the width and the height, from text."""

    skill: str
    whole: tuple[int, int]
    tokenizer: Tokenizer
    token_ids: list[int] = field(default_factory=list)
    items: list[Mapping[str, float]] = field(default_factory=list)
    rest: str = ""
    _push: Callable[[Sequence[int]], str] | None = None

    def allowed_token_ids(self) -> None:
        return None

    def consume_step(self, token_id: int, values: Sequence[float] = ()) -> Mapping[str, float] | None:
        self._push = self._push or self.tokenizer.detokenizer().push
        self.token_ids.append(token_id)
        self.rest += self._push((token_id,))
        found = _ENTRIES[self.skill].search(self.rest)
        if found is None:
            return None
        self.rest = self.rest[found.end() :]
        self.items.append(self._item([int(one) for one in found[1].split(",")]))
        return self.items[-1]

    def finalize(self) -> dict[str, Any]:
        return {_RESULTS[self.skill][0]: list(self.items)}

    def fork(self) -> Self:
        copy = type(self)(self.skill, self.whole, self.tokenizer)
        for token in self.token_ids:
            copy.consume_step(token)
        return copy

    def _item(self, numbers: Sequence[int]) -> dict[str, float]:
        """A box has its corners in any order."""
        shares = [min(1.0, number / self.whole[k % 2]) for k, number in enumerate(numbers)]
        if len(shares) == 4:
            (left, right), (top, bottom) = (sorted(shares[k::2]) for k in range(2))
            shares = [left, top, right, bottom]
        return dict(zip(_RESULTS[self.skill][1], shares, strict=True))


_ENTRIES = {
    name: re.compile(rf'"{key}"\s*:\s*\[\s*(\d+(?:\s*,\s*\d+){{{_NUMBERS[name] - 1}}})\s*\]')
    for name, key in _KEYS.items()
}
"""A quotation mark in a label has a backslash before it, so no label matches."""


def _object(call: SkillCall) -> str:
    value = call.options.get("object")
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest("object", "must be text that is not empty", value)
    return value


def _written(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, ensure_ascii=False).replace('["..."]', "[...]")
