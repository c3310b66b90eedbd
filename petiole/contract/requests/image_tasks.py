"""Requests about an image: `query`, `caption`, `point` and `detect`.

The engine checks what depends on the model: which of these skills it has, and its prompts.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from petiole.contract import limits
from petiole.contract.requests import images
from petiole.contract.requests.generation import Common, Text
from petiole.contract.requests.sampling import MaxTokens, SamplingParams
from petiole.contract.requests.validation import Given


def _checked(image: object) -> str | None:
    return None if image is None else images.check("image", image)


class Answering(Common):
    """Options of the skills that answer with text: `query` and `caption`."""

    max_tokens: MaxTokens = 768
    """The output has at most this many tokens; `"rest"`: as many as the context has room for."""
    temperature: limits.Temperature = 0.5
    """0 always takes the likeliest token; higher values vary more."""
    top_p: limits.TopP = 0.3
    """Draw only from the likeliest tokens that together have this probability."""
    seed: limits.Seed | None = None
    """The same request with the same seed draws the same tokens. `None`: derived from the task's id."""

    def sampling(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens, temperature=self.temperature, top_p=self.top_p, seed=self.seed
        )


class QueryRequest(Answering):
    """A question, about an image or not."""

    image: Annotated[str | None, Given(bytes)] = None
    """What the question is about, if anything: a file's bytes (JPEG, PNG or WebP), base64 of them, a data URL, or
    a handle of `put_image`. See docs/vision.md."""
    question: Text
    """The question."""
    reasoning: bool = False
    """The model reasons first; the result has its reasoning."""

    _image = field_validator("image", mode="before")(_checked)

    def subject(self) -> dict[str, Any]:
        return {"skill": ("query", {"question": self.question, "reasoning": self.reasoning})}

    def images(self) -> list[str]:
        return [] if self.image is None else [self.image]


class CaptionRequest(Answering):
    """A picture in words."""

    image: Annotated[str, Given(bytes)]
    """What to describe, in the forms that `query` takes."""
    length: Literal["short", "normal", "long"] = "normal"
    """How much to say."""

    _image = field_validator("image", mode="before")(_checked)

    def subject(self) -> dict[str, Any]:
        return {"skill": ("caption", {"length": self.length})}

    def images(self) -> list[str]:
        return [self.image]


class Finding(Common):
    """Options of the skills that find things: `point` and `detect`. They take the likeliest tokens."""

    skill: ClassVar[str]
    n_numbers: ClassVar[int]
    """How many tokens say where one thing is."""

    max_objects: Annotated[int, Field(ge=1, le=1000)] = 50
    """At most this many are found."""
    image: Annotated[str, Given(bytes)]
    """Where to look, in the forms that `query` takes."""
    object: Text
    """What to look for: `"car"`."""

    _image = field_validator("image", mode="before")(_checked)

    def subject(self) -> dict[str, Any]:
        return {"skill": (self.skill, {"object": self.object, "max_objects": self.max_objects})}

    def sampling(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.n_numbers * self.max_objects + 1, temperature=0.0)

    def images(self) -> list[str]:
        return [self.image]


class PointRequest(Finding):
    """Where things are: their centres."""

    skill, n_numbers = "point", 2


class DetectRequest(Finding):
    """A box around each thing."""

    skill, n_numbers = "detect", 3
