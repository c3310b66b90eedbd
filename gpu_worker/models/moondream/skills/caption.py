"""Caption: a picture in words.

options   length: short, normal (the default) or long
answer    {"caption": "..."}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petiole.gpu_worker.exceptions import require
from petiole.gpu_worker.models.moondream.config import MoondreamConfig
from petiole.gpu_worker.models.moondream.skills import options as checks
from petiole.gpu_worker.request.prepared_images import ImagePlace
from petiole.gpu_worker.request.skills import SkillPrompt, TextCodec


def ask(options: Mapping[str, Any], config: MoondreamConfig, n_images: int, codec: TextCodec) -> SkillPrompt:
    tokens = config.tokens
    checks.check_names("caption", options, ("length",))
    checks.needs_image("caption", n_images)
    known, length = tokens.templates["caption"], options.get("length", "normal")
    require(isinstance(length, str) and length in known, "length", f"must be one of {', '.join(known)}", length)
    prompt: list[int | ImagePlace] = [tokens.bos, ImagePlace(0), *known[length]]
    return SkillPrompt(prompt, answer="caption", banned_token_ids=(tokens.answer,))
