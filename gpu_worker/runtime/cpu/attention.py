"""Paged attention in plain torch: the reference, and the fallback where nothing faster is available.

If every row of a batch appends one position, the batch takes one product over the gathered keys of all rows,
padded to the longest. Any other batch goes row by row. The first chunk of a prompt attends to itself without
reading the pool; a later chunk gathers its prefix first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker.models.parts.attention import Distances
from petiole.gpu_worker.models.parts.rotary import Rotation, rotated
from petiole.gpu_worker.models.plan import Attention, Mixer
from petiole.gpu_worker.runtime.interface import Int32Array, Progress, nothing
from petiole.gpu_worker.runtime.memory.kv import KVCache


@dataclass(slots=True)
class PagedAttention:
    """The attention of one step. plan: the mixer of each layer. rows: int64 [B]; starts, lengths: host [B]; slots:
    of each group of layers, int64 [T], the slots of the step's positions. limits: int64 [T], for each query the
    end of the keys that it sees in layers with the mask "prefix"; None: all up to its own. progress: called
    in each layer."""

    cache: KVCache
    plan: Sequence[Mixer]
    rows: Tensor
    starts: Int32Array
    lengths: Int32Array
    slots: Sequence[Tensor]
    limits: Tensor | None = None
    progress: Progress = nothing
    _masks: dict[int, Tensor | None] = field(default_factory=dict)
    _gathered: dict[int, Tensor] = field(default_factory=dict)

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
        self.progress()
        assert distances is None, "only texts that are computed whole have scores by distance"
        plan, group = self.plan[layer], self.cache.groups[layer]
        assert isinstance(plan, Attention), "a layer that does not attend"
        q, k = rotated(q, k, rotation)
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        if k is not None:
            k = _keep(keys, self.slots[group], k)
            v = k if v is None else _keep(values, self.slots[group], v)
        if int(self.lengths.max()) == 1 and self.limits is None:
            return self._decode(plan, group, q, keys, values, sinks)
        outputs, at = [], 0
        for i, length in enumerate(self.lengths.tolist()):
            span = slice(at, at + length)
            own = None if k is None or v is None else (k[span], v[span])
            outputs.append(self._append(i, plan, group, q[span], own, keys, values, span, sinks))
            at += length
        return torch.cat(outputs)

    def _decode(
        self, plan: Attention, group: int, q: Tensor, keys: Tensor, values: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """All rows at once, each with one query. The query heads that share a head of keys stand side by side like
        queries of one sequence, so no key is copied for each of them."""
        size, heads, width = q.shape
        longest = int(self.starts.max()) + 1
        if group not in self._gathered:
            positions = torch.arange(longest).expand(size, longest).reshape(-1)
            rows = self.rows.repeat_interleave(longest)
            self._gathered[group] = self.cache.slots(rows, positions, group)
        gathered = (_at(pool, self._gathered[group], q.dtype) for pool in (keys, values))
        k, v = (x.view(size, longest, -1, width).transpose(1, 2) for x in gathered)
        grouped, mask = q.view(size, k.shape[1], -1, width), self._decode_mask(plan.window)
        if plan.softcap or sinks is not None:
            own = None if sinks is None else sinks.view(1, k.shape[1], -1, 1)
            out = _attention(plan, grouped, k, v, mask, own)
        else:
            out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=plan.scale)
        return out.reshape(size, heads * width)

    def _decode_mask(self, window: int) -> Tensor | None:
        """bool [B, 1, 1, longest], or None if every row sees every gathered position."""
        if window not in self._masks:
            last = torch.from_numpy(self.starts).long()[:, None]
            position = torch.arange(int(self.starts.max()) + 1)[None, :]
            seen = position <= last
            if window:
                seen &= position > last - window
            self._masks[window] = None if bool(seen.all()) else seen[:, None, None, :]
        return self._masks[window]

    def _append(
        self,
        i: int,
        plan: Attention,
        group: int,
        q: Tensor,
        own: tuple[Tensor, Tensor] | None,
        keys: Tensor,
        values: Tensor,
        span: slice,
        sinks: Tensor | None,
    ) -> Tensor:
        """One row's n new positions after `start` cached ones. own: the keys and values of these n, if they are
        not another layer's."""
        start, n = int(self.starts[i]), q.shape[0]
        end = start + n
        if start or own is None:
            slots = self.cache.slots(self.rows[i].expand(end), torch.arange(end), group)
            k, v = _at(keys, slots, q.dtype), _at(values, slots, q.dtype)
        else:
            k, v = own
        mask = self._mask(plan, start, end, span)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if plan.softcap or sinks is not None:
            groups = plan.heads // plan.kv_heads
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            if mask is None:
                mask = torch.ones(n, end, dtype=torch.bool).tril()
            out = _attention(plan, q, k, v, mask, None if sinks is None else sinks.view(1, -1, 1, 1))
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=plan.scale, enable_gqa=True
            )
        return out[0].transpose(0, 1).reshape(n, -1)

    def _mask(self, plan: Attention, start: int, end: int, span: slice) -> Tensor | None:
        """bool [n, end]; None: causal, and everything that is cached is among the queries."""
        window, queries, positions = plan.window, torch.arange(start, end)[:, None], torch.arange(end)[None, :]
        if plan.mask == "bidirectional":
            mask = torch.ones(end - start, end, dtype=torch.bool)
            return mask & ((queries - positions).abs() < window) if window else mask
        limits = self.limits if plan.mask == "prefix" else None
        if not start and not (window and end > window) and limits is None:
            return None
        mask = positions <= queries if limits is None else positions < limits[span, None]
        return mask & (positions > queries - window) if window else mask


