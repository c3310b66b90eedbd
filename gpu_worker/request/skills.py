"""Skills: what a vision model can be asked, beside text to continue, and how its answer is read.

A skill is called by name, with options that are data. The *processor* of the model turns the call into a prompt,
and into a state that restricts the tokens of the output and reads the answer from them: text, points or boxes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from petiole.contract.requests.images import AS_IT_IS, View
from petiole.gpu_worker.request.prepared_images import ImageLayout, ImagePlace, PreparedImage
from petiole.gpu_worker.request.protocols import PositionalSkill, SkillState

if TYPE_CHECKING:
    from PIL import Image


@dataclass(frozen=True, slots=True)
class SkillCall:
    """`query`: question, reasoning. `caption`: length (short, normal, long). `point` and `detect`: object,
    max_objects."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


class TextCodec(Protocol):
    """The model's tokenizer, as a skill uses it."""

    def encode(self, text: str, *, field: str) -> list[int]:
        """The token ids of a text, without special tokens around them. Raises InvalidRequest, naming `field`."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str: ...


Steering = Literal["none", "index", "tokens"]
"""What the allowed tokens depend on. none: all tokens are allowed; index: the output index alone; tokens: the
tokens before."""


@dataclass(frozen=True, slots=True)
class SkillPrompt:
    """A skill call as a prompt and a state.

    `state`: a PositionalSkill if `steering` is "index", a SkillState if "tokens", otherwise None. `answer`: what
    the answer is called, if it is the text. `banned_token_ids`: never allowed, at any index. `has_text`: whether
    the output is text, which is then streamed."""

    prompt: Sequence[int | ImagePlace]
    state: SkillState | PositionalSkill | None = None
    steering: Steering = "none"
    answer: str | None = None
    banned_token_ids: tuple[int, ...] = ()
    has_text: bool = True


class Pictures(Protocol):
    """Turns pictures into what a model encodes. Thread-safe; no tensors."""

    def layout(self, width: int, height: int, field: str, most: int, view: View = AS_IT_IS) -> ImageLayout:
        """What a picture of this size becomes, as it is turned. most: positions. view: its pixels; its detail is
        in `most`. Raises InvalidRequest, naming `field`, for what the model does not take."""
        ...

    def prepared(self, picture: Image.Image, content_hash: int, layout: ImageLayout) -> PreparedImage:
        """The pixels of an RGB picture."""
        ...


class Processor(Pictures, Protocol):
    """The processor of a model with skills of its own, by which it answers conversations, too."""

    def ask(self, call: SkillCall, n_images: int, codec: TextCodec) -> SkillPrompt:
        """The call as a prompt and a state. Raises InvalidRequest for a skill or an option that the model does not
        know."""
        ...

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> SkillCall:
        """The skill that answers a conversation, in which parts of type "image" stand for images. Raises
        InvalidRequest for a conversation that the model cannot answer."""
        ...
