"""Detect: a box around each thing of a kind.

options   object, max_objects (50)
answer    {"objects": [{"x_min": 0.1, "y_min": 0.2, "x_max": 0.5, "y_max": 0.9}, ...]}, as shares of the
          picture's width and height; boxes are cut at the picture's edges
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
    checks.check_names("detect", options, ("object", "max_objects"))
    kinds = (tokens.coordinate, tokens.coordinate, tokens.size)
    state = FindingState(kinds, tokens.eos, checks.max_objects(options), _box, "objects")
    return finding.asked("detect", options, tokens, n_images, codec, state)


def _box(values: Sequence[float]) -> Item:
    """The box with this centre, width and height."""
    x, y, width, height = values
    return {
        "x_min": clamped(x - width / 2),
        "y_min": clamped(y - height / 2),
        "x_max": clamped(x + width / 2),
        "y_max": clamped(y + height / 2),
    }
