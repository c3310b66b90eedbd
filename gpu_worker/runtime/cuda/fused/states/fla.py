"""The gated delta rule of long rows by fla-core, an optional package (MIT): chunks of 64 positions, with products
in bfloat16.

It computes a row from one state to another, and copies none in between. So a row is cut into *parts*, behind each
position whose state is copied; the host knows where (`parts_of`), and steps that are captured have no parts. Rows
and parts that are shorter than a chunk are followed position by position, as ever.

Queries, keys and values are rounded to bfloat16, and so are what its kernels make of them: outputs differ from
`recurrent` by some thousandths. No card has timed it beside `chunks` (`supported.tried`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from petiole.contract.settings.engine import switch
from petiole.gpu_worker.models.parts.recurrent.states import Rounded
from petiole.gpu_worker.runtime.cuda.supported import tried
from petiole.gpu_worker.runtime.device.device import upload
from petiole.gpu_worker.runtime.interface import Int32Array

CHUNK = 64
"""Positions of fla-core's chunks."""


class RowPart(NamedTuple):
    """Positions from first to end of a long row of the step. bounds: int32 [2], from 0 to their number, on the
    device. copied: whether the state after the last one is copied."""

    row: int
    first: int
    end: int
    bounds: Tensor
    copied: bool


def chosen() -> bool:
    return switch("exact") == "off" and tried("chunks") and importlib.util.find_spec("fla") is not None


def parts_of(bounds: Int32Array, copies: Int32Array, device: torch.device) -> list[RowPart]:
    """bounds: int32 [B + 1], of the rows; copies: int32 [T], see `StatesOnCuda`."""
    parts = []
    for row, (first, end) in enumerate(pairwise(bounds.tolist())):
        if end - first < CHUNK:
            continue
        behind = first + 1 + np.flatnonzero(copies[first:end] >= 0)
        for begin, stop in pairwise([first, *behind.tolist(), end]):
            if stop > begin:
                own = upload(np.array([0, stop - begin], np.int32), device)
                parts.append(RowPart(row, begin, stop, own, bool(copies[stop - 1] >= 0)))
    return parts


def apply_delta_rule_by_fla(
    qkv: Tensor,
    g: Tensor,
    beta: Tensor,
    matrices: Tensor,
    rounded: Rounded | None,
    places: Tensor,
    bounds: Tensor,
    copies: Tensor,
    parts: Sequence[RowPart],
    *,
    tiled: bool = False,
) -> Tensor:
    """As `recurrent.apply_delta_rule`, up to rounding. parts: of the rows of `CHUNK` positions and more, in their
    order."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    from petiole.gpu_worker.runtime.cuda.fused.states.recurrent import apply_delta_rule, key_heads_of

    step = places, bounds, copies
    outputs = apply_delta_rule(qkv, g, beta, matrices, rounded, *step, tiled=tiled, most=CHUNK - 1)
    key_heads, (heads, key_dim, value_dim) = key_heads_of(qkv, g, beta, matrices), matrices.shape[1:]
    sizes = [key_heads * key_dim, key_heads * key_dim, heads * value_dim]
    for row, first, end, own, copied in parts:
        place, some, n = places[row : row + 1], slice(first, end), end - first
        given = qkv[some], g[some], beta[some]
        if n < CHUNK:
            at = place, own, copies[some]
            outputs[some] = apply_delta_rule(*given, matrices, rounded, *at, tiled=tiled)
            continue
        q, k, v = torch.split(given[0].bfloat16(), sizes, 1)
        q, k, v = q.reshape(n, -1, key_dim), k.reshape(n, -1, key_dim), v.reshape(n, -1, value_dim)
        if tiled:
            q, k = (part.repeat(1, heads // key_heads, 1) for part in (q, k))
        found, state = chunk_gated_delta_rule(
            *(part.contiguous()[None] for part in (q, k, v)),
            g=given[1][None],
            beta=given[2][None],
            scale=1.0,  # of queries, which `prepare` has scaled; and it has normed them and the keys
            initial_state=matrices[place.long()],
            output_final_state=True,
        )
        outputs[some] = found[0]
        matrices[place.long()] = state
        if copied:
            copy = copies[end - 1 : end].long()
            if rounded is None:
                matrices[copy] = state
            else:
                rounded.put(copy - len(matrices), state)
    return outputs
