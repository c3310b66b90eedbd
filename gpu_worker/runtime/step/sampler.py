"""Sampling of a step: from logits to token ids, the rows' next inputs and the outputs for the host.

All code here runs in stream order. `RowStates` holds the state that outlives a step; `sampling` has the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.cache import ragged_arange
from petiole.gpu_worker.runtime.interface import VALUES, StepBatch, TokenMask
from petiole.gpu_worker.runtime.step.in_doubt import RowsInDoubt
from petiole.gpu_worker.runtime.step.inputs import DraftingHead, StepStates
from petiole.gpu_worker.runtime.step.rows import OutputPlan, RowStates, ScorePlan, Upload, Uses, sampled_with
from petiole.gpu_worker.runtime.step.sampling import (
    Choose,
    apply_bits,
    apply_penalties,
    bar,
    logprobs,
)
from petiole.gpu_worker.runtime.step.verify import Accept

_SCORED_TOGETHER = 64
_NO_PAIRS = np.empty((0, 2), np.int64)
_NOTHING = np.empty(0, np.int64)


class OutputSampler:
    """Samples steps. `upload` copies arrays to the device in stream order; `choose` draws tokens from logits
    there, and `accept` verifies drafts. `in_doubt`: None on a device that does not go ahead."""

    def __init__(
        self,
        states: RowStates,
        upload: Upload,
        choose: Choose,
        accept: Accept,
        in_doubt: RowsInDoubt | None = None,
    ) -> None:
        self._states, self._upload, self._choose, self._accept = states, upload, choose, accept
        self._in_doubt = in_doubt

    def sample(
        self, plan: OutputPlan, batch: StepBatch, states: StepStates, mask: TokenMask | None
    ) -> dict[str, Tensor]:
        """Sample, write the rows' next inputs and update the penalty counts.

        Returns the tensors to copy to the host, named as in `StepOutput`; `accepted` only for a verify, since the
        host knows it otherwise.
        """
        outputs = dict[str, Tensor]()
        if plan.n or plan.scores is not None:
            found = states.logits()
            if plan.scores is not None:
                outputs |= self._scores(found, plan.scores)
            if plan.n:
                found = found if plan.sampled is None else found[self._up(plan.sampled)]
                outputs |= self._sampled(found, plan, batch, states, mask)
        if states.head is not None and plan.following is not None:
            outputs |= self._drafted(plan, plan.following, batch, states.head, outputs)
        return outputs

    def _drafted(
        self,
        plan: OutputPlan,
        following: npt.NDArray[np.int64],
        batch: StepBatch,
        head: DraftingHead,
        outputs: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """What each row is expected to sample next, as many tokens as are wanted. Each is drawn as the row's
        output there will be, with the noise of its position: so it is the same token wherever head and model think
        alike."""
        if plan.n:
            following = following.copy()
            following[plan.sampled_inputs] = outputs["token_ids"].numpy()
        if batch.ahead is None:
            head.first(following, _NOTHING)
            return {}
        wanted = batch.ahead * (batch.outputs > 0)
        rows = np.flatnonzero(wanted)
        accepted = outputs["accepted"].numpy() if "accepted" in outputs else batch.outputs
        last = (np.cumsum(batch.outputs) - batch.outputs + accepted)[rows] - 1
        logits = head.first(following, plan.sampled_inputs[last])
        if not len(rows):
            return {}
        drafts, going = np.zeros((batch.size, self._states.n_drafts), np.int32), np.arange(len(rows))
        for n in range(int(wanted.max())):
            if n:
                goes_on = np.flatnonzero(wanted[rows[going]] > n)
                going = going[goes_on]
                logits = head.again(drafts[rows[going], n - 1].astype(np.int64), goes_on)
            drafts[rows[going], n] = self._drawn(logits, plan, last[going], drafts[rows[going], :n]).numpy()
        if self._in_doubt is not None:
            self._in_doubt.drafts[batch.rows[rows]] = drafts[rows]
        return {"drafts": torch.from_numpy(drafts)}

    def _drawn(
        self, logits: Tensor, plan: OutputPlan, last: npt.NDArray[np.int64], before: npt.NDArray[np.int32]
    ) -> Tensor:
        """Draw drafts, int [m]. last: [m], the output that is each row's last; before: [m, n], the drafts behind
        it."""
        m, n = before.shape
        pairs = _NO_PAIRS
        if plan.uses & Uses.PENALTIES:
            pairs = np.stack([np.arange(m).repeat(n), before.reshape(-1)], axis=1).astype(np.int64)
        own = replace(
            plan,
            rows=plan.rows[last],
            parameters=plan.parameters[last],
            positions=plan.positions[last] + 1 + n,
            drafts=None,
            draft_pairs=pairs,
            ends=_NO_PAIRS,
        )
        given = sampled_with(own, self._upload)
        return self._choose(self._adjust(logits, given.rows, own, None), given.choice)

    def _scores(self, logits: Tensor, plan: ScorePlan) -> dict[str, Tensor]:
        """The log-probabilities of given tokens, without penalties, bias and masks. Piece by piece, because each
        takes a table of the vocabulary."""
        places, token_ids = self._up(plan.at), self._up(plan.token_ids)
        parts = [
            logprobs(logits[places[some]].float(), token_ids[some], plan.top)
            for some in (slice(at, at + _SCORED_TOGETHER) for at in range(0, plan.n, _SCORED_TOGETHER))
        ]
        chosen, top_ids, top = map(torch.cat, zip(*parts, strict=True))
        return {"scored_logprobs": chosen, "scored_ids": top_ids.int(), "scored_top": top}

    def _sampled(
        self, logits: Tensor, plan: OutputPlan, batch: StepBatch, states: StepStates, mask: TokenMask | None
    ) -> dict[str, Tensor]:
        given = sampled_with(plan, self._upload)
        rows, pending = given.rows, self._states.pending
        logits = self._adjust(logits, rows, plan, mask)
        known = given.choice is None and plan.sampled is None and not _adjusts(plan, mask)
        if known and states.likeliest is not None:
            token_ids = states.likeliest
        else:
            token_ids = self._choose(logits, given.choice)
        sides = {name: make(token_ids) for name, make in states.sides.items()}
        values = sides.get(VALUES)
        accepted = None
        if given.drafts is None:
            outputs = {"token_ids": token_ids.int()}
            pending.write(rows, token_ids, values)
        else:
            shown, accepted = self._accept(token_ids, values, given.drafts, batch.size, pending)
            outputs = {"token_ids": shown, "accepted": accepted}
            if self._in_doubt is not None:
                self._in_doubt.note(batch, shown.numpy(), accepted.numpy())
        outputs |= sides
        k = plan.top_logprobs
        if k is not None:
            named = None if plan.named is None else self._up(plan.named)
            chosen, ids, top = logprobs(logits.float(), token_ids, k, named)
            outputs |= {"logprobs": chosen, "top_ids": ids.int(), "top_logprobs": top}
        if plan.uses & Uses.PENALTIES:
            self._states.count(rows, token_ids, None if accepted is None else self._counted(batch, accepted))
        return outputs

    def _adjust(self, logits: Tensor, rows: Tensor, plan: OutputPlan, mask: TokenMask | None) -> Tensor:
        p = plan.parameters
        if _adjusts(plan, mask):
            logits = logits.float()
        if plan.uses & Uses.BIAS:
            logits = logits + self._states.bias(rows, self._up(p["biased"]))
        if plan.uses & Uses.PENALTIES:
            numbers = self._up(np.stack([p["repetition"], p["presence"], p["frequency"]]))
            pairs = self._up(plan.draft_pairs) if len(plan.draft_pairs) else None
            logits = apply_penalties(logits, self._states.penalties(rows, numbers, pairs))
        if mask is not None and len(mask.outputs):
            logits = apply_bits(logits, self._up(mask.outputs).long(), self._up(mask.bits))
        if len(plan.ends):
            narrowed = plan.narrowed(mask)
            logits = bar(logits, self._up(plan.ends), self._up(narrowed) if len(narrowed) else None)
        return logits

    def _counted(self, batch: StepBatch, accepted: Tensor) -> Tensor:
        """bool [O]: whether the output is among the accepted ones of its row."""
        owner = np.repeat(np.arange(batch.size), batch.outputs)
        within = ragged_arange(np.zeros_like(batch.outputs), batch.outputs)
        return self._up(within) < accepted[self._up(owner)]

    def _up(self, array: npt.NDArray[Any]) -> Tensor:
        return self._upload([array])[0]


def _adjusts(plan: OutputPlan, mask: TokenMask | None) -> bool:
    """Whether logits are changed before tokens are drawn from them."""
    return bool(plan.uses & (Uses.BIAS | Uses.PENALTIES)) or mask is not None or len(plan.ends) > 0
