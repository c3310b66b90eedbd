"""The Gumbel maximum in one pass over the scores, without a logarithm for each token."""

from __future__ import annotations

from ctypes import c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from petiole.contract.settings.engine import switch
from petiole.gpu_worker.runtime.cpu.native.build import load_library


def draw(scores: Tensor, keys: Tensor) -> Tensor | None:
    """int64 [n]: argmax of scores + noise; None if there is no compiled code for it.

    scores: float32 [n, V]; keys: int32 [n, 2]; see `noise.gumbel`.
    """
    library = load_library() if scores.device.type == "cpu" and switch("native") == "on" else None
    if library is None:
        return None
    scores, keys = scores.contiguous(), keys.contiguous()
    tokens = torch.empty(len(scores), dtype=torch.int64)
    library.petiole_draw(
        c_int64(scores.shape[0]),
        c_int64(scores.shape[1]),
        c_void_p(scores.data_ptr()),
        c_void_p(keys.data_ptr()),
        c_void_p(tokens.data_ptr()),
        c_int32(torch.get_num_threads()),
    )
    return tokens
