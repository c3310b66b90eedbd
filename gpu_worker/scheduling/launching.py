"""The host side of a launch: a transaction until the step is dispatched.

    prepare   reserve pages, schedule operations, build arrays, publish chunks
    undo      withdraw chunks, revert operations, give pages back, forget the keys of images

`undo` compares the present state with the one at the beginning, so nothing records how far `prepare` came. The
last chunk that was published is the first to be withdrawn, because it may build on the others. Evictions are not
undone: they cost a miss of the cache, and nothing else. Snapshots of states are taken last, and unmade first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import numpy.typing as npt

from petiole.cache import GroupedTable, KVCacheManager, Snapshots
from petiole.gpu_worker.runtime.interface import EncodeInput, Int32Array, StepBatch
from petiole.gpu_worker.scheduling.batching import StepPayload, StepPlan, encode_batch, make_batch, state_updates
from petiole.gpu_worker.scheduling.outcomes import AllocationFailed


@dataclass(frozen=True, slots=True, eq=False)
class _Before:
    """A plan's sequences before their launch: their rows, where their operations start at the latest, how many
    positions before they may (None if none may), how many pages their rows have, and how much the sequences of its
    chunks have published."""

    rows: Int32Array
    starts: Int32Array
    in_doubt: Int32Array | None
    pages: npt.NDArray[np.int64]
    published: Sequence[int]


class Preparation:
    """One attempt to launch a plan. `keys` makes keys for the embeddings of images. `drafts`: whether there may be
    any."""

    def __init__(self, plan: StepPlan, manager: KVCacheManager, keys: Iterator[int], *, drafts: bool) -> None:
        self._plan = plan
        self._manager = manager
        self._keys, self._drafts = keys, drafts
        self._before: _Before | None = None
        self._made: Snapshots | None = None

    def prepare(self, slot_id: int, step_id: int) -> StepPayload:
        """The step, ready for dispatch. If anything raises, call `undo`."""
        plan = self._plan
        rows = np.array([seq.row for seq in plan.sequences], np.int32)
        starts = np.array([seq.scheduled_position for seq in plan.sequences], np.int32)
        published = [seq.published for seq in plan.chunks]
        doubts = [seq.in_doubt for seq in plan.sequences] if self._drafts else []
        in_doubt = np.array(doubts, np.int32) if any(doubts) else None
        before = _Before(rows, starts, in_doubt, self._manager.table.page_counts(rows), published)
        self._before = before
        batch = self._encode() if plan.kind == "encode" else self._schedule(before)
        return StepPayload(slot_id, step_id, plan, batch, time.perf_counter())

    def undo(self) -> bool:
        """Undo `prepare`. Returns False if others have matched positions that this launch published, and that were
        never computed: then the sequences whose allocations are stale must start anew."""
        before, plan, table = self._before, self._plan, self._manager.table
        if before is None:
            return True
        clean = True
        for seq, start in zip(plan.sequences, before.starts.tolist(), strict=True):
            while seq.scheduled_position > start:
                seq.revert_schedule()
        for seq, begin in plan.images:
            seq.features.pop(begin, None)
        if self._made is not None:
            assert isinstance(table, GroupedTable)
            assert table.states is not None
            table.states.unmake(self._made)
        for seq, published in zip(reversed(plan.chunks), reversed(before.published), strict=True):
            assert seq.allocation is not None
            clean &= seq.allocation.unpublish(published)
        if clean:
            for row, n in zip(before.rows.tolist(), before.pages.tolist(), strict=True):
                table.truncate(row, n * table.page_size)
        return clean

    def _schedule(self, before: _Before) -> StepBatch:
        plan, table, rows, starts = self._plan, self._manager.table, before.rows, before.starts
        n = len(plan.sequences)
        ends = starts + (1 if plan.lengths is None else np.array(plan.lengths, np.int32))
        if table.reserve_many(rows, ends) < n:
            raise AllocationFailed(f"no pages for a {plan.kind} of {n} sequences")
        if plan.lengths is None:
            for seq in plan.sequences:
                seq.schedule_decode(planned=True)
        else:
            n_decodes = plan.n_decodes
            for seq, drafts in zip(plan.sequences[:n_decodes], plan.drafts or repeat(()), strict=False):
                if drafts:
                    seq.schedule_speculative(1 + len(drafts), planned=True)
                else:
                    seq.schedule_decode(planned=True)
            for seq, length in zip(plan.chunks, plan.lengths[n_decodes:], strict=True):
                seq.schedule_prefill(length)
        batch = make_batch(plan, starts, rows, table, before.in_doubt, self._ahead(before, ends))
        for seq, end in zip(plan.chunks, ends[plan.n_decodes :].tolist(), strict=True):
            assert seq.allocation is not None
            # Later launches may reuse this KV, since they run after this step on the device stream.
            seq.allocation.publish(seq.cache_tokens, end)
        states = table.states if isinstance(table, GroupedTable) else None
        if states is None:
            return batch
        # Drafts may be rejected, and the state before them is copied elsewhere already.
        surely = np.where(batch.outputs > 1, starts + batch.certain - 1, ends)
        if before.in_doubt is not None:
            surely = np.where(before.in_doubt > 0, starts, surely)
        self._made = states.make(table.matrix, rows.astype(np.int64), starts, surely)
        return replace(batch, states=state_updates(states, batch, self._made))

    def _ahead(self, before: _Before, ends: Int32Array) -> Int32Array | None:
        """How many tokens the runtime drafts behind each operation: one, and more where there are pages, because
        its layer makes keys and values of all but the last."""
        plan = self._plan
        if plan.ahead is None:
            return None
        yields = np.array([seq.newest.max_yield for seq in plan.sequences], np.int32)
        ahead = np.where(yields > 0, np.array(plan.ahead, np.int32), 0)
        if ahead.max() > 1:
            ahead = ahead.astype(np.int32)
            n = self._manager.table.reserve_many(before.rows, ends + np.maximum(ahead - 1, 0))
            ahead[n:] = np.minimum(ahead[n:], 1)
        return ahead

    def _encode(self) -> StepBatch:
        """Prefills that are launched later may use the images, because they run after this step."""
        inputs = []
        for seq, begin in self._plan.images:
            key = seq.features[begin] = next(self._keys)
            prepared = seq.images[begin].prepared
            assert prepared is not None, f"{seq} was planned before its image was at hand"
            inputs.append(EncodeInput(key, prepared, seq.request.salt))
        return encode_batch(inputs)
