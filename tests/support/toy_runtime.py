"""A model whose arithmetic is exact, run asynchronously on the CPU device's streams.

What it samples at a position is an integer hash of the KV *contents* that it finds through its own copy of the
page table, in order, so a wrong page, position, order, mask, seed, penalty count or pending input gives wrong
tokens, and nothing ever differs by rounding. With `snapshots` it keeps the hash of its history in a state, too,
which must agree with what it finds. Its buffers belong to slots, and its kernels read them when they run,
not when they are enqueued, so a slot that is reused too early is read too late.

Three quarters of its greedy choices follow from the last token alone, which gives prompt lookup something to find;
the others, and all noise, depend on the whole history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from petiole.cache import WindowPages
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.runtime.device.cpu import CpuDevice, CpuEvent
from petiole.gpu_worker.runtime.device.device import DeviceError
from petiole.gpu_worker.runtime.device.transfer import DecodeSlot, RenderBuffer, check_shared_stream
from petiole.gpu_worker.runtime.interface import (
    DRAFTED,
    PENDING,
    LoadWeights,
    ModelLimits,
    Progress,
    RowBinding,
    StateUpdates,
    StepBatch,
    TokenMask,
    Transfer,
    nothing,
)

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15


def mix(*parts: int) -> int:
    """A 64-bit hash of integers, in order."""
    state = _BASE
    for part in parts:
        state = (state ^ (part & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 31)) * 0x94D049BB133111EB & _MASK
    return state ^ (state >> 29)


@dataclass
class Row:
    """What the device knows of the sequence in a row."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    adapter_slot: int = 0
    pending: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    n_prompt: int = 0
    ends: Collection[int] = ()
    drafts: list[int] = field(default_factory=list)  # behind the pending input
    start: int = 0  # of the step behind a verification
    repeated: list[int] = field(default_factory=list)  # the inputs with which that step begins


@dataclass
class Staging:
    """One slot's buffers. Kernels look here when they run."""

    token_ids: np.ndarray
    accepted: np.ndarray
    drafts: np.ndarray
    batch: StepBatch | None = None
    mask: TokenMask | None = None
    states: list[tuple[int, int, int, int]] = field(default_factory=list)  # (row, position, hash, last token)
    spans: list[tuple[int, list[int]]] = field(default_factory=list)  # of each row its start and inputs


class ToyCopies:
    """Implements `KVCopies`. A copy reads the pool, or writes to it, when the stream comes to it. most_blocks: of
    the ring."""

    layout, position_bytes = "toy", 8

    def __init__(self, runtime: ToyRuntime, most_blocks: int) -> None:
        self._runtime, self._most_blocks = runtime, most_blocks
        self.ring: deque[np.ndarray] = deque()

    def make_ring(self, n_blocks: int, n_positions: int) -> None:
        self.n_blocks = min(n_blocks, self._most_blocks)
        self.ring.extend(np.empty(n_positions, np.uint64) for _ in range(self.n_blocks))

    def to_host(self, slots: np.ndarray) -> ToyCopy | None:
        if not self.ring:
            return None
        copy = ToyCopy(self._runtime, slots, self.ring)
        self._runtime.compute.enqueue(copy.gather, "kv copy")
        copy.done = self._runtime.compute.record()
        return copy

    def staging(self, n_bytes: int) -> np.ndarray:
        return np.empty(n_bytes, np.uint8)

    def from_host(self, slots: np.ndarray, staged: np.ndarray, first: int) -> None:
        def write() -> None:
            self._runtime.kv.reshape(-1)[slots] = staged.view(np.uint64)[first : first + len(slots)]

        self._runtime.compute.enqueue(write, "kv copy")


class ToyCopy:
    done: CpuEvent

    def __init__(self, runtime: ToyRuntime, slots: np.ndarray, ring: deque[np.ndarray]) -> None:
        self._runtime, self._slots, self._ring, self._found = runtime, slots, ring, ring.popleft()

    def gather(self) -> None:
        self._found[:] = self._runtime.kv.reshape(-1)[self._slots]

    def wait(self) -> np.ndarray:
        self.done.synchronize()
        return self._found.view(np.uint8)

    def release(self) -> None:
        self._ring.append(self._found)


