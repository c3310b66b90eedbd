"""The limits of a request's numbers. `tasks` refuses a submission by them, the engine refuses a request by them.

A limit is part of a type. `tasks.requests.schemas` and `gpu_worker.request.SamplingParams` give their fields these
types, so both know the same limits. A limit that only one side can check is declared there: the lengths of lists
in the schemas, the vocabulary and the context in `gpu_worker.threads.preparation`."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

MaxTokens = Annotated[int, Ge(1)]
MinTokens = Annotated[int, Ge(0)]
Temperature = Annotated[float, Ge(0), Le(100)]
TopK = Annotated[int, Ge(0)]
TopP = Annotated[float, Gt(0), Le(1)]
MinP = Annotated[float, Ge(0), Le(1)]
RepetitionPenalty = Annotated[float, Ge(0.01), Le(100)]
Penalty = Annotated[float, Ge(-2), Le(2)]
Bias = Annotated[float, Ge(-1000), Le(1000)]
Seed = Annotated[int, Ge(-(2**63)), Lt(2**64)]
MOST_LOGPROB_TOKENS = 128
Logprobs = Annotated[int, Ge(0), Le(20)]
Truncate = Literal["start", "middle", "end"]
"""Which tokens of a text that is too long are left out."""
DeadlineS = Annotated[float, Gt(0), Le(1e9)]
"""The highest value is about a tenth of the longest timeout of a lock."""
