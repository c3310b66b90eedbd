"""Token masks for the constrained outputs of a step.

The mask of an output depends on all tokens before it. Therefore a step's forward is launched first, then all
earlier steps with one of its constrained sequences are committed, and then the mask is computed, while the device
runs the forward. The mask of a positional skill follows from the number of tokens before the output: nothing is
committed for it. Nor for a thought that stays within its budget, or where no banned word can be complete: any
token may come there. In a verify step, the mask of a draft position assumes that the drafts before it are
accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import methodcaller
from typing import cast

import numpy as np

from petiole.gpu_worker.constraints import (
    BannedState,
    BudgetState,
    ConstraintState,
    PositionalConstraint,
    SkillConstraint,
    fill_draft_masks,
    fill_masks,
)
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.request import FinishReason, SamplingParams
from petiole.gpu_worker.runtime.interface import Int32Array, StepBatch, TokenMask
from petiole.gpu_worker.scheduling.batching import StepPayload
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.stopping import Finish

_SATISFIED = Finish(FinishReason.STOP, "constraint")


def constrained(sequences: Iterable[ScheduledSequence]) -> list[ScheduledSequence]:
    """The sequences that have a constraint and are not finalized."""
    return [seq for seq in sequences if seq.constraint is not None and not seq.finalized]


def awaiting_commit(sequences: Sequence[ScheduledSequence], batch: StepBatch) -> list[ScheduledSequence]:
    """The constrained sequences of a batch whose masks depend on the earlier tokens themselves, or on how many
    these are where only the device knows that."""
    exact = batch.outputs == 1 if batch.in_doubt is None else (batch.outputs == 1) & (batch.in_doubt == 0)
    return [
        seq
        for seq, known in zip(sequences, exact.tolist(), strict=True)
        if seq.constraint is not None
        and not seq.finalized
        and not (known and isinstance(seq.constraint, PositionalConstraint))
        and not _is_free(seq)
    ]


def _is_free(seq: ScheduledSequence) -> bool:
    """Whether any token may come at every place that is in flight. If so, a commit changes nothing about it."""
    state = seq.constraint
    return isinstance(state, BannedState | BudgetState) and state.is_free_for(seq.outstanding_yield)


def compute_mask(
    sequences: Sequence[ScheduledSequence],
    payload: StepPayload,
    vocab_size: int,
    fail: Callable[[ScheduledSequence, Exception], None],
) -> TokenMask | None:
    """The mask of a step, or None if no output is constrained. Finalized sequences are not masked, since their
    outputs are dropped. A constraint that raises fails its own request through `fail`, without a mask."""
    plan, outputs = payload.plan, payload.batch.outputs
    firsts = np.cumsum(outputs) - outputs
    n_words = (vocab_size + 31) // 32
    plain: list[tuple[int, ScheduledSequence]] = []  # (output index, sequence) of sequences with one output
    indices: list[int] = []
    masks: list[Int32Array] = []
    for i, seq in enumerate(sequences):
        if seq.constraint is None or seq.finalized or outputs[i] == 0 or _is_free(seq):
            continue
        if outputs[i] == 1 and isinstance(seq.constraint, PositionalConstraint):
            row = np.zeros((1, n_words), np.int32)
            if _try(seq, fail, partial(_fill_at, index=seq.scheduled_position - seq.num_input_tokens, out=row[0])):
                indices.append(int(firsts[i]))
                masks.append(row)
            continue
        if outputs[i] == 1:
            plain.append((int(firsts[i]), seq))
            continue
        assert plan.drafts is not None
        rows = np.zeros((int(outputs[i]), n_words), np.int32)
        if _try(seq, fail, partial(fill_draft_masks, drafts=plan.drafts[i], out=rows)):
            indices.extend(range(int(firsts[i]), int(firsts[i] + outputs[i])))
            masks.append(rows)
    for first, mask in _plain_masks(plain, n_words, fail):
        indices.append(first)
        masks.append(mask)
    if not indices:
        return None
    return TokenMask(np.array(indices, np.int32), np.concatenate(masks))


def _plain_masks(
    plain: Sequence[tuple[int, ScheduledSequence]],
    n_words: int,
    fail: Callable[[ScheduledSequence, Exception], None],
) -> Iterable[tuple[int, Int32Array]]:
    """One mask per sequence, computed in one batch; if that raises, one by one to find the failing sequences."""
    masks = np.zeros((len(plain), n_words), np.int32)
    try:
        fill_masks([cast(ConstraintState, seq.constraint) for _, seq in plain], masks)
        return [(first, masks[k : k + 1]) for k, (first, _) in enumerate(plain)]
    except Exception:
        return [
            (first, masks[k : k + 1])
            for k, (first, seq) in enumerate(plain)
            if _try(seq, fail, methodcaller("fill_mask", masks[k]))
        ]


def _fill_at(constraint: ConstraintState, index: int, out: Int32Array) -> None:
    cast(PositionalConstraint, constraint).fill_mask_at(index, out)


def _try(
    seq: ScheduledSequence,
    fail: Callable[[ScheduledSequence, Exception], None],
    fill: Callable[[ConstraintState], object],
) -> bool:
    try:
        fill(cast(ConstraintState, seq.constraint))
    except Exception as error:
        fail(seq, error)
        return False
    return True


def consume(
    seq: ScheduledSequence,
    fresh: list[int],
    finish: Finish | None,
    values: Sequence[tuple[float, ...]] | None = None,
) -> tuple[list[int], Finish | None]:
    """Advance the constraint by committed tokens. A satisfied constraint ends the sequence, even between drafts.

    Returns the tokens up to the end of the sequence, and how the sequence finishes. Sampling applies the mask and
    the request's allowed and banned tokens. If these or its bad words leave no token, sampling draws an arbitrary
    one, which raises InvalidRequest here. Any other token that does not match the constraint raises ValueError."""
    constraint, sampling = cast(ConstraintState, seq.constraint), seq.request.sampling
    limited = bool(sampling.banned_token_ids) or sampling.allowed_token_ids is not None
    limited = limited or isinstance(constraint, BannedState)
    stopped = finish is not None and finish.reason is FinishReason.STOP
    for n_consumed, token in enumerate(fresh, 1):
        last = stopped and n_consumed == len(fresh)  # EOS or a stop token: not part of the constrained text
        if last and not limited:
            break
        if last:
            allowed = constraint.fork().consume(token)
        elif isinstance(constraint, SkillConstraint) and values is not None:
            allowed = constraint.consume(token, values[n_consumed - 1])
        else:
            allowed = constraint.consume(token)
        if limited and not (allowed and _permits(sampling, token)):
            raise InvalidRequest("constraint", "must leave a token that is allowed and not banned", "none")
        if not allowed:
            raise ValueError(f"token {token} does not match the constraint")
        if constraint.finished:
            return fresh[:n_consumed], finish if n_consumed == len(fresh) and finish else _SATISFIED
    return fresh, finish


def _permits(sampling: SamplingParams, token: int) -> bool:
    allowed = sampling.allowed_token_ids
    return token not in sampling.banned_token_ids and (allowed is None or token in allowed)
