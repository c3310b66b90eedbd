"""FlashInfer's kernels: paged attention, and the small parts of a decoder layer.

A wrapper plans on the host (which row gets which part of the card) and runs on the device. Its plan is made from
`indptr` and last-page lengths on the host; the long list of KV pages is built on the device from the page table
and never crosses the bus. In layers with a window a row begins at the first page that its step reads: keys are
kept rotated, so attention need not know their positions. A wrapper belongs to one slot: planning fills pinned
memory of its own and copies it without waiting, and only committing the slot's step proves that the copy has
happened.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from petiole.gpu_worker.models.parts.attention import Distances
from petiole.gpu_worker.models.parts.kernels import TorchKernels
from petiole.gpu_worker.models.parts.rotary import Rotation, rotated
from petiole.gpu_worker.models.plan import Attention, FeedForward, ModelPlan, Router
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout, Product
from petiole.gpu_worker.models.weights.stacked import StackedLinear
from petiole.gpu_worker.runtime.cuda.supported import has_kernel, tried, with_kernel
from petiole.gpu_worker.runtime.interface import Int32Array
from petiole.gpu_worker.runtime.memory.kv import KVCache

os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")  # read when FlashInfer is imported
"""FlashInfer's norms as CUDA kernels, like all its other kernels that are called here. By default FlashInfer uses
norms in CuTe, which nobody has tried with this path."""

WORKSPACE_BYTES = 128 * 2**20
"""For the partial sums of all wrappers of one stream. A row of queries is split among no more blocks than the card
has, so for every model the sums take a fraction of this memory."""

PLAN_BYTES = 2**20
"""Device memory for the plan of a captured step; it takes as much pinned memory, too. The plan assigns parts of
rows to blocks, and takes some twenty bytes for each block, row and position. FlashInfer's own default is 8 MB."""

_CUDA_CORE_GROUPS = frozenset({1, 2, 3, 4, 6, 8, 16})

TENSOR_CORES_FROM = 4
"""From this many queries for each head of keys, tensor cores are quicker: on an H100, with 64 rows of 640
positions, 69 us a layer against 80; with two queries both take 68 to 70 (`bench.gpu --only attention`)."""

TILE = 128
"""Queries of a block of a prefill, those that share a head of keys counted together."""

KEYS_A_BLOCK = 40
"""The keys of a prefill's longest row are read whole if they are at most this many for each block that the step
has. On an H100, merging cost more than splitting saved up to there: 512 tokens of the 8B shape took 70 us a layer
split and 32 whole, of 0.6B 40 and 25."""

MOST_ON_CUDA_CORES = 256
"""Wider heads are for tensor cores. FlashInfer has the other kernel for few groups of them."""

HEAD_SIZES = (64, 128, 256, 512)
"""The kernels refuse smaller heads. They do not check other sizes, which they compute wrongly: a prefill reads
whole groups of 64 elements only (of 96, the first 64), and a decode needs a number of threads that is a power of
two."""


