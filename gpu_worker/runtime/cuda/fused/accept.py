"""Verification on CUDA, in one launch with one warp for each row; see `step.verify`."""

# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from petiole.gpu_worker.runtime.step.pending import PendingInputs

_WIDTH = 32


def accept(
    token_ids: Tensor, values: Tensor | None, drafts: Tensor, n_rows: int, pending: PendingInputs
) -> tuple[Tensor, Tensor]:
    """See `verify.accept`. All tensors are dense."""
    device = token_ids.device
    shown = torch.empty(len(token_ids), dtype=torch.int32, device=device)
    accepted = torch.empty(n_rows, dtype=torch.int32, device=device)
    beside, n_beside = (shown, 0) if values is None else (values, values.shape[1])
    tensors = (token_ids, beside, drafts, pending.token_ids, pending.values, shown, accepted)
    _accept[(n_rows,)](*tensors, N_VALUES=n_beside, WIDTH=_WIDTH, num_warps=1)
    return shown, accepted


@triton.jit
def _accept(
    token_ids,
    values,
    drafts,
    pending,
    pending_values,
    shown,
    accepted,
    N_VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    i, n_rows = tl.program_id(0), tl.num_programs(0)
    first, count = tl.load(drafts + i), tl.load(drafts + n_rows + i)
    start, refused = tl.full([], 0, tl.int64), count
    while start < count:
        at = start + tl.arange(0, WIDTH)
        there = at < count
        sampled = tl.load(token_ids + first + at, mask=there, other=0)
        draft = tl.load(drafts + 3 * n_rows + first + at, mask=there, other=0)
        tl.store(shown + first + at, sampled.to(tl.int32), mask=there)
        refused = tl.minimum(refused, tl.min(tl.where(sampled != draft, at, count), 0))
        start += WIDTH
    if count > 0:
        row, last = tl.load(drafts + 2 * n_rows + i), first + refused
        tl.store(pending + row, tl.load(token_ids + last))
        for k in tl.static_range(N_VALUES):
            tl.store(pending_values + row * N_VALUES + k, tl.load(values + last * N_VALUES + k))
        refused += 1
    tl.store(accepted + i, refused.to(tl.int32))
