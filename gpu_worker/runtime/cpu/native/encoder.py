"""The layers of encoders, computed by `layers/` as if each crop or picture were a prompt: `NativeEncoder` of crops
of one size, and `NativeTower` of pictures.

All positions of a crop or picture see each other, and nothing is sampled. The keys and values of a layer overwrite
those of the previous layer.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.models.fast_paths import supports_encoder
from petiole.gpu_worker.models.parts.layered import LayeredEncoder
from petiole.gpu_worker.models.vision.tower import Behind, Spans, Tower
from petiole.gpu_worker.runtime.cpu.native.layers.structures import KVPointers
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

    def __init__(self, library: ctypes.CDLL, encoder: LayeredEncoder, progress: Progress = nothing) -> None:
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

    def __init__(self, library: ctypes.CDLL, tower: Tower, progress: Progress = nothing) -> None:
        self._tower, self._progress = tower, progress
        self._keys = self._values = torch.zeros(0, dtype=tower.dtype)
        table, n_layers = torch.zeros((1, 1), dtype=torch.int32), len(tower.plan)
        self._stack = Stack(
            library,
            list(zip(tower.plan, tower.layers, strict=True)),
            KVPointers([self._keys] * n_layers, [self._values] * n_layers, [table] * n_layers, page_size=1),
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
        """A run of patches that see each other is as a prompt: it has a row and a page of its own. Where the runs
        of the next layer are others, so are its patches' rows, and their positions there."""
        tower, inputs, taps = self._tower, hidden.float(), self._tower.config.taps
        n_layers, every = len(tower.plan), torch.arange(len(hidden))
        rows_of = {id(runs): _Rows.of(runs) for runs in spans}
        of_layers = [rows_of[id(runs)] for runs in spans]
        self._make_room(max(one.room for one in rows_of.values()))
        keys, values = [self._keys] * n_layers, [self._values] * n_layers
        self._stack.keep_in(keys, values, [one.table for one in of_layers], [one.page_size for one in of_layers])
        rows, positions, limits = now = of_layers[0].places.clone()

        def ended(layer: int, stream: Tensor) -> None:
            if layer in taps:
                behind(layer, stream.to(tower.dtype))
            if layer + 1 < n_layers:
                now.copy_(of_layers[layer + 1].places)

        turns = (i for i in range(n_layers - 1) if spans[i + 1] is not spans[i])
        self._stack.run(
            inputs,
            positions,
            rows,
            every,
            rotary=every,
            limits=limits,
            tables=[None if one is None else one.float() for one in tower.stack.tables_by_axes(axes)],
            behind=ended,
            stops=sorted({*taps, *turns}),
        )
        return inputs.to(tower.dtype)

    def _make_room(self, n: int) -> None:
        needed = n * self._tower.plan[0].attention.kv_size + _BEHIND
        if len(self._keys) < needed:
            self._keys, self._values = (torch.zeros(needed, dtype=self._tower.dtype) for _ in ("keys", "values"))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Runs of positions as rows of a cache. table: int32 [runs, 1], the page of each. places: int64 [3, T], of
    each position its row, its place there, and the row's length."""

    table: Tensor
    page_size: int
    places: Tensor

    @staticmethod
    def of(runs: Sequence[int]) -> _Rows:
        lengths = torch.tensor(runs)
        rows = torch.arange(len(runs)).repeat_interleave(lengths)
        begins = lengths.cumsum(0) - lengths
        places = torch.stack([rows, torch.arange(len(rows)) - begins[rows], lengths[rows]])
        return _Rows(torch.arange(len(runs), dtype=torch.int32)[:, None], max(runs), places)

    @property
    def room(self) -> int:
        return len(self.table) * self.page_size


def native_tower(tower: Tower, progress: Progress = nothing) -> NativeTower | None:
    """The fast CPU path for the layers of a tower, as `native_encoder`."""
    library = _library_for(tower, tower.config.hidden)
    return None if library is None else NativeTower(library, tower, progress)


def native_encoder(encoder: LayeredEncoder, progress: Progress = nothing) -> NativeEncoder | None:
    """The fast CPU path for the layers of an encoder. None where `native_decoder` is None. progress:
    called after every few crops, and every second of those that take longer.

    The layers' weights are rearranged in place, so only the fast path can use them afterwards."""
    library = _library_for(encoder, encoder.hidden_size)
    return None if library is None else NativeEncoder(library, encoder, progress)


def _library_for(encoder: LayeredEncoder | Tower, hidden: int) -> ctypes.CDLL | None:
    known = supports_encoder(encoder, VALUES, PARTS)
    if known.model is None:
        known = with_sizes(known, encoder.plan, encoder.layers, hidden, lanes=8)
    if (reason := known.reason) is not None:
        log.warning("torch encodes images on this CPU, which is slower: compiled code does not know %s", reason)
        return None
    return library_for(encoder.dtype)
