"""Skills of models whose chat template places images: a question or a caption is a conversation of one turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petiole.gpu_worker.exceptions import InvalidRequest, require
from petiole.gpu_worker.request.skills import SkillCall

_CAPTIONS = {
    "short": "Describe this image in one short sentence.",
    "normal": "Describe this image.",
    "long": "Describe this image in detail.",
}
_NAMES = {"query": "answer", "caption": "caption"}
"""By skill: the field of the result that has the text."""


def conversation_of(call: SkillCall, n_images: int) -> tuple[list[Mapping[str, Any]], str]:
    """The messages of a call, and the name of its answer. Raises InvalidRequest."""
    require(call.name in _NAMES, "skill", f"must be one that this model has: {', '.join(_NAMES)}", call.name)
    if call.name == "caption":
        require(n_images == 1, "image", "caption takes one image", f"{n_images} images")
        length = call.options.get("length", "normal")
        known = isinstance(length, str) and length in _CAPTIONS
        require(known, "length", f"must be one of {', '.join(_CAPTIONS)}", length)
        text = str(_CAPTIONS[str(length)])
    else:
        reasoning, given = call.options.get("reasoning", False), call.options.get("question")
        require(reasoning is False, "reasoning", "must be false: this model's skills do not reason", reasoning)
        if not isinstance(given, str) or not given.strip():
            raise InvalidRequest("question", "must be text that is not empty", given)
        text = given
    pictures: list[dict[str, Any]] = [{"type": "image"}] * n_images
    return [{"role": "user", "content": [*pictures, {"type": "text", "text": text}]}], _NAMES[call.name]
