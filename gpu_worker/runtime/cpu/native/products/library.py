"""`Library`: torch's own products (oneDNN), as `library.c` calls them, over weights that `pack.c` has packed.

oneDNN needs weights in bfloat16 in an order of its own. When it packs a matrix, it names the order for that shape.
If the order is the blocks of 32 or 64 outputs that pack.c can write, both read the same memory: no weight is kept
twice, and for each number of rows the quicker one can multiply."""

from __future__ import annotations

import ctypes
import logging
import weakref
from ctypes import c_int32, c_int64, c_uint8, c_void_p
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger(__name__)

BLOCKS = (32, 64)
"""Outputs side by side in a block of the library's order, on processors with and without AMX."""
NEVER = 1 << 62
_CPU = 0


class _Description(ctypes.Structure):
    """What oneDNN says of a tensor's order (its `dnnl_memory_desc`)."""

    _fields_ = [
        ("n_dims", c_int32),
        ("dims", c_int64 * 12),
        ("type", c_int32),
        ("padded_dims", c_int64 * 12),
        ("padded_offsets", c_int64 * 12),
        ("offset", c_int64),
        ("format", c_int32),
        ("strides", c_int64 * 12),
        ("n_blocks", c_int32),
        ("blocks", c_int64 * 12),
        ("block_dims", c_int64 * 12),
    ]


class _LibraryStruct(ctypes.Structure):
    _fields_ = [
        ("from_memory", c_void_p),
        ("multiply", c_void_p),
        ("data_of", c_void_p),
        ("release", c_void_p),
        ("dtype", c_int32),
    ]


class Library:
    """torch's C interface. Make it with `open_library`."""

    def __init__(self, torch_cpu: ctypes.CDLL) -> None:
        self._create = torch_cpu.aoti_torch_create_tensor_from_blob_v2
        self._release = torch_cpu.aoti_torch_delete_tensor_object
        self._bfloat16 = torch_cpu.aoti_torch_dtype_bfloat16()
        self._mkldnn = torch_cpu.aoti_torch_layout__mkldnn()
        self._struct = _LibraryStruct(
            _address(torch_cpu.aoti_torch_create_tensor_from_blob),
            _address(torch_cpu.aoti_torch_cpu__linear_pointwise),
            _address(torch_cpu.aoti_torch_get_data_ptr),
            _address(torch_cpu.aoti_torch_delete_tensor_object),
            self._bfloat16,
        )
        self._orders: dict[tuple[int, int], torch.Tensor | None] = {}

    @property
    def address(self) -> int:
        return ctypes.addressof(self._struct)

    def takes(self, n: int, k: int) -> bool:
        """Whether the library's weights [n, k] lie as the C kernels' weights do."""
        return self.block(n, k) is not None

    def block(self, n: int, k: int) -> int | None:
        """How many outputs lie side by side in the library's weights [n, k]; None if the C kernels have no such
        order."""
        order = self._order(n, k)
        if order is None:
            return None
        found = _Description.from_buffer_copy(bytes(order.tolist()))
        if found.n_blocks not in (2, 3):
            return None
        inner = list(zip(found.blocks, found.block_dims, strict=True))[: found.n_blocks]
        (pairs, _), (block, _), pair = [(1, 1)] * (3 - len(inner)) + inner
        usual = [dim for _, dim in inner] == [1, 0, 1][3 - len(inner) :] and pair == (2, 1)
        in_order = tuple(found.strides[:2]) == (block * k, block * pairs * 2)
        return block if usual and in_order and block in BLOCKS and n % block == 0 else None

    def weights(self, address: int, n: int, k: int, owner: object) -> int:
        """A handle for the packed weights [n, k] at `address`, for as long as `owner` lives."""
        order = self._order(n, k)
        assert order is not None
        handle = c_void_p()
        metadata = (c_uint8 * order.numel())(*order.tolist())
        failed = self._create(
            c_void_p(address),
            c_int64(2),
            (c_int64 * 2)(n, k),
            (c_int64 * 2)(k, 1),
            c_int64(0),
            c_int32(self._bfloat16),
            c_int32(_CPU),
            c_int32(0),
            ctypes.byref(handle),
            c_int32(self._mkldnn),
            metadata,
            c_int64(len(metadata)),
        )
        if failed or not handle.value:
            raise RuntimeError(f"torch makes no tensor of packed weights [{n}, {k}]")
        weakref.finalize(owner, self._release, c_void_p(handle.value))
        return handle.value

    def _order(self, n: int, k: int) -> torch.Tensor | None:
        """oneDNN's name for the order of weights [n, k]; None if they take another amount of memory than here."""
        if (n, k) not in self._orders:
            packed = torch.ops.mkldnn._reorder_linear_weight(torch.empty(n, k, dtype=torch.bfloat16), None)
            same = torch.ops.mkldnn._nbytes(packed) == 2 * n * k
            self._orders[n, k] = torch.ops.mkldnn._get_mkldnn_serialized_md(packed) if same else None
        return self._orders[n, k]


@cache
def open_library() -> Library | None:
    """The library; None if this torch has no such products."""
    try:
        (path,) = (Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*")
        library = Library(ctypes.CDLL(str(path)))
        return library if library.takes(64, 64) else None
    except (AttributeError, OSError, RuntimeError, ValueError) as error:
        log.info("torch's packed products cannot be used on this machine: %s", str(error).split("\n")[0])
        return None


def _address(function: object) -> int | None:
    return ctypes.cast(function, c_void_p).value  # type: ignore[arg-type]
