"""The engine's sequence: the state machine plus the request's data.

A preparation thread creates a sequence; then the engine thread owns it. `output` belongs to the text thread and is
not used here. Sequences rank by (priority, arrival): smaller ranks run first and are preempted last.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from petiole.cache import CacheNamespace, CacheToken, CacheTokens, ImageToken
from petiole.gpu_worker.request import Request
from petiole.gpu_worker.request.prepared_images import ImageLimits, Region, RequestImage, rotary_positions
from petiole.gpu_worker.request.values import Numbers, ValueKinds
from petiole.gpu_worker.scheduling.sequence import IntArray, SchedulableSequence
from petiole.gpu_worker.scheduling.stopping import StopRules

if TYPE_CHECKING:
    from petiole.gpu_worker.constraints import ConstraintState
    from petiole.gpu_worker.runtime.memory.kv_tier import Load
    from petiole.gpu_worker.speculation import Drafter


@dataclass(frozen=True, slots=True)
class SequenceInputs:
    """What a sequence begins with.

    ids: the prompt, with IMAGE at the positions of images. numbers: what tokens of the prompt and of a resumed
    output carry, by position. images: by the position where each begins. values, image_limits: the model's."""

    ids: Sequence[int] | IntArray
    numbers: Mapping[int, Numbers] = field(default_factory=dict)
    images: Mapping[int, RequestImage] = field(default_factory=dict)
    values: ValueKinds | None = None
    image_limits: ImageLimits | None = None
    whole: bool = False

    @property
    def regions(self) -> tuple[Region, ...]:
        if self.whole:
            return (Region(0, len(self.ids), bidirectional=True),)
        return () if self.image_limits is None else self.image_limits.regions(self.images)

    @property
    def seen_by_all(self) -> int | None:
        """The content of the image on which the KV of all positions depends, if there is such an image."""
        leads = self.image_limits is not None and self.image_limits.lead > 0
        return next(iter(self.images.values())).content_hash if leads and self.images else None


@dataclass(frozen=True, slots=True)
class Arrival:
    """number: counts the requests of an engine. at_s: the time."""

    number: int = 0
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Resolved:
    """Options of the request whose value does not stand in it. adapter_key: None for the adapter's name."""

    seed: int = 0
    adapter_key: str | None = None


@dataclass(frozen=True, slots=True)
class Followers:
    """What follows the sequence's committed tokens. output: the text thread's."""

    constraint: ConstraintState | None = None
    drafter: Drafter | None = None
    output: Any = None


FIRST, DEFAULTS, NOBODY = Arrival(), Resolved(), Followers()


