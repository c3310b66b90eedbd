"""The tensors of a GGUF file under the names, and in the order of rows, of Hugging Face's checkpoints."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.models.checkpoint.gguf.blocks import values_of
from petiole.gpu_worker.models.checkpoint.gguf.config import architecture_of, config_of
from petiole.gpu_worker.models.checkpoint.gguf.header import read_header
from petiole.gpu_worker.models.checkpoint.gguf.names import FREQUENCIES
from petiole.gpu_worker.models.checkpoint.gguf.types import TYPES
from petiole.gpu_worker.models.checkpoint.safetensors import Entry, TensorFile

_VALUES_AT_ONCE = 2**24


class GgufTensors(TensorFile):
    """See `TensorFile`. The type of a quantised tensor is that of its blocks, and `stored` returns these as bytes,
    [rows, bytes of a row]."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        header, config = read_header(path), config_of(path)
        self._of = architecture_of(header)
        self._heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"]}
        for given, tensor in header.tensors.items():
            if given == FREQUENCIES:
                continue
            if (name := self._of.name_of(given)) is None:
                raise ModelError(f"{path}: tensor {shown(given)} is not one of a {self._of.hub}")
            self.entries[name] = Entry(tensor.kind, tensor.shape, tensor.start, tensor.end)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

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
        return values.float() - 1 if self._of.norms_with_one and name.endswith("norm.weight") else values

    def _rows(self, name: str) -> Tensor:
        """uint8 [rows, bytes of a row]. A tensor of one dimension is one row, or rows of one number if turned."""
        entry, heads = self.entries[name], self._of.order(name)
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.end - entry.start, offset=entry.start)
        if heads is None:
            return flat.view(entry.shape[0] if len(entry.shape) > 1 else 1, -1)
        n = self._heads[heads]
        if entry.shape[0] % (2 * n):
            raise ModelError(
                f"{self.path}: tensor {name} must have rows for {n} heads of an even width, got {entry.shape[0]}"
            )
        return flat.view(n, entry.shape[0] // n // 2, 2, -1).transpose(1, 2).flatten(0, 2)
