"""Vectors of texts as results carry them: base64 of little-endian numbers. Reading them needs no numpy.

dense     `vectors`: one a text (`Vectors`)
sparse    `sparse`: a weight for each of a text's words (`SparseVectors`): how many there are, as a uint32; then
          the tokens, a uint32 each, ascending; then a float32, the weight, for each
colbert   `colbert`: one a token (`TokenVectors`): all but the first token's, one after the other

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

DENSE, SPARSE, COLBERT = "dense", "sparse", "colbert"
Output = Literal["dense", "sparse", "colbert"]
FIELDS: dict[str, str] = {DENSE: "vectors", SPARSE: "sparse", COLBERT: "colbert"}
"""The fields of deltas and results, by the names of outputs."""

MOST_BYTES = 16 * 2**20
"""The most bytes of all vectors of a result, as JSON. Above 32 MB, Redis drops a subscriber that reads slowly."""
MOST_TEXTS = 10_000
"""The most texts of one task."""
_BESIDE = 12  # quotes, commas and the number of tokens of a text


def n_bytes(dimensions: int, encoding: Encoding) -> int:
    """The bytes of one vector, before base64."""
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
    return min(MOST_TEXTS, MOST_BYTES // _sent(n_bytes(dimensions, encoding)))


def how_many_fit(
    tokens: Sequence[int], outputs: Sequence[str], dimensions: int, of_tokens: int, encoding: Encoding
) -> int:
    """How many texts of these numbers of tokens a result holds. dimensions: of the vector of a text; of_tokens: of
    a token."""
    total = 0
    for k, n in enumerate(tokens):
        total += _sent(n_bytes(dimensions, encoding)) if DENSE in outputs else 0
        total += _sent(4 + 8 * n) if SPARSE in outputs else 0
        total += _sent(max(0, n - 1) * n_bytes(of_tokens, encoding)) if COLBERT in outputs else 0
        if total > MOST_BYTES or k == MOST_TEXTS:
            return k
    return len(tokens)


def _sent(n: int) -> int:
    """The length of n bytes as JSON."""
    return -(-n // 3) * 4 + _BESIDE


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
        """Reads the dictionary that a task returns. Raises ValueError if it has no vectors."""
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
        whole = numpy.frombuffer(b"".join(self.bytes()), numpy.uint8).reshape(
            len(self), n_bytes(self.dimensions, self.encoding)
        )
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


@dataclass(frozen=True)
class SparseVectors(Sequence[dict[int, float]]):
    """The sparse vectors of a result of `embed` with the output "sparse", in the order of the texts: a sequence of
    weights by token."""

    data: Sequence[str]

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> SparseVectors:
        """Reads the dictionary that a task returns. Raises ValueError if it has no such vectors."""
        return cls(_field(result, "sparse"))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return SparseVectors(self.data[index])
        data = base64.b64decode(self.data[index])
        (n,) = struct.unpack_from("<I", data)
        return dict(
            zip(struct.unpack_from(f"<{n}I", data, 4), struct.unpack_from(f"<{n}f", data, 4 + 4 * n), strict=True)
        )

    def numpy(self) -> list[tuple[Any, Any]]:
        """For each text its tokens, uint32, and their weights, float32. Needs numpy."""
        numpy = import_module("numpy")
        parts = [numpy.frombuffer(base64.b64decode(one), numpy.uint8)[4:].reshape(2, -1) for one in self.data]
        return [(part[0].view("<u4"), part[1].view("<f4")) for part in parts]


@dataclass(frozen=True)
class TokenVectors(Sequence[Vectors]):
    """The vectors of tokens of a result of `embed` with the output "colbert", in the order of the texts: a
    sequence of `Vectors`, with one for each token of a text but its first."""

    data: Sequence[str]
    dimensions: int
    encoding: Encoding = "float32"

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> TokenVectors:
        """Reads the dictionary that a task returns. Raises ValueError if it has no such vectors."""
        data = _field(result, "colbert")
        return cls(data, int(result["token_dimensions"]), result.get("encoding") or "float32")

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return TokenVectors(self.data[index], self.dimensions, self.encoding)
        data, size = base64.b64decode(self.data[index]), n_bytes(self.dimensions, self.encoding)
        parts = [base64.b64encode(data[at : at + size]).decode() for at in range(0, len(data), size)]
        return Vectors(parts, self.dimensions, self.encoding)

    def numpy(self) -> list[Any]:
        """For each text float32 [tokens - 1, dimensions]; of bits uint8. Needs numpy."""
        return [self[k].numpy() for k in range(len(self))]


def _field(result: Mapping[str, Any], name: str) -> list[str]:
    data = result.get(name)
    if not isinstance(data, list):
        raise ValueError(f"result: must be that of embed with outputs={[name]}")
    return data