class FlashInferKernels:
    """See `models.parts.kernels.Kernels`. `add_rms_norm` works in place."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from flashinfer.norm import rmsnorm

        if x.dim() == 3:  # heads, which may lie apart
            return self.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
        if weight.dtype != x.dtype:  # in float32, because a part of it was added
            from petiole.gpu_worker.runtime.cuda.fused.norms import rms_norm

            return rms_norm(x, weight, eps)
        out: Tensor = rmsnorm(x, weight, eps)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        from flashinfer.norm import fused_add_rmsnorm

        if weight.dtype != x.dtype:
            from petiole.gpu_worker.runtime.cuda.fused.norms import rms_norm

            return rms_norm(residual, weight, eps, added=x)
        fused_add_rmsnorm(x, residual, weight, eps)
        return x

    def gated_rms_norm(self, x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        from petiole.gpu_worker.runtime.cuda.fused.norms import gated_rms_norm

        return gated_rms_norm(x, z, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        from flashinfer.activation import silu_and_mul

        out: Tensor = silu_and_mul(gate_up)
        return out

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        from petiole.gpu_worker.runtime.cuda.fused.layers import quantize_rows

        return quantize_rows(x)

    def held(self, form: CodeLayout) -> CodeLayout:
        return with_kernel(form)

    @property
    def codes_of_tokens(self) -> bool:
        return False

    def take(self, weight: Coded) -> tuple[Coded, Product] | None:
        if not has_kernel(weight.form):
            return None
        if weight.form.table:
            weight = weight.put_in_runs(in_tiles=tried("codes") and weight.form.in_whole_tiles)
        return weight, _multiply

    def multiply_wide(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not x.is_cuda or x.dtype != weight.dtype or x.dtype == torch.float32:
            return TorchKernels().multiply_wide(x, weight, bias)
        wide = torch.mm(x, weight.t(), out_dtype=torch.float32)
        return wide if bias is None else wide.add_(bias)

    def choose_experts(
        self, plan: Router, logits: Tensor, correction: Tensor | None, scales: Tensor | None, real: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from petiole.gpu_worker.runtime.cuda.fused.routing import choose_experts, has_kernel

        choose = choose_experts if has_kernel(plan) else TorchKernels().choose_experts
        return choose(plan, logits, correction, scales, real)

    def mix_experts(
        self,
        plan: FeedForward,
        up: StackedLinear,
        down: StackedLinear,
        x: Tensor,
        chosen: Tensor,
        shares: Tensor,
        taken: Tensor,
    ) -> Tensor | None:
        from petiole.gpu_worker.runtime.cuda.fused.experts import mix_experts

        return mix_experts(plan, up, down, x, chosen, shares, taken, self)


def _multiply(x: Tensor, weight: Coded, bias: Tensor | None) -> Tensor:
    from petiole.gpu_worker.runtime.cuda.fused.linear.grouped import multiply

    return multiply(x, weight, bias)


class AttentionKind(NamedTuple):
    """Layers of one kind share FlashInfer's plan of a step."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    rank: int = 0
    """The width of latents; 0: there are none."""
    ahead: bool = False
    """Whether the positions of a region see each other."""
    group: int = 0
    """Of layers, which have a pool of keys: see `KVCache`."""

    @staticmethod
    def of(mixer: Attention, group: int = 0) -> AttentionKind:
        sizes = mixer.heads, mixer.kv_heads, mixer.head_dim
        rank = 0 if mixer.latent is None else mixer.latent.rank
        ahead = mixer.mask == "prefix"
        return AttentionKind(*sizes, mixer.scale, mixer.window, mixer.softcap, rank, ahead, group)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The kinds of attention of a model over its cache."""

    plan: ModelPlan
    cache: KVCache
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.cache.device

    @property
    def kinds(self) -> list[AttentionKind]:
        """The distinct kinds of layers: each needs a plan of its own."""
        return sorted({self.kind(layer) for layer, _ in self.plan.attending})

    def kind(self, layer: int) -> AttentionKind:
        return AttentionKind.of(self.plan.layers[layer].attention, self.cache.groups[layer])

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys [n_pages, page_size, Hkv, D], and the values."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        shape = (-1, self.cache.page_size, *keys.shape[1:])
        return keys.view(shape), values.view(shape)

    def plan_settings(self, kind: AttentionKind) -> dict[str, Any]:
        return {
            "q_data_type": self.dtype,
            "kv_data_type": self.cache.dtype,
            "sm_scale": kind.scale,
            "window_left": kind.window - 1 if kind.window else -1,
            **({"logits_soft_cap": kind.softcap} if kind.softcap else {}),
        }

    def sizes(self, kind: AttentionKind) -> tuple[int, int, int, int]:
        return kind.heads, kind.kv_heads, kind.head_dim, self.cache.page_size


class RowPages(NamedTuple):
    """Which pages the rows of a step read, all int32. firsts: [groups, B], the columns of the table where they
    begin; indptr: [groups, B + 1], of the lists; last: [B], tokens in the last page."""

    firsts: Int32Array
    indptr: Int32Array
    last: Int32Array


def host_page_counts(cache: KVCache, starts: Int32Array, queries: Int32Array, ends: Int32Array) -> RowPages:
    """The queries of a row, padding included, are at the positions before its end. What they read of layers with a
    window begins at the window of position `starts`, where padding has ended, or at the first of the padding."""
    size = cache.page_size
    counts = (ends + size - 1) // size
    firsts = np.zeros((len(cache.tables), len(ends)), np.int32)
    for group, pool in enumerate(cache.windows, 1):
        firsts[group] = np.minimum(starts - (pool.window - 1), ends - queries).clip(0) // size
    indptr = np.zeros((len(firsts), len(ends) + 1), np.int32)
    np.cumsum(counts - firsts, axis=1, out=indptr[:, 1:])
    return RowPages(firsts, indptr, (ends - np.maximum(counts - 1, 0) * size).astype(np.int32))


class PageList(NamedTuple):
    """The pages that rows read of a group: `indptr` is pinned, `indices` are on the device."""

    indptr: Tensor
    indices: Tensor


@dataclass(frozen=True, slots=True)
class FlashInferAttention:
    """One step's attention; `wrappers` by kind of layer, all planned; slots: int64 [groups, T], where the step's
    positions go. The first `n_bidirectional` queries have wrappers of their own. See
    `models.parts.attention.StepAttention`."""

    geometry: Geometry
    slots: Tensor
    wrappers: Mapping[AttentionKind, Any]
    n_bidirectional: int = 0
    bidirectional: Mapping[AttentionKind, Any] = field(default_factory=dict)

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        rotation: Rotation,
        sinks: Tensor | None = None,
        distances: Distances | None = None,
    ) -> Tensor:
        from petiole.gpu_worker.runtime.cuda.fused.layers import rotate_and_store

        assert distances is None, "only texts that are computed whole have scores by distance"
        cache, kind = self.geometry.cache, self.geometry.kind(layer)
        if q.shape[1:] != (kind.heads, kind.head_dim):
            planned = f"{kind.heads} heads of {kind.head_dim}"
            raise ValueError(f"queries: must be of {planned}, as planned, got {list(q.shape[1:])}")
        if k is None:
            q, _ = rotated(q, None, rotation)
        else:
            rotate_and_store(q, k, v, rotation, cache.keys[layer], cache.values[layer], self.slots[kind.group])
        out = torch.empty(
            q.shape, dtype=q.dtype, device=q.device
        )  # otherwise FlashInfer fills a prefill's buffers with zeros
        pages, n = self.geometry.pages(layer), self.n_bidirectional
        if n:
            _run(self.bidirectional[kind], q[:n], pages, out[:n], sinks)
        if n < len(q):
            _run(self.wrappers[kind], q[n:], pages, out[n:], sinks)
        return out.view(q.shape[0], -1)


def _run(wrapper: Any, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor, sinks: Tensor | None) -> None:
    """Sinks [heads] are one score more in each sum of exponentials. So what the kernel gives is too large by a
    factor that follows from that sum, whose logarithm, of base 2, the kernel gives as well."""
    if sinks is None:
        wrapper.run(q, pages, out=out)
        return
    _, sums = wrapper.run(q, pages, out=out, return_lse=True)
    out *= torch.sigmoid(sums * math.log(2) - sinks.float())[..., None]


class DecodeWrappers:
    """The captured decodes of one slot at one batch size, of `queries` positions for each row: fixed buffers and a
    wrapper for each kind of layer. If rows have several positions, attention always runs on tensor cores.

    By default a graph has a merge kernel in each layer, for rows that are split among blocks. If a batch fills the
    card, no row is split, and the wrapper is told to leave the merge out. The kernel without tensor cores finds
    that out itself.

    indices: of each group, the page list that a captured step reads."""

    def __init__(
        self, geometry: Geometry, size: int, workspace: Tensor, indices: Sequence[Tensor], queries: int = 1
    ) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper

        self.geometry, self.size = geometry, size
        self._more = {"q_len_per_req": queries} if queries > 1 else {}
        self.whole = {
            kind: _on_tensor_cores(kind, queries) and fills_the_card(geometry, kind, size)
            for kind in geometry.kinds
        }
        self.indices = indices
        self.indptr = torch.zeros((len(indices), size + 1), dtype=torch.int32, device=geometry.device)
        self.last_page_len = torch.ones(size, dtype=torch.int32, device=geometry.device)
        self.wrappers = {
            kind: BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=_on_tensor_cores(kind, queries),
                paged_kv_indptr_buffer=self.indptr[kind.group],
                paged_kv_indices_buffer=indices[kind.group],
                paged_kv_last_page_len_buffer=self.last_page_len,
                backend="fa2",
            )
            for kind in geometry.kinds
        }
        _shrink_plans(self.wrappers, workspace)

    def plan(self, lists: Sequence[PageList], last_page_len: Tensor) -> None:
        """Plan a step. lists: of each group. last_page_len: pinned. Nothing waits."""
        for kind, wrapper in self.wrappers.items():
            settings = self.geometry.plan_settings(kind) | self._more
            sizes, whole = self.geometry.sizes(kind), self.whole[kind]
            wrapper.plan(*lists[kind.group], last_page_len, *sizes, disable_split_kv=whole, **settings)


class AppendWrappers:
    """Prefill and verify of one slot: any number of positions for each row, in one pass. If it is not `causal`,
    each query sees all keys of its row, in layers that look ahead.

    rows: the number of rows of a captured step, whose first plan must be the largest; 0: steps are not captured.
    indices: of each group, the page list that a captured step reads.

    By default FlashInfer splits the keys of a step that does not fill the card, and merges the parts. In eager
    steps it is told when that would take longer than it saves. In captured ones see `fills_the_card`.

    The backend is named, because "auto" takes another kernel on Hopper. Few installations have that kernel
    compiled, compiling it takes minutes, and its sums differ from those of the decode."""

    def __init__(
        self,
        geometry: Geometry,
        workspace: Tensor,
        rows: int = 0,
        indices: Sequence[Tensor] = (),
        *,
        causal: bool = True,
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self.geometry, self._causal = geometry, causal
        self._rows = rows
        bounds, starts, last = (
            torch.zeros(shape, dtype=torch.int32, device=geometry.device)
            for shape in (rows + 1, (len(indices), rows + 1), rows)
        )

        def fixed(group: int) -> dict[str, Any]:
            if not rows:
                return {}
            return {
                "use_cuda_graph": True,
                "qo_indptr_buf": bounds,
                "paged_kv_indptr_buf": starts[group],
                "paged_kv_indices_buf": indices[group],
                "paged_kv_last_page_len_buf": last,
            }

        self.wrappers = {
            kind: BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2", **fixed(kind.group))
            for kind in geometry.kinds
        }
        if rows:
            _shrink_plans(self.wrappers, workspace)

    def plan(self, lengths: Tensor, lists: Sequence[PageList], last_page_len: Tensor) -> None:
        """Plan a step. lengths: appended positions, as an indptr; lists: of each group. lengths, last_page_len:
        pinned."""
        for kind, wrapper in self.wrappers.items():
            settings, pages = self.geometry.plan_settings(kind), lists[kind.group]
            causal = self._causal or not kind.ahead
            # FlashInfer plans a window as if all masks were causal: split, it would not read the last keys.
            whole = (bool(kind.window) and not causal) or self._whole(kind, lengths, pages.indptr)
            settings |= {"causal": causal, "disable_split_kv": whole}
            wrapper.plan(lengths, *pages, last_page_len, *self.geometry.sizes(kind), **settings)

    def _whole(self, kind: AttentionKind, lengths: Tensor, indptr: Tensor) -> bool:
        if self._rows:
            return fills_the_card(self.geometry, kind, self._rows)
        tiles = -(-np.diff(lengths.numpy()) * (kind.heads // kind.kv_heads) // TILE)
        longest = int(np.diff(indptr.numpy()).max()) * self.geometry.cache.page_size
        return longest <= KEYS_A_BLOCK * int(tiles.sum()) * kind.kv_heads


def _shrink_plans(wrappers: Mapping[AttentionKind, Any], workspace: Tensor) -> None:
    for wrapper in wrappers.values():
        plan = torch.empty(PLAN_BYTES, dtype=torch.uint8, device=workspace.device)
        wrapper.reset_workspace_buffer(workspace, plan)


def _on_tensor_cores(kind: AttentionKind, queries: int) -> bool:
    group = kind.heads // kind.kv_heads
    if kind.head_dim > MOST_ON_CUDA_CORES:
        return True
    return queries > 1 or group not in _CUDA_CORE_GROUPS or group >= TENSOR_CORES_FROM


def fills_the_card(geometry: Geometry, kind: AttentionKind, rows: int) -> bool:
    """Whether rows times heads of keys fill the blocks that the card runs, two on each processor."""
    processors = torch.cuda.get_device_properties(geometry.device).multi_processor_count
    return rows * kind.kv_heads >= 2 * processors


def new_workspace(device: torch.device, n_bytes: int = WORKSPACE_BYTES) -> Tensor:
    """Shared by all wrappers of one stream; must be zero before its first use."""
    return torch.zeros(n_bytes, dtype=torch.uint8, device=device)
