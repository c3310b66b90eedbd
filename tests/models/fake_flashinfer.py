"""FlashInfer's interface in plain torch on the CPU, as strict about shapes and types as the real one.

It shows that plans, page lists, padding and buffers are right, without a GPU; tests/gpu shows the same with one.
"""

from __future__ import annotations

import sys
import types

import torch


def check_int32(*tensors):
    for tensor in tensors:
        assert tensor.dtype == torch.int32, tensor.dtype


def rmsnorm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def fused_add_rmsnorm(x, residual, weight, eps):
    residual += x
    x.copy_(rmsnorm(residual, weight, eps))


def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    assert cos_sin_cache.dtype == torch.float32
    check_int32(positions)
    cos, sin = cos_sin_cache[positions.long()][:, None].chunk(2, dim=-1)
    for x in (query.view(len(query), -1, head_size), key.view(len(key), -1, head_size)):
        low, high = x.float().chunk(2, dim=-1)
        x.copy_(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))


def silu_and_mul(x):
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def append_paged_kv_cache(k, v, owners, positions, pages, indices, indptr, last_page_len, layout):
    check_int32(owners, positions, indices, indptr, last_page_len)
    page_size = pages[0].shape[1]
    at = indices[(indptr[owners.long()] + positions // page_size).long()].long()
    pages[0][at, positions.long() % page_size] = k
    pages[1][at, positions.long() % page_size] = v


class _Wrapper:
    """Attends from what its buffers hold when it runs, as a captured kernel does."""

    def _attend(self, q, pages, queries):
        """queries: how many of the last positions each row asks from."""
        outputs, at = [], 0
        for row, n in enumerate(queries):
            first, end = int(self.indptr[row]), int(self.indptr[row + 1])
            assert end > first, "every row, a padding one too, has a page"
            length = (end - first - 1) * self.page_size + int(self.last_page_len[row])
            at_pages = self.indices[first:end].long()
            k, v = (p[at_pages].flatten(0, 1)[:length].to(q.dtype).transpose(0, 1) for p in pages)
            position = torch.arange(length)
            query = torch.arange(length - n, length)[:, None]
            mask = position <= query
            if self.window_left >= 0:
                mask &= position >= query - self.window_left
            out = torch.nn.functional.scaled_dot_product_attention(
                q[at : at + n].transpose(0, 1)[None],
                k[None],
                v[None],
                attn_mask=mask,
                scale=self.scale,
                enable_gqa=True,
            )
            outputs.append(out[0].transpose(0, 1))
            at += n
        return torch.cat(outputs)

    def _set(self, sizes, settings):
        _, _, _, self.page_size = sizes
        self.scale, self.window_left = settings["sm_scale"], settings["window_left"]


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        workspace,
        layout,
        *,
        use_cuda_graph,
        use_tensor_cores,
        paged_kv_indptr_buffer,
        paged_kv_indices_buffer,
        paged_kv_last_page_len_buffer,
        backend,
    ):
        assert workspace.numel() >= 128 * 2**20
        assert not workspace[::4096].any()
        self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last_page_len = paged_kv_last_page_len_buffer

    def plan(self, indptr, indices, last_page_len, *sizes, **settings):
        check_int32(indptr, indices, last_page_len)
        assert len(indptr) == len(self.indptr)
        assert len(indices) == int(indptr[-1]) <= len(self.indices)
        self.indptr.copy_(indptr)
        self.last_page_len.copy_(last_page_len)
        self.indices[: len(indices)].copy_(indices)
        self._set(sizes, settings)

    def run(self, q, pages):
        assert len(q) == len(self.last_page_len)
        return self._attend(q, pages, [1] * len(q))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, workspace, layout, *, backend):
        pass

    def plan(self, lengths, indptr, indices, last_page_len, *sizes, causal, **settings):
        check_int32(lengths, indptr, indices, last_page_len)
        assert causal
        self.queries = lengths.diff().tolist()
        self.indptr, self.indices, self.last_page_len = indptr.clone(), indices.clone(), last_page_len.clone()
        self._set(sizes, settings)

    def run(self, q, pages):
        return self._attend(q, pages, self.queries)


def install(monkeypatch):
    def module(name, **members):
        made = types.ModuleType(name)
        made.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, made)

    module(
        "flashinfer",
        BatchDecodeWithPagedKVCacheWrapper=BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper=BatchPrefillWithPagedKVCacheWrapper,
    )
    module("flashinfer.norm", rmsnorm=rmsnorm, fused_add_rmsnorm=fused_add_rmsnorm)
    module("flashinfer.rope", apply_rope_with_cos_sin_cache_inplace=apply_rope_with_cos_sin_cache_inplace)
    module("flashinfer.activation", silu_and_mul=silu_and_mul)
    module("flashinfer.page", append_paged_kv_cache=append_paged_kv_cache)
