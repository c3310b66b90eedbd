"""The scheduler's state: waiting, prefilling and running sequences, and the transitions between them.

    waiting --start--> prefilling --last chunk launched--> running --finalize--> (zombie) --> row and pages back
       ^                    |                                 |
       '----- preempt ------+---------------------------------'    (once nothing is outstanding)

A zombie is a finalized sequence with outstanding operations. It is in no list but still holds its row. Therefore
capacity is the number of rows held (`table.num_allocated`), never a list length.

`emissions` collects tokens, ends and admissions for the text thread, in order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec

from petiole.cache import KVAllocation, KVCacheManager
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.exceptions import AdapterError, InvalidRequest, failed
from petiole.gpu_worker.request import TokenLogprobs
from petiole.gpu_worker.request.pooling import Pooled
from petiole.gpu_worker.request.values import Numbers
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.gpu_worker.runtime.memory.kv_tier import KVTier
from petiole.gpu_worker.scheduling.priorities.admission import (
    Cut,
    Deadlines,
    ImageCropping,
    ResidentAdapters,
    WaitingQueue,
    forked,
)
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.scheduling.stopping import End
from petiole.gpu_worker.speculation import SpeculationStats

logger = logging.getLogger(__name__)
P = ParamSpec("P")


class Extras(NamedTuple):
    """The log-probabilities of tokens, the numbers that they carry, the values that these stand for, and what
    is made of texts: one entry per token, or None."""

    logprobs: Sequence[TokenLogprobs] | None = None
    numbers: Sequence[Numbers] | None = None
    values: Sequence[tuple[float, ...]] | None = None
    pooled: Sequence[Pooled] | None = None

    def keep(self, seq: ScheduledSequence, n: int) -> Extras:
        """The entries of the first `n` tokens. These must be the last `n` of `seq`, which stores their numbers."""
        logprobs = None if self.logprobs is None else self.logprobs[:n]
        if self.numbers is None or self.values is None:
            return Extras(logprobs, pooled=self.pooled)
        first = seq.total_tokens - n
        seq.numbers.update((first + k, numbers) for k, numbers in enumerate(self.numbers[:n]) if numbers)
        return Extras(logprobs, self.numbers[:n], self.values[:n])


@dataclass(slots=True)
class Admitted:
    seq: ScheduledSequence


@dataclass(slots=True)
class Generated:
    """New tokens of a sequence."""

    seq: ScheduledSequence
    token_ids: Sequence[int]
    extras: Extras | None


@dataclass(slots=True)
class PromptScored:
    """The next tokens of the prompt, with their log-probabilities."""

    seq: ScheduledSequence
    entries: Sequence[TokenLogprobs]


@dataclass(slots=True)
class SequenceEnded:
    seq: ScheduledSequence
    end: End


Emission = Admitted | PromptScored | Generated | SequenceEnded


@dataclass(slots=True)
class Counters:
    """encode_s: from launch to completion of encode steps. image_hits: images whose KV was cached at admission.
    resets: how often a fault had left the books of the pages wrong."""

    steps: int = 0
    prefill_steps: int = 0
    encode_s: float = 0.0
    image_hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    resets: int = 0
    zombie_outputs: int = 0
    finished: int = 0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)


class Faults:
    """Faults of the host, and whether the books of the pages are right after one.

    What may have been interrupted in the middle of a change is noted by `doubt`. `put_right` then checks the
    books, once for all that was noted."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager
        self.doubtful = self._distrusted = False

    def surely(self, change: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Make a change that may be begun again. It is, if it raises; a second error is the caller's."""
        try:
            change(*args, **kwargs)
        except Exception as error:
            self.doubt(error)
            change(*args, **kwargs)

    def doubt(self, error: BaseException) -> None:
        """Note a fault in something that may have changed the books."""
        if not isinstance(error, (InvalidRequest, AdapterError)):
            logger.error("a fault while sequences or their pages changed", exc_info=error)
            self.doubtful = True

    def distrust(self, error: BaseException) -> None:
        """Note that a launch could not be undone. The cache may have KV that nothing has computed: `put_right`
        forgets it, even if the books are right."""
        logger.error("a launch could not be undone", exc_info=error)
        self.doubtful = self._distrusted = True

    def put_right(self) -> bool:
        """Check the books of the pages. If they are wrong, sequences keep what they hold, and the cache forgets
        everything else. If even that cannot be known, all pages are free and nothing is cached from now on; this
        returns False: the sequences with rows must start anew. Steps in flight may still use the pages: what later
        steps write there, they write afterwards."""
        right = not self._distrusted and (self._are_right() or self._mended())
        self.doubtful = self._distrusted = False
        if not right:
            self._manager.reset()
        return right

    def _are_right(self) -> bool:
        try:
            self._manager.check()
            self._manager.check_running()
        except Exception as error:
            logger.error("the books of the pages are wrong after a fault", exc_info=error)
            return False
        return True

    def _mended(self) -> bool:
        try:
            self._manager.mend()
        except Exception as error:
            logger.error("the books cannot be mended: all sequences start anew", exc_info=error)
            return False
        logger.warning("the books of the pages are mended: what no sequence used is cached no longer")
        return True


class SchedulerState:
    """All sequences and their transitions. Owned by the engine thread. `faults`: of the host; `audit` follows."""

    def __init__(
        self,
        config: EngineConfig,
        limits: ModelLimits,
        manager: KVCacheManager,
        adapters: ResidentAdapters,
        forget_images: Callable[[Sequence[int]], None],
        cut: Cut,
        tier: KVTier | None = None,
    ) -> None:
        self.config = config
        self.forget_images = forget_images
        self.limits = limits
        self.manager = manager
        self.adapters = adapters
        self.waiting = WaitingQueue()
        self.prefilling: list[ScheduledSequence] = []
        self.running: list[ScheduledSequence] = []
        self.cutting = ImageCropping(cut, self.finalize)
        self.tier = tier
        self.counters = Counters()
        self.emissions: list[Emission] = []
        self.faults = Faults(manager)
        self._deadlines = Deadlines()

    @property
    def num_allocated(self) -> int:
        return self.manager.table.num_allocated

    @property
    def active(self) -> list[ScheduledSequence]:
        """Sequences that hold a row and are not finalized."""
        return self.prefilling + self.running

    @property
    def priorities(self) -> tuple[int, int] | None:
        """The best and the worst of all sequences, those that wait included; None if there is none."""
        waiting = (seq for seq in (self.waiting.first(), self.waiting.last()) if seq is not None)
        found = [seq.rank[0] for seq in (*self.active, *waiting)]
        return (min(found), max(found)) if found else None

    @property
    def num_zombies(self) -> int:
        return self.num_allocated - len(self.prefilling) - len(self.running)

    @property
    def has_work(self) -> bool:
        return self.num_allocated > 0 or len(self.waiting) > 0

    def reusable(self, seq: ScheduledSequence) -> int:
        """The number of positions that a waiting sequence would not compute if it started now."""
        matched = self.manager.match_length(seq.cache_tokens, seq.namespace)
        return matched if self.tier is None else self.tier.reach(seq, matched)

    # ------------------------------------------------------------ admission

    def enqueue(self, seq: ScheduledSequence) -> None:
        """Queue an accepted request. Running sequences that begin with the same tokens publish their committed
        positions. If that raises, the sequence is in the queue, and `fail` removes it."""
        self.waiting.push(seq)
        if self.running and self.config.prefix_cache != "off":
            n_cached = self.manager.known_length(seq.cache_tokens, seq.namespace)
            for origin in forked(seq, self.running, n_cached):
                origin.publish_committed()

    def start(self, seq: ScheduledSequence, first_chunk: int, now: float) -> bool:
        """Give a waiting sequence a row, its first pages and an adapter slot. Returns False if one of them is not
        available. Then, and if anything raises, the sequence has none of them and stays in the queue. Raises
        AdapterError."""
        slot = self.adapters.acquire(seq.adapter_key, seq.request.adapter)
        if slot is None:
            return False
        with ExitStack() as undo:
            undo.callback(self.adapters.release, seq.adapter_key)
            full = seq.max_positions if self.config.reserve == "full" else None
            chunk = None if full is not None else first_chunk
            if chunk is not None and self.tier is not None:
                n_cached = self.manager.match_length(seq.cache_tokens, seq.namespace)
                chunk += self.tier.reach(seq, n_cached) - n_cached
            allocation = self.manager.start(seq.cache_tokens, seq.namespace, kv_length=full, first_chunk=chunk)
            if allocation is None:
                return False
            undo.callback(allocation.discard)
            if self.tier is not None:
                self.tier.restore(seq, allocation)
            undo.callback(seq.release)
            seq.match_and_add_prefix(allocation, allocation.reused)
            if seq.scheduled_s is None:
                self._admitted(seq, allocation.reused, now)
            if self.manager.has_groups:
                self.manager.keep(allocation.row, seq.ends(self.limits.eos_token_ids))
            self.waiting.remove(seq)
            undo.pop_all()
        seq.adapter_slot = slot
        self.prefilling.append(seq)
        return True

    def _admitted(self, seq: ScheduledSequence, reused: int, now: float) -> None:
        seq.scheduled_s = now
        seq.cached_prompt_tokens = min(reused, seq.num_input_tokens)
        self.counters.image_hits += sum(begin < reused for begin in seq.images)
        self._deadlines.add(seq)
        self.emissions.append(Admitted(seq))

    # ------------------------------------------------------------ end and preemption

    def finalize(self, seq: ScheduledSequence, end: End) -> None:
        """End a request. Outstanding operations make the sequence a zombie; their outputs are dropped."""
        assert not seq.finalized, f"I8: {seq} ends twice"
        ended = SequenceEnded(seq, end)
        seq.finalized = True  # from here on it has ended, whatever fails
        self.emissions.append(ended)
        self.counters.finished += 1
        self.leave(seq)

    def leave(self, seq: ScheduledSequence) -> None:
        """Remove a finalized sequence from all lists, as far as it is there."""
        self.faults.surely(self._leave, seq)
        self.settle(seq)

    def _leave(self, seq: ScheduledSequence) -> None:
        self._deadlines.drop(seq)
        self.waiting.remove(seq)
        seq.load = None
        self._forget(seq)

    def fail(self, seq: ScheduledSequence, error: Exception) -> None:
        """End a request after an error on the host (in admission, a mask, drafter or launch). Others go on."""
        named = isinstance(error, (InvalidRequest, AdapterError))  # the caller's errors are passed on unchanged
        self.finalize(seq, error if named else failed(seq.request.request_id, error))

    def preempt(self, seq: ScheduledSequence) -> None:
        """Stop planning a sequence. Once no operation is outstanding, it releases its row and waits again."""
        seq.preempting = True
        self.counters.preemptions += 1
        self.settle(seq)

    def settle(self, seq: ScheduledSequence) -> None:
        """Release the row of a finalized or preempted sequence if no operation is outstanding."""
        self.faults.surely(self._settle, seq)

    def _settle(self, seq: ScheduledSequence) -> None:
        if not seq.is_idle or seq.allocation is None:
            return
        if seq.finalized:
            self.give_back(seq)
        elif seq.preempting:
            self.waiting.push(seq)
            self._forget(seq)
            self.give_back(seq)

    def _forget(self, seq: ScheduledSequence) -> None:
        for members in (self.prefilling, self.running):
            if seq in members:
                members.remove(seq)

    def give_back(self, seq: ScheduledSequence) -> None:
        """Cache the committed positions, and release the row, the pages and the adapter slot. If they cannot be
        cached, the next prompt that begins with them computes them again."""
        allocation = seq.allocation
        assert allocation is not None
        try:
            if seq.kv_position > allocation.published:
                allocation.publish(seq.cached_as(seq.kv_position), seq.kv_position)
            if self.tier is not None and allocation.row:
                self.tier.save(seq, allocation)
                self.tier.touch(seq, seq.cached_prompt_tokens or 0)
        except Exception as error:
            self.faults.doubt(error)
        self.faults.surely(self._discard, allocation)
        if seq.adapter_slot:
            self.faults.surely(self.adapters.release, seq.adapter_key)
            seq.adapter_slot = 0
        if seq.features:
            self.faults.surely(self.forget_images, list(seq.features.values()))
            seq.features.clear()
        self.faults.surely(seq.release)

    @staticmethod
    def _discard(allocation: KVAllocation) -> None:
        if allocation.row:
            allocation.discard()

    def clear(self) -> None:
        """Remove all sequences. Their rows have been released already."""
        self.prefilling.clear()
        self.running.clear()
        self.waiting = WaitingQueue()
        self._deadlines = Deadlines()

    # ------------------------------------------------------------ faults of the host

    def spoil(self, seq: ScheduledSequence, error: Exception) -> None:
        """`fail` after a fault that may have come while the request ended."""
        self.faults.doubt(error)
        if seq.finalized:
            self.leave(seq)
        else:
            self.fail(seq, error)

    def audit(self) -> bool:
        """After a fault, put the books of the pages right. Returns False if that takes all pages: then the
        sequences with rows start anew; their tokens stay the same."""
        if not self.faults.doubtful:
            return True
        right = self.faults.put_right()
        self.counters.resets += not right
        for seq in self.active:
            if seq.preempting:
                self.settle(seq)
            elif not right:
                self.preempt(seq)
        return right

    # ------------------------------------------------------------ deadlines

    def expired(self, now: float) -> list[ScheduledSequence]:
        """Remove and return the sequences whose deadline has passed. Also give up reads that took too long."""
        if self.tier is not None:
            self.tier.expire(now)
        return self._deadlines.pop_due(now)

    def next_deadline(self) -> float | None:
        found = [self._deadlines.first, None if self.tier is None else self.tier.next_deadline]
        return min((at for at in found if at is not None), default=None)
