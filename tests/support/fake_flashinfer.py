"""FlashInfer's interface in plain torch on the CPU, as strict as the real one (0.7.2) about types and shapes, and
the project's own Triton kernels likewise.

It shows that plans, page lists, padding and buffers are right, without a GPU; tests/gpu shows the same with one.
What the real plan copies without waiting, this one keeps to copy when the wrapper runs: so whoever fills a pinned
buffer again too early, or plans one wrapper twice for two steps in flight, gets wrong tokens here as well.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import itertools
import math
import sys
import types
from functools import cache

import torch
from packaging.version import Version

from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.parts.kernels import TorchKernels, rms_norm as plain_norm
from petiole.gpu_worker.models.parts.recurrent.delta_inputs import convolution_inputs, rule_gates, rule_heads
from petiole.gpu_worker.models.parts.recurrent.delta_rule import delta_rule
from petiole.gpu_worker.models.parts.recurrent.states import convolved
from petiole.gpu_worker.models.weights.quantized import Coded, CodedLinear
from petiole.gpu_worker.runtime.cuda import executor, graphs
from petiole.gpu_worker.runtime.cuda.attention import installed
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import FlashInferKernels
from petiole.gpu_worker.runtime.cuda.capture import eager
from petiole.gpu_worker.runtime.cuda.executor import CudaExecutor
from petiole.gpu_worker.runtime.cuda.fused import linear
from petiole.gpu_worker.runtime.cuda.fused.split.pieces import piece_length
from petiole.gpu_worker.runtime.cuda.supported import has_kernel
from petiole.gpu_worker.runtime.cuda.whole_texts import CudaTextExecutor
from petiole.gpu_worker.runtime.step.sampling import choose
from petiole.gpu_worker.runtime.step.verify import accept
from tests.support import split_keys

WORKSPACE_BYTES = 128 * 2**20
CUDA_CORE_GROUPS = {1, 2, 3, 4, 6, 8, 16}
PROCESSORS = 4


def check_int32(*tensors):
    for tensor in tensors:
        assert tensor.dtype == torch.int32, tensor.dtype
        assert tensor.is_contiguous()
        assert tensor.dim() == 1


def check_dense_rows(*tensors):
    """The last dimension without gaps, and every row where a vector of 16 bytes may begin."""
    for tensor in tensors:
        assert tensor.stride(-1) == 1
        assert all(stride * tensor.element_size() % 16 == 0 for stride in tensor.stride()[:-1])
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0


# ---------------------------------------------------------------- flashinfer.norm, flashinfer.activation


def rmsnorm(x, weight, eps):
    check_dense_rows(x, weight)
    assert x.dim() in (2, 3)
    assert weight.shape == x.shape[-1:]
    assert weight.dtype == x.dtype
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def fused_add_rmsnorm(x, residual, weight, eps):
    check_dense_rows(x, residual)
    assert x.dim() == residual.dim() == 2
    assert x.dtype == residual.dtype
    residual += x
    x.copy_(rmsnorm(residual, weight, eps))


def silu_and_mul(x):
    assert x.is_contiguous()
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


# ---------------------------------------------------------------- gpu_worker.runtime.cuda.fused.layers


def rotate_and_store(q, k, v, rotation, keys, values, slots):
    table, positions = rotation.table, rotation.positions
    assert table is None or table.dtype == torch.float32
    assert slots.dtype == torch.int64
    assert positions.shape == slots.shape == q.shape[:1]
    assert keys.is_contiguous()
    assert values.is_contiguous()
    assert v is not None or keys is values
    if table is None:  # nothing is rotated
        table = torch.ones(int(positions.max()) + 1, 0)
    cos, sin = table[positions.long()][:, None].chunk(2, dim=-1)

    def rotated(x, norm):
        assert x.stride()[1:] == (x.shape[2], 1)
        wide = x.float()
        if norm is not None:
            wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + rotation.eps) * norm.float()
        turned, rest = wide.split([2 * cos.shape[-1], x.shape[2] - 2 * cos.shape[-1]], dim=-1)
        near = rotation.neighbours
        low, high = turned.unflatten(-1, (-1, 2) if near else (2, -1)).unbind(-1 if near else -2)
        pairs = torch.stack([low * cos - high * sin, high * cos + low * sin], dim=-1 if near else -2)
        return torch.cat([pairs.flatten(-2), rest], dim=-1)

    q_norm, k_norm = rotation.norms or (None, None)
    q.copy_(rotated(q, q_norm))
    stored = [(rotated(k, k_norm), keys), *([] if v is None else [(v, values)])]
    for source, target in stored:
        largest = torch.finfo(target.dtype).max
        target[slots] = source.float().clamp(-largest, largest).to(target.dtype)


def write_pages(tables, rows, columns, pages):
    check_int32(rows, columns, *pages)
    assert tables.dtype == torch.int32
    assert len(tables) == len(pages)
    assert len(rows) == len(columns) == pages.shape[1]
    tables[:, rows.long(), columns.long()] = pages


def gather_pages(table, rows, firsts, indptr, pages):
    check_int32(firsts, indptr, pages)
    assert rows.dtype == torch.int32
    assert len(indptr) == len(rows) + 1 == len(firsts) + 1
    assert int(indptr[-1]) <= len(pages)
    assert int(firsts.min()) >= 0
    for i, row in enumerate(rows.tolist()):
        first, end, column = int(indptr[i]), int(indptr[i + 1]), int(firsts[i])
        assert column + end - first <= table.shape[1]
        pages[first:end] = table[row, column : column + end - first]


def token_slots(tables, rows, positions, page_size):
    assert rows.shape == positions.shape
    pages = tables[:, rows.long(), positions.long() // page_size].long()
    return pages * page_size + positions.long() % page_size


def quantize_rows(x):
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


# ---------------------------------------------------------------- gpu_worker.runtime.cuda.fused.split.attend


def cut(indptr, last_page_len, page_size, window, queries, pieces):
    check_int32(indptr, last_page_len)
    lengths = ((indptr.diff() - 1) * page_size + last_page_len).tolist()
    assert min(lengths) >= queries, "each query has a position"
    found = []
    for row, length in enumerate(lengths):
        start = max(0, length - window - queries + 1) if window else 0
        each = piece_length(length - start)
        begins = range(start, length, each)
        rest = (length, int(indptr[row]), len(begins))
        found += [(row, begin, min(begin + each, length), *rest) for begin in begins]
    found.sort(key=lambda piece: (piece[1] - piece[2], piece[2] == piece[3]))
    listed = torch.tensor(found, dtype=torch.int32)
    pieces.listed[: len(found), : listed.shape[1]] = listed
    for row in range(len(lengths)):
        own = (listed[:, 0] == row).nonzero()
        pieces.of_rows[:, row] = torch.tensor([int(own[0]), int(own[-1]), len(own)])
    pieces.count[0] = len(found)


def page_counts(lengths, page_size):
    """int32 [B + 1], [B]: where the pages of rows of these lengths begin, and the positions in the last ones."""
    lengths = torch.as_tensor(lengths, dtype=torch.int32)
    counts = (lengths + page_size - 1) // page_size
    return torch.cat([torch.zeros(1), counts.cumsum(0)]).int(), (lengths - (counts - 1).clamp(0) * page_size).int()


def attend(layers, q, pages, out, sums):
    queries, page_size = layers.queries, layers.page_size
    check_dense_rows(q)
    assert out.is_contiguous()
    assert all(p.is_contiguous() for p in pages)
    assert pages[0].shape[1:] == (page_size, layers.kv_heads, layers.width)
    parts = {}
    for row, begin, end, length, first, n in layers.pieces.listed[: layers.pieces.count, :6].tolist():
        position, last = torch.arange(begin, end), torch.arange(length - queries, length)[:, None]
        slots = layers.indices[first + position // page_size].long() * page_size + position % page_size
        k, v = (p.flatten(0, 1)[slots].to(q.dtype).transpose(0, 1) for p in pages)
        k, v = (x.repeat_interleave(layers.heads // layers.kv_heads, 0) for x in (k, v))
        scores = q[row * queries : (row + 1) * queries].transpose(0, 1) @ k.transpose(1, 2) * layers.scale
        if layers.softcap:
            scores = torch.tanh(scores / layers.softcap) * layers.softcap
        seen = position <= last
        if layers.window:
            seen &= position > last - layers.window
        scores = scores.masked_fill(~seen, -math.inf)
        part = parts.setdefault((row, n), [])
        part.append((scores.logsumexp(-1)[..., None], scores.softmax(-1).nan_to_num() @ v))
    out.fill_(math.nan)
    for (row, n), found in parts.items():
        assert len(found) == n
        logarithms, attended = (torch.stack(one) for one in zip(*found, strict=True))
        at = slice(row * queries, (row + 1) * queries)
        total = logarithms.logsumexp(0)
        out[at] = ((logarithms - total).exp() * attended).sum(0).transpose(0, 1)
        if sums is not None:
            sums[at] = total[..., 0].t() / math.log(2)


# ---------------------------------------------------------------- gpu_worker.runtime.cuda.fused.adapters


def add_terms(x, y, a, b, slots, ranks):
    check_int32(slots, ranks)
    assert x.stride(1) == y.stride(1) == 1
    most = a.shape[1] // len(b)
    for t, slot in enumerate(slots.tolist()):
        first = 0
        for part, matrix in enumerate(b):
            rows = slice(part * most, part * most + int(ranks[slot]))
            inner = a[slot, rows].float() @ x[t].float()
            outputs = y[t, first : first + matrix.shape[1]]
            if slot:
                outputs.copy_(outputs.float() + matrix[slot, :, : ranks[slot]].float() @ inner)
            first += matrix.shape[1]


# ---------------------------------------------------------------- gpu_worker.runtime.cuda.fused.states.recurrent


def check_rows(places, bounds, copies, n):
    check_int32(places, bounds, copies)
    assert len(bounds) == len(places) + 1
    assert len(copies) == n
    assert int(bounds[0]) == 0
    assert int(bounds.diff().min()) >= 0
    assert int(bounds[-1]) <= n, "padding follows the last row"


def convolve(x, kernel, bias, inputs, places, bounds, of, copies):
    check_rows(places, bounds, copies, len(x))
    assert x.stride(1) == 1
    assert inputs.is_contiguous()
    mixed = torch.full(x.shape, math.nan, dtype=torch.float32, device=x.device)
    for i, (place, (first, end)) in enumerate(
        zip(places.tolist(), itertools.pairwise(bounds.tolist()), strict=True)
    ):
        assert (of[first:end] == i).all()
        before = inputs[place : place + 1].clone()
        for t in range(first, end):
            mixed[t : t + 1], before = (part[0] for part in convolved(x[None, t : t + 1], before, kernel, bias))
            before = before[None]
            if copies[t] >= 0:
                inputs[copies[t]] = before[0]
        inputs[place] = before[0]
    return mixed


def prepare(plan, weights, projected, gates, inputs, places, bounds, of, copies):
    assert projected.stride(1) == gates.stride(1) == 1
    x = convolution_inputs(plan, projected)
    heads = rule_heads(plan, convolve(x, weights.convolution, None, inputs, places, bounds, of, copies))
    return torch.cat([part.flatten(1) for part in heads], 1), *rule_gates(plan, weights, gates)


def parts_of_heads(qkv, matrices, tiled):
    """Queries, keys and values of each head of values."""
    heads, key_dim, value_dim = matrices.shape[1:]
    q, k, v = qkv.tensor_split([(n := (qkv.shape[1] - heads * value_dim) // 2), 2 * n], dim=1)
    q, k = (part.unflatten(1, (-1, key_dim)) for part in (q, k))
    each = heads // q.shape[1]
    q, k = (part.repeat(1, each, 1) if tiled else part.repeat_interleave(each, dim=1) for part in (q, k))
    return q, k, v.unflatten(1, (heads, value_dim))


def apply_delta_rule(qkv, g, beta, matrices, rounded, places, bounds, copies, *, tiled=False, most=math.inf):
    check_rows(places, bounds, copies, len(qkv))
    assert {part.dtype for part in (qkv, g, beta, matrices)} == {torch.float32}
    assert all(part.is_contiguous() for part in (qkv, g, beta, matrices))
    q, k, v = parts_of_heads(qkv, matrices, tiled)
    outputs = torch.full(v.shape, math.nan, device=v.device)
    for place, (first, end) in zip(places.tolist(), itertools.pairwise(bounds.tolist()), strict=True):
        if end - first > most:
            continue
        stored = matrices[place : place + 1].clone()
        for t in range(first, end):
            one = (part[None, t : t + 1] for part in (q, k, v, g, beta))
            outputs[None, t : t + 1], stored = delta_rule(*one, stored)
            if copies[t] >= 0 and rounded is None:
                matrices[copies[t]] = stored[0]
            elif copies[t] >= 0:
                rounded.put(copies[t : t + 1].long() - len(matrices), stored)
        matrices[place] = stored[0]
    return outputs


def apply_delta_rule_in_chunks(qkv, g, beta, matrices, rounded, places, bounds, copies, *, tiled=False):
    check_rows(places, bounds, copies, len(qkv))
    q, k, v = parts_of_heads(qkv, matrices, tiled)
    outputs = torch.full(v.shape, math.nan, device=v.device)
    for place, (first, end) in zip(places.tolist(), itertools.pairwise(bounds.tolist()), strict=True):
        stored, start = matrices[place : place + 1].clone(), first
        for after in (t + 1 for t in range(first, end) if t + 1 == end or copies[t] >= 0):
            some = (part[None, start:after] for part in (q, k, v, g, beta))
            outputs[None, start:after], stored = delta_rule(*some, stored)
            start, copy = after, int(copies[after - 1])
            if copy >= 0 and rounded is None:
                matrices[copy] = stored[0]
            elif copy >= 0:
                rounded.put(torch.tensor([copy - len(matrices)]), stored)
        matrices[place] = stored[0]
    return outputs


def chunk_gated_delta_rule(q, k, v, *, g, beta, scale, initial_state, output_final_state):
    """fla-core's, in float32."""
    assert {part.dtype for part in (q, k, v)} == {torch.bfloat16}
    assert {part.dtype for part in (g, beta, initial_state)} == {torch.float32}
    assert all(part.is_contiguous() for part in (q, k, v, g, beta))
    (n, heads, value_dim), (key_heads, key_dim) = v.shape[1:], k.shape[2:]
    assert q.shape == k.shape == (1, n, key_heads, key_dim)
    assert n >= 64
    assert heads % key_heads == 0
    assert g.shape == beta.shape == (1, n, heads)
    assert initial_state.shape == (1, heads, key_dim, value_dim)
    assert (scale, output_final_state) == (1.0, True)
    q, k = (part.float().repeat_interleave(heads // key_heads, 2) for part in (q, k))
    found, state = delta_rule(q, k, v.float(), g, beta, initial_state)
    return found.bfloat16(), state


def key_heads_of(qkv, g, beta, matrices):
    return (qkv.shape[1] - matrices.shape[1] * matrices.shape[3]) // (2 * matrices.shape[2])


def install_fla(monkeypatch):
    made = types.ModuleType("fla.ops.gated_delta_rule")
    made.chunk_gated_delta_rule = chunk_gated_delta_rule
    for name, module in (
        ("fla", types.ModuleType("fla")),
        ("fla.ops", types.ModuleType("fla.ops")),
        (made.__name__, made),
    ):
        monkeypatch.setitem(sys.modules, name, module)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)


def rms_norm(x, weight, eps, added=None):
    assert x.dim() == 2
    assert weight.dtype == torch.float32
    if added is not None:
        x += added
    return plain_norm(x, weight, eps)


def gated_rms_norm(x, z, weight, eps):
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    assert z.stride(2) == 1
    return TorchKernels().gated_rms_norm(x, z, weight, eps)


# ---------------------------------------------------------------- codes and experts


def multiply(x, weight, bias):
    assert x.dim() == 2
    assert has_kernel(weight.form)
    return CodedLinear(weight, bias)(x)


def sort_pairs(taken, counts):
    flat, layers = taken.flatten(), len(counts)
    assert ((flat >= 0) & (flat <= layers)).all()
    found = torch.bincount(flat, minlength=layers + 1)[:-1]
    counts += found
    bounds = torch.cat((torch.zeros(1, dtype=torch.int64), found.cumsum(0))).int()
    order = flat.argsort(stable=True)
    return types.SimpleNamespace(taken=taken, order=order, bounds=bounds, chosen=taken.shape[1], layers=layers)


def gather_product(x, pairs, weight, bias):
    return of_layers(x[pairs.order // pairs.chosen], pairs, weight, bias)


def scatter_product(x, pairs, weight, bias):
    sorted_ = of_layers(x, pairs, weight, bias)
    return torch.empty_like(sorted_).index_copy_(0, pairs.order, sorted_)


def of_layers(x, pairs, weight, bias):
    """Rows, sorted by layer; no numbers for what takes none."""
    wide = weight.values().to(x.dtype) if isinstance(weight, Coded) else weight
    parts = wide.chunk(len(pairs.bounds) - 1)
    biases = [None] * len(parts) if bias is None else bias.chunk(len(parts))
    y = torch.full((len(x), len(parts[0])), torch.nan, dtype=x.dtype)
    for part, added, (first, end) in zip(parts, biases, itertools.pairwise(pairs.bounds.tolist()), strict=True):
        y[first:end] = torch.nn.functional.linear(x[first:end], part, added)
    return y


def combined(y, pairs, shares):
    there = (pairs.taken < pairs.layers)[..., None]
    weighted = torch.where(there, y.view(*shares.shape, -1).float() * shares[..., None], 0)
    return sum(weighted.unbind(1)).to(y.dtype)


# ---------------------------------------------------------------- the wrappers


class _Wrapper:
    """Attends from what its buffers hold when it runs, as a captured kernel does. A row whose keys are split comes
    out wrong if its plan was for another number of them: see `split_keys`."""

    causal = use_tensor_cores = True

    def __init__(self, workspace, layout, backend):
        assert layout == "NHD"
        assert backend == "fa2", "what is compiled ahead, and takes any head size"
        assert workspace.dtype == torch.uint8
        assert workspace.numel() >= WORKSPACE_BYTES
        assert not workspace[::4096].any(), "it must be zero before its first use"
        self._copies = []

    def reset_workspace_buffer(self, workspace, plan):
        assert workspace.numel() >= WORKSPACE_BYTES
        assert plan.dtype == torch.uint8

    def _copy_later(self, target, source):
        self._copies.append((target, source))

    def _land(self):
        for target, source in self._copies:
            target.copy_(source)
        self._copies.clear()

    def _attend(self, q, pages, queries, out, return_lse):
        """queries: how many of the last positions each row asks from; None: as its `bounds` say. return_lse: also
        the logarithm, of base 2, of each head's sum of exponentials."""
        self._land()
        queries = self.bounds.diff().tolist() if queries is None else queries
        check_dense_rows(q)
        assert out.is_contiguous()
        assert (out.shape, out.dtype) == (q.shape, self.q_dtype)
        assert isinstance(pages, tuple)
        for p in pages:
            assert p.dim() == 4
            assert p.is_contiguous()
            assert p.dtype == self.kv_dtype
        assert q.dtype == self.q_dtype
        assert q.shape[1:] == (self.n_heads, self.head_dim)
        assert pages[0].shape[1:] == (self.page_size, self.n_kv_heads, self.head_dim)
        outputs, sums, at = [], [], 0
        for row, n in enumerate(queries):
            first, end = int(self.indptr[row]), int(self.indptr[row + 1])
            if n == 0:
                continue
            assert end > first, "every row with a query has a page"
            length = (end - first - 1) * self.page_size + int(self.last_page_len[row])
            at_pages = self.indices[first:end].long()
            k, v = (p[at_pages].flatten(0, 1)[:length].to(q.dtype).transpose(0, 1) for p in pages)
            position = torch.arange(length)
            query = torch.arange(length - n, length)[:, None]
            mask = position <= query if self.causal else position < length + 0 * query
            if self.window_left >= 0:
                mask &= position >= query - self.window_left
            groups = self.n_heads // self.n_kv_heads
            k, v = (x.repeat_interleave(groups, 0) for x in (k, v))
            scores = q[at : at + n].transpose(0, 1) @ k.transpose(1, 2) * self.scale
            if self.softcap:
                scores = torch.tanh(scores / self.softcap) * self.softcap
            scores = scores.masked_fill(~mask, -math.inf)
            attended = (scores.softmax(-1) @ v).transpose(0, 1)
            if self.split:
                planned, tensor_cores = int(self.planned[row]), self.use_tensor_cores
                agrees = split_keys.agree(planned, length, n, tensor_cores=tensor_cores)
                attended = attended if agrees else torch.full_like(attended, math.nan)
            outputs.append(attended)
            sums.append(scores.float().logsumexp(-1).t() / math.log(2))
            at += n
        out[at:] = math.nan  # what nobody asked for may hold anything
        out[:at] = torch.cat(outputs)
        if not return_lse:
            return out
        lse = torch.full(q.shape[:2], math.nan)
        lse[:at] = torch.cat(sums)
        return out, lse

    def _set(self, sizes, *, q_data_type, kv_data_type, sm_scale, window_left, logits_soft_cap=0.0):
        self.n_heads, self.n_kv_heads, self.head_dim, self.page_size = sizes
        assert self.n_heads % self.n_kv_heads == 0
        self.scale, self.window_left, self.softcap = sm_scale, window_left, logits_soft_cap
        self.q_dtype, self.kv_dtype = q_data_type, kv_data_type


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
        super().__init__(workspace, layout, backend)
        assert use_cuda_graph
        check_int32(paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
        self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last_page_len = paged_kv_last_page_len_buffer
        self.use_tensor_cores = use_tensor_cores

    def plan(self, indptr, indices, last_page_len, *sizes, disable_split_kv, q_len_per_req=1, **settings):
        lengths = (indptr.diff() - 1) * sizes[-1] + last_page_len
        assert int(lengths.min()) >= q_len_per_req, "each query has a position"
        assert q_len_per_req == 1 or self.use_tensor_cores
        assert getattr(self, "queries", q_len_per_req) == q_len_per_req, "it is part of what was captured"
        self.queries = q_len_per_req
        if self.use_tensor_cores:
            assert disable_split_kv == (len(last_page_len) * sizes[1] >= 2 * PROCESSORS)
        else:
            assert not disable_split_kv, "the kernel without tensor cores does not know it"
        check_int32(indptr, indices, last_page_len)
        assert len(indptr) == len(self.indptr), "the batch size is fixed"
        assert len(last_page_len) == len(self.last_page_len)
        assert len(indices) == int(indptr[-1]) <= len(self.indices)
        assert int(last_page_len.min()) >= 1
        group = sizes[0] // sizes[1]
        assert self.use_tensor_cores or group in CUDA_CORE_GROUPS
        self.planned, self.split = lengths, not disable_split_kv
        self._copy_later(self.indptr, indptr)
        self._copy_later(self.last_page_len, last_page_len)
        self._copy_later(self.indices[: len(indices)], indices)
        self._set(sizes, **settings)

    def run(self, q, pages, *, out, return_lse=False):
        assert len(q) == len(self.last_page_len) * self.queries
        return self._attend(q, pages, [self.queries] * len(self.last_page_len), out, return_lse)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """With fixed buffers, a captured one: its first plan says how many positions there may be, later ones may have
    fewer, and rows without any. What lies behind them is not computed."""

    def __init__(
        self,
        workspace,
        layout,
        *,
        backend,
        use_cuda_graph=False,
        qo_indptr_buf=None,
        paged_kv_indptr_buf=None,
        paged_kv_indices_buf=None,
        paged_kv_last_page_len_buf=None,
    ):
        super().__init__(workspace, layout, backend)
        self.captured, self.most = use_cuda_graph, None
        if use_cuda_graph:
            check_int32(qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
            rows = len(paged_kv_last_page_len_buf)
            assert len(qo_indptr_buf) == len(paged_kv_indptr_buf) == rows + 1
            self.bounds, self.indptr = qo_indptr_buf, paged_kv_indptr_buf
            self.indices, self.last_page_len = paged_kv_indices_buf, paged_kv_last_page_len_buf

    def plan(self, lengths, indptr, indices, last_page_len, *sizes, causal, disable_split_kv, **settings):
        check_int32(lengths, indptr, indices, last_page_len)
        self.causal = causal
        assert len(lengths) == len(indptr) == len(last_page_len) + 1
        assert len(indices) == int(indptr[-1])
        queries, pages = lengths.diff(), indptr.diff()
        if self.captured:
            n = int(lengths[-1])
            self.most = n if self.most is None else self.most
            assert n <= self.most, "the first plan is the largest"
            assert len(lengths) == len(self.bounds), "the batch size is fixed"
            assert len(indices) <= len(self.indices)
            assert disable_split_kv == (len(last_page_len) * sizes[1] >= 2 * PROCESSORS)
            assert ((queries > 0) == (pages > 0)).all(), "a row of padding has nothing"
            self._copy_later(self.bounds, lengths)
            self._copy_later(self.indices[: len(indices)], indices)
        else:
            assert int(queries.min()) >= 1
            blocks = int((-(-queries * (sizes[0] // sizes[1]) // 128)).sum()) * sizes[1]
            of_region = not causal and settings["window_left"] >= 0
            few = int(pages.max()) * sizes[-1] <= 40 * blocks
            assert disable_split_kv == (of_region or few), "or keys at the end of a region's window are not read"
            self.bounds, self.indices = torch.empty_like(lengths), torch.empty_like(indices)
            self.indptr, self.last_page_len = torch.empty_like(indptr), torch.empty_like(last_page_len)
            self._copies.clear()
            self._copy_later(self.bounds, lengths)
            self._copy_later(self.indices, indices)
            self.most = int(lengths[-1])
        used = (last_page_len >= 1) & (last_page_len <= sizes[-1])
        assert (used | ((pages == 0) & (last_page_len == 0))).all()
        assert ((pages - 1) * sizes[-1] + last_page_len >= queries)[pages > 0].all(), "each query has a position"
        self._copy_later(self.indptr, indptr)
        self._copy_later(self.last_page_len, last_page_len)
        self.planned, self.split = (pages - 1) * sizes[-1] + last_page_len, not disable_split_kv
        self._set(sizes, **settings)

    def run(self, q, pages, *, out, return_lse=False):
        assert len(q) == self.most
        return self._attend(q, pages, None, out, return_lse)


@dataclasses.dataclass(frozen=True)
class MLAPlanMetadata:
    rows: tuple[torch.Tensor, ...]

    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        check_int32(qo_indptr, kv_indptr, kv_indices, kv_len_arr)
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
        assert int(qo_indptr[0]) == int(kv_indptr[0]) == 0
        assert len(kv_indices) == int(kv_indptr[-1])
        return cls((qo_indptr, kv_indptr, kv_indices, kv_len_arr))


class BatchMLAPagedAttentionWrapper:
    """What the host reads is read when it plans. A captured wrapper launches what its first plan asked for."""

    def __init__(
        self,
        workspace,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
    ):
        assert backend == "fa2"
        assert workspace.numel() >= WORKSPACE_BYTES
        self.fixed = (qo_indptr, kv_indptr, kv_indices, kv_len_arr) if use_cuda_graph else None
        if self.fixed:
            check_int32(*self.fixed)
            assert len({buffer.data_ptr() for buffer in self.fixed}) == 4, "they must not overlap"
        self.clusters = None

    def plan(
        self,
        *,
        metadata,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
        query_layout,
        kv_cache_layout,
    ):
        bounds, indptr, indices, lengths = metadata.rows
        assert q_data_type == kv_data_type
        assert query_layout == kv_cache_layout == "split"
        queries, pages = bounds.diff(), indptr.diff()
        assert int(queries.min()) >= 1
        assert (pages == -(-lengths // page_size)).all()
        assert (lengths >= queries).all(), "each query has a position"
        tile = 128 if int(queries.sum()) * num_heads // len(queries) > 64 else 64
        if tile % num_heads:
            assert int(queries.max()) * num_heads <= tile, "a tile may end inside a query, and miss a key"
        if self.fixed:
            assert [len(x) for x in (bounds, indptr, lengths)] == [len(self.fixed[i]) for i in (0, 1, 3)]
            assert len(indices) <= len(self.fixed[2])
            assert indices.data_ptr() == self.fixed[2].data_ptr(), "nothing copies the list"
            assert self.clusters in (None, tile), "a captured launch cannot change"
        self.clusters, self.causal, self.scale = tile, causal, sm_scale
        self.heads, self.widths, self.page_size, self.dtype = (
            num_heads,
            (head_dim_ckv, head_dim_kpe),
            page_size,
            q_data_type,
        )
        self.host, self.indices = [x.clone() for x in (bounds, indptr, lengths)], indices

    def run(self, *, query, kv_cache, out):
        bounds, indptr, lengths = (x.tolist() for x in self.host)
        assert [x.shape for x in query] == [(bounds[-1], self.heads, width) for width in self.widths]
        assert [x.shape[1:] for x in kv_cache] == [(self.page_size, width) for width in self.widths]
        assert {x.dtype for x in (*query, *kv_cache, out)} == {self.dtype}
        assert out.shape == query[0].shape
        check_dense_rows(*query, *kv_cache, out)
        q, cached = torch.cat(query, -1), torch.cat(kv_cache, -1)
        for row, length in enumerate(lengths):
            first, end = bounds[row], bounds[row + 1]
            k = cached[self.indices[indptr[row] : indptr[row + 1]].long()].flatten(0, 1)[:length]
            scores = torch.einsum("nhd,kd->hnk", q[first:end], k) * self.scale
            if self.causal:
                ends = torch.arange(length - (end - first), length)
                scores = scores.masked_fill(torch.arange(length) > ends[:, None], -math.inf)
            out[first:end] = torch.einsum("hnk,kd->nhd", scores.softmax(-1), k[:, : self.widths[0]])


# ---------------------------------------------------------------- gpu_worker.runtime.cuda.fused.linear

MOST_ROWS, MOST_SPLIT = 2, 6


def fits(decoder):
    return decoder.dtype == torch.float32


def forward(decoder, hidden, step):
    """The layers as products that are added to the residual."""
    assert len(hidden) <= MOST_ROWS
    assert step.terms is None
    for i, (plan, layer) in enumerate(zip(decoder.plan.layers, decoder.layers, strict=True)):
        mixer, fed = layer.mixer, layer.dense
        x = rmsnorm(hidden, layer.mixer_norm.weight, plan.mixer_norm.eps)
        hidden += mixer.out(decoder.attend(i, mixer.qkv(x), step))
        x = rmsnorm(hidden, layer.feed_forward_norm.weight, plan.feed_forward_norm.eps)
        hidden += fed.down(silu_and_mul(fed.gate_up(x)))
    return hidden


def split_k_forward(decoder, hidden, step):
    """The layers as torch computes them, for more families and more rows."""
    assert len(hidden) <= MOST_SPLIT
    assert step.terms is None
    return decoder.forward(hidden, step)


def writes(head, n):
    return n <= MOST_SPLIT


def write_logits(x, head, logits, tokens):
    head.write(x, logits)
    tokens.copy_(logits.argmax(-1))


@cache
def workspace():
    """One for all runtimes: it is zero before each use, because nothing here writes it."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8)


def install(monkeypatch):
    def module(name, *members):
        made = types.ModuleType(name)
        made.__dict__.update({member.__name__: member for member in members})
        monkeypatch.setitem(sys.modules, name, made)
        return made

    def afresh(name):
        """The module itself, over what has been installed."""
        spec = importlib.util.find_spec(name)
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        monkeypatch.setitem(sys.modules, name, made)

    card = types.SimpleNamespace(multi_processor_count=PROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    monkeypatch.setattr(executor, "new_workspace", lambda device, n_bytes: workspace())
    for often in ("ROUNDS", "REPLAYS"):  # which way is quicker says nothing here
        monkeypatch.setattr(graphs, often, 1)
    monkeypatch.setattr(installed, "installed_version", lambda: Version("0.7.2.post1"))
    module("flashinfer", BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper)
    module("flashinfer.mla", BatchMLAPagedAttentionWrapper, MLAPlanMetadata)
    module("flashinfer.norm", rmsnorm, fused_add_rmsnorm)
    module("flashinfer.activation", silu_and_mul)
    layers = (rotate_and_store, write_pages, gather_pages, token_slots, quantize_rows)
    module("petiole.gpu_worker.runtime.cuda.fused.layers", *layers)
    module("petiole.gpu_worker.runtime.cuda.fused.split.attend", cut, attend)
    module("petiole.gpu_worker.runtime.cuda.fused.adapters", add_terms)
    module(
        "petiole.gpu_worker.runtime.cuda.fused.states.recurrent", convolve, prepare, apply_delta_rule, key_heads_of
    )
    module("petiole.gpu_worker.runtime.cuda.fused.states.chunks", apply_delta_rule_in_chunks)
    module("petiole.gpu_worker.runtime.cuda.fused.norms", rms_norm, gated_rms_norm)
    grouped = (multiply, gather_product, scatter_product, combined)
    module("petiole.gpu_worker.runtime.cuda.fused.linear.grouped", *grouped)
    routing = module("petiole.gpu_worker.runtime.cuda.fused.routing", sort_pairs)
    routing.choose_experts, routing.has_kernel = TorchKernels().choose_experts, lambda plan: True
    afresh("petiole.gpu_worker.runtime.cuda.fused.experts")
    module("petiole.gpu_worker.runtime.cuda.fused.choose", choose)
    module("petiole.gpu_worker.runtime.cuda.fused.accept", accept)
    decode = module("petiole.gpu_worker.runtime.cuda.fused.linear.decode", fits, forward)
    decode.MOST_ROWS = MOST_ROWS
    split_k = module("petiole.gpu_worker.runtime.cuda.fused.linear.split_k", fits, writes, write_logits)
    split_k.MOST_ROWS, split_k.forward = MOST_SPLIT, split_k_forward
    for name, made in (("decode", decode), ("split_k", split_k)):
        monkeypatch.setattr(linear, name, made, raising=False)


def compute_as_on_cuda(runtime):
    """From now on a runtime on the CPU computes with the executor of CUDA, without graphs. `install` comes
    first."""
    decoder = runtime._decoder
    if isinstance(decoder, Decoder):
        decoder = dataclasses.replace(decoder, kernels=FlashInferKernels())
    memory = runtime._memory
    if decoder.plan.whole_texts:
        runtime._executor = CudaTextExecutor(decoder, memory.bank, torch.device("cpu"))
        return runtime
    parts = (decoder, memory.cache, memory.bank, memory.states.pending, runtime.config)
    runtime._executor = CudaExecutor(*parts, runtime._device, runtime._stream, eager, memory.recurrent)
    return runtime
