"""Which tokens the constrained outputs of a step may be.

The mask of an output depends on every token before it. So a step's forward is launched first, then all earlier
steps that hold one of its constrained sequences are committed, and only then is the mask computed, while the
device is busy with the forward. In a verify, a draft's mask assumes that the drafts before it hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from gpu_worker.request import FinishReason
from gpu_worker.runtime.interface import Int32Array, TokenMask
from gpu_worker.scheduling.batching import StepPayload
from gpu_worker.scheduling.scheduled import ConstraintState, ScheduledSequence
from gpu_worker.scheduling.stopping import Finish

_SATISFIED = Finish(FinishReason.STOP, "constraint")


def needs_mask(sequences: Iterable[ScheduledSequence]) -> bool:
    """Does any sequence that has not ended sample under a constraint?"""
    return any(seq.constraint is not None and not seq.finalized for seq in sequences)


def compute_mask(
    sequences: Sequence[ScheduledSequence],
    payload: StepPayload,
    vocab_size: int,
    fail: Callable[[ScheduledSequence, Exception], None],
) -> TokenMask | None:
    """The mask of a step, or None when every output is free. Finalized sequences are free: their outputs are
    dropped. A constraint that raises fails its own request, whose outputs are then free as well."""
    n_words = (vocab_size + 31) // 32
    indices: list[int] = []
    masks: list[Int32Array] = []
    offset = 0
    for i, seq in enumerate(sequences):
        n = int(payload.batch.outputs[i])
        if seq.constraint is not None and not seq.finalized and n:
            drafts = payload.plan.drafts[i] if payload.plan.drafts else ()
            try:
                rows = _masks(seq.constraint, drafts, n_words)
            except Exception as error:
                fail(seq, error)
            else:
                indices.extend(range(offset, offset + n))
                masks.extend(rows)
        offset += n
    if not indices:
        return None
    return TokenMask(np.array(indices, np.int32), np.stack(masks))


def _masks(constraint: ConstraintState, drafts: Sequence[int], n_words: int) -> list[Int32Array]:
    """One mask for each draft position and one behind the last. Leaves the constraint as it was."""
    masks: list[Int32Array] = []
    consumed = 0
    try:
        for draft in (*drafts, None):
            mask = np.zeros(n_words, np.int32)
            constraint.fill_mask(mask)
            masks.append(mask)
            if draft is not None:
                if not constraint.consume(draft):
                    raise ValueError(f"draft {draft} is not allowed")
                consumed += 1
    finally:
        if consumed:
            constraint.rollback(consumed)
    return masks


def consume(
    constraint: ConstraintState, fresh: list[int], finish: Finish | None
) -> tuple[list[int], Finish | None]:
    """Go on by committed tokens. A satisfied constraint ends the sequence, also in the middle of drafts."""
    stopped = finish is not None and finish.reason is FinishReason.STOP
    for taken, token in enumerate(fresh, 1):
        if stopped and taken == len(fresh):  # EOS or a stop token: not the constraint's business
            break
        if not constraint.consume(token):
            raise ValueError(f"token {token} does not match the constraint")
        if constraint.finished:
            return fresh[:taken], finish if taken == len(fresh) and finish else _SATISFIED
    return fresh, finish
