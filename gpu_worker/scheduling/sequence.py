"""The state machine of one sequence: which positions have KV, which are in flight, what may be scheduled next.

Scheduling and applying are two phases. `schedule_*` records that an operation is launched and advances
`scheduled_position`, which determines attention lengths, positions and pages. `apply_*` records its outcome and
advances `kv_position` and the tokens, which determine streaming and stop conditions. The two are never mixed.

    tokens       p p p p p p p p g g        p: prompt, g: generated; total_tokens = 10
    kv           # # # # # # # # #          kv_position = 9: the last token, the *tail*, is the next step's input
    scheduled    # # # # # # # # # + +      two decodes outstanding: scheduled_position = 11

Up to `max_outstanding` operations (default 2; 1 for the blocking engine) are outstanding at once. All other state
about them is derived from their queue:

    schedule_prefill / schedule_decode / schedule_speculative      append to the queue
    apply_prefill    / apply_decode    / apply_speculative         remove the oldest   (FIFO)
    revert_schedule                                                remove the newest   (only before dispatch)
    discard                                                        remove the oldest   (of a zombie: finalized)

Preconditions count the tokens that outstanding operations will yield. A decode and a final prefill chunk yield
exactly one token, so a decode may be scheduled after them: the sequence then has exactly one tail token. A
speculative operation yields an unknown number of tokens. Where the runtime knows lengths alone (`goes_ahead`), the
next operation is scheduled all the same, and planned for the most tokens: it begins at `scheduled_position` or up
to `in_doubt` positions before. Elsewhere a speculative operation is exclusive until it is applied.

Layers that keep a state cannot drop inputs that were rejected. Such a sequence (`keeps_state`) goes back to the
state before its first draft, and the accepted drafts join its tail. Its next operation computes them once more:

    tokens       p p p p g g d d     the drafts d d were accepted, and the next was not
    kv           # # # # # # - -     kv_position = 6: the next operation begins there, with three inputs

If that operation is outstanding already, it grows by the inputs that it repeats.

Prefill computes the positions up to a target. The target is normally the prompt, and the last chunk yields the
first token. After a preemption, a resume or a reload of weights, generated tokens are known already. Then the
target is all tokens but the last, the last chunk yields no token, and the known tail is the next input
(*recompute*).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from petiole.cache import KVAllocation
from petiole.gpu_worker.scheduling.outcomes import (
    AcceptedExceedsScheduled,
    AllocationFailed,
    GenerationComplete,
    MissingTokenOnFinalChunk,
    NotIdle,
    Operation,
    PrefillComplete,
    PrefillNotComplete,
    PrefillOverrun,
    SequenceState,
    TokenOnNonFinalChunk,
    WrongDanglingCount,
    WrongState,
)

IntArray = npt.NDArray[np.int32]
_DECODE = Operation(SequenceState.DECODE_SCHEDULED, 1, 1)


@cache
def _verification(n_positions: int, n_tokens: int) -> Operation:
    return Operation(SequenceState.SPECULATIVE_SCHEDULED, n_positions, n_tokens)


@cache
def _decode(n_positions: int) -> Operation:
    return _DECODE if n_positions == 1 else Operation(SequenceState.DECODE_SCHEDULED, n_positions, 1)


class SchedulableSequence:
    """The state machine. `tokens` is the prompt, `generated` the output tokens that are known already.

    `num_known_tokens`: generated tokens known when the current prefill began. `allocation` is set by
    `match_and_add_prefix`; without it, memory is unlimited (used by tests). `keeps_state`: whether a
    rejected draft takes the drafts before it back, too: see the module. `goes_ahead`: whether operations may be
    scheduled behind a speculative one.
    """

    __slots__ = (
        "allocation",
        "finalized",
        "generated",
        "goes_ahead",
        "keeps_state",
        "kv_position",
        "max_output_tokens",
        "max_outstanding",
        "num_input_tokens",
        "num_known_tokens",
        "outstanding",
        "prompt",
    )

    def __init__(
        self,
        tokens: Sequence[int] | IntArray,
        max_output_tokens: int,
        *,
        generated: Sequence[int] = (),
        max_outstanding: int = 2,
        keeps_state: bool = False,
        goes_ahead: bool = False,
    ) -> None:
        self.prompt: IntArray = np.asarray(tokens, dtype=np.int32)
        if len(self.prompt) == 0:
            raise ValueError("a sequence needs at least one token")
        self.num_input_tokens = len(self.prompt)
        self.generated: list[int] = list(generated)
        self.max_output_tokens = max_output_tokens
        self.max_outstanding = max_outstanding
        self.keeps_state = keeps_state
        self.goes_ahead = goes_ahead
        self.finalized = False
        self.kv_position = 0
        self.num_known_tokens = len(self.generated)
        self.allocation: KVAllocation | None = None
        self.outstanding: deque[Operation] = deque()

    # ------------------------------------------------------------ derived

    @property
    def total_tokens(self) -> int:
        return self.num_input_tokens + len(self.generated)

    @property
    def tail_tokens(self) -> int:
        """Committed tokens without committed KV."""
        return self.num_input_tokens + len(self.generated) - self.kv_position

    @property
    def n_repeated(self) -> int:
        """Number of inputs that the next decode or verification computes once more, before the last token."""
        return 0 if self.outstanding else self.tail_tokens - 1

    @property
    def inflight_refs(self) -> int:
        """Number of outstanding operations, equal to the in-flight steps with this sequence (I4)."""
        return len(self.outstanding)

    @property
    def is_idle(self) -> bool:
        return not self.outstanding

    @property
    def state(self) -> SequenceState:
        return self.outstanding[-1].state if self.outstanding else SequenceState.IDLE

    @property
    def newest(self) -> Operation:
        """The newest outstanding operation."""
        return self.outstanding[-1]

    @property
    def scheduled_position(self) -> int:
        """KV length after all outstanding operations: the start of the next one."""
        outstanding = self.outstanding
        if len(outstanding) == 1:
            return self.kv_position + outstanding[0].n_positions
        return self.kv_position + sum([op.n_positions for op in outstanding])

    @property
    def outstanding_yield(self) -> int:
        """Maximum number of tokens that the outstanding operations yield."""
        return sum([op.max_yield for op in self.outstanding])

    @property
    def in_doubt(self) -> int:
        """How many positions before `scheduled_position` the next operation may begin: drafts that outstanding
        operations verify."""
        doubt = 0
        for op in self.outstanding:
            if op.max_yield > 1:
                doubt += op.max_yield - 1
        return doubt

    @property
    def prefill_target(self) -> int:
        """Number of positions to prefill: the prompt, or all known tokens but the last."""
        return len(self.prompt) + self.num_known_tokens - self.is_recompute

    @property
    def is_recompute(self) -> bool:
        """Whether the prefill only rebuilds KV and yields no token, because the next token is known."""
        return self.num_known_tokens > 0

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prefill is not scheduled yet."""
        return self.scheduled_position < self.prefill_target

    @property
    def remaining_tokens(self) -> int:
        """Tokens that may still be scheduled: the budget minus committed and outstanding tokens."""
        return self.max_output_tokens - len(self.generated) - self.outstanding_yield

    @property
    def can_decode(self) -> bool:
        """Whether `schedule_decode` would succeed now, apart from pages. Does not raise."""
        outstanding = self.outstanding
        if self.finalized or len(outstanding) >= self.max_outstanding:
            return False
        if not outstanding:
            idle = self.kv_position >= self.prefill_target and len(self.generated) < self.max_output_tokens
            return idle and (self.tail_tokens == 1 or (self.keeps_state and self.tail_tokens > 1))
        if outstanding[-1] is _DECODE:  # after a decode there is exactly one tail token
            yields = 1 if len(outstanding) == 1 else self.outstanding_yield
            return len(self.generated) + yields < self.max_output_tokens
        if outstanding[-1].state is SequenceState.SPECULATIVE_SCHEDULED:
            return self.goes_ahead and self.remaining_tokens > 0
        if self.is_prefilling or self.remaining_tokens <= 0:
            return False
        return self.tail_tokens + self.outstanding_yield == self.scheduled_position - self.kv_position + 1

    def tokens(self, start: int = 0, stop: int | None = None) -> IntArray:
        """Committed tokens [start, stop): int32."""
        stop = self.total_tokens if stop is None else stop
        n = len(self.prompt)
        if stop <= n:
            return self.prompt[start:stop]
        tail = np.array(self.generated[max(start - n, 0) : stop - n], dtype=np.int32)
        return tail if start >= n else np.concatenate((self.prompt[start:], tail))

    def token(self, position: int) -> int:
        """The id at one position. An image has IMAGE at each of its positions."""
        n = self.num_input_tokens
        return int(self.prompt[position]) if position < n else self.generated[position - n]

    @property
    def last_token(self) -> int:
        return self.generated[-1] if self.generated else int(self.prompt[-1])

    # ------------------------------------------------------------ pages

    def match_and_add_prefix(self, allocation: KVAllocation | None, n_cached: int) -> int:
        """Attach pages whose first `n_cached` positions hold KV already, at first or again after `release`: the
        others are computed. Returns `n_cached`."""
        if self.outstanding or self.kv_position:
            raise NotIdle("the sequence has KV already")
        if not 0 <= n_cached < self.prefill_target:
            raise PrefillOverrun(
                f"{n_cached} cached positions, a target of {self.prefill_target}: compute at least 1"
            )
        self.allocation = allocation
        self.kv_position = n_cached
        return n_cached

    def release(self) -> None:
        """Detach the pages and keep the tokens. Raises NotIdle while operations are outstanding: the device may
        still write to the pages."""
        if self.outstanding:
            raise NotIdle(f"{len(self.outstanding)} operations are outstanding")
        self.allocation = None
        self.kv_position = 0
        self.num_known_tokens = len(self.generated)

    # ------------------------------------------------------------ schedule

    def schedule_prefill(self, n_tokens: int) -> None:
        """Schedule a prefill chunk of `n_tokens`. The previous chunk may still be outstanding."""
        position = self.scheduled_position
        if position >= self.prefill_target:
            raise PrefillComplete(f"all {self.prefill_target} tokens are prefilled or scheduled")
        if len(self.outstanding) >= self.max_outstanding:
            raise NotIdle(f"{len(self.outstanding)} operations are outstanding")
        if not 0 < n_tokens <= self.prefill_target - position:
            raise PrefillOverrun(f"a chunk of {n_tokens}, {self.prefill_target - position} are left")
        self._cover(position + n_tokens)
        final = position + n_tokens == self.prefill_target
        yields = 1 if final and not self.is_recompute else 0
        self.outstanding.append(Operation(SequenceState.PREFILL_SCHEDULED, n_tokens, yields))

    def schedule_decode(self, planned: bool = False) -> None:
        """Schedule one token. `planned`: skip the checks, because the caller has just checked `can_decode` and
        reserved the pages of the whole batch."""
        if not planned:
            if not self.can_decode:
                self._refuse()
            self._cover(self.scheduled_position + self.n_repeated + 1)
        outstanding = self.outstanding
        outstanding.append(_DECODE if outstanding else _decode(1 + self.n_repeated))

    def schedule_speculative(self, n_tokens: int, planned: bool = False) -> None:
        """Schedule a verification that yields up to `n_tokens`: the drafts and the token after them. `planned`: as
        in `schedule_decode`."""
        if not planned:
            if (self.outstanding and not self.goes_ahead) or not self.can_decode:
                self._refuse()
            if not 0 < n_tokens <= self.remaining_tokens:
                raise GenerationComplete(f"{n_tokens} tokens to verify, a budget of {self.remaining_tokens}")
            self._cover(self.scheduled_position + self.n_repeated + n_tokens)
        self.outstanding.append(_verification(self.n_repeated + n_tokens, n_tokens))

    def revert_schedule(self) -> None:
        """Remove the newest operation, which must not have been dispatched to the device. Its pages stay in the
        row."""
        if not self.outstanding:
            raise WrongState("nothing is outstanding")
        self.outstanding.pop()

    # ------------------------------------------------------------ apply

    def apply(self, tokens: Sequence[int]) -> None:
        """Apply the outcome of the oldest operation, of any kind: the tokens that it yielded."""
        state = self.outstanding[0].state if self.outstanding else SequenceState.IDLE
        if state is SequenceState.PREFILL_SCHEDULED:
            self.apply_prefill(*tokens)
        elif state is SequenceState.SPECULATIVE_SCHEDULED:
            self.apply_speculative(tokens)
        else:
            self.apply_decode(*tokens)

    def apply_prefill(self, token: int | None = None) -> None:
        op = self._oldest(SequenceState.PREFILL_SCHEDULED)
        if token is not None and op.max_yield == 0:
            raise TokenOnNonFinalChunk(f"token {token} from a chunk that yields none")
        if token is None and op.max_yield == 1:
            raise MissingTokenOnFinalChunk("the final chunk yields the first token")
        self.outstanding.popleft()
        if token is not None:
            self.generated.append(token)
        self.kv_position += op.n_positions

    def apply_decode(self, token: int) -> None:
        outstanding = self.outstanding
        if not outstanding or outstanding[0] is not _DECODE:
            self._oldest(SequenceState.DECODE_SCHEDULED)
        self.kv_position += outstanding.popleft().n_positions
        self.generated.append(token)

    def apply_speculative(self, accepted: Sequence[int]) -> None:
        """Apply the accepted tokens, in order; at least one. Frees the pages of rejected positions."""
        op = self._oldest(SequenceState.SPECULATIVE_SCHEDULED)
        if not 0 < len(accepted) <= op.max_yield:
            raise AcceptedExceedsScheduled(f"{len(accepted)} accepted, {op.max_yield} scheduled")
        outstanding = self.outstanding
        outstanding.popleft()
        self.generated.extend(accepted)
        goes_back = self.keeps_state and len(accepted) < op.max_yield
        self.kv_position += op.n_positions - op.max_yield + (1 if goes_back else len(accepted))
        if outstanding and self.tail_tokens > 1:
            behind = outstanding[0]
            outstanding[0] = behind._replace(n_positions=behind.n_positions + self.tail_tokens - 1)
        computed = max(self.total_tokens - 1, self.scheduled_position)
        if self.allocation is not None and self.allocation.kv_capacity > computed:
            self.allocation.trim(computed)

    def discard(self) -> None:
        """Remove the oldest operation of a finalized sequence and ignore its outputs."""
        if not self.outstanding:
            raise WrongState("nothing is outstanding")
        if not self.finalized:
            raise WrongState("only a finalized sequence discards outputs")
        self.outstanding.popleft()

    # ------------------------------------------------------------ internal

    def _cover(self, n_positions: int) -> None:
        own = self.allocation
        if own is not None and own.kv_capacity < n_positions and not own.reserve(n_positions):
            raise AllocationFailed(f"no pages for position {n_positions - 1}")

    def _oldest(self, state: SequenceState) -> Operation:
        if not self.outstanding or self.outstanding[0].state is not state:
            actual = self.outstanding[0].state if self.outstanding else SequenceState.IDLE
            raise WrongState(f"oldest operation: {actual}, applying to {state}")
        return self.outstanding[0]

    def _refuse(self) -> NoReturn:
        """Raise the error for the first reason why no decode may be scheduled."""
        exclusive = self.state is SequenceState.SPECULATIVE_SCHEDULED and not self.goes_ahead
        if exclusive or len(self.outstanding) >= self.max_outstanding:
            raise NotIdle(f"{len(self.outstanding)} operations are outstanding")
        if self.is_prefilling:
            raise PrefillNotComplete(f"{self.scheduled_position} of {self.prefill_target} tokens")
        if self.finalized or self.remaining_tokens <= 0:
            raise GenerationComplete(f"{len(self.generated)} of {self.max_output_tokens} tokens")
        if self.outstanding:
            raise NotIdle(f"{len(self.outstanding)} operations are outstanding")
        raise WrongDanglingCount(f"{self.tail_tokens} tokens without KV")
