"""The beginning of a GGUF file: metadata, and a table of its tensors. All numbers are little-endian.

magic, version (uint32), number of tensors, number of entries (uint64)
entry    key, type (uint32), value; an array is its type, its length and its values
tensor   name, number of dimensions (uint32), sizes (the innermost first), type (uint32), offset (uint64)

The data follow at a multiple of `general.alignment`, one tensor behind the other, each at such a multiple."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import count
from pathlib import Path
from threading import Lock
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import check_disjoint, check_file, shown
from petiole.gpu_worker.models.checkpoint.gguf.block_types import NAMES, TYPES
from petiole.gpu_worker.models.checkpoint.gguf.choosing import pieces_of

MAGIC = b"GGUF"

_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_MOST_ENTRIES, _MOST_TENSORS, _MOST_VALUES, _MOST_BYTES = 10_000, 100_000, 2**22, 2**24
"""Values: of all arrays together. Each takes some fifty bytes in memory."""
_MOST_HEADER = 2**28
"""Bytes of the whole header: the largest vocabularies take 20 MB."""
_MAX_DIMENSIONS = 4
_ALIGNMENTS = [2**i for i in range(21)]
_READING = Lock()
"""Weights and tokenizer are made by two threads at the same time: the second one finds what the first has read."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of the file. kind: the name of its type. shape: the outermost size first. start, end: its bytes in
    the file `path`."""

    kind: str
    shape: tuple[int, ...]
    start: int
    end: int
    path: Path


@dataclass(frozen=True)
class GgufHeader:
    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @cached_property
    def token_ids(self) -> Mapping[str, int]:
        """The vocabulary. Of several tokens with one text it has the last, as llama.cpp has."""
        texts = self.metadata.get("tokenizer.ggml.tokens")
        return dict(zip(texts, count(), strict=False)) if isinstance(texts, list) else {}


def read_whole(path: Path) -> GgufHeader:
    """The metadata of a model's first piece, and the tensors of all. Raises ModelError."""
    first, *more = (read_header(piece) for piece in pieces_of(path))
    said = first.metadata.get("split.count", 1)
    if said not in (0, 1, 1 + len(more)):
        raise ModelError(
            f"{path}: split.count must be {1 + len(more)}, as the file's name says, got {shown(said)}"
        )
    tensors = dict(first.tensors)
    for piece in more:
        if twice := tensors.keys() & piece.tensors.keys():
            raise ModelError(f"{piece.path} repeats tensor {min(twice)} of another piece")
        tensors |= piece.tensors
    if len(tensors) != (promised := first.metadata.get("split.tensors.count", len(tensors))):
        raise ModelError(f"{path}: its pieces must have {shown(promised)} tensors together, got {len(tensors)}")
    return GgufHeader(first.path, first.metadata, tensors) if more else first


def read_header(path: Path) -> GgufHeader:
    """The header of one file. Raises ModelError, in one line, for a damaged file and for tensors of unknown
    types."""
    check_file(path)
    try:
        found = path.stat()
        with _READING:
            return _read(path, (found.st_ino, found.st_mtime_ns, found.st_size))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


