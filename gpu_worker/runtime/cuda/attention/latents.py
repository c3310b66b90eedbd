"""FlashInfer's attention over latents: all heads of queries over one vector for each position (`plan.Latent`).

One kind of wrapper plans prefills, decodes and verifications. Like the others it fills pinned memory and copies it
without waiting; it allocates that memory anew for each plan, and keeps it until its next one. No card has run this
module: `tests/support/fake_flashinfer.py` stands in for the wrapper. FlashInfer compiles one kernel for it
(`gen_batch_mla_module`) when the first model starts, for which nvcc and ninja are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from petiole.gpu_worker.exceptions import MachineError
from petiole.gpu_worker.models.plan import Attention, ModelPlan
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import (
    AppendWrappers,
    AttentionKind,
    Geometry,
    PageList,
)
from petiole.gpu_worker.runtime.device.device import staged

PLAN_BYTES = 8 * 2**20
"""Device memory for the plan of a captured step, which FlashInfer allocates, beside as much pinned memory."""

_BLOCKS, _PARTS = 16_384, 256
"""Blocks of 128 queries, heads counted, that FlashInfer plans at most in a step; and more than it adds to them
when it cuts long contexts into parts, one for each multiprocessor."""

_RANKS, _TURNING = 128, 64
"""Multiples of these are what the kernel computes."""


def require_supported(mixer: Attention) -> None:
    """Raises MachineError for sizes without a kernel."""
    assert mixer.latent is not None
    for name, value, of in (
        ("kv_lora_rank", mixer.latent.rank, _RANKS),
        ("qk_rope_head_dim", mixer.head_dim - mixer.latent.rank, _TURNING),
    ):
        if value % of:
            limit = f"must be a multiple of {of} on CUDA"
            raise MachineError(f"{name}: {limit}, got {value}; device=cpu serves this model")


def most_batched_tokens(model: ModelPlan, rows: int) -> int:
    """The most positions of a step that FlashInfer plans, however they are spread over rows. The last block of
    each row may be nearly empty, and rows of few positions have smaller blocks, of 64 queries."""
    heads = max(_padded(mixer.heads) for _, mixer in model.attending if mixer.latent is not None)
    return max(1, (_BLOCKS - _PARTS - 2 * rows) * 128 // heads)


def _padded(heads: int) -> int:
    return 1 << (heads - 1).bit_length()


class LatentWrappers:
    """Prefill, decode and verify of one slot, with a wrapper for each kind of layer.

    rows: of a captured step; 0: steps are not captured. indices: of each group, the page list that a captured step
    reads. queries: of each row of a captured step."""

    def __init__(
        self,
        geometry: Geometry,
        workspace: Tensor,
        rows: int = 0,
        indices: Sequence[Tensor] = (),
        queries: int = 0,
    ) -> None:
        self.geometry = geometry
        self.wrappers = {
            kind: LatentWrapper(kind, workspace, rows, indices[kind.group] if rows else None, queries)
            for kind in geometry.kinds
        }

    def plan(self, lengths: Tensor, lists: Sequence[PageList], last_page_len: Tensor) -> None:
        """Plan a step. lengths: its positions, as an indptr; lists: of each group. lengths, last_page_len:
        pinned."""
        from flashinfer.mla import MLAPlanMetadata

        cache = self.geometry.cache
        for kind, wrapper in self.wrappers.items():
            indptr, indices = lists[kind.group]
            cached = np.maximum(np.diff(indptr.numpy()) - 1, 0) * cache.page_size + last_page_len.numpy()
            rows = MLAPlanMetadata.csr(lengths, indptr, indices, staged(cached.astype(np.int32), cache.device))
            wrapper.plan(rows, cache.page_size, self.geometry.dtype)


class LatentWrapper:
    """A block of the kernel computes 64 or 128 queries, heads counted. If rows have several queries, and a block
    ends inside one, it may miss a key, and FlashInfer refuses the plan. Then there are more heads, up to the next
    power of two, whose queries are zeros."""

    def __init__(
        self, kind: AttentionKind, workspace: Tensor, rows: int, indices: Tensor | None, queries: int
    ) -> None:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper

        fixed: dict[str, Any] = {}
        if rows:
            bounds, starts, cached = (
                torch.zeros(n, dtype=torch.int32, device=workspace.device) for n in (rows + 1, rows + 1, rows)
            )
            fixed = {
                "use_cuda_graph": True,
                "qo_indptr": bounds,
                "kv_indptr": starts,
                "kv_indices": indices,
                "kv_len_arr": cached,
            }
        self._kind, self._turning = kind, kind.head_dim - kind.rank
        self._heads = kind.heads if queries == 1 else _padded(kind.heads)
        self._wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="fa2", **fixed)

    def plan(self, rows: Any, page_size: int, dtype: torch.dtype) -> None:
        self._wrapper.plan(
            metadata=rows,
            num_heads=self._heads,
            head_dim_ckv=self._kind.rank,
            head_dim_kpe=self._turning,
            page_size=page_size,
            causal=True,
            sm_scale=self._kind.scale,
            q_data_type=dtype,
            kv_data_type=dtype,
            query_layout="split",
            kv_cache_layout="split",
        )

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor) -> None:
        """q, out: [T, heads, turning + rank]; pages: [n_pages, page_size, 1, turning + rank], twice. Writes the
        sums of latents; what stands before them in `out` stays undefined."""
        more, sums = self._heads - self._kind.heads, out
        if more:
            q = pad(q, (0, 0, 0, more))
            sums = torch.empty_like(q)
        self._wrapper.run(query=self._parts(q), kv_cache=self._parts(pages[0][:, :, 0]), out=self._parts(sums)[0])
        if more:
            out.copy_(sums[:, :-more])

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is of latents, and what turns."""
        return x[..., self._turning :], x[..., : self._turning]


def append_wrappers(geometry: Geometry, workspace: Tensor) -> AppendWrappers | LatentWrappers:
    """The wrappers of a slot's steps that are not captured."""
    return (LatentWrappers if geometry.plan.reads_latents else AppendWrappers)(geometry, workspace)
