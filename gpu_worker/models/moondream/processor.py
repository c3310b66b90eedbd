"""Turns pictures into crops, and skill calls and conversations into prompts, for Moondream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from petiole.contract.requests.images import AS_IT_IS, View
from petiole.gpu_worker.exceptions import InvalidRequest, require
from petiole.gpu_worker.models.moondream.config import MoondreamConfig
from petiole.gpu_worker.models.moondream.crops import cropped
from petiole.gpu_worker.models.moondream.skills import SKILLS
from petiole.gpu_worker.request.prepared_images import ImageLayout, PreparedImage
from petiole.gpu_worker.request.skills import SkillCall, SkillPrompt, TextCodec

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class MoondreamProcessor:
    """Implements `Processor`."""

    config: MoondreamConfig

    def layout(self, width: int, height: int, field: str, most: int, view: View = AS_IT_IS) -> ImageLayout:
        view.check_of_one_size(field)
        return ImageLayout(self.config.vision.geometry.grid**2)

    def prepared(self, picture: Image.Image, content_hash: int, layout: ImageLayout) -> PreparedImage:
        crops = cropped(picture, self.config.vision.geometry)
        return PreparedImage(content_hash, layout.n_positions, crops.pixels, crops.tiling)

    def ask(self, call: SkillCall, n_images: int, codec: TextCodec) -> SkillPrompt:
        known = ", ".join(SKILLS)
        require(call.name in SKILLS, "skill", f"must be one that this model has: {known}", call.name)
        return SKILLS[call.name](call.options, self.config, n_images, codec)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> SkillCall:
        """One turn of the user is a query; an image may stand before or after its text."""
        roles = [message.get("role") for message in messages]
        require(
            roles == ["user"],
            "messages",
            "must be one message of the user: this model answers no others",
            f"roles {roles}",
        )
        content = messages[0].get("content")
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(parts, Sequence):
            raise InvalidRequest("messages[0].content", "must be text or a list of parts", content)
        kinds = [part.get("type") if isinstance(part, Mapping) else None for part in parts]
        most = "must have one text, and at most one image: this model reads no more"
        require(kinds.count("image") <= 1, "messages[0].content", most, f"{kinds.count('image')} images")
        require(kinds.count("text") == 1 and len(kinds) <= 2, "messages[0].content", most, f"parts {kinds}")
        return SkillCall("query", {"question": parts[kinds.index("text")].get("text")})
