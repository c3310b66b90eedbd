"""Random lives of sequences over tier and tree, against a model that remembers everything that was computed.

The KV of a position is a number that follows from all tokens up to it, the namespace and the weights. Whatever a
row holds must be that number, from wherever it came: computed, matched in the tree, or read from a file. As long
as nothing has been lost (no file evicted or damaged, no write failed, no copy dropped), the files have every whole
chunk that was ever committed. The threads of the tier and what they post run when the machine says so.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from petiole.cache import CacheNamespace, CacheTokens, KVAllocation, KVCacheManager, PageTable, build_prefix_cache
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.runtime.interface import Computing
from petiole.gpu_worker.runtime.memory import kv_tier
from petiole.gpu_worker.runtime.memory.chunk_files import HEADER, ChunkFiles
from petiole.gpu_worker.runtime.memory.kv_tier import KVTier, Load, Rates
from tests.cache.toy_kv import PAGE_SIZES
from tests.support.toy_runtime import mix
from tests.support.trials import examples

CHUNK, ROWS, RING = 4, 4, 3
SALT = CacheNamespace(salt="tenant")
NAMESPACES = [CacheNamespace(), CacheNamespace(), CacheNamespace(lora_id="a"), SALT]
restored: list[int] = []  # tokens, in each engine's life
DICE = st.integers(0, 2**32 - 1).map(random.Random)


class Sequence:
    """See `kv_tier.TieredSequence`."""

    tiered = True

    def __init__(self, tokens: list[int], namespace: CacheNamespace) -> None:
        self.tokens, self.namespace = tokens, namespace
        self.kv_position, self.prefill_target = 0, len(tokens)
        self.chunk_keys: list[bytes] = []
        self.n_copied = 0
        self.load: Load | None = None
        self.cache_tokens = self.cached_as(len(tokens))
        self.kv: KVAllocation | None = None

    def cached_as(self, n_positions: int) -> CacheTokens:
        return CacheTokens.from_text(np.array(self.tokens[:n_positions]))

    def content(self, weights: int) -> list[int]:
        first = mix(weights, *repr(self.namespace).encode())
        return list(accumulate(self.tokens, mix, initial=first))[1:]


class Copies:
    """See `interface.KVCopies`: at once, as a stream that is never behind."""

    layout, position_bytes = "toy", 8

    def __init__(self, pool: np.ndarray) -> None:
        self.pool, self.free = pool, deque[np.ndarray]()

    def make_ring(self, n_blocks: int, n_positions: int) -> None:
        self.free.extend(np.empty(n_positions, np.uint64) for _ in range(RING))

    def to_host(self, slots: np.ndarray) -> Any:
        if not self.free:
            return None
        block = self.free.popleft()
        block[:] = self.pool[slots]
        return SimpleNamespace(wait=lambda: block.view(np.uint8), release=lambda: self.free.append(block))

    def staging(self, n_bytes: int) -> np.ndarray:
        return np.empty(n_bytes, np.uint8)

    def from_host(self, slots: np.ndarray, staged: np.ndarray, first: int) -> None:
        self.pool[slots] = staged.view(np.uint64)[first : first + len(slots)]


class Jobs:
    """In place of a thread of the tier."""

    busy_since = None

    def __init__(self, name: str) -> None:
        self.queue: deque[Callable[[], None]] = deque()

    def put(self, job: Callable[[], None]) -> None:
        self.queue.append(job)

    def end(self, timeout_s: float) -> None:
        while self.queue:
            self.queue.popleft()()


class TierMachine(RuleBasedStateMachine):
    kind = "radix"

    @initialize()
    def build(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.patches = [mock.patch.object(kv_tier, "_Worker", Jobs), mock.patch.object(kv_tier, "CHUNK", CHUNK)]
        self.patches += [mock.patch.object(Rates, "reading_pays", return_value=True)]
        for patch in self.patches:
            patch.start()
        self.weights, self.lossless, self.said = 1, True, deque[Callable[[], None]]()
        self.waiting: list[Sequence] = []
        self.committed: list[Sequence] = []  # all that ever had positions, of these weights
        self.open_engine()

    def open_engine(self) -> None:
        self.note_restored()
        page_size = PAGE_SIZES[self.kind]
        self.table = PageTable({1: 41, 16: 9}[page_size], page_size, ROWS + 1)
        self.manager = KVCacheManager(self.table, build_prefix_cache(self.kind, self.table, None))  # type: ignore[arg-type]
        self.pool = np.zeros((self.table.total_pages + 1) * page_size, np.uint64)
        self.copies = Copies(self.pool)
        self.files = ChunkFiles(self.folder / "kv", 1 << 30)
        self.tier = KVTier(
            EngineConfig(kv_tier_salted=True, max_num_batched_tokens=2 * CHUNK),
            self.copies,
            lambda: SimpleNamespace(fingerprint=str(self.weights), files="", device="", computing=Computing()),  # type: ignore[arg-type, return-value]
            self.manager,
            self.files,
            self.said.append,
        )
        self.size = self.tier._size
        self.running: list[Sequence] = []

    def note_restored(self) -> None:
        if hasattr(self, "tier"):
            restored.append(self.tier.counters.restored_tokens)

    def teardown(self) -> None:
        if not hasattr(self, "folder"):
            return
        self.note_restored()
        try:
            self.hear_all()
            for seq in list(self.running):
                self.give_back(seq)
                self.hear_all()
            if self.lossless:
                self.nothing_is_missing()
        finally:
            for patch in self.patches:
                patch.stop()
            shutil.rmtree(self.folder)

    def nothing_is_missing(self) -> None:
        self.open_engine()
        for seq in self.committed:
            whole = min(seq.kv_position, seq.prefill_target - 1) // self.size * self.size
            again = Sequence(seq.tokens, seq.namespace)
            self.tier.at_hand(again, 0.0, first=True)
            self.hear_all()
            assert self.tier.at_hand(again, 0.0, first=True)
            assert self.tier.reach(again, 0) >= whole // self.table.page_size * self.table.page_size

    # --- what happens ---

    def hear_all(self) -> None:
        while self.tier._reader.queue or self.tier._writer.queue or self.said:  # type: ignore[attr-defined]
            self.tier._reader.end(0)
            self.tier._writer.end(0)
            while self.said:
                self.said.popleft()()

    @rule(dice=DICE)
    def a_thread_works(self, dice: random.Random) -> None:
        queue = dice.choice([self.tier._reader, self.tier._writer]).queue  # type: ignore[attr-defined]
        for _ in range(dice.randint(1, 4)):
            if queue:
                queue.popleft()()

    @rule(dice=DICE)
    def the_engine_hears(self, dice: random.Random) -> None:
        for _ in range(dice.randint(1, 6)):
            if self.said:
                self.said.popleft()()

    @rule(dice=DICE, several=st.integers(1, 3))
    def run_prompts(self, dice: random.Random, several: int) -> None:
        """From arrival to end, so that files and tree fill."""
        for _ in range(several):
            seq = self.arrive(dice)
            self.start_one(seq, dice)
            while seq in self.running and seq.kv_position < len(seq.tokens) and self.compute_some(seq, dice):
                pass
            if seq in self.running:
                self.give_back(seq)
            if dice.random() < 0.7:
                self.hear_all()

    @rule(dice=DICE)
    def go_on_in_another_process(self, dice: random.Random) -> None:
        """Its tree is empty, so that what was computed comes from files."""
        self.run_prompts(dice, 2)
        self.another_process(killed=False)
        self.run_prompts(dice, 3)

    @rule(dice=DICE)
    def arrive_alone(self, dice: random.Random) -> None:
        self.arrive(dice)

    def arrive(self, dice: random.Random) -> Sequence:
        """Prompts go on with earlier ones, or share a beginning with them."""
        tokens = list(dice.choice(self.committed).tokens) if self.committed and dice.random() < 0.7 else []
        tokens = tokens[: dice.randint(0, len(tokens))] if dice.random() < 0.3 else tokens
        tokens += [dice.randint(0, 2)] * dice.randint(1, 2 * self.size)
        self.waiting.append(Sequence(tokens[: 5 * self.size], dice.choice(NAMESPACES)))
        return self.waiting[-1]

    @precondition(lambda self: self.waiting)
    @rule(dice=DICE)
    def start(self, dice: random.Random) -> None:
        self.start_one(dice.choice(self.waiting), dice)

    def start_one(self, seq: Sequence, dice: random.Random) -> None:
        if not self.tier.at_hand(seq, 0.0, first=seq is self.waiting[0]):
            if dice.random() < 0.3:
                return
            self.hear_all()
            if not self.tier.at_hand(seq, 0.0, first=seq is self.waiting[0]):
                return
        n_cached = self.manager.match_length(seq.cache_tokens, seq.namespace)
        chunk = dice.randint(1, 8) + self.tier.reach(seq, n_cached) - n_cached
        allocation = self.manager.start(seq.cache_tokens, seq.namespace, first_chunk=chunk)
        if allocation is None:
            return
        before = allocation.reused
        self.tier.restore(seq, allocation)
        assert before <= allocation.reused < seq.prefill_target, "something is computed"
        self.waiting.remove(seq)
        self.running.append(seq)
        seq.kv, seq.kv_position = allocation, allocation.reused
        self.committed.append(seq)

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def compute(self, dice: random.Random) -> None:
        self.compute_some(dice.choice(self.running), dice)

    def compute_some(self, seq: Sequence, dice: random.Random) -> bool:
        """Returns False if it is as long as it may be, or no page is free."""
        assert seq.kv is not None
        if seq.kv_position == len(seq.tokens) and len(seq.tokens) < 5 * self.size:
            seq.tokens.append(dice.randint(0, 2))
        end = min(len(seq.tokens), seq.kv_position + dice.randint(1, 2 * self.size))
        if end == seq.kv_position or not seq.kv.reserve(end):
            return False
        wanted = seq.content(self.weights_of(seq))
        self.pool[
            self.tier._slots(seq.kv, 0, -(-end // self.table.page_size) * self.table.page_size)[
                seq.kv_position : end
            ]
        ] = wanted[seq.kv_position : end]
        if end <= seq.prefill_target:
            seq.kv.publish(seq.cache_tokens, end)
        seq.kv_position = end
        self.tier.follow(seq, seq.kv)
        return True

    @precondition(lambda self: self.running)
    @rule(dice=DICE)
    def end(self, dice: random.Random) -> None:
        self.give_back(dice.choice(self.running))

    def give_back(self, seq: Sequence) -> None:
        assert seq.kv is not None
        self.running.remove(seq)
        if seq.kv_position > seq.kv.published:
            seq.kv.publish(seq.cached_as(seq.kv_position), seq.kv_position)
        dropped = self.tier.counters.dropped_chunks
        self.tier.save(seq, seq.kv)
        self.tier.touch(seq, seq.kv.reused)
        self.lossless &= self.tier.counters.dropped_chunks == dropped
        seq.kv.discard()

    @rule(dice=DICE)
    def patience_ends(self, dice: random.Random) -> None:
        self.tier.expire(dice.choice([1.0, 1e9]))

    @rule(weights=st.integers(1, 12))
    def other_weights(self, weights: int) -> None:
        """New ones, or those of before. Running sequences go on with what they have, and nobody may use that."""
        if weights > 2 or weights == self.weights:
            return
        for seq in self.running:
            seq.stale_of = self.weights_of(seq)  # type: ignore[attr-defined]
        self.committed.clear()
        self.weights = weights
        self.manager.flush()

    def weights_of(self, seq: Sequence) -> int:
        return getattr(seq, "stale_of", self.weights)

    @rule(killed=st.booleans())
    def another_process(self, killed: bool) -> None:
        """killed: what was on the way is lost."""
        if killed:
            self.lossless &= not self.tier._writer.queue  # type: ignore[attr-defined]
            self.lossless &= all(seq.kv_position // self.size <= seq.n_copied for seq in self.running)
        else:
            for seq in list(self.running):
                self.give_back(seq)
            self.tier.close()
        self.said.clear()
        for seq in self.waiting:
            seq.load = None
        self.open_engine()

    @rule(dice=DICE)
    def harm(self, dice: random.Random) -> None:
        """A file is damaged, cut, removed or put in place of another one; or files are evicted for room."""
        paths = sorted(path for path in self.folder.rglob("*.kv") if path.stat().st_size > HEADER)
        if not paths:
            return
        self.lossless = False
        path, how = dice.choice(paths), dice.choice(["bit", "cut", "gone", "another", "evicted", "full"])
        data = bytearray(path.read_bytes())
        if how == "gone":
            path.unlink()
        elif how == "evicted":
            self.files.evict(dice.choice([0, 3 * len(data)]))
        elif how == "full":
            queue = self.tier._writer.queue  # type: ignore[attr-defined]
            with mock.patch.object(os, "posix_fallocate", side_effect=OSError(28, "full")):
                while queue:
                    queue.popleft()()
            self.files._paused_until = 0.0
        else:
            if how == "bit":
                data[dice.choice([dice.randrange(200), dice.randrange(HEADER, len(data))])] ^= 1 << dice.randrange(
                    8
                )
            source = bytes(data) if how == "bit" else bytes(data[: dice.randrange(len(data))])
            if how == "another" and len(paths) > 9:
                source = dice.choice(paths).read_bytes()
            path.unlink()  # it may be read-only
            path.write_bytes(source)

    # --- what must hold ---

    @invariant()
    def rows_have_what_was_computed(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.table.check()
        for seq in self.running:
            assert seq.kv is not None
            size = self.table.page_size
            slots = self.tier._slots(seq.kv, 0, -(-seq.kv_position // size) * size)[: seq.kv_position]
            assert self.pool[slots].tolist() == seq.content(self.weights_of(seq))[: seq.kv_position]
        assert len(self.copies.free) + len(self.tier._writer.queue) >= RING, "no block is lost"  # type: ignore[attr-defined]


class BlockMachine(TierMachine):
    kind = "block"


@pytest.mark.parametrize("machine", [TierMachine, BlockMachine], ids=["radix", "block"])
def test_tier_and_tree_against_a_model_that_remembers_everything(machine: type[TierMachine]) -> None:
    restored.clear()
    with mock.patch.object(kv_tier.logger, "exception"), mock.patch.object(ChunkFiles, "_fails", _count):
        run_state_machine_as_test(  # type: ignore[no-untyped-call]
            machine,
            settings=settings(
                max_examples=examples(120),
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
    assert sum(restored) > 20


def _count(files: ChunkFiles, what: str, error: OSError) -> None:
    files.counters.failed += 1
