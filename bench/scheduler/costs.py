"""The cost of the scheduler: plan, launch bookkeeping and commit, over a runtime that computes nothing.

Sequences decode side by side with the radix cache on, two steps deep, through the same four verbs as in the
engine, without tokenization, text and device. The target is 4 µs for each sequence and step, and 1.0 ms for a step
of 256 sequences. A step that verifies drafts yields several tokens for each sequence."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from bench.harness import report
from bench.harness.stand_ins import NullRuntime
from petiole.cache import KVCacheManager, PageTable
from petiole.cache.prefix.factory import build_prefix_cache
from petiole.gpu_worker import EngineConfig, Request, SamplingParams
from petiole.gpu_worker.scheduling.batching import StepPlan
from petiole.gpu_worker.scheduling.pipeline import PipelineState
from petiole.gpu_worker.scheduling.scheduled_sequence import Arrival, Followers, ScheduledSequence, SequenceInputs
from petiole.gpu_worker.scheduling.scheduler import Scheduler
from petiole.gpu_worker.scheduling.stopping import StopRules
from petiole.gpu_worker.speculation import NgramDrafter, Price

PROMPT_TOKENS, DRAFTS = 100, 5
MARK_US = 4.0
TARGET_MS = 1.0


class Sure(NgramDrafter):
    """Drafts whatever a draft costs: here that is all that a step costs."""

    def worth(self, price: Price, *, in_flight: bool) -> int:
        return 2 * (1 + DRAFTS)


class Harness:
    """A scheduler over a runtime that computes nothing, driven by hand: the engine's loop without the engine."""

    def __init__(self, rows: int, *, max_model_len: int = 4096, n_pages: int = 1 << 19, **config: Any) -> None:
        runtime = NullRuntime(rows=rows, n_pages=n_pages, max_model_len=max_model_len)
        settings = EngineConfig(max_num_seqs=rows, **config).decided(runtime.limits.batching)
        table = PageTable(n_pages, 1, rows + 1, max_model_len)
        manager = KVCacheManager(table, build_prefix_cache(settings.prefix_cache, table))
        self.scheduler = Scheduler(settings, runtime, manager)
        self.pipeline = PipelineState[ScheduledSequence](2)
        self._arrivals, self._drafts = itertools.count(), settings.speculative_tokens > 0

    def submit(self, prompt: np.ndarray, max_tokens: int) -> None:
        """Submit a request, which guesses drafts if the configuration has some. Its id is its number, from 0."""
        limits, arrival = self.scheduler.state.limits, next(self._arrivals)
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(prompt=prompt.tolist(), sampling=sampling, request_id=str(arrival))
        rules = StopRules.of(sampling, limits.eos_token_ids, len(prompt), limits.max_model_len)
        drafter = None
        if self._drafts:
            drafter = Sure(2, 4)
            drafter.extend(prompt.tolist())
        followers, arrived = Followers(drafter=drafter), Arrival(arrival)
        sequence = ScheduledSequence(
            request,
            SequenceInputs(prompt),
            rules,
            arrival=arrived,
            followers=followers,
            goes_ahead=limits.goes_ahead,
        )
        self.scheduler.state.enqueue(sequence)

    def plan(self) -> StepPlan | None:
        return None if self.pipeline.is_full else self.scheduler.schedule_step(self.pipeline)

    def launch(self, plan: StepPlan) -> None:
        scheduler, pipeline, slot_id = self.scheduler, self.pipeline, self.pipeline.free_slot_id()
        assert slot_id is not None
        handle = scheduler.launch_forward_async(plan, slot_id)
        assert handle is not None
        pipeline.on_launch(handle)
        pipeline.on_pending_commit(scheduler.finalize_sampling(handle, scheduler.compute_mask(handle)))

    def commit(self) -> None:
        """Commit the oldest step, if there is one."""
        step = self.pipeline.pop_oldest()
        if step is not None:
            self.scheduler.commit_step(step)
            self.pipeline.on_step_completed()

    def step(self) -> None:
        """One trip of the loop."""
        plan = self.plan()
        if plan is not None:
            self.launch(plan)
        if plan is None or self.pipeline.is_full:
            self.commit()
        self.scheduler.state.emissions = []


def decoding(n: int, cache: str = "radix", drafts: int = 0) -> Harness:
    """`n` sequences, past their prompts. From their third token on, each has that many right drafts."""
    settings = {"max_num_batched_tokens": n * PROMPT_TOKENS, "speculative_tokens": drafts}
    harness = Harness(n, prefix_cache=cache, **settings)
    rng = np.random.default_rng(0)
    for _ in range(n):
        harness.submit(rng.integers(1, 1000, PROMPT_TOKENS), 4096)
    while len(harness.scheduler.state.running) < n:
        harness.step()
    return harness


def step_samples(n: int, cache: str, rounds: int, steps: int, drafts: int = 0) -> list[float]:
    """Seconds of a step, one figure for each round, in the engine thread's own time: time that other processes
    take is not the scheduler's cost."""
    harness = decoding(n, cache, drafts)
    counters, samples = harness.scheduler.state.counters, []
    for _ in range(rounds):
        start, before = time.thread_time(), counters.steps
        while counters.steps < before + steps:
            harness.step()
        samples.append((time.thread_time() - start) / steps)
    return samples


def main(argv: list[str] | None = None) -> None:
    options = report.arguments(__doc__).parse_args(argv)
    rounds, steps = (3, 20) if options.quick else (20, 100)
    result = report.Report("Scheduler: one decode step, nothing computed")
    for n in (32, 256) if options.quick else (1, 32, 64, 128, 256, 512):
        samples = step_samples(n, "radix", rounds, steps)
        best = min(samples)
        result.add(
            f"step, {n} sequences",
            best * 1e3,
            "ms",
            target=TARGET_MS if n == 256 else None,
            better="lower",
            spread=(best * 1e3, max(samples) * 1e3),
            samples=samples,
        )
        if n >= 32:
            result.add(
                f"a sequence, of {n}",
                best / n * 1e6,
                "us",
                target=MARK_US if n == 256 else None,
                better="lower",
                note="best round",
            )
    for cache in ("block", "off"):
        samples = step_samples(256, cache, rounds, steps)
        result.add(
            f"step, 256 sequences, cache {cache}", min(samples) * 1e3, "ms", better="lower", samples=samples
        )
    samples = step_samples(256, "radix", min(rounds, 6), min(steps, 50), DRAFTS)
    result.add(
        f"a step that verifies {DRAFTS} drafts for each of 256 sequences",
        min(samples) * 1e3,
        "ms",
        better="lower",
        samples=samples,
        note=f"all accepted: {min(samples) / (256 * (1 + DRAFTS)) * 1e6:.2f} us a token",
    )
    result.finish(options.json)
