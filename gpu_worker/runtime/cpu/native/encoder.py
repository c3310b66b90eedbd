"""The layers of encoders, computed by `layers/` as if each crop or picture were a prompt: `NativeEncoder` of crops
of one size, and `NativeTower` of pictures.

All positions of a crop or picture see each other, and nothing is sampled. The keys and values of a layer overwrite
those of the previous layer.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from petiole.gpu_worker.models.fast_paths import supports_encoder
from petiole.gpu_worker.models.parts.layered import LayeredEncoder
from petiole.gpu_worker.models.vision.tower import Behind, Spans, Tower
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


class NativeTower:
    """A tower in native code. It takes over the weights of the layers. Make it with `native_tower`."""

    def __init__(
        self, library: ctypes.CDLL, tower: Tower, products: Products, progress: Progress = nothing
    ) -> None:
        self._tower, self._progress = tower, progress
        self._keys = self._values = torch.zeros(0, dtype=tower.dtype)
        self._table, n_layers = torch.zeros((1, 1), dtype=torch.int32), len(tower.plan)
        self._stack = Stack(
            library,
            products,
            list(zip(tower.plan, tower.layers, strict=True)),
            KVPointers([self._keys] * n_layers, [self._values] * n_layers, [self._table] * n_layers, page_size=1),
            tower.config.hidden,
            tower.dtype,
            tables=tower.stack.tables,
            progress=progress,
        )

    def encode(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
        """See `ImageDecoder`. One picture after the other: a product of hundreds of patches gains nothing from
        more."""
        found = []
        for image in images:
            found += self._tower.encode([image], self._computed)
            self._progress()
        return found

    def _computed(self, hidden: Tensor, axes: Tensor, spans: Spans, behind: Behind) -> Tensor:
        tower, inputs = self._tower, hidden.float()
        t, n_layers = len(hidden), len(tower.plan)
        self._make_room(t)
        self._stack.keep_in([self._keys] * n_layers, [self._values] * n_layers, [self._table] * n_layers, t)
        at, zeros = torch.arange(t), torch.zeros(t, dtype=torch.int64)
        self._stack.run(
            inputs,
            at,
            zeros,
            at,
            limits=torch.full_like(at, t),
            tables=[None if one is None else one.float() for one in tower.stack.tables_by_axes(axes)],
            behind=lambda layer, stream: behind(layer, stream.to(tower.dtype)),
            stops=tower.config.taps,
        )
        return inputs.to(tower.dtype)

    def _make_room(self, t: int) -> None:
        needed = t * self._tower.plan[0].attention.kv_size + _BEHIND
        if len(self._keys) < needed:
            self._keys, self._values = (torch.zeros(needed, dtype=self._tower.dtype) for _ in ("keys", "values"))


def native_tower(tower: Tower, progress: Progress = nothing) -> NativeTower | None:
    """The fast CPU path for the layers of a tower, as `native_encoder`."""
    if tower.config.window:
        log.warning("torch encodes images on this CPU, which is slower: compiled code does not know windows")
        return None
    ready = _ready(tower, tower.config.hidden)
    if ready is None:
        return None
    library, products = ready
    return NativeTower(library, tower, products, progress)


def native_encoder(encoder: LayeredEncoder, progress: Progress = nothing) -> NativeEncoder | None:
    """The fast CPU path for the layers of an encoder. None where `native_decoder` is None, and if torch's
    library is quicker at some maps but cannot read the others as the C kernels pack them. progress: called after
    every few crops, and every second of those that take longer.

    The layers' weights are rearranged in place, so only the fast path can use them afterwards."""
    ready = _ready(encoder, encoder.hidden_size)
    if ready is None:
        return None
    library, products = ready
    return NativeEncoder(library, encoder, products, progress)


def _ready(encoder: LayeredEncoder | Tower, hidden: int) -> tuple[ctypes.CDLL, Products] | None:
    known = supports_encoder(encoder, VALUES, PARTS)
    if known.model is None:
        known = with_sizes(known, encoder.plan, encoder.layers, hidden, lanes=8)
    if (reason := known.reason) is not None:
        log.warning("torch encodes images on this CPU, which is slower: compiled code does not know %s", reason)
        return None
    library = library_for(encoder.dtype)
    if library is None:
        return None
    products = choose_products(library, encoder.layers, None, encoder.dtype, in_part=True)
    shapes = _shapes(hidden, encoder.plan[0].dense.inner)
    if products.library is not None and not all(products.library.takes(*shape) for shape in shapes):
        return None
    return library, products


def _shapes(hidden: int, inner: int) -> list[tuple[int, int]]:
    """The numbers of outputs and inputs of each map of a layer."""
    return [(3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner)]
