"""Captured decodes whose rows are cut along their keys, so that a long row costs its bytes and no more.

A row is cut into pieces by its own length alone (`piece_length`). So its output has the same bits alone and in any
batch, of whatever lengths, and in every captured size that is split here. A piece and a head of keys is an item. A
launch has as many programs as the card runs at a time, and each computes the items program, program + programs,
and so on. The host knows neither the number of items nor their lengths.

    cut      once a step: for each row its pieces, in a list that begins with the longest ones, so that programs
             end together
    attend   in each layer: the items. The only piece of a row writes the row's output. Every other piece writes
             its part, and the logarithm of the sum of its weights
    merge    in each layer: the parts of a row, in order, to the row's output

The kernels are in `fused.split`. No card has timed them, see `supported.tried`. Arithmetic, for the 396
programs of an H100: 256 rows with 8 heads of keys, one of 32,768 positions and the others of 128, are 256 items of
1,024 positions and 2,040 of 128. A multiprocessor gets two long items and some 15 short ones, and so 3,968
positions; the mean is 3,964. Unsplit, the long row alone is 32,768 positions for each of eight programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.runtime.cuda.attention.flashinfer import AttentionKind, Geometry, PageList, fills_the_card
from petiole.gpu_worker.runtime.cuda.fused.split.pieces import FIELDS, Pieces, SplitLayers, most_pieces
from petiole.gpu_worker.runtime.cuda.shapes import Shape
from petiole.gpu_worker.runtime.cuda.supported import tried
from petiole.gpu_worker.runtime.device.cuda import capability

_HEAD_SIZES = (64, 128, 256)
_MOST_QUERIES = 16
"""For each head of keys. With more, sums do not fit into registers."""


def has_kernel(kind: AttentionKind, queries: int = 1) -> bool:
    """Whether `fused.split` computes decodes of so many positions a row."""
    group = kind.heads // kind.kv_heads
    return kind.rank == 0 and kind.head_dim in _HEAD_SIZES and group * queries <= _MOST_QUERIES


def is_chosen(geometry: Geometry, shape: Shape) -> bool:
    """Whether captured decodes of this shape are split here. FlashInfer splits rows itself as long as they do not
    fill the card."""
    return tried("split") and all(
        has_kernel(kind, shape.queries) and fills_the_card(geometry, kind, shape.rows) for kind in geometry.kinds
    )


def workspace_bytes(kinds: Iterable[AttentionKind], shapes: Sequence[Shape], longest: int) -> int:
    """The most that a layer of any of these takes. longest: maximum positions of a row."""
    sizes = [
        part_bytes(kind, shape.rows, shape.queries, longest)
        for kind in kinds
        for shape in shapes
        if shape.queries and has_kernel(kind, shape.queries)
    ]
    return max(sizes, default=0) if tried("split") else 0


def list_bytes(rows: int, longest: int) -> int:
    """Memory for the list of a step."""
    return 4 * rows * most_pieces(longest) * FIELDS


def part_bytes(kind: AttentionKind, rows: int, queries: int, longest: int) -> int:
    """Memory for the parts of a layer."""
    return 4 * rows * queries * most_pieces(longest) * kind.heads * (kind.head_dim + 1)


def programs_at_once(kind: AttentionKind, queries: int, card: tuple[int, int]) -> int:
    """On a multiprocessor, by its shared memory, which holds one of 66 KiB (3090, 4090), two (A100) or three
    (H100), and by its registers, which hold two with wide heads or many queries."""
    few = kind.head_dim <= 128 and kind.heads // kind.kv_heads * queries <= 8
    fit = 3 if (9, 0) <= card < (12, 0) else 2 if card == (8, 0) else 1
    return min(fit, 3 if few else 2)


class SplitWrappers:
    """The captured decodes of one slot at one batch size. See `flashinfer.DecodeWrappers`, whose interface this
    has."""

    def __init__(
        self, geometry: Geometry, size: int, workspace: Tensor, indices: Sequence[Tensor], queries: int = 1
    ) -> None:
        self.geometry = geometry
        self.indptr = torch.zeros((len(indices), size + 1), dtype=torch.int32, device=geometry.device)
        self.last_page_len = torch.ones(size, dtype=torch.int32, device=geometry.device)
        self.wrappers = {
            kind: SplitWrapper.over(workspace, geometry, kind, size, queries, indices[kind.group])
            for kind in geometry.kinds
        }

    def plan(self, lists: Sequence[PageList], last_page_len: Tensor) -> None:
        """Plan a step. lists: of each group, with the indices that were given before; last_page_len: pinned.
        Nothing waits."""
        for kept, pages in zip(self.indptr, lists, strict=True):
            kept.copy_(pages.indptr, non_blocking=True)
        self.last_page_len.copy_(last_page_len, non_blocking=True)
        for kind, wrapper in self.wrappers.items():
            wrapper.plan(self.indptr[kind.group], self.last_page_len)


@dataclass(frozen=True, slots=True)
class SplitWrapper(SplitLayers):
    """See `flashinfer.DecodeWrappers.wrappers`."""

    @staticmethod
    def over(
        workspace: Tensor, geometry: Geometry, kind: AttentionKind, rows: int, queries: int, indices: Tensor
    ) -> SplitWrapper:
        """workspace: uint8, at least `part_bytes`."""
        page_size, device = geometry.cache.page_size, geometry.device
        longest = geometry.cache.table.shape[1] * page_size
        pieces = Pieces.empty(rows, longest, device)
        outputs = len(pieces.listed) * queries * kind.heads
        room = workspace[: part_bytes(kind, rows, queries, longest)].view(torch.float32)
        parts, sums = room.tensor_split([outputs * kind.head_dim])
        programs = programs_at_once(kind, queries, capability(device))
        programs *= torch.cuda.get_device_properties(device).multi_processor_count
        scores = kind.scale, kind.window, kind.softcap
        return SplitWrapper(
            kind.heads,
            kind.kv_heads,
            kind.head_dim,
            *scores,
            queries,
            page_size,
            indices,
            pieces,
            parts,
            sums,
            programs,
        )

    def plan(self, indptr: Tensor, last_page_len: Tensor) -> None:
        from petiole.gpu_worker.runtime.cuda.fused.split.attend import cut

        cut(indptr, last_page_len, self.page_size, self.window, self.queries, self.pieces)

    def run(
        self, q: Tensor, pages: tuple[Tensor, Tensor], *, out: Tensor, return_lse: bool = False
    ) -> Tensor | tuple[Tensor, Tensor]:
        """q, out: [rows * queries, heads, width], heads dense; pages: keys and values, [n, page_size, heads of
        keys, width]. `return_lse`: also float32 [rows * queries, heads], the logarithm, of base 2, of each sum of
        exponentials."""
        from petiole.gpu_worker.runtime.cuda.fused.split.attend import attend

        sums = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if return_lse else None
        attend(self, q, pages, out, sums)
        return out if sums is None else (out, sums)
