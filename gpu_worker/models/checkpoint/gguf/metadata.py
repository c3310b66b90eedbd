"""Keys of a GGUF file's metadata, checked."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.models.checkpoint.gguf.header import GgufHeader

_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class Metadata:
    """name: of the architecture, before its own keys."""

    header: GgufHeader
    name: str

    def has(self, key: str) -> bool:
        return f"{self.name}.{key}" in self.header.metadata

    def get(self, key: str, default: Any = None) -> Any:
        return self.header.metadata.get(f"{self.name}.{key}", default)

    def whole(self, key: str, default: int | None = None, low: int = 1, high: int = _LIMIT) -> int:
        """Raises ModelError, as all of these, for another value."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.wrong(key, f"be a whole number from {low} to {high}", shown(value))
        return value

    def of_layers(self, key: str, n: int, default: int) -> list[int]:
        """A number for each of the first n layers; the file may have one for all."""
        value = self.get(key, default)
        if isinstance(value, list) and len(value) == self.get("block_count"):
            value = value[:n]
        found = value if isinstance(value, list) else [value] * n
        if len(found) != n or not all(type(one) is int and 0 <= one <= _LIMIT for one in found):
            raise self.wrong(
                key, f"be a whole number from 0 to {_LIMIT}, or one for each of {n} layers", shown(value)
            )
        return found

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
            raise self.wrong(key, "be a number", shown(value))
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.wrong(key, "be true or false", shown(value))
        return value

    def floats(self, name: str, n: int) -> list[float]:
        """The n numbers of a tensor of the file."""
        stored = self.header.tensors[name]
        if (stored.kind, stored.shape) != ("F32", (n,)):
            got = f"{stored.kind} {list(stored.shape)}"
            raise ModelError(f"{self.header.path}: tensor {name} must be F32 [{n}], got {got}")
        with stored.path.open("rb") as file:
            file.seek(stored.start)
            return list(struct.unpack(f"<{n}f", file.read(4 * n)))

    def wrong(self, key: str, limit: str, got: object) -> ModelError:
        return ModelError(f"{self.header.path}: {self.name}.{key} must {limit}, got {got}")
