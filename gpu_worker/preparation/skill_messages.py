"""Skills of models whose chat template places images: a question, a caption or a search for things is a
conversation of one turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petiole.gpu_worker.exceptions import InvalidRequest, require
from petiole.gpu_worker.preparation import locating
from petiole.gpu_worker.request.skills import SkillCall

_CAPTIONS = {
    "short": "Describe this image in one short sentence.",
    "normal": "Describe this image.",
    "long": "Describe this image in detail.",
}
ANSWERS = {"query": "answer", "caption": "caption"}
"""By skill: the field of the result that has the text."""


def conversation_of(call: SkillCall, n_images: int, *, finds: bool) -> list[Mapping[str, Any]]:
    """The messages of a call. finds: whether the model has learnt where things are. Raises InvalidRequest."""
    known = (*ANSWERS, *(locating.SKILLS if finds else ()))
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
    if call.name in locating.SKILLS:
        return locating.text_of(call)
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