@lru_cache(maxsize=16)
def _read(path: Path, content: tuple[int, ...]) -> GgufHeader:
    """content: tells the file from another one of this name."""
    with path.open("rb") as file:
        if file.read(4) != MAGIC:
            raise ModelError(f"{path} is not a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _HeaderReader(path, data).header()
            except (ValueError, struct.error, OverflowError) as error:
                if isinstance(error, ModelError):
                    raise
                raise ModelError(f"{path} has a damaged header: {error}") from None


class _HeaderReader:
    """Reads from the front to the back."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at, self._values = path, data, len(MAGIC), 0

    def header(self) -> GgufHeader:
        version = self._number("I")
        if version and not version & 0xFFFF:
            raise ModelError(f"{self._path} is big-endian: take a file in little-endian order")
        if version not in _VERSIONS:
            known = " or ".join(map(str, _VERSIONS))
            raise ModelError(f"{self._path}: GGUF's version must be {known}, got {version}")
        n_tensors = self._count("tensors", _MOST_TENSORS)
        metadata: dict[str, Any] = {}
        for _ in range(self._count("entries", _MOST_ENTRIES)):
            key = self._text()
            if key in metadata:
                raise ValueError(f"two entries {shown(key)}")
            try:
                metadata[key] = self._value(self._number("I"))
            except ValueError as error:
                raise error if isinstance(error, ModelError) else ValueError(f"{shown(key)}: {error}") from None
        raw = [self._tensor() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment not in _ALIGNMENTS:
            limit = f"must be a power of two from 1 to {_ALIGNMENTS[-1]}"
            raise ValueError(f"general.alignment {limit}, got {shown(alignment)}")
        begin = -(-self._at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, kind, shape, offset in raw:
            if name in tensors:
                raise ValueError(f"two tensors {shown(name)}")
            tensors[name] = self._stored(name, kind, shape, begin + offset)
        check_disjoint(tensors)
        self._check_no_gaps(tensors, begin, alignment)
        return GgufHeader(self._path, metadata, tensors)

    @staticmethod
    def _check_no_gaps(tensors: Mapping[str, GgufTensor], begin: int, alignment: int) -> None:
        """As llama.cpp. A gap means that a size or a type is damaged: the tensor before it has other numbers."""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
            if tensor.start != begin:
                raise ValueError(
                    f"tensor {shown(name)} must begin at byte {begin}, behind the one before, got {tensor.start}"
                )
            begin = tensor.start + -(-(tensor.end - tensor.start) // alignment) * alignment

    def _stored(self, name: str, number: int, shape: tuple[int, ...], start: int) -> GgufTensor:
        kind = NAMES.get(number, str(number))
        if kind not in TYPES:
            raise ModelError(
                f"{self._path}: tensor {shown(name)} must be of type {', '.join(TYPES)}, got {kind};"
                f" take the file in Q8_0 or Q4_K_M, or the checkpoint in safetensors"
            )
        block = TYPES[kind]
        if len(shape) == 1 and block.quantised:
            raise ValueError(f"tensor {shown(name)} of one dimension must be F32, F16 or BF16, got {kind}")
        if shape[-1] % block.values:
            raise ValueError(f"tensor {shown(name)}: {shape[-1]} inputs in blocks of {block.values}")
        end = start + math.prod(shape) // block.values * block.n_bytes
        if end > len(self._data):
            raise self._truncated(f", its header promises {end}")
        return GgufTensor(kind, shape, start, end, self._path)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, dimensions = self._text(), self._number("I")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            raise ValueError(f"tensor {shown(name)}: {dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(dimensions))[::-1]
        if not all(1 <= size <= 2**40 for size in shape):
            raise ValueError(f"tensor {shown(name)}: sizes {shown(list(shape))}")
        return name, self._number("I"), shape, self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            raise ValueError(f"values of type {kind}")
        inner, n = self._number("I"), self._count("values", _MOST_VALUES)
        self._values += n
        if self._values > _MOST_VALUES:
            raise ValueError(f"must have at most {_MOST_VALUES} values in all arrays, got {self._values}")
        if inner == _STRING:
            return self._texts(n)
        if inner not in _SCALARS:
            raise ValueError(f"arrays of type {inner}")
        code = _SCALARS[inner]
        return list(struct.unpack(f"<{n}{code}", self._bytes(n * struct.calcsize(code))))

    def _texts(self, n: int) -> list[str]:
        """Vocabularies have hundreds of thousands, so each takes few steps."""
        data, at, length_at, found = self._data, self._at, _LENGTH.unpack_from, list[str]()
        most = min(len(data), _MOST_HEADER)
        for _ in range(n):
            begin = at + _LENGTH.size
            end = begin + length_at(data, at)[0] if begin <= most else begin
            if end > most or end - begin > _MOST_BYTES:
                break  # the error is that of `_text`
            found.append(data[begin:end].decode())
            at = end
        self._at = at
        return found if len(found) == n else [*found, self._text()]

    def _text(self) -> str:
        return self._bytes(self._count("bytes of text", _MOST_BYTES)).decode()

    def _truncated(self, found: str) -> ModelError:
        return ModelError(f"{self._path} is truncated: {len(self._data)} bytes{found}; fetch it again")

    def _count(self, what: str, most: int) -> int:
        n: int = self._number("Q")
        if n > most:
            raise ValueError(f"must have at most {most} {what}, got {n}")
        return n

    def _number(self, code: str) -> Any:
        (found,) = struct.unpack(f"<{code}", self._bytes(struct.calcsize(code)))
        return found

    def _bytes(self, n: int) -> bytes:
        start, self._at = self._at, self._at + n
        if self._at > len(self._data):
            raise self._truncated(" end within its header")
        if self._at > _MOST_HEADER:
            raise ModelError(f"{self._path}: its header must have at most {_MOST_HEADER} bytes, got {self._at}")
        return self._data[start : self._at]
