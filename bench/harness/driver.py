"""A minimal scheduler over the `Runtime` protocol, for tests and benchmarks of models.

Rows are taken from 1 up, pages one after another. A batch lives until all its sequences have their tokens. The
driver runs steps one at a time (`depth=1`) or keeps two in flight, as the engine does."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.runtime.interface import (
    PENDING,
    PageUpdates,
    RowBinding,
    Runtime,
    StateUpdates,
    StepBatch,
    StepKind,
    StepOutput,
    TokenMask,
    Transfer,
)


@dataclass(slots=True)
class Stream:
    """One prompt and its output. `length`: positions in the KV cache, by the device's progress."""

    row: int
    prompt: list[int]
    sampling: SamplingParams
    seed: int
    adapter_slot: int = 0
    length: int = 0
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    snapshots: dict[int, int] = field(default_factory=dict)  # by position
    source: int = 0  # the snapshot from which it goes on
    bound: bool = False
    remapped: bool = False


class _WindowPages:
    """The pages of layers with a window, by the page of the other layers for the same positions. Those that were
    taken first are given away when pages run out, because they lie behind all windows."""

    def __init__(self, n_pages: int) -> None:
        self.of: dict[int, int] = {}
        self._free = deque(range(1, n_pages))

    def take(self, page: int) -> None:
        own = self.of.pop(page, 0)
        if not own:
            own = self._free.popleft() if self._free else self.of.pop(next(iter(self.of)))
        self.of[page] = own


