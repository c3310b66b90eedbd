"""Load on an engine: requests at a fixed concurrency or as a Poisson process, and the times of their deltas.

Times are taken on the engine's text thread, as the deltas come, so a reader in the same process would see the
same."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.harness.checkpoints.decoders import Shape
from bench.harness.report import percentile
from petiole.gpu_worker import Engine, Request, SamplingParams
from petiole.gpu_worker.request import Delta, Result
from petiole.gpu_worker.request.handle import Handle

_REST_S = 1.5


def rest() -> None:
    """Between the turns of two sides on a CPU: the threads of the first go on spinning for a while."""
    time.sleep(_REST_S)


def settle() -> None:
    """Exclude loaded models from garbage collections from now on, as a worker does."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, *gc.get_threshold()[1:])


def let_go() -> None:
    """Free the models that `settle` has excluded and nobody uses any more."""
    gc.unfreeze()
    gc.collect()


@dataclass(frozen=True)
class Case:
    """A load to compare: `n` requests, `concurrency` of them open at a time, in `rounds` rounds."""

    shape: Shape
    n: int
    prompt: int
    output: int
    concurrency: int
    rounds: int
    target: float | None = None

    @property
    def name(self) -> str:
        at_once = f"{self.n}" if self.concurrency >= self.n else f"{self.concurrency} of {self.n}"
        return f"{self.shape.name}, {at_once} at once, {self.prompt} in, {self.output} out"

    @property
    def tokens(self) -> int:
        """All answers together."""
        return self.n * self.output


@dataclass
class Stream:
    """When a request was submitted, and when its tokens came."""

    submitted: float
    stamps: list[float] = field(default_factory=list)
    tokens: int = 0
    begun: threading.Event = field(default_factory=threading.Event)
    handle: Handle | None = None

    def on_delta(self, _: Handle, delta: Delta) -> None:
        if delta.token_ids:
            self.stamps.append(time.perf_counter())
            self.tokens += len(delta.token_ids)
            if len(self.stamps) == 1:
                self.begun.set()

    @property
    def ttft_s(self) -> float:
        return self.stamps[0] - self.submitted

    @property
    def result(self) -> Result:
        assert self.handle is not None
        return self.handle.result()


@dataclass
class Run:
    """A finished load. Rates are over the time from the first submission to the last token."""

    streams: list[Stream]

    @property
    def seconds(self) -> float:
        return max(s.stamps[-1] for s in self.streams) - min(s.submitted for s in self.streams)

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self.streams)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def requests_per_s(self) -> float:
        return len(self.streams) / self.seconds

    @property
    def ttfts_ms(self) -> list[float]:
        return [1e3 * stream.ttft_s for stream in self.streams]

    @property
    def gaps_ms(self) -> list[float]:
        """Milliseconds between consecutive deltas of the same stream."""
        return [1e3 * (b - a) for s in self.streams for a, b in itertools.pairwise(s.stamps)]

    def ttft_ms(self, share: float) -> float:
        return percentile(self.ttfts_ms, share)


def submit(engine: Engine, request: Request, release: threading.Semaphore | None = None) -> Stream:
    stream = Stream(time.perf_counter())

    def done(_: Handle) -> None:
        if release is not None:
            release.release()

    stream.handle = engine.submit(request, on_delta=stream.on_delta, on_done=done)
    return stream


def finished(streams: Sequence[Stream]) -> Run:
    for stream in streams:
        _ = stream.result  # raises the request's error
    return Run(list(streams))


def at_concurrency(engine: Engine, requests: Iterable[Request], concurrency: int) -> Run:
    """As many open requests as `concurrency`: the next is submitted when one has ended."""
    free = threading.Semaphore(concurrency)
    streams = []
    for request in requests:
        free.acquire()
        streams.append(submit(engine, request, free))
    return finished(streams)


def poisson(engine: Engine, requests: Sequence[Request], per_second: float, seed: int = 0) -> Run:
    """Arrivals that do not wait for anybody."""
    at = time.perf_counter()
    streams = []
    for request, gap in zip(requests, arrival_gaps(len(requests), per_second, seed), strict=True):
        at += gap
        time.sleep(max(0.0, at - time.perf_counter()))
        streams.append(submit(engine, request))
    return finished(streams)


def while_prefilled(engine: Engine, length: int, n: int, per_second: float) -> Run:
    """At least `n` short requests, each submitted before the first token of a long prompt ahead of it.

    The first comes right after the long prompt, the others as Poisson arrivals while the long prompt is
    prefilled. If the machine has prefilled it before `n` have come, another long prompt follows."""
    caught: list[Stream] = []
    while len(caught) < n:
        long = submit(engine, requests(1, length, 2, seed=len(caught))[0])
        shorts = iter(requests(512, 32, 8, seed=len(caught) + 1))
        gaps = iter(arrival_gaps(512, per_second, seed=len(caught)))
        streams = [long]
        while not long.stamps and (short := next(shorts, None)) is not None:
            streams.append(submit(engine, short))
            long.begun.wait(next(gaps))
        finished(streams)
        caught += [short for short in streams[1:] if short.submitted < long.stamps[0]]
    return Run(caught)


def arrival_gaps(n: int, per_second: float, seed: int = 0) -> list[float]:
    gaps: list[float] = np.random.default_rng(seed).exponential(1 / per_second, n).tolist()
    return gaps


def prompts(n: int, length: int, *, seed: int = 0, high: int = 500) -> list[list[int]]:
    """Prompts of token ids that every shape here has."""
    ids: list[list[int]] = np.random.default_rng(seed).integers(3, high, (n, length)).tolist()
    return ids


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


def requests(n: int, prompt: int, output: int, *, seed: int = 0) -> list[Request]:
    return [Request(prompt=p, sampling=greedy(output)) for p in prompts(n, prompt, seed=seed)]
