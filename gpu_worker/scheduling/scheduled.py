"""The engine's sequence: the state machine plus the request's data.

A preparation thread creates a sequence; then the engine thread owns it. `output` belongs to the text thread and is
not used here. Sequences rank by (priority, arrival): smaller ranks run first and are preempted last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from petiole.cache import CacheNamespace, CacheToken, CacheTokens, ImageToken, KVAllocation
from petiole.gpu_worker.request import Request
from petiole.gpu_worker.request.images import ImageLimits, Region, RequestImage, rotary_positions
from petiole.gpu_worker.request.values import Bins, ValueTokens
from petiole.gpu_worker.scheduling.sequence import IntArray, SchedulableSequence
from petiole.gpu_worker.scheduling.stopping import StopRules

if TYPE_CHECKING:
    from petiole.gpu_worker.constraints import ConstraintState
    from petiole.gpu_worker.speculation import Drafter


class ScheduledSequence(SchedulableSequence):
    """The sequence of one accepted request.

    `adapter_key`: content key of its adapter; keys its KV namespace and its adapter slot. `allocation`: its row
    and pages, or None. `expected_reuse`: cached KV positions at admission's first look-up, None before that.
    `preempting`: no further steps are planned; the row is released once no operation is outstanding. `bins`: the
    bins of its coordinate and size tokens, by position. `values`: the model's value tokens. `images`: by the
    position where each begins; `regions`: the regions of the images. `features`: the runtime's key of each image
    whose encoding has been launched and not used yet, by the same position. `rotary`: int32 [axes, prompt]; None
    if rotary positions are the KV indices. Behind the prompt, a rotary position is its KV index plus
    `rotary_offset`. Times (`*_s`) are seconds of `time.perf_counter`."""

    __slots__ = (
        "adapter_key",
        "adapter_slot",
        "arrival_s",
        "bins",
        "cache_tokens",
        "cached_prompt_tokens",
        "constraint",
        "drafter",
        "expected_reuse",
        "features",
        "first_token_s",
        "images",
        "namespace",
        "output",
        "preempting",
        "rank",
        "regions",
        "request",
        "rotary",
        "rules",
        "scheduled_s",
        "seed",
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
        max_outstanding: int = 2,
        constraint: ConstraintState | None = None,
        drafter: Drafter | None = None,
        output: Any = None,
        adapter_key: str | None = None,
        history_length: int = 0,
        values: ValueTokens | None = None,
        bins: Mapping[int, Bins] | None = None,
        images: Mapping[int, RequestImage] | None = None,
        image_limits: ImageLimits | None = None,
    ) -> None:
        super().__init__(
            prompt,
            rules.max_output_tokens,
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
        self.output = output
        self.adapter_key = request.adapter if adapter_key is None else adapter_key
        self.images: dict[int, RequestImage] = dict(images or {})
        self.features: dict[int, int] = {}
        self.regions: tuple[Region, ...] = ()
        self.rotary = rotary_positions(self.num_input_tokens, self.images)
        seen_by_all = None
        if image_limits is not None and self.images:
            self.regions = tuple(image_limits.region(at, image) for at, image in self.images.items())
            if image_limits.lead:
                seen_by_all = next(iter(self.images.values())).content_hash
        self.namespace = CacheNamespace(
            lora_id=self.adapter_key, image_hash=seen_by_all, salt=request.salt or None
        )
        self.values = values
        self.bins: dict[int, Bins] = dict(bins or {})
        self.adapter_slot = 0
        self.preempting = False
        self.arrival_s = arrival_s
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.cached_prompt_tokens: int | None = None
        self.expected_reuse: int | None = None
        self.cache_tokens = self.cached_as(self.prefill_target)

    def __repr__(self) -> str:
        return f"<Sequence {self.request.request_id} {self.state} kv={self.kv_position}+{self.inflight_refs}>"

    @property
    def allocation(self) -> KVAllocation | None:
        return self.blocks if isinstance(self.blocks, KVAllocation) else None

    @property
    def reused(self) -> int:
        """Number of cached positions with which it got its row. Its first step begins there."""
        assert self.blocks is not None, "a sequence without a row"
        return self.blocks.reused  # type: ignore[attr-defined, no-any-return]

    @property
    def published(self) -> int:
        """Number of positions that others can match now."""
        assert self.blocks is not None, "a sequence without a row"
        return self.blocks.published  # type: ignore[attr-defined, no-any-return]

    @property
    def row(self) -> int:
        assert self.blocks is not None, "a sequence without a row"
        return self.blocks.row  # type: ignore[attr-defined, no-any-return]

    @property
    def rotary_offset(self) -> int:
        return 0 if self.rotary is None else int(self.rotary[:, -1].max()) + 1 - self.num_input_tokens

    @property
    def max_positions(self) -> int:
        """Maximum number of KV positions. The last output token needs none."""
        return len(self.prompt) + self.max_output_tokens - 1

    def release(self) -> None:
        super().release()
        self.preempting = False
        self.expected_reuse = None
        self.cache_tokens = self.cached_as(self.prefill_target)

    def publish_committed(self) -> None:
        """Make the committed positions matchable. Positions that another sequence published first are shared with
        it."""
        allocation = self.allocation
        assert allocation is not None
        allocation.publish(self.cached_as(self.kv_position), self.kv_position)
        allocation.share(self.kv_position)

    def cache_codes(self, n_positions: int) -> npt.NDArray[np.int64]:
        """The cache codes of the first positions. The last of them may lie inside an image."""
        if n_positions <= self.cache_tokens.kv_length:
            return self.cache_tokens.codes[:n_positions]
        return self.cached_as(n_positions).codes

    def cached_as(self, n_positions: int) -> CacheTokens:
        """The first positions, as prefix cache tokens. They must not end inside an image."""
        ids = self.tokens(0, n_positions).astype(np.int64)
        if not self.bins and not self.images:
            return CacheTokens.from_text(ids)
        known: dict[int, CacheToken | int] = {
            at: ImageToken(image.content_hash, image.n_positions)
            for at, image in self.images.items()
            if at < n_positions
        }
        if self.values is not None:
            for at, bins in self.bins.items():
                if at < n_positions:
                    known[at] = self.values.cache_token(int(ids[at]), bins)
        return CacheTokens.from_ids(ids, known)
