"""Point and detect: the prompt names an object, and each thing that is found takes the same kinds of tokens.

    point     x  y   x  y   ... end              x: a coordinate, or the end
    detect    x  y  size   x  y  size   ... end

So the allowed tokens depend on the index in the output alone, and no step waits for the previous one.

    options   object, max_objects (50)
    answer    {"points": [{"x": 0.5, "y": 0.25}, ...]}, or
              {"objects": [{"x_min": 0.1, "y_min": 0.2, "x_max": 0.5, "y_max": 0.9}, ...]}, as shares of the
              picture's width and height; boxes are cut at the picture's edges
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from petiole.gpu_worker.models.moondream.config import MoondreamConfig, TokenConfig
from petiole.gpu_worker.models.moondream.skills import options as checks
from petiole.gpu_worker.request.prepared_images import ImagePlace
from petiole.gpu_worker.request.skills import SkillPrompt, TextCodec

Item = dict[str, float]


@dataclass(slots=True)
class FindingState:
    """A `PositionalSkill`. kinds: the kinds of tokens of one thing, in order. item: makes a thing from the values
    of its tokens. name: the key of all things in the answer."""

    kinds: Sequence[int]
    end: int
    max_objects: int
    item: Callable[[Sequence[float]], Item]
    name: str
    items: list[Item] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    consumed: int = 0

    def allowed_at(self, index: int) -> Sequence[int]:
        number, part = divmod(index, len(self.kinds))
        if number >= self.max_objects:
            return [self.end]
        return [self.kinds[part], self.end] if part == 0 else [self.kinds[part]]

    def consume_step(self, token_id: int, values: Sequence[float] = ()) -> Mapping[str, float] | None:
        self.consumed += 1
        if token_id == self.end:
            return None
        self.values.extend(values)
        if self.consumed % len(self.kinds):
            return None
        self.items.append(self.item(self.values))
        self.values.clear()
        return self.items[-1]

    def finalize(self) -> dict[str, list[Item]]:
        return {self.name: list(self.items)}

    def fork(self) -> Self:
        return type(self)(
            self.kinds,
            self.end,
            self.max_objects,
            self.item,
            self.name,
            list(self.items),
            list(self.values),
            self.consumed,
        )


def point(options: Mapping[str, Any], config: MoondreamConfig, n_images: int, codec: TextCodec) -> SkillPrompt:
    kinds = (config.tokens.coordinate, config.tokens.coordinate)
    return _asked("point", options, config.tokens, n_images, codec, kinds, _point, "points")


def detect(options: Mapping[str, Any], config: MoondreamConfig, n_images: int, codec: TextCodec) -> SkillPrompt:
    kinds = (config.tokens.coordinate, config.tokens.coordinate, config.tokens.size)
    return _asked("detect", options, config.tokens, n_images, codec, kinds, _box, "objects")


def _asked(
    skill: str,
    options: Mapping[str, Any],
    tokens: TokenConfig,
    n_images: int,
    codec: TextCodec,
    kinds: Sequence[int],
    item: Callable[[Sequence[float]], Item],
    found: str,
) -> SkillPrompt:
    """The prompt that names the object, with a space before it."""
    checks.check_names(skill, options, ("object", "max_objects"))
    state = FindingState(kinds, tokens.eos, checks.max_objects(options), item, found)
    checks.needs_image(skill, n_images)
    around = tokens.templates[skill]
    name = codec.encode(" " + checks.text(options, "object"), field="object")
    prompt: list[int | ImagePlace] = [tokens.bos, ImagePlace(0), *around["prefix"], *name, *around["suffix"]]
    return SkillPrompt(prompt, state, steering="index", has_text=False)


def _point(values: Sequence[float]) -> Item:
    x, y = values
    return {"x": _clamped(x), "y": _clamped(y)}


def _box(values: Sequence[float]) -> Item:
    """The box with this centre, width and height."""
    x, y, width, height = values
    return {
        "x_min": _clamped(x - width / 2),
        "y_min": _clamped(y - height / 2),
        "x_max": _clamped(x + width / 2),
        "y_max": _clamped(y + height / 2),
    }


def _clamped(value: float) -> float:
    return min(1.0, max(0.0, value))
