"""Products in four bits by humming-kernels, a peer where it is installed (`pip install humming-kernels`). At the
first call it compiles a kernel for each shape and number of rows, with nvcc or NVRTC."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

GROUP = 32


def products(outputs: int, inputs: int, rows: int, n: int) -> list[Callable[[Tensor], Tensor]]:
    """So many layers of this size, whose weights differ: int4 with a scale for each `GROUP` inputs, in bfloat16.
    rows: of what they are called with. Empty where the package is not installed."""
    if importlib.util.find_spec("humming") is None:
        return []
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config

    found: list[Callable[[Tensor], Tensor]] = []
    for _ in range(n):
        form = {"dtype": "int4", "group_size": GROUP}
        layer = HummingLayer(
            shape_n=outputs, shape_k=inputs, weight_config=form, torch_dtype=torch.bfloat16
        ).cuda()
        layer.load_from_unquantized(torch.randn((outputs, inputs), dtype=torch.bfloat16, device="cuda"))
        layer.transform()
        found.append(partial(layer, tuning_config=get_heuristics_config(layer.humming_config, rows)))
    return found