class ScheduledSequence(SchedulableSequence):
    """The sequence of one accepted request.

    `adapter_key`: content key of its adapter; keys its KV namespace and its adapter slot. `expected_reuse`: cached
    KV positions at admission's first look-up, None before that. `suspect`: whether a launch with it left the books
    wrong. `preempting`: no further steps are planned; the row is released once no operation is outstanding.
    `numbers`: what its tokens carry, by position, for those that carry any. `values`: the model's kinds of values.
    `images`: by the position where each begins; `regions`: the regions of the images, or all of it. `features`:
    the runtime's key of each image whose encoding has been launched and not used yet, by the same position.
    `rotary`: int32 [axes, prompt]; None if rotary positions are the KV indices. Behind the prompt, a rotary
    position is its KV index plus `rotary_offset`. `tiered`, `chunk_keys`, `n_copied`, `load`: see
    `kv_tier.TieredSequence`. `n_drafter_knows`: the number of generated tokens that its drafter got;
    `drafts_from`: the number from which on it gets the others, and is asked. `scored`: the number of tokens of the
    prompt whose log-probabilities are delivered or on their way. `draft_tokens`, `accepted_draft_tokens`: of its
    verifications. Times (`*_s`) are seconds of `time.perf_counter`."""

    __slots__ = (
        "accepted_draft_tokens",
        "adapter_key",
        "adapter_slot",
        "arrival_s",
        "cache_tokens",
        "cached_prompt_tokens",
        "chunk_keys",
        "constraint",
        "draft_tokens",
        "drafter",
        "drafts_from",
        "expected_reuse",
        "features",
        "first_token_s",
        "images",
        "load",
        "n_copied",
        "n_drafter_knows",
        "namespace",
        "numbers",
        "output",
        "preempting",
        "rank",
        "regions",
        "request",
        "rotary",
        "rules",
        "scheduled_s",
        "scored",
        "seed",
        "suspect",
        "tiered",
        "values",
    )

    def __init__(
        self,
        request: Request,
        inputs: SequenceInputs,
        rules: StopRules,
        *,
        arrival: Arrival = FIRST,
        resolved: Resolved = DEFAULTS,
        followers: Followers = NOBODY,
        max_outstanding: int = 2,
        keeps_state: bool = False,
        goes_ahead: bool = False,
    ) -> None:
        super().__init__(
            inputs.ids,
            rules.max_output_tokens,
            generated=request.resume_token_ids,
            max_outstanding=max_outstanding,
            keeps_state=keeps_state,
            goes_ahead=goes_ahead,
        )
        self.request, self.rules = request, rules
        self.rank, self.arrival_s = (request.priority, arrival.number), arrival.at_s
        self.seed = resolved.seed
        self.adapter_key = request.adapter if resolved.adapter_key is None else resolved.adapter_key
        self.constraint, self.drafter, self.output = followers.constraint, followers.drafter, followers.output
        self.n_drafter_knows, self.drafts_from = len(self.generated), 0
        self.values, self.numbers = inputs.values, dict(inputs.numbers)
        self.images, self.regions = dict(inputs.images), inputs.regions
        self.features: dict[int, int] = {}
        self.rotary = rotary_positions(self.num_input_tokens, self.images)
        self.namespace = CacheNamespace(
            lora_id=self.adapter_key, image_hash=inputs.seen_by_all, salt=request.salt or None
        )
        self.scored = request.resume_prompt_tokens
        if self.wants_scores:  # it may reuse only what it has computed itself, and has scored by then
            own = f"{request.salt} scores of {arrival.number}, request {request.request_id}"
            self.namespace = replace(self.namespace, salt=own)
        self.adapter_slot = self.draft_tokens = self.accepted_draft_tokens = 0
        self.preempting = self.suspect = False
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.cached_prompt_tokens: int | None = None
        self.expected_reuse: int | None = None
        self.tiered = not self.wants_scores  # what is computed for scores has a namespace of its own
        self.chunk_keys: list[bytes] = []
        self.n_copied = 0
        self.load: Load | None = None
        self.cache_tokens = self.cached_as(self.prefill_target)

    def __repr__(self) -> str:
        return f"<Sequence {self.request.request_id} {self.state} kv={self.kv_position}+{self.inflight_refs}>"

    @property
    def is_planned(self) -> bool:
        """Whether it has a row and goes on."""
        return self.allocation is not None and not self.preempting and not self.finalized

    @property
    def asks_for_drafts(self) -> bool:
        """Whether it has a drafter that does not rest."""
        return self.drafter is not None and len(self.generated) >= self.drafts_from

    @property
    def reused(self) -> int:
        """Number of cached positions with which it got its row. Its first step begins there."""
        assert self.allocation is not None, "a sequence without a row"
        return self.allocation.reused

    @property
    def published(self) -> int:
        """Number of positions that others can match now."""
        assert self.allocation is not None, "a sequence without a row"
        return self.allocation.published

    @property
    def row(self) -> int:
        assert self.allocation is not None, "a sequence without a row"
        return self.allocation.row

    @property
    def wants_scores(self) -> bool:
        """Whether log-probabilities of tokens of the prompt are still to be computed."""
        return self.request.sampling.prompt_logprobs is not None and self.scored < self.num_input_tokens

    def scores_of(self, start: int, end: int) -> range:
        """The positions among [start, end) whose logits score the next token of the prompt."""
        if not self.wants_scores:
            return range(0)
        return range(max(start, self.scored - 1), min(end, self.num_input_tokens - 1))

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
        self.expected_reuse = self.load = None
        self.cache_tokens = self.cached_as(self.prefill_target)

    def publish_committed(self) -> None:
        """Make the committed positions matchable. Positions that another sequence published first are shared with
        it."""
        allocation = self.allocation
        assert allocation is not None
        allocation.publish(self.cached_as(self.kv_position), self.kv_position)
        allocation.share(self.kv_position)

    def ends(self, eos_ids: Collection[int]) -> npt.NDArray[np.int64]:
        """The positions after which other sequences may go on: the ends of the messages that it knows, as far as
        an end-of-sequence token ends each, and of its prompt."""
        behind = np.flatnonzero(np.isin(self.tokens(), list(eos_ids))) + 1
        return np.append(behind, self.num_input_tokens)

    def cache_codes(self, n_positions: int) -> npt.NDArray[np.int64]:
        """The cache codes of the first positions. The last of them may lie inside an image."""
        if n_positions <= self.cache_tokens.kv_length:
            return self.cache_tokens.codes[:n_positions]
        return self.cached_as(n_positions).codes

    def cached_as(self, n_positions: int) -> CacheTokens:
        """The first positions, with all of an image in which they end, as prefix cache tokens."""
        ends = [at + image.n_positions for at, image in self.images.items() if at < n_positions]
        n_positions = max([n_positions, *ends])
        ids = self.tokens(0, n_positions).astype(np.int64)
        if not self.numbers and not self.images:
            return CacheTokens.from_text(ids)
        known: dict[int, CacheToken | int] = {
            at: ImageToken(image.content_hash, image.n_positions)
            for at, image in self.images.items()
            if at < n_positions
        }
        if self.values is not None:
            for at, numbers in self.numbers.items():
                if at < n_positions:
                    known[at] = self.values.cache_token(int(ids[at]), numbers)
        return CacheTokens.from_ids(ids, known)