class ToyRuntime:
    """Implements `Runtime`. `fail_forward_at` makes the device fail in that step, `fail_launch_at` the launch."""

    def __init__(
        self,
        *,
        vocab_size: int = 48,
        rows: int = 8,
        n_pages: int = 256,
        page_size: int = 1,
        max_model_len: int = 96,
        eos: frozenset[int] = frozenset({0}),
        jitter: Callable[[], None] | None = None,
        fail_forward_at: int | None = None,
        n_slots: int = 2,
        windows: Sequence[WindowPages] = (),
        snapshots: int = 0,
        ring: int = 1000,
        drafts: int = 0,
        right: float = 1.0,
        goes_ahead: bool = True,
    ) -> None:
        self.limits = ModelLimits(
            model="toy",
            fingerprint="toy",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            n_pages=n_pages,
            page_size=page_size,
            max_batch_size=rows + 1,
            windows=windows,
            snapshots=snapshots,
            eos_token_ids=eos,
            drafts=drafts,
            goes_ahead=goes_ahead,
        )
        self.right = right
        self.kv_copies = None if windows or snapshots else ToyCopies(self, ring)
        self.weights = 1
        self.adapters: dict[int, str] = {}
        self.device = CpuDevice(jitter=jitter)
        self.compute = self.device.new_stream("compute")
        self.copy = self.device.new_stream("copy")
        self.fail_forward_at = fail_forward_at
        self.steps = 0
        width = -(-max_model_len // page_size)
        self.table = np.zeros((rows + 1, width), np.int32)
        self.kv = np.zeros((n_pages, page_size), np.uint64)
        self.window_tables = [np.zeros_like(self.table) for _ in windows]
        self.window_kv = [np.zeros((pool.n_pages, page_size), np.uint64) for pool in windows]
        self.live: dict[int, tuple[int, int]] = {}  # row -> (positions, hash) in its state
        self.before: dict[int, tuple[int, int]] = {}  # the same of the state before its last drafts
        self.snapshots: dict[int, tuple[int, int]] = {0: (0, 0)}
        self.powers = np.array([power(p) for p in range(max_model_len)], np.uint64)
        self.rows = [Row() for _ in range(rows + 1)]
        self.slots = tuple(self._new_slot(slot_id, rows) for slot_id in range(n_slots))
        check_shared_stream(self.slots)

    def _new_slot(self, slot_id: int, rows: int) -> DecodeSlot[Staging]:
        n = rows * 16 + 1
        shapes = {"token_ids": n, "accepted": rows + 1, "drafts": (rows + 1, self.limits.drafts)}
        own, host = ({name: np.zeros(shape, np.int32) for name, shape in shapes.items()} for _ in range(2))
        staging = Staging(**own)
        return DecodeSlot(slot_id, self.compute, RenderBuffer(host, self.copy), staging)

    # ------------------------------------------------------------ the protocol

    def launch_forward(self, slot_id: int, batch: StepBatch) -> None:
        self.slots[slot_id].staging.batch = batch
        self.slots[slot_id].compute_stream.enqueue(lambda: self._forward(slot_id), "forward")

    def launch_sampling(self, slot_id: int, batch: StepBatch, mask: TokenMask | None) -> Transfer:
        slot = self.slots[slot_id]
        slot.staging.mask = mask
        slot.compute_stream.enqueue(lambda: self._sample(slot_id), "sample")
        n = int(batch.outputs.sum())
        lengths = {"token_ids": n, "accepted": batch.size}
        if self.limits.drafts:
            lengths["drafts"] = batch.size
        sources = {name: getattr(slot.staging, name) for name in lengths}
        return slot.render.start_transfer(slot.compute_stream.record(), sources, lengths)

    def forget_images(self, keys: Sequence[int]) -> None:
        pass

    def encoded_images(self) -> int:
        return 0

    def feature_hits(self) -> int:
        return 0

    def expert_tokens(self) -> Sequence[Sequence[int]]:
        return ()

    def adapter_key(self, adapter: str) -> str:
        return adapter

    def adapter_at_hand(self, adapter: str) -> bool:
        return True

    def load_adapter(self, adapter: str, slot: int) -> None:
        self.adapters[slot] = adapter

    def prepare_reload(self, model: str) -> LoadWeights:
        def load(progress: Progress = nothing, /) -> None:
            self.weights += 1

        return load

    def synchronize(self) -> None:
        self.device.synchronize()

    def close(self) -> None:
        self.device.close()

    # ------------------------------------------------------------ on the compute stream

    def _forward(self, slot_id: int) -> None:
        staging = self.slots[slot_id].staging
        batch = staging.batch
        assert batch is not None
        self.steps += 1
        if self.fail_forward_at is not None and self.steps >= self.fail_forward_at:
            raise DeviceError(f"step {self.steps} was told to fail")
        for binding in batch.bindings:
            self._bind(binding)
        updates = batch.pages
        self.table[updates.rows, updates.columns] = updates.pages
        for table, pages in zip(self.window_tables, updates.windows, strict=True):
            table[updates.rows, updates.columns] = pages
        if (moves := batch.states) is not None:
            for row, source in zip(moves.begun.tolist(), moves.sources.tolist(), strict=True):
                self.live[row] = self.snapshots[source]
                self.before.pop(row, None)
        staging.states, staging.spans = [], [self._span(batch, i) for i in range(batch.size)]
        for i, row in enumerate(batch.rows.tolist()):
            (start, inputs), outputs = staging.spans[i], int(batch.outputs[i])
            states = self._append(row, start, inputs)
            if outputs:
                staging.states += states[-outputs:]
            if batch.states is not None:
                self._advance(batch.states, i, row, start, states, outputs)
            if batch.pending[i] != PENDING:
                self.rows[row].pending = int(batch.pending[i])

    def _span(self, batch: StepBatch, i: int) -> tuple[int, list[int]]:
        """Where a row begins, and its inputs."""
        it, start, at = self.rows[int(batch.rows[i])], int(batch.starts[i]), int(batch.lengths[:i].sum())
        given = batch.token_ids[at : at + int(batch.lengths[i])].tolist()
        inputs = [it.pending if token == PENDING else token for token in given]
        inputs = [it.drafts[k - 1] if token == DRAFTED else token for k, token in enumerate(inputs)]
        if batch.in_doubt is not None and batch.in_doubt[i]:
            assert start - batch.in_doubt[i] <= it.start <= start, "a row begins where it was not expected"
            assert it.start + len(it.repeated) <= start, "a row ends where it was not expected"
            return it.start, [*it.repeated, *inputs]
        return start, inputs

    def _advance(
        self,
        moves: StateUpdates,
        i: int,
        row: int,
        start: int,
        states: list[tuple[int, int, int, int]],
        outputs: int,
    ) -> None:
        """The row's state, or the one before its drafts, must be where the step begins, and hold what the KV
        does."""
        if self.live[row][0] != start:
            self.live[row] = self.before.pop(row)
        assert self.live[row] == (start, self._history(row, start)), f"the state of row {row} before {start}"
        behind = {start + 1 + k: history for k, (_, _, history, _) in enumerate(states)}
        self.live[row] = max(behind.items())
        for k, position, slot in zip(
            moves.kept.tolist(), moves.positions.tolist(), moves.snapshots.tolist(), strict=True
        ):
            if k == i:
                self.snapshots[slot] = (position, behind[position])
        if i in moves.undecided:
            position = start + len(states) - outputs + 1
            self.before[row] = (position, behind[position])

    def _bind(self, binding: RowBinding) -> None:
        counts: dict[int, int] = {}
        for token in binding.output_token_ids.tolist():
            counts[token] = counts.get(token, 0) + 1
        self.rows[binding.row] = Row(
            binding.sampling,
            binding.seed,
            binding.adapter_slot,
            counts=counts,
            n_prompt=len(binding.prompt_token_ids),
            ends=binding.end_token_ids,
        )

    def _append(self, row: int, start: int, inputs: list[int]) -> list[tuple[int, int, int, int]]:
        """Write the KV of the inputs; the hash of the whole history behind each of them."""
        self._check_windows(row, start)
        state = self._history(row, start)
        states = []
        size = self.limits.page_size
        for position, token in enumerate(inputs, start):
            adapter = self.adapters.get(self.rows[row].adapter_slot, "")
            entry = kv_entry(state, token, position, self.weights, adapter)
            self.kv[self.table[row, position // size], position % size] = entry
            for table, kv in zip(self.window_tables, self.window_kv, strict=True):
                assert table[row, position // size], f"position {position} of row {row} has no page"
                kv[table[row, position // size], position % size] = entry
            state = (state + entry * int(self.powers[position])) & _MASK
            states.append((row, position, state, token))
        return states

    def _history(self, row: int, length: int) -> int:
        positions = np.arange(length)
        pages = self.table[row, positions // self.limits.page_size]
        return int((self.kv[pages, positions % self.limits.page_size] * self.powers[:length]).sum(dtype=np.uint64))

    def _check_windows(self, row: int, start: int) -> None:
        """Whether each group of layers with a window has the KV that position `start` reads."""
        size = self.limits.page_size
        for pool, table, kv in zip(self.limits.windows, self.window_tables, self.window_kv, strict=True):
            positions = np.arange(max(0, start - pool.window + 1), start)
            columns, offsets = positions // size, positions % size
            same = kv[table[row, columns], offsets] == self.kv[self.table[row, columns], offsets]
            assert same.all(), f"row {row} reads wrong KV in the window of {pool.window} before {start}"

    def _sample(self, slot_id: int) -> None:
        staging = self.slots[slot_id].staging
        batch = staging.batch
        assert batch is not None
        masks = (
            {}
            if staging.mask is None
            else dict(zip(staging.mask.outputs.tolist(), staging.mask.bits, strict=True))
        )
        first = 0
        for i, row in enumerate(batch.rows.tolist()):
            outputs, (start, inputs) = int(batch.outputs[i]), staging.spans[i]
            drafts = inputs[len(inputs) - outputs + 1 :] if outputs else []
            counts = dict(self.rows[row].counts)
            accepted = 0
            for j in range(outputs):
                token = self._choose(staging.states[first + j], counts, masks.get(first + j))
                staging.token_ids[first + j] = token
                holds = accepted == j
                if holds:
                    accepted += 1
                    counts[token] = counts.get(token, 0) + 1
                    self.rows[row].counts = dict(counts)
                    self.rows[row].pending = token
                    if j < len(drafts) and drafts[j] != token:
                        accepted = -accepted  # nothing behind it holds
                else:
                    counts[token] = counts.get(token, 0) + 1
            staging.accepted[i] = accepted = abs(accepted)
            if outputs:
                n = 0 if batch.ahead is None else int(batch.ahead[i])
                self._chain(row, start + len(inputs) - outputs + accepted, n)
                self.rows[row].drafts = self._drafted(staging.states[first + accepted - 1])[:n]
                staging.drafts[i] = -1
                staging.drafts[i, :n] = self.rows[row].drafts
            self.rows[row].start, self.rows[row].repeated = start + len(inputs) - outputs + accepted, []
            if self.limits.snapshots and accepted < outputs:
                self.rows[row].start = start + len(inputs) - outputs + 1
                self.rows[row].repeated = drafts[: accepted - 1]
            first += outputs

    def _chain(self, row: int, end: int, n: int) -> None:
        """What a chain of n drafts leaves at all of its positions but the last: nothing that anybody may read."""
        for position in range(end, end + n - 1):
            page = self.table[row, position // self.limits.page_size]
            assert page, f"row {row} drafts {n} tokens behind {end} without pages"
            self.kv[page, position % self.limits.page_size] = 0xDEAD

    def _drafted(self, state: tuple[int, int, int, int]) -> list[int]:
        """The tokens after the one that was sampled after a state, without masks, of which each is right with a
        probability. Behind a wrong one nothing is right."""
        row, position, history, _ = state
        it, found = self.rows[row], list[int]()
        counts, token, adapter = dict(it.counts), it.pending, self.adapters.get(it.adapter_slot, "")
        while len(found) < self.limits.drafts:
            position += 1
            if position >= self.limits.max_model_len:
                return [*found, *[0] * (self.limits.drafts - len(found))]
            entry = kv_entry(history, token, position, self.weights, adapter)
            history = (history + entry * int(self.powers[position])) & _MASK
            token = self._choose((row, position, history, token), counts, None)
            if mix(history, position) % 1000 >= 1000 * self.right:
                token = (token + 1) % self.limits.vocab_size
            counts[token] = counts.get(token, 0) + 1
            found.append(token)
        return found

    def _choose(self, state: tuple[int, int, int, int], counts: dict[int, int], mask: np.ndarray | None) -> int:
        row, position, history, last = state
        allowed = None
        if mask is not None:
            allowed = [v for v in range(self.limits.vocab_size) if int(mask[v // 32]) >> (v % 32) & 1]
        it = self.rows[row]
        barred = it.ends if position + 1 < it.n_prompt + it.sampling.min_tokens else ()
        return choose(
            it.sampling, it.seed, self.limits.vocab_size, history, position, last, counts, allowed, barred
        )


def kv_entry(state: int, token: int, position: int, weights: int, adapter: str) -> int:
    """What a position's KV holds: everything before it, and its input."""
    return mix(state, token, position, weights, len(adapter))


def power(position: int) -> int:
    """The weight of a position in the history's hash: order matters."""
    return pow(_BASE | 1, position + 1, 1 << 64)


def choose(
    sampling: SamplingParams,
    seed: int,
    vocab_size: int,
    history: int,
    position: int,
    last: int,
    counts: dict[int, int],
    allowed: list[int] | None,
    barred: Collection[int] = (),
) -> int:
    """The token behind `position`. Integers only."""
    candidates: Sequence[int] = range(vocab_size) if allowed is None else (allowed or [0])
    candidates = [v for v in candidates if v not in barred] or candidates
    favourite = (3 * last + 1) % vocab_size if history >> 7 & 3 else -1
    width = int(sampling.temperature * 65536)
    best, best_score = 0, -(1 << 62)
    for v in candidates:
        score = (mix(history, v) >> 48) + ((1 << 17) if v == favourite else 0)
        if width:
            score += (mix(seed, position, v) >> 40) % width
        if v in counts:
            score -= int(sampling.frequency_penalty * 32768) * counts[v] + int(sampling.presence_penalty * 32768)
        if score > best_score:
            best, best_score = v, score
    return best


def toy_continuation(
    prompt: list[int],
    sampling: SamplingParams,
    seed: int,
    *,
    vocab_size: int = 48,
    adapter: str = "",
    weights: int = 1,
    constraint: Any = None,
    ends: Collection[int] = (),
) -> Iterator[int]:
    """The oracle: what the toy samples, token by token, with no pages, no batches and no engine."""
    state, position = 0, 0
    counts: dict[int, int] = {}
    inputs = list(prompt)
    while True:
        for token in inputs:
            entry = kv_entry(state, token, position, weights, adapter)
            state = (state + entry * power(position)) & _MASK
            position += 1
        allowed = None if constraint is None else constraint.allowed()
        barred = ends if position < len(prompt) + sampling.min_tokens else ()
        token = choose(sampling, seed, vocab_size, state, position - 1, inputs[-1], counts, allowed, barred)
        counts[token] = counts.get(token, 0) + 1
        if constraint is not None:
            constraint.consume(token)
        inputs = [token]
        yield token
