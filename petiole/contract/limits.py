"""The limits of a request: of its numbers, as parts of types, and of its texts and lists.

Limits that only the model has, such as the vocabulary and the context, are in `gpu_worker.preparation`."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

MAX_PROMPT_CHARACTERS = 4_000_000
MAX_PROMPT_TOKENS = 500_000
MAX_STOPS = 64
MAX_BAD_WORDS = 1024
MAX_BIASES = 65_536
MAX_CHOICES = 10_000
MAX_MESSAGES = 10_000
MAX_TOOLS = 1024
MAX_SALT_CHARACTERS = 256
MAX_SCHEMA_CHARACTERS = 1_000_000  # of a JSON schema, of all tools, or of all variables of a chat template

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
