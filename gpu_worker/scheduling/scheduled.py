"""The engine's sequence: the state machine plus the request's data.

A preparation thread creates a sequence; then the engine thread owns it. `stream` belongs to the text thread and is
not used here. Sequences rank by (priority, arrival): smaller ranks run first and are preempted last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cache import CacheNamespace, CacheTokens, KVAllocation
from gpu_worker.request import Request
from gpu_worker.scheduling.sequence import IntArray, SchedulableSequence
from gpu_worker.scheduling.stopping import StopRules

if TYPE_CHECKING:
    from gpu_worker.constraints import ConstraintState
    from gpu_worker.speculation import Drafter


class ScheduledSequence(SchedulableSequence):
    """The sequence of one accepted request.

    `adapter_key`: content key of its adapter; keys its KV namespace and its adapter slot.
    `allocation`: its row and pages, or None. `bound`: a step with the row's binding has been launched.
    `expected_reuse`: cached KV positions at admission's first look-up, None before that.
    `preempting`: no further steps are planned; the row is released once no operation is outstanding.
    `values`: values (coordinates, sizes) decoded with each generated token, for models that decode them.
    Times (`*_s`) are seconds of `time.perf_counter`.
    """

    __slots__ = (
        "adapter_key",
        "adapter_slot",
        "arrival_s",
        "bound",
        "cache_tokens",
        "cached_prompt_tokens",
        "constraint",
        "drafter",
        "expected_reuse",
        "first_token_s",
        "namespace",
        "preempting",
        "rank",
        "request",
        "rules",
        "scheduled_s",
        "seed",
        "stream",
        "values",
    )

    def __init__(
        self,
        request: Request,
        prompt: Sequence[int] | IntArray,
        rules: StopRules,
        *,
        arrival: int = 0,
        arrival_s: float = 0.0,
        seed: int = 0,
        page_size: int = 1,
        max_outstanding: int = 2,
        constraint: ConstraintState | None = None,
        drafter: Drafter | None = None,
        stream: Any = None,
        adapter_key: str | None = None,
        history_length: int = 0,
    ) -> None:
        super().__init__(
            prompt,
            rules.max_output_tokens,
            page_size,
            generated=request.resume_token_ids,
            max_outstanding=max_outstanding,
            history_length=history_length,
        )
        self.request = request
        self.rules = rules
        self.rank = (request.priority, arrival)
        self.seed = seed
        self.constraint = constraint
        self.drafter = drafter
        self.stream = stream
        self.adapter_key = request.adapter if adapter_key is None else adapter_key
        self.namespace = CacheNamespace(lora_id=self.adapter_key, salt=request.salt or None)
        self.values: list[tuple[float, ...]] = []
        self.adapter_slot = 0
        self.bound = False
        self.preempting = False
        self.arrival_s = arrival_s
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.cached_prompt_tokens: int | None = None
        self.expected_reuse: int | None = None
        self.cache_tokens = self._prefill_tokens()

    def __repr__(self) -> str:
        return f"<Sequence {self.request.request_id} {self.state} kv={self.kv_position}+{self.inflight_refs}>"

    @property
    def allocation(self) -> KVAllocation | None:
        return self.blocks if isinstance(self.blocks, KVAllocation) else None

    @property
    def row(self) -> int:
        assert self.blocks is not None, "a sequence without a row"
        return self.blocks.row  # type: ignore[attr-defined, no-any-return]

    @property
    def max_positions(self) -> int:
        """Maximum number of KV positions. The last output token needs none."""
        return len(self.prompt) + self.max_output_tokens - 1

    def release(self) -> None:
        super().release()
        self.bound = False
        self.preempting = False
        self.expected_reuse = None
        self.cache_tokens = self._prefill_tokens()

    def _prefill_tokens(self) -> CacheTokens:
        """The tokens of the prefill, as prefix cache tokens."""
        return CacheTokens.from_text(self.tokens(0, self.prefill_target).astype(np.int64))
