"""Requests, parameters and results: the engine's inputs and outputs. Callers use the names of this package.

requests  `Request`, `SamplingParams`, `Delta`, `Result`
images    images in a prompt: what they look like, which positions see each other
skills    what a vision model can be asked, and how its answer is read
values    numbers that tokens carry, and what they stand for
"""

from petiole.gpu_worker.request.requests import (
    Constraint,
    ConstraintKind,
    Delta,
    FinishReason,
    Request,
    Result,
    SamplingParams,
)
from petiole.outputs import Timing, TokenLogprobs, Usage

__all__ = [
    "Constraint",
    "ConstraintKind",
    "Delta",
    "FinishReason",
    "Request",
    "Result",
    "SamplingParams",
    "Timing",
    "TokenLogprobs",
    "Usage",
]
