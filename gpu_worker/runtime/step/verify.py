"""Verification: how many of a row's drafts are the tokens that were sampled in their place.

inputs     p  x  y     p  x        p: pending   x, y: drafts
drafts     x  y -1     x -1        each sampled token is compared with the draft after its input
sampled    x  z  .     x  w
accepted   2           2           up to and with the first that differs, which is the row's next input
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.cache import ragged_arange
from petiole.gpu_worker.runtime.interface import Int64Array, StepBatch
from petiole.gpu_worker.runtime.step.inputs import StepInputs
from petiole.gpu_worker.runtime.step.pending import PendingInputs


def drafts_of(batch: StepBatch, inputs: StepInputs) -> Int64Array:
    """The drafts of a step with O outputs of B rows, int64 [3 B + O], for one copy to the device: of each row the
    index of its first output; of each the number of its outputs; of each its place in the page table; and the
    draft that each sampled token is compared with, -1 for a row's last output."""
    ends, n = batch.outputs.cumsum(), batch.size
    after = np.empty_like(inputs.token_ids)
    after[:-1] = inputs.token_ids[1:]
    drafts = np.concatenate([ends - batch.outputs, batch.outputs, batch.rows, inputs.of_outputs(after)])
    drafts[3 * n + ends - 1] = -1  # a row without outputs repeats the end of another
    return drafts


def following_of(batch: StepBatch, inputs: StepInputs) -> Int64Array:
    """int64 [T]: the token after each input, as far as the host knows it."""
    after = np.zeros_like(inputs.token_ids)
    after[:-1] = inputs.token_ids[1:]
    if batch.following is not None:
        after[np.cumsum(batch.lengths) - 1] = batch.following
    return np.maximum(after, 0)


def draft_pairs(batch: StepBatch, inputs: StepInputs, wanted: npt.NDArray[np.bool_]) -> Int64Array:
    """int64 [n, 2], (output, token) for each draft that precedes a wanted output in its row. wanted: [O]."""
    within = ragged_arange(np.zeros_like(batch.outputs), batch.outputs)
    counts = np.where(wanted, within, 0)
    outputs = np.repeat(np.arange(len(within)), counts)
    drafts = ragged_arange(inputs.sampled_inputs - counts + 1, counts)
    return np.stack([outputs, inputs.token_ids[drafts]], axis=1)


Accept = Callable[[Tensor, Tensor | None, Tensor, int, PendingInputs], tuple[Tensor, Tensor]]
"""`accept`, implemented for a device."""


def accept(
    token_ids: Tensor, values: Tensor | None, drafts: Tensor, n_rows: int, pending: PendingInputs
) -> tuple[Tensor, Tensor]:
    """The sampled tokens, int32 [O], and how many of them are accepted of each row, int32 [B]. A row's last
    accepted token becomes its next input.

    token_ids: int64 [O]. values: int32 [O, width], or None. drafts: see `drafts_of`; n_rows: B."""
    tokens, groups, following = token_ids.numpy(), drafts[: 3 * n_rows], drafts[3 * n_rows :]
    first, counts, rows = groups.view(3, n_rows).numpy()
    refused = np.flatnonzero(tokens != following.numpy())
    sampled = np.flatnonzero(counts)
    last = refused[np.searchsorted(refused, first[sampled])]
    accepted = np.zeros(n_rows, np.int32)
    accepted[sampled] = last - first[sampled] + 1
    pending.token_ids.numpy()[rows[sampled]] = tokens[last]
    if values is not None:
        pending.values.numpy()[rows[sampled]] = values.numpy()[last]
    return token_ids.int(), torch.from_numpy(accepted)
