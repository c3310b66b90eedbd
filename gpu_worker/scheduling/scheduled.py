"""The sequence that the engine runs on: the state machine, and the request that it belongs to.

Made on a preparation thread, then owned by the engine thread. What the text thread needs of it (`stream`) is never
touched here. A sequence ranks by (priority, arrival): smaller runs first and is preempted last.
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
    """One accepted request.

    `adapter_key`: its adapter, by content; what its KV and its device slot are keyed by.
    `allocation`: its row and pages while it has them. `bound`: the device knows the row's sequence.
    `expected_reuse`: KV positions that the cache had of it when admission first asked, None before that.
    `preempting`: it is planned no more and gives up its row once nothing is outstanding.
    `values`: what the model decoded beside each generated token, where it does. Times in seconds of
    `time.perf_counter`.
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
        self.values: list[tuple[float, ...]] | None = None
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
        """KV positions that it can ever need: the last token of the output needs none."""
        return len(self.prompt) + self.max_output_tokens - 1

    def release(self) -> None:
        super().release()
        self.bound = False
        self.preempting = False
        self.expected_reuse = None
        self.cache_tokens = self._prefill_tokens()

    def _prefill_tokens(self) -> CacheTokens:
        """What the prefill computes, as the prefix cache sees it."""
        return CacheTokens.from_text(self.tokens(0, self.prefill_target).astype(np.int64))
