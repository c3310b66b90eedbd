"""Requests, parameters and results: the engine's inputs and outputs. Callers use the names of this package.

handle           what `submit` returns: a request's output and result
requests         `Request` and `Result`; checks of what comes in. `SamplingParams` is in
                 `petiole.contract.requests.sampling`, the parts of a result in `petiole.contract.results.outputs`
prepared_images  images in a prompt: what they look like, which positions see each other
videos           frames as images of a prompt
skills           what a vision model can be asked, and how its answer is read
pooling          `Embedding` and `Scoring`; what a model of texts takes; how vectors and scores are sent
values           numbers that tokens carry, and what they stand for
protocols        what a constraint or a skill must be able to do; callers may bring their own
"""

from petiole.contract.requests.sampling import SamplingParams
from petiole.contract.results.outputs import Delta, FinishReason, Timing, TokenLogprobs, Usage
from petiole.gpu_worker.request.pooling import Embedding, Scoring
from petiole.gpu_worker.request.requests import (
    Constraint,
    ConstraintKind,
    Request,
    Result,
)

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
