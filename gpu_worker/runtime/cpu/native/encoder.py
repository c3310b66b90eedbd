"""`NativeEncoder`: the layers of an encoder of crops, computed by `layers/` as if each crop were a prompt.

All positions of a crop see each other, nothing is rotated, and nothing is sampled. The keys and values of a layer
overwrite those of the previous layer.
"""

from __future__ import annotations

import ctypes
import logging

import torch
from torch import Tensor

from petiole.gpu_worker.models.fast_paths import supports_encoder
from petiole.gpu_worker.models.parts.layered import LayeredEncoder
from petiole.gpu_worker.runtime.cpu.native.layers.structures import KVPointers
from petiole.gpu_worker.runtime.cpu.native.products.choice import Products, choose_products
from petiole.gpu_worker.runtime.cpu.native.stack import Stack, library_for
from petiole.gpu_worker.runtime.cpu.native.supported import PARTS, VALUES, with_sizes
from petiole.gpu_worker.runtime.interface import Progress, nothing

log = logging.getLogger(__name__)

_ROWS = 1024
"""Positions at a time, but at least those of one crop: more would take much memory and be no faster."""
_BEHIND = 64
"""Elements after the last value of a head. Vector instructions read them, but ignore their values."""


class NativeEncoder:
    """An encoder in native code. It takes over the weights of the layers. Make it with `native_encoder`."""

    def __init__(
        self, library: ctypes.CDLL, encoder: LayeredEncoder, products: Products, progress: Progress = nothing
    ) -> None:
        self._encoder, self._progress, dtype = encoder, progress, encoder.dtype
        n, mixer = encoder.n_positions, encoder.plan[0].attention
        self._n_crops = max(1, _ROWS // n)
        self._inputs = at = torch.arange(self._n_crops * n)
        self._positions, self._rows, self._limits = at % n, at // n, torch.full_like(at, n)
        table = torch.arange(self._n_crops, dtype=torch.int32)[:, None]
        keys, values = (torch.zeros(len(at) * mixer.kv_size + _BEHIND, dtype=dtype) for _ in ("keys", "values"))
        n_layers = len(encoder.plan)
        self._stack = Stack(
            library,
            products,
            list(zip(encoder.plan, encoder.layers, strict=True)),
            KVPointers([keys] * n_layers, [values] * n_layers, [table] * n_layers, page_size=n),
            encoder.hidden_size,
            dtype,
            progress=progress,
        )

    def features(self, crops: Tensor) -> Tensor:
        """uint8 [n, height, width, 3] -> [n, ...]."""
        parts = []
        for some in torch.split(crops, self._n_crops):
            parts.append(self._few(some))
            self._progress()
        return torch.cat(parts)

    def _few(self, crops: Tensor) -> Tensor:
        hidden = self._encoder.embedded(crops).float().flatten(0, 1)
        t = len(hidden)
        self._stack.run(hidden, self._positions[:t], self._rows[:t], self._inputs[:t], limits=self._limits[:t])
        return self._encoder.finished(hidden.view(len(crops), -1, hidden.shape[1]).to(self._encoder.dtype))


def native_encoder(encoder: LayeredEncoder, progress: Progress = nothing) -> NativeEncoder | None:
    """The fast CPU path for the layers of an encoder. None where `native_decoder` is None, and if torch's
    library is quicker at some maps but cannot read the others as the C kernels pack them. progress: called after
    every few crops, and every second of those that take longer.

    The layers' weights are rearranged in place, so only the fast path can use them afterwards."""
    known = supports_encoder(encoder, VALUES, PARTS)
    if known.model is None:
        known = with_sizes(known, encoder.plan, encoder.layers, encoder.hidden_size, lanes=8)
    if (reason := known.reason) is not None:
        log.warning("torch encodes images on this CPU, which is slower: compiled code does not know %s", reason)
        return None
    library = library_for(encoder.dtype)
    if library is None:
        return None
    products = choose_products(library, encoder.layers, None, encoder.dtype, in_part=True)
    if products.library is not None and not all(products.library.takes(*shape) for shape in _shapes(encoder)):
        return None
    return NativeEncoder(library, encoder, products, progress)


def _shapes(encoder: LayeredEncoder) -> list[tuple[int, int]]:
    """The numbers of outputs and inputs of each map of a layer."""
    hidden, inner = encoder.hidden_size, encoder.plan[0].dense.inner
    return [(3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)]
