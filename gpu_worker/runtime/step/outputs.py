"""Sampling of a step: from logits to token ids, the rows' next inputs and the outputs for the host.

All code here runs in stream order. `RowStates` holds the state that outlives a step; `sampling` has the
arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.cache import ragged_arange
from petiole.gpu_worker.runtime.interface import StepBatch, TokenMask
from petiole.gpu_worker.runtime.step.inputs import StepStates
from petiole.gpu_worker.runtime.step.rows import OutputPlan, RowStates, Upload, Uses, sampled_with, write_rows
from petiole.gpu_worker.runtime.step.sampling import (
    Choose,
    apply_bits,
    apply_penalties,
    bar,
    first_refused,
    logprobs,
)


class OutputSampler:
    """Samples steps. `upload` copies arrays to the device in stream order; `choose` draws tokens from logits
    there."""

    def __init__(self, states: RowStates, upload: Upload, choose: Choose) -> None:
        self._states, self._upload, self._choose = states, upload, choose

    def sample(
        self, plan: OutputPlan, batch: StepBatch, states: StepStates, mask: TokenMask | None
    ) -> dict[str, Tensor]:
        """Sample, write the rows' next inputs and update the penalty counts.

        Returns the tensors to copy to the host, named as in `StepOutput`; `accepted` only for a verify, since the
        host knows it otherwise.
        """
        rows, choice = sampled_with(plan, self._upload)
        logits = self._adjust(states.logits(), rows, plan, mask)
        token_ids = self._choose(logits, choice)
        outputs = {"token_ids": token_ids.int()}
        bins = None if states.bins is None else states.bins(token_ids)
        if bins is not None:
            outputs["bins"] = bins
        k = plan.top_logprobs
        if k is not None:
            chosen, ids, top = logprobs(logits.float(), token_ids, k)
            outputs |= {"logprobs": chosen, "top_ids": ids.int(), "top_logprobs": top}
        if plan.verifies:
            outputs["accepted"] = self._verify(plan, batch, rows, token_ids, bins).int()
            return outputs
        self._next_inputs(rows, token_ids, bins)
        if plan.uses & Uses.PENALTIES:
            self._states.count(rows, token_ids, None)
        return outputs

    def _adjust(self, logits: Tensor, rows: Tensor, plan: OutputPlan, mask: TokenMask | None) -> Tensor:
        p = plan.parameters
        if plan.uses & (Uses.BIAS | Uses.PENALTIES) or mask is not None or len(plan.ends):
            logits = logits.float()
        if plan.uses & Uses.BIAS:
            logits = logits + self._states.bias(rows, self._up(p["biased"]))
        if plan.uses & Uses.PENALTIES:
            numbers = self._up(np.stack([p["repetition"], p["presence"], p["frequency"]]))
            pairs = self._up(plan.draft_pairs) if plan.verifies else None
            logits = apply_penalties(logits, self._states.penalties(rows, numbers, pairs))
        if mask is not None and len(mask.outputs):
            logits = apply_bits(logits, self._up(mask.outputs).long(), self._up(mask.bits))
        if len(plan.ends):
            narrowed = plan.narrowed(mask)
            logits = bar(logits, self._up(plan.ends), self._up(narrowed) if len(narrowed) else None)
        return logits

    def _next_inputs(self, rows: Tensor, token_ids: Tensor, bins: Tensor | None) -> None:
        write_rows(self._states.pending, rows, token_ids)
        if bins is not None:
            write_rows(self._states.pending_bins, rows, bins)

    def _verify(
        self, plan: OutputPlan, batch: StepBatch, rows: Tensor, token_ids: Tensor, bins: Tensor | None
    ) -> Tensor:
        """int64 [B]: the number of accepted outputs of each row. The last accepted one is the row's next input."""
        sampled = np.flatnonzero(batch.outputs)
        counts, first = batch.outputs[sampled], (np.cumsum(batch.outputs) - batch.outputs)[sampled]
        within = np.arange(counts.max())
        outputs = first[:, None] + np.minimum(within, counts[:, None] - 1)
        arrays = (plan.drafts, outputs.ravel(), first, sampled, batch.rows[sampled])
        drafts, places, first_of, of, rows_of = self._together(arrays)
        refused = first_refused(token_ids, drafts, places.view(outputs.shape))
        last = first_of + refused
        self._next_inputs(rows_of, token_ids[last], None if bins is None else bins[last])
        accepted = refused + 1
        if len(sampled) < batch.size:
            accepted = accepted.new_zeros(batch.size).index_put_((of,), accepted)
        if plan.uses & Uses.PENALTIES:
            self._states.count(rows, token_ids, self._counted(batch, accepted))
        return accepted

    def _counted(self, batch: StepBatch, accepted: Tensor) -> Tensor:
        """bool [O]: whether the output is among the accepted ones of its row."""
        owner = np.repeat(np.arange(batch.size), batch.outputs)
        within = ragged_arange(np.zeros_like(batch.outputs), batch.outputs)
        return self._up(within) < accepted[self._up(owner)]

    def _up(self, array: npt.NDArray[Any]) -> Tensor:
        return self._upload([array])[0]

    def _together(self, arrays: Sequence[npt.NDArray[np.integer]]) -> tuple[Tensor, ...]:
        """Copy arrays of whole numbers to the device, as int64, in one copy."""
        together = self._up(np.concatenate(arrays).astype(np.int64, copy=False))
        return tuple(torch.split(together, [len(a) for a in arrays]))
