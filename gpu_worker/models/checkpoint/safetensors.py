"""Checkpoint files, memory-mapped and read tensor by tensor.

A tensor is a view of the mapped file and is copied only once, to its destination. `release` then tells the system
that the file's pages are no longer needed, so a load never holds the weights twice.
"""

from __future__ import annotations

import math
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import (
    MAX_BYTES,
    check_disjoint,
    check_file,
    inside,
    parsed,
    read_json,
    shown,
)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types of plain weights."""

STORED_DTYPES = DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""And those of quantised weights, which mean nothing without the tensors beside them."""

MAX_HEADER_BYTES = 2**25
"""About 250,000 tensors. JSON takes up to twenty times as many bytes in memory."""
_MAX_DIMENSIONS = 8
_MAX_SIZE = 2**63 - 1


@dataclass(frozen=True, slots=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def _entry(raw: Any, data: int) -> TensorEntry:
    """The header's entry for a tensor. `data`: the byte from which offsets count. Raises ValueError for an
    impossible entry."""
    shape, offsets = raw["shape"], raw["data_offsets"]
    named = str(raw["dtype"])
    if not (0 < len(named) <= 20 and named.isidentifier()):
        raise ValueError(f"dtype must be the name of a type, got {shown(raw['dtype'])}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMENSIONS:
        limit = f"at most {_MAX_DIMENSIONS} whole numbers from 0 to {_MAX_SIZE}"
        raise ValueError(f"shape must be {limit}, got {shown(shape)}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        limit = f"two whole numbers from 0 to {_MAX_SIZE} in order"
        raise ValueError(f"data_offsets must be {limit}, got {shown(offsets)}")
    entry = TensorEntry(named, tuple(shape), *(data + offset for offset in offsets))
    dtype = STORED_DTYPES.get(entry.dtype)
    n_bytes = entry.end - entry.start
    if dtype is not None and math.prod(entry.shape) * dtype.itemsize != n_bytes:
        raise ValueError(f"{n_bytes} bytes for {entry.dtype} {list(entry.shape)}")
    return entry


def _are_sizes(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= _MAX_SIZE for value in values)


def _reason(error: Exception) -> str:
    """In a line that does not repeat the file, as the `repr` of a UnicodeDecodeError would."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said if len(said) <= 400 else said[:400] + '…'}"


_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""Linux reserves no memory for pages that might be written: a file may be larger than the memory."""


def contents(path: Path, *, mapped: bool = True) -> mmap.mmap | bytearray:
    """A private copy of the file: torch wants memory that it may write to. Raises ModelError."""
    try:
        with path.open("rb") as file:
            if not mapped:
                return bytearray(file.read())
            return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE | _NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None


class TensorFile(ABC):
    """A file with tensors, mapped into memory. entries: by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, TensorEntry] = {}
        self._map: mmap.mmap | bytearray = bytearray()

    @abstractmethod
    def tensor(self, name: str) -> Tensor:
        """Plain weights, perhaps as a view of the mapped file. Do not store it."""

    @abstractmethod
    def stored(self, name: str) -> Tensor:
        """A tensor as it is stored, quantised or not. Do not store it."""

    @abstractmethod
    def copy(self, name: str, into: Tensor) -> None:
        """Plain weights, in the type of `into`. On the "meta" device only the type is checked."""

    def sample(self, name: str, n_bytes: int = 256) -> bytes:
        """The first bytes of a tensor, for a fingerprint."""
        entry = self.entries[name]
        return bytes(self._map[entry.start : min(entry.end, entry.start + n_bytes)])

    def chunks(self, name: str, n_bytes: int = 2**24) -> Iterator[bytes]:
        """The bytes of a tensor, in chunks."""
        entry = self.entries[name]
        for start in range(entry.start, entry.end, n_bytes):
            yield bytes(self._map[start : min(start + n_bytes, entry.end)])
            self.release(name)

    def release(self, name: str) -> None:
        if isinstance(self._map, mmap.mmap) and hasattr(self._map, "madvise"):
            entry = self.entries[name]
            start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, entry.end - start)


class SafetensorsFile(TensorFile):
    """One file of a checkpoint. Opening it checks that every tensor lies inside the file.

    `mapped` False: read it into memory instead. Truncating a mapped file while it is read kills the process.
    `most`: bytes of the file.
    """

    def __init__(self, path: Path, *, mapped: bool = True, most: int | None = None) -> None:
        super().__init__(path)
        if not path.exists():
            raise ModelError(f"{path} is missing")
        check_file(path, most)
        self._map = contents(path, mapped=mapped)
        self.entries = self._read_header()

    def _read_header(self) -> dict[str, TensorEntry]:
        size = len(self._map)
        length = int.from_bytes(self._map[:8], "little") if size >= 8 else -1
        if MAX_HEADER_BYTES < length <= size - 8:
            raise ModelError(f"{self.path}: its header must have at most {MAX_HEADER_BYTES} bytes, got {length}")
        if not 0 < length <= size - 8:
            raise ModelError(f"{self.path} is not a safetensors file, or is truncated ({size} bytes)")
        at = ""
        try:
            header: dict[str, Any] = parsed(self._map[8 : 8 + length].decode())
            header.pop("__metadata__", None)
            entries = {}
            for name, raw in header.items():
                at = f"tensor {shown(name)}: "
                entries[name] = _entry(raw, 8 + length)
            at = ""
            check_disjoint(entries)
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise ModelError(f"{self.path} has a damaged header: {at}{_reason(error)}") from None
        end = max((entry.end for entry in entries.values()), default=0)
        if end > size:
            raise ModelError(f"{self.path} is truncated: {size} bytes, its header promises {end}")
        return entries

    def tensor(self, name: str) -> Tensor:
        return self._view(name, DTYPES)

    def stored(self, name: str) -> Tensor:
        return self._view(name, STORED_DTYPES)

    def _view(self, name: str, types: Mapping[str, torch.dtype]) -> Tensor:
        """types: those that the caller can read."""
        entry = self.entries[name]
        if entry.dtype not in types:
            known = ", ".join(types)
            raise ModelError(f"{self.path}: tensor {name} must be of type {known}, got {entry.dtype}")
        dtype = types[entry.dtype]
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.start % dtype.itemsize:
            return torch.frombuffer(bytearray(self._map[entry.start : entry.end]), dtype=dtype).view(entry.shape)
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.start)
        return flat.view(entry.shape)

    def copy(self, name: str, into: Tensor) -> None:
        tensor = self.tensor(name)
        if into.device.type != "meta":
            into.copy_(tensor)


class Checkpoint:
    """All tensors of a model folder, in one file or in the shards of its index. files: in place of these. modules:
    folders and files inside it whose tensors belong to the model, too: with the folder before their names, as
    `2_Dense/linear.weight`, or with the file, as `sparse_linear.weight`."""

    def __init__(self, folder: Path, files: Sequence[TensorFile] = (), modules: Sequence[str] = ()) -> None:
        self.folder = folder
        self.files = list(files) or [SafetensorsFile(path) for path in _weight_files(folder)]
        for module in modules:
            where, stem = folder / module, module.removesuffix(".safetensors")
            alone = stem != module
            of_module = [SafetensorsFile(path) for path in ([where] if alone else _weight_files(where))]
            before = f"{stem}." if alone else f"{module}/"
            for file in of_module:
                file.entries = {before + name: entry for name, entry in file.entries.items()}
            self.files += of_module
        self._file_of = {name: file for file in self.files for name in file.entries}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.files = []
        self._file_of = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        return sorted(self._file_of)

    def entry(self, name: str) -> TensorEntry:
        return self._owner(name).entries[name]

    def sample(self, name: str) -> bytes:
        return self._owner(name).sample(name)

    def n_bytes(self) -> int:
        return sum(entry.end - entry.start for file in self.files for entry in file.entries.values())

    def copy(self, name: str, into: Tensor) -> int:
        """Copy a tensor to `into`, converting its dtype. Returns its number of bytes in the file. On the
        "meta" device it only checks shape and dtype."""
        file, entry = self._owner(name), self.entry(name)
        if not filled(f"{file.path}: tensor {name}", lambda: file.copy(name, into), into, shape=entry.shape):
            return 0
        file.release(name)
        return entry.end - entry.start

    def stored(self, name: str) -> Tensor:
        """A view of a tensor as it is stored, quantised or not. Do not keep it; call `done` after its use."""
        return self._owner(name).stored(name)

    def done(self, name: str) -> int:
        """A `stored` tensor has been read. Returns its number of bytes in the file."""
        self._owner(name).release(name)
        entry = self.entry(name)
        return entry.end - entry.start

    def same(self, name: str, other: str) -> bool:
        """Whether two tensors are bitwise equal."""
        one, two = self.entry(name), self.entry(other)
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            return False
        pieces = zip(self._owner(name).chunks(name), self._owner(other).chunks(other), strict=True)
        return all(left == right for left, right in pieces)

    def _owner(self, name: str) -> TensorFile:
        try:
            return self._file_of[name]
        except KeyError:
            raise ModelError(f"{self.folder} has no tensor {name}") from None


def put(what: str, tensor: Tensor, into: Tensor, shape: tuple[int, ...]) -> bool:
    """`filled` with this tensor."""
    return filled(what, lambda: into.copy_(tensor), into, shape)


def filled(what: str, fill: Callable[[], object], into: Tensor, shape: tuple[int, ...]) -> bool:
    """Fill a tensor with finite numbers; False on the "meta" device, where this only checks the shape, and what
    `fill` checks. what: for messages."""
    if shape != tuple(into.shape):
        raise ModelError(f"{what} must have shape {list(into.shape)}, got {list(shape)}")
    fill()
    if into.device.type == "meta":
        return False
    extremes = torch.stack(torch.aminmax(into)).tolist() if into.numel() else []  # reads once, copies nothing
    if not all(map(math.isfinite, extremes)):
        raise ModelError(f"{what} must have finite numbers in {into.dtype}, got inf or NaN")
    return True


def _weight_files(folder: Path) -> list[Path]:
    """The files of a folder's weights. A head that drafts may have one of its own beside a single file, which
    programs without drafts do not read."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single, *folder.glob("mtp.safetensors")]
    if index.exists():
        given = read_json(index, MAX_BYTES).get("weight_map")
        if not isinstance(given, dict) or not all(isinstance(name, str) for name in given.values()):
            raise ModelError(f"{index}: weight_map must be names of files by tensor, got {shown(given)}")
        return [inside(folder, name, f"{index}: weight_map") for name in sorted(set(given.values()))]
    other = sorted(path.name for path in folder.glob("*.bin"))
    hint = f"; {other[0]} is a pickle, convert it to safetensors" if other else ""
    raise ModelError(f"{folder} has neither model.safetensors nor model.safetensors.index.json{hint}")
