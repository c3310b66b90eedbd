"""Vectors of texts as results carry them: base64 of little-endian numbers. Reading them needs no numpy.

float32   4 bytes a number
float16   2 bytes a number
int8      a float32, the scale, and then a signed byte for each number: the number is scale * byte
bits      a bit for each number, set where the number is above 0; the first number is a byte's highest bit
"""

from __future__ import annotations

import array
import base64
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

Encoding = Literal["float32", "float16", "int8", "bits"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)

MOST_BYTES = 16 * 2**20
"""Of all vectors of a result, as JSON. Above 32 MB, Redis drops a subscriber that reads slowly."""
MOST_TEXTS = 10_000
"""Of one task."""
_BESIDE = 12  # quotes, commas and the number of tokens of a text


def n_bytes(dimensions: int, encoding: Encoding) -> int:
    """Of one vector, before base64."""
    match encoding:
        case "float32":
            return 4 * dimensions
        case "float16":
            return 2 * dimensions
        case "int8":
            return 4 + dimensions
        case "bits":
            return -(-dimensions // 8)


def most_texts(dimensions: int, encoding: Encoding) -> int:
    """How many vectors a result holds."""
    each = -(-n_bytes(dimensions, encoding) // 3) * 4 + _BESIDE
    return min(MOST_TEXTS, MOST_BYTES // each)


@dataclass(frozen=True)
class Vectors(Sequence[list[float]]):
    """The vectors of a result of `embed`, in the order of the texts: a sequence of lists.

    vectors = Vectors.of(embed.delay(texts=["a", "b"]).get())
    vectors[0], vectors.numpy()
    """

    data: Sequence[str]
    dimensions: int
    encoding: Encoding = "float32"

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Vectors:
        """Of the dictionary that a task returns. Raises ValueError if it has no vectors."""
        if not isinstance(result.get("vectors"), list) or "dimensions" not in result:
            raise ValueError("result: must be that of embed, with vectors and dimensions")
        return cls(result["vectors"], int(result["dimensions"]), result.get("encoding") or "float32")

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[list[float]]:
        return (self._numbers(one) for one in self.data)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Vectors(self.data[index], self.dimensions, self.encoding)
        return self._numbers(self.data[index])

    def lists(self) -> list[list[float]]:
        """The numbers; of bits 0 and 1."""
        return list(self)

    def bytes(self) -> list[bytes]:
        """As they were sent, without base64."""
        return [base64.b64decode(one) for one in self.data]

    def numpy(self) -> Any:
        """float32 [texts, dimensions]; of bits uint8 [texts, bytes], as FAISS takes them. Needs numpy, which this
        package does not import before."""
        numpy = import_module("numpy")
        whole = numpy.frombuffer(b"".join(self.bytes()), numpy.uint8).reshape(len(self), -1)
        if self.encoding == "bits":
            return whole
        if self.encoding == "int8":
            scales = numpy.ascontiguousarray(whole[:, :4]).view("<f4")
            return (scales * whole[:, 4:].view(numpy.int8)).astype(numpy.float32)
        return whole.view("<f4" if self.encoding == "float32" else "<f2").astype(numpy.float32)

    def _numbers(self, text: str) -> list[float]:
        data = base64.b64decode(text)
        match self.encoding:
            case "float16":
                return list(struct.unpack(f"<{len(data) // 2}e", data))
            case "int8":
                (scale,) = struct.unpack_from("<f", data)
                return [scale * code for code in array.array("b", data[4:])]
            case "bits":
                bits = "".join(f"{byte:08b}" for byte in data)
                return [float(bit) for bit in bits[: self.dimensions]]
        numbers = array.array("f", data)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers.tolist()
