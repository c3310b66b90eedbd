"""Experts that a checkpoint stores in one tensor, as a layer each.

Readers ask for `...experts.3.gate_proj.weight` and the tensors beside it, as for any other layer. Where the
checkpoint has `...experts.gate_up_proj` instead, they get views of it. So every format and every quantisation
reads both layouts alike, and no tensor is ever copied as a whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from petiole.gpu_worker.models.checkpoint.safetensors import DTYPES, Checkpoint, TensorEntry, put
from petiole.gpu_worker.models.weights.names import Fused

_LAYER = re.compile(r"(.*experts\.)(\d{1,6})\.(gate|up|down)_proj\.(weight|bias|weight_packed|weight_scale)")
_STORED = {
    "weight": ("", ".weight"),
    "bias": ("_bias",),
    "weight_packed": ("_blocks",),
    "weight_scale": ("_scales",),
}
"""How the tensor with all experts is called, after the name of the product."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The part of a tensor that is one layer of one expert. shape: of that part. view: the tensor -> the part."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    view: Callable[[Tensor], Tensor]


class ExpertTensors:
    """The tensors of a checkpoint, those of fused experts under the names that each expert's would have. turned:
    layers that are stored as [inputs, outputs] are given the other way round."""

    def __init__(self, checkpoint: Checkpoint, fused: Fused, turned: Sequence[str] = ()) -> None:
        self._checkpoint, self._fused = checkpoint, fused
        self._turned = tuple(f".{name}.weight" for name in turned)

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint or self._piece(name) is not None

    def entry(self, name: str) -> TensorEntry:
        piece = self._piece(name)
        if piece is None:
            return self._checkpoint.entry(name)
        return TensorEntry(piece.dtype, piece.shape, 0, 0)

    def stored(self, name: str) -> Tensor:
        piece = self._piece(name)
        if piece is None:
            return self._checkpoint.stored(name)
        return piece.view(self._checkpoint.stored(piece.name))

    def done(self, name: str) -> int:
        piece = self._piece(name)
        if piece is None:
            return self._checkpoint.done(name)
        self._checkpoint.done(piece.name)
        view = piece.view(self._checkpoint.stored(piece.name))
        return view.numel() * view.element_size()

    def copy(self, name: str, into: Tensor) -> int:
        piece = self._piece(name)
        if piece is None or piece.dtype not in DTYPES:  # which the checkpoint refuses by the tensor's own name
            return self._checkpoint.copy(name if piece is None else piece.name, into)
        what = f"{self._checkpoint.folder}: tensor {piece.name}, of {name},"
        copied = put(what, piece.view(self._checkpoint.stored(piece.name)), into, piece.shape)
        return self.done(name) if copied else 0

    def _piece(self, name: str) -> _Piece | None:
        if self._turned and name.endswith(self._turned) and name in self._checkpoint:
            entry = self._checkpoint.entry(name)
            return _Piece(name, entry.dtype, tuple(reversed(entry.shape)), Tensor.t)
        match = None if name in self._checkpoint else _LAYER.fullmatch(name)
        if match is None:
            return None
        at, expert, product, kind = match[1], int(match[2]), match[3], match[4]
        whole = at.removesuffix("experts.") + (self._fused.down if product == "down" else self._fused.gate_up)
        found = next((whole + one for one in _STORED[kind] if whole + one in self._checkpoint), None)
        if found is None:
            return None
        entry = self._checkpoint.entry(found)
        if expert >= entry.shape[0]:
            return None
        packed = kind in ("weight_packed", "weight_scale")
        turned = kind == "weight" and self._input_major(at)
        axes = entry.shape[1:]
        outputs = axes[-1] if turned else axes[0]
        if product != "down" and outputs % 2:
            return None
        rows = _rows(product, outputs, interleaved=self._fused.interleaved)

        def view(tensor: Tensor) -> Tensor:
            mine = tensor[expert].t() if turned else tensor[expert]
            return mine[rows].flatten(1) if packed else mine[rows]

        n = outputs if product == "down" else outputs // 2
        rest = axes[:-1] if turned else axes[1:]
        return _Piece(found, entry.dtype, (n, *_flat(rest, packed=packed)), view)

    def _input_major(self, at: str) -> bool:
        """Whether a layer's experts are stored as [experts, inputs, outputs]. Some families are published in one
        order and saved by transformers in the other; the sizes of both products tell."""
        stored = [at.removesuffix("experts.") + name for name in (self._fused.gate_up, self._fused.down)]
        found = [
            next((name + end for end in _STORED["weight"] if name + end in self._checkpoint), None)
            for name in stored
        ]
        up, down = (() if name is None else self._checkpoint.entry(name).shape[1:] for name in found)
        if len(up) != 2 or len(down) != 2:
            return self._fused.input_major
        if (up[1], up[0]) == (down[0], 2 * down[1]):
            return False
        return self._fused.input_major or (up[0], up[1]) == (down[1], 2 * down[0])


def _rows(product: str, outputs: int, *, interleaved: bool) -> slice:
    if product == "down":
        return slice(None)
    if interleaved:
        return slice(product == "up", None, 2)
    return slice(outputs // 2, None) if product == "up" else slice(outputs // 2)


def _flat(axes: tuple[int, ...], *, packed: bool) -> tuple[int, ...]:
    """Blocks of codes lie one after the other."""
    return (axes[0] * axes[1],) if packed and len(axes) == 2 else axes
