"""A decoder of text with eyes, of any family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

from torch import Tensor

from petiole.gpu_worker.models.decoder import Decoder


class Eyes(Protocol):
    """What encodes pictures."""

    def encode(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> Sequence[Tensor]:
        """See `ImageDecoder`."""
        ...

    def working_bytes(self, n_encoded: int) -> int:
        """See `ImageDecoder.encode_bytes`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeingDecoder(Decoder):
    """Implements `ImageDecoder`. Text is computed as in any decoder."""

    vision: Eyes

    @classmethod
    def around(cls, text: Decoder, **more: Any) -> Self:
        """A decoder of text with more: the fields of this class, and the limits of what it takes."""
        own = {field.name: getattr(text, field.name) for field in fields(Decoder)}
        return cls(**own | more)

    def encode(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> Sequence[Tensor]:
        return self.vision.encode(images)

    def encode_bytes(self, n_encoded: int) -> int:
        return self.vision.working_bytes(n_encoded)
