"""A scheduler stepped by hand: a runtime that answers at once, no threads, no torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bench.harness.stand_ins import NullRuntime
from petiole.cache import KVCacheManager, PageTable
from petiole.cache.prefix.factory import build_prefix_cache
from petiole.contract.settings.engine import BATCHING
from petiole.gpu_worker import EngineConfig, Request, SamplingParams
from petiole.gpu_worker.runtime.interface import StepBatch
from petiole.gpu_worker.scheduling.batching import StepPlan
from petiole.gpu_worker.scheduling.pipeline import PipelineState
from petiole.gpu_worker.scheduling.scheduled_sequence import Arrival, ScheduledSequence, SequenceInputs
from petiole.gpu_worker.scheduling.scheduler import Scheduler
from petiole.gpu_worker.scheduling.stopping import StopRules


def sequence(prompt: list[int], arrival: int = 0, max_tokens: int = 8, **request: Any) -> ScheduledSequence:
    made = Request(prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens), **request)
    rules = StopRules.of(made.sampling, frozenset({0}), len(prompt), 64)
    return ScheduledSequence(made, SequenceInputs(prompt), rules, arrival=Arrival(arrival))


class Bench:
    """A scheduler and its pipeline. `plans` is what was launched, `batches` what the runtime was given, `device`
    the runtime's copy of the page table, `now` the clock that plans go by."""

    def __init__(self, n_pages: int = 1000, slots: int = 2, page_size: int = 1, **config: Any) -> None:
        settings = EngineConfig(**{"max_num_seqs": 4, "page_size": page_size, **config}).decided(BATCHING["cpu"])
        rows = settings.max_num_seqs
        runtime = NullRuntime(rows=rows, n_pages=n_pages, page_size=page_size, max_model_len=64)
        self.plans: list[StepPlan] = []
        self.batches: list[StepBatch] = []
        runtime.launch_forward = self._forward  # type: ignore[method-assign]
        table = PageTable(n_pages, page_size, rows + 1, 64)
        self.device = table.matrix.copy()
        manager = KVCacheManager(table, build_prefix_cache(settings.prefix_cache, table))
        self.scheduler = Scheduler(settings, runtime, manager)
        self.pipeline = PipelineState[ScheduledSequence](slots)
        self.now: Callable[[], float] = time.perf_counter

    def submit(self, *sequences: ScheduledSequence) -> None:
        for seq in sequences:
            self.scheduler.state.enqueue(seq)

    def _forward(self, slot_id: int, batch: StepBatch) -> None:
        self.batches.append(batch)
        table, updates = self.scheduler.manager.table, batch.pages
        self.device[updates.rows, updates.columns] = updates.pages
        for row, end in zip(batch.rows.tolist(), (batch.starts + batch.lengths).tolist(), strict=True):
            n = table.pages_for(end)
            assert (self.device[row, :n] == table.matrix[row, :n]).all(), f"row {row} reads wrong pages"

    def launch(self) -> str | None:
        slot_id = self.pipeline.free_slot_id()
        assert slot_id is not None
        plan = self.scheduler.planner.schedule_step(self.pipeline, self.now())
        if plan is None:
            return None
        handle = self.scheduler.launch_forward_async(plan, slot_id)
        assert handle is not None
        self.plans.append(plan)
        self.pipeline.on_launch(handle)
        self.pipeline.on_pending_commit(self.scheduler.finalize_sampling(handle, None))
        self.scheduler.check_invariants(self.pipeline)
        return plan.kind

    def commit(self) -> None:
        step = self.pipeline.pop_oldest()
        assert step is not None
        self.scheduler.commit_step(step)
        self.pipeline.on_step_completed()
        self.scheduler.check_invariants(self.pipeline)

    def round(self) -> None:
        """Half a trip of the engine's loop: launch, or commit when the slots are used up or nothing can start.
        What arrives before a commit arrives while the engine waits for that step."""
        if self.pipeline.is_full or not self.launch():
            self.commit()

    @property
    def has_work(self) -> bool:
        return self.scheduler.state.has_work
