"""Requests, parameters and results: the engine's inputs and outputs. Callers use the names of this package.

requests  `Request`, `SamplingParams`, `Result`; the parts of a result are in `petiole.outputs`
images    images in a prompt: what they look like, which positions see each other
skills    what a vision model can be asked, and how its answer is read
texts     texts of which a model makes vectors or scores, and how these are sent
values    numbers that tokens carry, and what they stand for
"""

from petiole.gpu_worker.request.requests import (
    Constraint,
    ConstraintKind,
    Request,
    Result,
    SamplingParams,
)
from petiole.gpu_worker.request.texts import Embedding, Scoring
from petiole.outputs import Delta, FinishReason, Timing, TokenLogprobs, Usage

__all__ = [
    "Constraint",
    "ConstraintKind",
    "Delta",
    "Embedding",
    "FinishReason",
    "Request",
    "Result",
    "SamplingParams",
    "Scoring",
    "Timing",
    "TokenLogprobs",
    "Usage",
]