@dataclass(frozen=True, slots=True)
class TextAttention:
    """The attention of one text, all of whose positions are in the step. It keeps the keys that later layers read.
    plan, progress: see `PagedAttention`."""

    plan: Sequence[Attention]
    progress: Progress = nothing
    _kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

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
        self.progress()
        plan, n = self.plan[layer], len(q)
        q, k = rotated(q, k, rotation)
        if plan.keys_of is not None:
            k, v = self._kept[plan.keys_of]
        assert k is not None, "a layer that reads no other one's keys has its own"
        v = k if v is None else v
        if any(later.keys_of == layer for later in self.plan):
            self._kept[layer] = k, v
        mask = self._mask(plan, n)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        if distances is not None:
            added = distances.added(q, k.repeat_interleave(plan.heads // plan.kv_heads, 1), plan.scale)
            mask = added if mask is None else added.masked_fill(~mask, -torch.inf)
        if plan.softcap or sinks is not None:
            groups = plan.heads // plan.kv_heads
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            out = _attention(plan, q, k, v, mask, None if sinks is None else sinks.view(1, -1, 1, 1))
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=plan.scale, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(n, -1)

    def _mask(self, plan: Attention, n: int) -> Tensor | None:
        """bool [n, n]; None: every position sees all."""
        if plan.mask == "bidirectional" and not plan.window:
            return None
        at = torch.arange(n)
        behind = at[:, None] - at[None, :]
        mask = torch.ones(n, n, dtype=torch.bool) if plan.mask == "bidirectional" else behind >= 0
        return mask & (behind.abs() < plan.window) if plan.window else mask


def _attention(
    plan: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    """Attention with capped scores or sinks, in float32. q, k, v: [B, H, ., D]; sinks: [1, H, ., 1]."""
    scores = q.float() @ k.float().transpose(-1, -2) * plan.scale
    if plan.softcap:
        scores = torch.tanh(scores / plan.softcap) * plan.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[-2]]
    return (weights @ v.float()).to(q.dtype)


_EIGHT_BITS = torch.float8_e4m3fn


def _keep(pool: Tensor, slots: Tensor, x: Tensor) -> Tensor:
    """Writes x to these slots of a pool, and returns what later steps read there."""
    most = torch.finfo(pool.dtype).max
    kept = (x.clamp(-most, most) if pool.dtype == _EIGHT_BITS else x).to(pool.dtype)
    _movable(pool).index_copy_(0, slots, _movable(kept))
    return kept.to(x.dtype)


def _at(pool: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    return _movable(pool).index_select(0, slots).view(pool.dtype).to(dtype)


def _movable(x: Tensor) -> Tensor:
    """torch moves no numbers of eight bits, but it moves bytes."""
    return x.view(torch.uint8) if x.dtype == _EIGHT_BITS else x