class Driver:
    """Builds StepBatches by hand. Every method that runs a step returns its `StepOutput`. `ahead`: how many tokens
    the runtime is to draft behind each step."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._slot = 0
        limits = runtime.limits
        self.ahead = limits.drafts
        self._page_size = limits.page_size
        self._free = deque(range(1, limits.n_pages))
        self._rows = deque(range(1, limits.max_batch_size))
        self._windows = [_WindowPages(pool.n_pages) for pool in limits.windows]
        self._snapshots = deque(range(1, limits.snapshots))

    def sequence(
        self, prompt: Sequence[int], sampling: SamplingParams | None = None, seed: int = 0, adapter_slot: int = 0
    ) -> Stream:
        greedy = SamplingParams(temperature=0.0)
        return Stream(self._rows.popleft(), list(prompt), sampling or greedy, seed, adapter_slot)

    def finish(self, sequence: Stream) -> None:
        self._free.extend(sequence.pages)
        self._rows.append(sequence.row)

    def fork(self, sequence: Stream, prompt: Sequence[int], shared: int) -> Stream:
        """A new sequence whose first `shared` tokens (a multiple of the page size) lie in the other's pages."""
        child = self.sequence(prompt, sequence.sampling, sequence.seed)
        child.length = shared
        child.pages = sequence.pages[: shared // self._page_size]
        child.source = sequence.snapshots[shared] if self.runtime.limits.snapshots else 0
        return child

    def keep(self, sequence: Stream, position: int) -> None:
        """Copy the states of layers that keep one, if there are any, when a step reaches the position. Forks go on
        from there."""
        if self.runtime.limits.snapshots:
            sequence.snapshots[position] = self._snapshots.popleft()

    def remap(self, sequence: Stream, other: Stream, shared: int) -> None:
        """From its next step on, the sequence reads its first `shared` tokens from the other's pages. Its own
        pages are given out next."""
        n = shared // self._page_size
        self._free.extendleft(sequence.pages[:n])
        sequence.pages[:n] = other.pages[:n]
        sequence.remapped = True

    # -- steps

    def prefill(self, sequences: Sequence[Stream], upto: Sequence[int] | None = None) -> StepOutput:
        """Append each prompt up to `upto[i]` tokens (all of it by default, and then sample)."""
        ends = [len(s.prompt) for s in sequences] if upto is None else list(upto)
        tokens = [s.prompt[s.length : end] for s, end in zip(sequences, ends, strict=True)]
        outputs = [int(end == len(s.prompt)) for s, end in zip(sequences, ends, strict=True)]
        return self.finish_step(*self.launch("prefill", sequences, tokens, outputs))

    def decode(self, sequences: Sequence[Stream], mask: TokenMask | None = None) -> StepOutput:
        inputs = [[PENDING] for _ in sequences]
        return self.finish_step(*self.launch("decode", sequences, inputs, [1] * len(sequences), mask))

    def verify(self, sequences: Sequence[Stream], drafts: Sequence[Sequence[int]]) -> StepOutput:
        """Verify drafts after each pending token. The KV of rejected drafts is forgotten."""
        inputs = [[PENDING, *d] for d in drafts]
        before = [s.length for s in sequences]
        step = self.launch("verify", sequences, inputs, [len(i) for i in inputs], undecided=True)
        output = self.finish_step(*step)
        for sequence, start, accepted in zip(sequences, before, output.accepted.tolist(), strict=True):
            sequence.length = start + accepted
        return output

    def launch(
        self,
        kind: StepKind,
        sequences: Sequence[Stream],
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[int],
        mask: TokenMask | None = None,
        pending: Sequence[int] | None = None,
        undecided: bool = False,
    ) -> tuple[list[Stream], list[int], Transfer]:
        """undecided: all inputs but a row's first may be rejected."""
        batch = self._batch(kind, sequences, inputs, outputs, pending, undecided=undecided)
        slot, self._slot = self._slot, 1 - self._slot
        self.runtime.launch_forward(slot, batch)
        return list(sequences), list(outputs), self.runtime.launch_sampling(slot, batch, mask)

    def finish_step(self, sequences: list[Stream], outputs: list[int], transfer: Transfer) -> StepOutput:
        output = transfer.wait()
        at = 0
        for sequence, n, accepted in zip(sequences, outputs, output.accepted.tolist(), strict=True):
            sequence.output += output.token_ids[at : at + accepted].tolist()
            at += n
        return output

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        seeds: Sequence[int] | None = None,
        chunk: int = 0,
        depth: int = 1,
    ) -> list[list[int]]:
        """Generate `n_tokens` tokens for every prompt, all prompts in one batch."""
        sequences = [self.sequence(p, sampling, seeds[i] if seeds else 0) for i, p in enumerate(prompts)]
        for sequence in sequences:
            while chunk and len(sequence.prompt) - sequence.length > chunk:
                self.prefill([sequence], [sequence.length + chunk])
        self.prefill(sequences)
        self.decode_many(sequences, n_tokens - 1, depth)
        for sequence in sequences:
            self.finish(sequence)
        return [s.output for s in sequences]

    def decode_many(self, sequences: Sequence[Stream], n_steps: int, depth: int = 2) -> None:
        """Run decode steps, up to `depth` of them in flight."""
        flying: deque[tuple[list[Stream], list[int], Transfer]] = deque()
        ones = [1] * len(sequences)
        inputs = [[PENDING]] * len(sequences)
        for _ in range(n_steps):
            if len(flying) == depth:
                self.finish_step(*flying.popleft())
            flying.append(self.launch("decode", sequences, inputs, ones))
        while flying:
            self.finish_step(*flying.popleft())

    # -- batches

    def _batch(
        self,
        kind: StepKind,
        sequences: Sequence[Stream],
        inputs: Sequence[Sequence[int]],
        outputs: Sequence[int],
        pending: Sequence[int] | None,
        *,
        undecided: bool,
    ) -> StepBatch:
        updates: list[tuple[int, int, int]] = []
        bindings = []
        starts = [s.length for s in sequences]
        for sequence, tokens in zip(sequences, inputs, strict=True):
            if not sequence.bound:
                bindings.append(self._binding(sequence))
                sequence.remapped = True
            if sequence.remapped:
                sequence.remapped = False
                updates += [(sequence.row, column, page) for column, page in enumerate(sequence.pages)]
            sequence.length += len(tokens)
            updates += self._grow(sequence)
        table = np.array(updates, dtype=np.int32).reshape(-1, 3)
        windows = [
            np.array([pool.of.get(page, 0) for _, _, page in updates], dtype=np.int32) for pool in self._windows
        ]
        return StepBatch(
            kind=kind,
            rows=np.array([s.row for s in sequences], dtype=np.int32),
            starts=np.array(starts, dtype=np.int32),
            lengths=np.array([len(t) for t in inputs], dtype=np.int32),
            token_ids=np.fromiter(chain.from_iterable(inputs), dtype=np.int32),
            outputs=np.array(outputs, dtype=np.int32),
            pending=np.array(pending or [PENDING] * len(sequences), dtype=np.int32),
            bindings=bindings,
            pages=PageUpdates(table[:, 0], table[:, 1], table[:, 2], windows),
            following=np.array([_after(s) for s in sequences], dtype=np.int32),
            ahead=np.full(len(sequences), self.ahead, dtype=np.int32),
            states=self._states(sequences, starts, bindings, outputs if undecided else ()),
        )

    def _states(
        self,
        sequences: Sequence[Stream],
        starts: Sequence[int],
        bindings: Sequence[RowBinding],
        outputs: Sequence[int],
    ) -> StateUpdates | None:
        if not self.runtime.limits.snapshots:
            return None
        bound = {binding.row for binding in bindings}
        begun = [(s.row, s.source, start) for s, start in zip(sequences, starts, strict=True) if s.row in bound]
        kept = [
            (i, position, snapshot)
            for i, (s, start) in enumerate(zip(sequences, starts, strict=True))
            for position, snapshot in s.snapshots.items()
            if start < position <= s.length
        ]
        undecided = [(i, starts[i] + 1) for i, n in enumerate(outputs) if n > 1]
        columns = (np.array(one, dtype=np.int32).reshape(-1, 3).T for one in (begun, kept))
        more = np.array(undecided, dtype=np.int32).reshape(-1, 2).T
        return StateUpdates(*(part for three in columns for part in three), *more)

    def _binding(self, sequence: Stream) -> RowBinding:
        sequence.bound = True
        return RowBinding(
            row=sequence.row,
            sampling=sequence.sampling,
            seed=sequence.seed,
            prompt_token_ids=np.array(sequence.prompt, dtype=np.int32),
            output_token_ids=np.array(sequence.output, dtype=np.int32),
            end_token_ids={*self.runtime.limits.eos_token_ids, *sequence.sampling.stop_token_ids},
            adapter_slot=sequence.adapter_slot,
        )

    def _grow(self, sequence: Stream) -> list[tuple[int, int, int]]:
        updates = []
        reached = sequence.length + max(0, self.runtime.limits.drafts - 1)
        while not self.runtime.limits.whole_texts and len(sequence.pages) * self._page_size < reached:
            page = self._free.popleft()
            updates.append((sequence.row, len(sequence.pages), page))
            sequence.pages.append(page)
            for pool in self._windows:
                pool.take(page)
        return updates


def _after(sequence: Stream) -> int:
    """The token after a sequence's last input, if it is of the prompt."""
    return sequence.prompt[sequence.length] if sequence.length < len(sequence.prompt) else PENDING
