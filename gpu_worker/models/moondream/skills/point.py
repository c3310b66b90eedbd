"""Point: the centres of all things of a kind.

options   object, max_objects (50)
answer    {"points": [{"x": 0.5, "y": 0.25}, ...]}, as shares of the picture's width and height
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from petiole.gpu_worker.models.moondream.config import MoondreamConfig
from petiole.gpu_worker.models.moondream.skills import finding, options as checks
from petiole.gpu_worker.models.moondream.skills.finding import FindingState, Item, clamped
from petiole.gpu_worker.request.skills import SkillPrompt, TextCodec


def ask(options: Mapping[str, Any], config: MoondreamConfig, n_images: int, codec: TextCodec) -> SkillPrompt:
    tokens = config.tokens
    checks.check_names("point", options, ("object", "max_objects"))
    kinds = (tokens.coordinate, tokens.coordinate)
    state = FindingState(kinds, tokens.eos, checks.max_objects(options), _point, "points")
    return finding.asked("point", options, tokens, n_images, codec, state)


def _point(values: Sequence[float]) -> Item:
    x, y = values
    return {"x": clamped(x), "y": clamped(y)}
