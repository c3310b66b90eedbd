"""The tensors of a GGUF file under the names, and in the order of rows, of Hugging Face's checkpoints."""

from __future__ import annotations

import math
import re
from pathlib import Path

import torch
from torch import Tensor

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.models.checkpoint.gguf.block_types import TYPES
from petiole.gpu_worker.models.checkpoint.gguf.blocks import values_of
from petiole.gpu_worker.models.checkpoint.gguf.config import architecture_of, config_of
from petiole.gpu_worker.models.checkpoint.gguf.header import GgufTensor, read_header, read_whole
from petiole.gpu_worker.models.checkpoint.gguf.tensor_mapping import FREQUENCIES, LONG, SHORT, Place
from petiole.gpu_worker.models.checkpoint.safetensors import TensorEntry, TensorFile, contents

_VALUES_AT_ONCE = 2**24
_MOST_ENTRIES = 2**19
"""Tensors under the names of Hugging Face, which has those of experts one by one."""
_DROPPED = {".conv.conv.weight": 1, ".conv1d.weight": 1, ".mlp.shared_expert_gate.weight": 0}
"""The dimension of size 1 that the converter drops, by the end of a tensor's name."""
_FLAT = (".A_log", ".mixer.D", ".mamba.D", ".mixer.norm.weight", ".mamba.norm.weight")
"""Tensors of one dimension that the converter stores in two."""

_BY_HEAD = (".k_b_proj.weight", ".v_b_proj.weight")
"""Tensors that the converter stores head by head, in three dimensions."""


def _entry(tensor: GgufTensor, place: Place) -> TensorEntry:
    """A tensor's part that has this place: of one that several share by heads, as many bytes."""
    shape = tensor.shape
    for end, at in _DROPPED.items():
        if place.name.endswith(end):
            shape = (*shape[:at], 1, *shape[at:])
    if place.name.endswith(_FLAT):
        shape = (math.prod(shape),)
    if place.name.endswith(_BY_HEAD) and len(shape) == 3:
        shape = (shape[0] * shape[1], *shape[2:])
    if place.parts > 1:
        within = place.parts // (1 if place.by_heads else shape[0])
        outer, *inner = shape if place.by_heads else shape[1:]
        shape = (outer // within, *inner)
    each = (tensor.end - tensor.start) // place.parts
    start = tensor.start + place.which * each
    return TensorEntry(tensor.kind, shape, start, start + each)


class GgufTensors(TensorFile):
    """See `TensorFile`. The type of a quantised tensor is that of its blocks, and `stored` returns these as bytes,
    [rows, bytes of a row]. path: of a model's piece."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        header, config = read_whole(path), config_of(path)
        self._of = architecture_of(header)
        self._heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        self._by_heads: dict[str, tuple[int, int, int]] = {}
        for given, tensor in read_header(path).tensors.items():
            if given in (FREQUENCIES, LONG, SHORT) or self._is_beyond(given, config["num_hidden_layers"]):
                continue
            known = len(self.entries)
            for place in self._of.places(given, tensor.shape[0]):
                self.entries[place.name] = _entry(tensor, place)
                if place.by_heads:
                    self._by_heads[place.name] = place.which, place.parts, config["linear_num_key_heads"]
                if len(self.entries) > _MOST_ENTRIES:
                    limit = f"must have at most {_MOST_ENTRIES} tensors, each expert's counted"
                    raise ModelError(f"{path}: {limit}, got more: {shown(given)} has {tensor.shape[0]} experts")
            if len(self.entries) == known:
                raise ModelError(f"{path}: tensor {shown(given)} is not one of a {self._of.hub}")
        self._map = contents(path)

    def _is_beyond(self, name: str, n_layers: int) -> bool:
        """Whether a tensor belongs to a layer that predicts further tokens."""
        found = re.match(r"blk\.(\d{1,5})\.", name)
        return found is not None and int(found[1]) >= n_layers

    def tensor(self, name: str) -> Tensor:
        entry = self.entries[name]
        return self._values(name, self._rows(name)).view(entry.shape)

    def stored(self, name: str) -> Tensor:
        return self._rows(name) if TYPES[self.entries[name].dtype].quantised else self.tensor(name)

    def copy(self, name: str, into: Tensor) -> None:
        if into.device.type == "meta":
            return
        rows, inputs = self._rows(name), self.entries[name].shape[-1]
        step = max(1, _VALUES_AT_ONCE // inputs)
        flat = into.view(len(rows), -1)
        for start in range(0, len(rows), step):
            flat[start : start + step].copy_(self._values(name, rows[start : start + step]))

    def _values(self, name: str, rows: Tensor) -> Tensor:
        """Numbers [rows, inputs]."""
        values = values_of(rows, self.entries[name].dtype)
        if name.endswith(".A_log"):
            return values.float().neg().log()
        with_one = self._of.norms_with_one and name.endswith("norm.weight") and ".linear_attn." not in name
        return values.float() - 1 if with_one else values

    def _rows(self, name: str) -> Tensor:
        """uint8 [rows, bytes of a row]. A tensor of one dimension is one row, or rows of one number if turned."""
        entry, heads = self.entries[name], self._of.order(name)
        n_bytes = entry.end - entry.start
        if name in self._by_heads:
            which, parts, n = self._by_heads[name]
            whole = self._bytes(entry.start - which * n_bytes, parts * n_bytes)
            return whole.view(n, parts, entry.shape[0] // n, -1)[:, which].flatten(0, 1)
        flat = self._bytes(entry.start, n_bytes)
        if heads is None:
            return flat.view(entry.shape[0] if len(entry.shape) > 1 else 1, -1)
        n = self._heads[heads]
        if entry.shape[0] % (2 * n):
            raise ModelError(
                f"{self.path}: tensor {name} must have rows for {n} heads of an even width, got {entry.shape[0]}"
            )
        return flat.view(n, entry.shape[0] // n // 2, 2, -1).transpose(1, 2).flatten(0, 2)

    def _bytes(self, start: int, n: int) -> Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8, count=n, offset=start)
