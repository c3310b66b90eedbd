"""Builds the arrays of a `StepBatch` from a plan. Does not modify sequences.

The plan says what each sequence contributes to the step: first decodes and verifications, then chunks of prompts.
The kind of the step does not, because a step may hold all three together.

Page-table updates are mostly derived: a step sends the table columns that its positions are the first to use,
`ceil(start / page_size) .. ceil(end / page_size)`. The first step of a row sends all columns from 0. Earlier steps
of the same row have sent the other columns, in stream order. Only columns that were remapped since then are
recorded, by the page table; the row's next step sends all from the first of these on.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, cast

import numpy as np

from petiole.cache import GroupedTable, PageTable, Snapshots, StateGroup, ragged_arange
from petiole.contract.results.vectors import DENSE
from petiole.gpu_worker.request.values import NO_NUMBER
from petiole.gpu_worker.runtime.interface import (
    FEATURES,
    NO_UPDATES,
    PENDING,
    TYPES,
    VALUES,
    EncodeInput,
    Int32Array,
    KeptInput,
    PageUpdates,
    RowBinding,
    ScoredTokens,
    StateUpdates,
    StepBatch,
    StepKind,
)
from petiole.gpu_worker.scheduling.pipeline import LaunchHandle, PendingCommit
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence

Drafts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The sequences of the next step and the number of positions to compute for each.

    `lengths`: 1 + number of repeated inputs and drafts, or the size of a prompt's chunk; None if each is 1, a
    decode. `drafts`: draft tokens, empty for a sequence without drafts; None if nobody has any. `ahead`: how many
    tokens the runtime is to draft behind each; None if it drafts none. `n_chunks`: how
    many sequences, at the end of the list, have a chunk of their prompt computed; the others decode or verify.
    `images`: the images of an encode, which has no sequences: (the image's sequence, the position where it
    begins)."""

    sequences: Sequence[ScheduledSequence]
    lengths: Sequence[int] | None = None
    drafts: Drafts | None = None
    n_chunks: int = 0
    images: Sequence[tuple[ScheduledSequence, int]] = ()
    ahead: Sequence[int] | None = None

    @property
    def kind(self) -> StepKind:
        """For staging, statistics and traces."""
        if self.images:
            return "encode"
        if self.n_chunks:
            return "mixed" if self.n_decodes else "prefill"
        return "decode" if self.lengths is None else "verify"

    @property
    def n_decodes(self) -> int:
        return len(self.sequences) - self.n_chunks

    @property
    def chunks(self) -> Sequence[ScheduledSequence]:
        return self.sequences[self.n_decodes :]

    @property
    def members(self) -> Sequence[ScheduledSequence]:
        """The sequences whose positions or images the step computes."""
        return list(dict.fromkeys([*self.sequences, *(seq for seq, _ in self.images)]))

    def only(self, members: Set[ScheduledSequence]) -> StepPlan:
        """The parts of these members in the step."""
        kept = [i for i, seq in enumerate(self.sequences) if seq in members]
        n_chunks = sum(i >= self.n_decodes for i in kept)
        drafts = None if self.drafts is None else [self.drafts[i] for i in kept]
        lengths = [self.lengths[i] for i in kept] if self.lengths is not None else []
        ragged = n_chunks > 0 or any(n > 1 for n in lengths)
        return StepPlan(
            sequences=[self.sequences[i] for i in kept],
            lengths=lengths if ragged else None,
            drafts=drafts if ragged else None,
            n_chunks=n_chunks,
            images=[(seq, begin) for seq, begin in self.images if seq in members],
            ahead=None if self.ahead is None else [self.ahead[i] for i in kept],
        )

    def beside(self, chunks: StepPlan) -> StepPlan:
        """One step with the decodes of this plan and the chunks of the other."""
        lengths = self.lengths or [1] * len(self.sequences)
        return StepPlan(
            sequences=[*self.sequences, *chunks.sequences],
            lengths=[*lengths, *(chunks.lengths or ())],
            drafts=None if self.drafts is None else [*self.drafts, *([()] * chunks.n_chunks)],
            n_chunks=chunks.n_chunks,
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepPayload:
    """The data of a launched step. The pipeline uses the slot, `commit_step` the rest.

    `launched_s`: launch time in seconds of `time.perf_counter`.
    """

    slot_id: int
    step_id: int
    plan: StepPlan
    batch: StepBatch
    launched_s: float


def payload_of(step: LaunchHandle[ScheduledSequence] | PendingCommit[ScheduledSequence]) -> StepPayload:
    return cast(StepPayload, step.payload)


def make_batch(
    plan: StepPlan,
    starts: Int32Array,
    rows: Int32Array,
    table: PageTable,
    in_doubt: Int32Array | None = None,
    ahead: Int32Array | None = None,
) -> StepBatch:
    """The batch of a plan whose pages are reserved and whose operations are scheduled. `starts`: int32 [B], the
    first position of each operation; `in_doubt`, `ahead`: see `StepBatch`."""
    n = len(plan.sequences)
    ones = _constant(n, 1)
    lengths = ones if plan.lengths is None else np.array(plan.lengths, np.int32)
    reached = lengths if ahead is None or ahead.max() < 2 else lengths + np.maximum(ahead - 1, 0)
    if plan.lengths is None:
        pending, pages = _constant(n, PENDING), page_updates(table, rows, starts, reached, _constant(0, 0))
        return StepBatch(
            plan.kind, rows, starts, ones, pending, ones, pending, [], pages, in_doubt=in_doubt, ahead=ahead
        )
    return _ragged_batch(plan, starts, lengths, reached, rows, table, in_doubt=in_doubt, ahead=ahead)


def encode_batch(images: Sequence[EncodeInput]) -> StepBatch:
    """The batch of an encode: images, and no positions."""
    none = _constant(0, 0)
    return StepBatch("encode", none, none, none, none, none, none, [], NO_UPDATES, images=images)


@lru_cache(maxsize=1024)
def _constant(n: int, value: int) -> Int32Array:
    """A cached array of `n` times `value`; read-only, because steps share it."""
    array = np.full(n, value, np.int32)
    array.setflags(write=False)
    return array


def _ragged_batch(
    plan: StepPlan,
    starts: Int32Array,
    lengths: Int32Array,
    reached: Int32Array,
    rows: Int32Array,
    table: PageTable,
    **more: Any,
) -> StepBatch:
    """A batch of any operations. reached: [B], the positions that need a page. more: fields of the batch."""
    token_ids, outputs = _decoded(plan, starts[: plan.n_decodes], lengths[: plan.n_decodes])
    if not plan.n_chunks:
        pending, pages = _constant(len(rows), PENDING), page_updates(table, rows, starts, reached, _constant(0, 0))
        more |= _images(plan, starts, lengths)
        return StepBatch(plan.kind, rows, starts, lengths, token_ids, outputs, pending, [], pages, **more)
    pending = np.full(len(rows), PENDING, np.int32)
    bindings, following, inputs = list[RowBinding](), pending.copy(), [token_ids]
    for i, seq in enumerate(plan.chunks, plan.n_decodes):
        start, end = int(starts[i]), int(starts[i] + lengths[i])
        inputs.append(seq.tokens(start, end))
        if start == seq.reused:
            bindings.append(_binding(seq))
        if end == seq.prefill_target and seq.is_recompute:
            pending[i] = seq.last_token
        if end < seq.total_tokens:
            following[i] = max(0, seq.token(end))  # an image has no tokens
    bound_rows = np.array([binding.row for binding in bindings], np.int32)
    return StepBatch(
        kind=plan.kind,
        rows=rows,
        starts=starts,
        lengths=lengths,
        token_ids=np.concatenate(inputs),
        outputs=np.append(outputs, np.array([seq.newest.max_yield for seq in plan.chunks], np.int32)),
        pending=pending,
        bindings=bindings,
        pages=page_updates(table, rows, starts, reached, bound_rows),
        following=following,
        scored=_scored(plan, starts, lengths),
        of_tokens=_of_tokens(plan),
        unpooled=_unpooled(plan),
        **(_known_values(plan, starts, lengths) or _types(plan, starts, lengths)),
        **_images(plan, starts, lengths),
        **more,
    )


def _decoded(plan: StepPlan, starts: Int32Array, lengths: Int32Array) -> tuple[Int32Array, Int32Array]:
    """The inputs of decodes and verifications, and how many tokens each of these samples. The inputs are the
    pending token and its drafts, behind those that are repeated. starts, lengths: of each."""
    token_ids = np.full(int(lengths.sum()), PENDING, np.int32)
    if plan.drafts is None:
        n_drafts = np.zeros(len(lengths), np.int32)
    else:
        n_drafts = np.fromiter(map(len, plan.drafts[: len(lengths)]), np.int32, len(lengths))
        ends = lengths.cumsum()
        at = ragged_arange(ends - n_drafts, n_drafts)
        token_ids[at] = np.fromiter(chain.from_iterable(plan.drafts), np.int32, len(at))
    for i in np.flatnonzero(lengths - n_drafts > 1).tolist():
        start, n = int(starts[i]), int(lengths[i] - n_drafts[i])
        first = int(lengths[:i].sum())
        token_ids[first : first + n] = plan.sequences[i].tokens(start, start + n)
    return token_ids, n_drafts + 1


def _scored(plan: StepPlan, starts: Int32Array, lengths: Int32Array) -> ScoredTokens | None:
    """The inputs whose logits score tokens of prompts. None if no sequence asks for any."""
    if not any(seq.wants_scores for seq in plan.chunks):
        return None
    counts, inputs, tokens, offset, top = np.zeros(len(starts), np.int32), [], [], 0, 0
    for i, seq in enumerate(plan.sequences):
        start, length = int(starts[i]), int(lengths[i])
        if i >= plan.n_decodes and (scored := seq.scores_of(start, start + length)):
            counts[i] = len(scored)
            inputs.append(np.arange(scored.start, scored.stop, dtype=np.int32) + (offset - start))
            tokens.append(seq.prompt[scored.start + 1 : scored.stop + 1])
            top = max(top, seq.request.sampling.prompt_logprobs or 0)
        offset += length
    none = _constant(0, 0)
    return ScoredTokens(np.concatenate([none, *inputs]), np.concatenate([none, *tokens]), counts, top)


def _of_tokens(plan: StepPlan) -> Sequence[Sequence[str]] | None:
    """What texts want of each token. None if no text wants any."""
    asked = [seq.request.embedding for seq in plan.sequences]
    wanted = [[name for name in one.outputs if name != DENSE] if one is not None else [] for one in asked]
    return wanted if any(wanted) else None


def _unpooled(plan: StepPlan) -> Sequence[int] | None:
    """How many first positions of each text are not pooled. None if all are."""
    found = [seq.request.unpooled for seq in plan.sequences]
    return found if any(found) else None


def _known_values(plan: StepPlan, starts: Int32Array, lengths: Int32Array) -> dict[str, Any]:
    """The numbers of the values in a prompt or in a recompute."""
    kinds = next((seq.values for seq in plan.sequences if seq.numbers), None)
    if kinds is None:
        return {}
    values = np.full((int(lengths.sum()), kinds.width), NO_NUMBER, np.int32)
    pending = np.full((len(plan.sequences), kinds.width), NO_NUMBER, np.int32)
    offset = 0
    for i, seq in enumerate(plan.sequences):
        for position, numbers in seq.numbers.items():
            if 0 <= (at := position - int(starts[i])) < lengths[i]:
                kinds.write(seq.token(position), numbers, values[offset + at])
        last = seq.total_tokens - 1
        kinds.write(seq.token(last), seq.numbers.get(last, ()), pending[i])
        offset += int(lengths[i])
    return {"side_inputs": {VALUES: values}, "pending_sides": {VALUES: pending}}


def _types(plan: StepPlan, starts: Int32Array, lengths: Int32Array) -> dict[str, Any]:
    """Which tokens are of the second text of a pair."""
    if all(seq.request.second_at is None for seq in plan.sequences):
        return {}
    types, offset = np.zeros(int(lengths.sum()), np.int32), 0
    for seq, start, length in zip(plan.sequences, starts.tolist(), lengths.tolist(), strict=True):
        if (second_at := seq.request.second_at) is not None:
            types[offset + max(0, second_at - start) : offset + length] = 1
        offset += length
    return {"side_inputs": {TYPES: types}}


def _images(plan: StepPlan, starts: Int32Array, lengths: Int32Array) -> dict[str, Any]:
    """The features of the images in this step, or of the parts that it computes, and its bidirectional regions."""
    if not any(seq.images for seq in plan.sequences):
        return {}
    features, regions, offset = [], [], 0
    for i, seq in enumerate(plan.sequences):
        start, end = int(starts[i]), int(starts[i] + lengths[i])
        for begin, image in seq.images.items():
            first, stop = max(begin, start), min(begin + image.n_positions, end)
            if first < stop:
                last = stop == begin + image.n_positions
                at = offset + first - start
                features.append(KeptInput(seq.features[begin], at, stop - first, first - begin, last=last))
        regions += [
            (i, r.begin, r.end) for r in seq.regions if r.bidirectional and start < r.end and r.begin < end
        ]
        offset += end - start
    return {
        "kept": {FEATURES: features} if features else {},
        "regions": np.array(regions, np.int32) if regions else None,
        "rotary": _rotary(plan, starts, lengths),
    }


def _rotary(plan: StepPlan, starts: Int32Array, lengths: Int32Array) -> Int32Array | None:
    """Rotary positions have several axes only if these differ: all axes of text are one."""
    axes = max(0 if seq.rotary is None else len(seq.rotary) for seq in plan.sequences)
    if not axes:
        return None
    parts = []
    for seq, start, end in zip(plan.sequences, starts.tolist(), (starts + lengths).tolist(), strict=True):
        positions = np.tile(np.arange(start, end, dtype=np.int32), (axes, 1))
        if seq.rotary is not None:
            n = max(0, min(end, seq.num_input_tokens) - start)
            positions[:, :n] = seq.rotary[:, start : start + n]
            positions[:, n:] += seq.rotary_offset
        parts.append(positions)
    found = np.concatenate(parts, axis=1)
    return found[0] if (found == found[0]).all() else found


def _binding(seq: ScheduledSequence) -> RowBinding:
    return RowBinding(
        row=seq.row,
        sampling=seq.request.sampling,
        seed=seq.seed,
        prompt_token_ids=seq.prompt,
        output_token_ids=np.array(seq.generated, np.int32),
        end_token_ids=seq.rules.end_ids,
        adapter_slot=seq.adapter_slot,
        rotary_offset=seq.rotary_offset,
    )


def state_updates(states: StateGroup, batch: StepBatch, made: Snapshots) -> StateUpdates:
    """For a batch with the snapshots that the step makes. Rows begin with the step that binds them."""
    bound = {binding.row for binding in batch.bindings}
    begun = [i for i, row in enumerate(batch.rows.tolist()) if row in bound] if bound else []
    return StateUpdates(
        begun=batch.rows[begun],
        sources=np.array([states.source(row) for row in batch.rows[begun].tolist()], np.int32),
        starts=batch.starts[begun],
        kept=made.of.astype(np.int32),
        positions=made.positions.astype(np.int32),
        snapshots=made.slots,
        undecided=np.flatnonzero(batch.outputs > 1).astype(np.int32),
        certain=(batch.starts + batch.certain)[batch.outputs > 1],
    )


def page_updates(
    table: PageTable, rows: Int32Array, starts: Int32Array, lengths: Int32Array, bound_rows: Int32Array
) -> PageUpdates:
    """The page-table entries that this step is the first to use, and those that were remapped."""
    size = table.page_size
    if size == 1 and lengths is _constant(len(rows), 1) and not table.has_remapped:  # decode on pages of one token
        return _updates(table, rows, starts)
    first = -(-starts // size)
    if len(bound_rows):
        first = np.where(np.isin(rows, bound_rows), 0, first)
    if table.has_remapped:
        for i, column in table.remapped(rows):
            first[i] = min(first[i], column)
    count = -(-(starts + lengths) // size) - first
    entries, columns = np.repeat(rows, count), ragged_arange(first, count).astype(np.int32)
    return _updates(table, entries, columns)


def _updates(table: PageTable, rows: Int32Array, columns: Int32Array) -> PageUpdates:
    pages = table.matrix[rows, columns]
    if isinstance(table, GroupedTable):
        return PageUpdates(rows, columns, pages, table.companions(pages))
    return PageUpdates(rows, columns, pages)
