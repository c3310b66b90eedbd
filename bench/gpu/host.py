"""What the host does for a step on CUDA, by the processor's time. On a card, or on a pretended one, which computes
nothing: `python -m tests.gpu.pretend python -m bench.gpu.host`.

The engine's thread is measured whole: it plans, launches and commits. The launches of single steps are measured
beside it, for each kind of step that has a graph. A pretended card also counts kernels and copies. The model has
the shape of Qwen3-0.6B.
"""

from __future__ import annotations

import ctypes
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from bench.gpu.card import SMALL, opened, release, tokens
from bench.harness.driver import Driver, Stream
from bench.harness.report import Report, arguments
from petiole.gpu_worker.engine import Engine
from petiole.gpu_worker.request import Request, SamplingParams
from petiole.gpu_worker.runtime.interface import PENDING
from petiole.gpu_worker.runtime.runtime import ModelRuntime

BATCHES = {4: 0.5, 64: 0.7, 256: 1.5}
"""And the most milliseconds that a step may take the engine's thread."""

DRAFTS, CHUNK = 5, 512
SHORT, LONG = 20, 140
"""Tokens of two generations, whose difference is that of decode steps alone."""

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
USUAL = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, ignore_eos=True)
"""As Qwen3 recommends."""


class Counts(ctypes.Structure):
    """What a pretended card counts: see `tests/gpu/pretend/pretend.h`."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("refused", "launched", "captured", "replayed", "copied", "pageable")),
        *((name, ctypes.c_size_t) for name in ("peak", "memory")),
    )


def counts() -> Counts | None:
    """None on a real card."""
    count = getattr(ctypes.CDLL(None), "pretend_counts", None)
    found = Counts()
    if count is None:
        return None
    count(ctypes.byref(found))
    return found


def counted() -> Counter[str]:
    """All `counts`; nothing on a real card."""
    found = counts()
    return Counter({} if found is None else {field[0]: getattr(found, field[0]) for field in Counts._fields_})


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu.host needs a CUDA device, or a pretended one: python -m tests.gpu.pretend")
    report = Report("The host's share of a step on CUDA")
    report.extra["device"] = torch.cuda.get_device_name()
    rounds = 2 if options.quick else 7
    of_engine(report, rounds)
    release()
    captured = of_launches(report, rounds)
    release()
    for name, (ms, note) in without_graphs(rounds).items():
        was, counted = captured[name]
        note = f"{counted}; without a graph {note}" if counted else ""
        report.add(f"launches, {name}", was, "ms", peer=ms, better="lower", note=note)
    report.finish(options.json)


SIZES: dict[str, Any] = {
    "max_num_seqs": max(BATCHES),
    "graph_batch_sizes": tuple(BATCHES),
    "max_model_len": 2048,
}
MORE: dict[str, Any] = {"speculative_tokens": DRAFTS, "prefill_policy": "mixed", "chunk_size": CHUNK}


def of_engine(report: Report, rounds: int) -> None:
    context = opened(SMALL, **SIZES)
    with context as runtime, Engine(context.config, runtime=runtime) as engine:
        for batch, most in BATCHES.items():
            add, what = report.add, f"the engine's thread, {batch} sequences: a decode step"
            add(what, engine_ms(engine, batch, GREEDY, rounds), "ms", target=most, better="lower")
            add("  with top-k and top-p", engine_ms(engine, batch, USUAL, rounds), "ms", better="lower")


def of_launches(report: Report, rounds: int) -> dict[str, tuple[float, str]]:
    with opened(SMALL, **SIZES, **MORE) as runtime:
        launches(report, runtime, rounds)
        return prompts(runtime, rounds)


def without_graphs(rounds: int) -> dict[str, tuple[float, str]]:
    with opened(SMALL, **SIZES, **MORE, cuda_graphs="off") as runtime:
        return prompts(runtime, rounds)


def engine_ms(engine: Engine, batch: int, sampling: SamplingParams, rounds: int) -> float:
    clock = time.pthread_getcpuclockid(engine._thread.ident)  # type: ignore[arg-type]

    def spent(n: int) -> float:
        asked = replace(sampling, max_tokens=n)
        start = time.clock_gettime(clock)
        engine.generate([Request(prompt=[i, *tokens(30)], sampling=asked) for i in range(batch)])
        return time.clock_gettime(clock) - start

    short, long = (min(spent(n) for _ in range(rounds)) for n in (SHORT, LONG))
    return 1e3 * (long - short) / (LONG - SHORT)


def launches(report: Report, runtime: ModelRuntime, rounds: int) -> None:
    """Decodes and verifications."""
    for batch in BATCHES:
        driver = Driver(runtime)
        sequences = [driver.sequence(tokens(32), USUAL) for _ in range(batch)]
        for sequence in sequences:
            driver.prefill([sequence])
        drafts = [[7] * DRAFTS] * batch
        in_turns = (partial(driver.decode, sequences), partial(driver.verify, sequences, drafts))
        (ms, note), (verify, verify_note) = measured(runtime, in_turns, rounds * 20)
        report.add(f"launches, {batch} sequences: a decode step", ms, "ms", better="lower", note=note)
        what = f"  a verify step of {DRAFTS} drafts"
        report.add(what, verify, "ms", peer=ms, target=1.3, better="lower", note=verify_note)


def prompts(runtime: ModelRuntime, rounds: int) -> dict[str, tuple[float, str]]:
    """Prefills and mixed steps: milliseconds, and what was counted."""
    found = {}
    for length in (32, CHUNK):
        driver = Driver(runtime)
        waiting = [driver.sequence(tokens(length), USUAL) for _ in range(rounds + 1)]
        (found[f"a prefill of {length} tokens"],) = measured(runtime, [prefill_one(driver, waiting)], rounds)
    driver, decoding = Driver(runtime), 64
    sequences = [driver.sequence(tokens(32), USUAL) for _ in range(decoding)]
    for sequence in sequences:
        driver.prefill([sequence])
    waiting = [driver.sequence(tokens(CHUNK), USUAL) for _ in range(rounds + 1)]

    def mixed() -> None:
        prompt = waiting.pop()
        inputs = [*([PENDING] for _ in sequences), prompt.prompt]
        driver.finish_step(*driver.launch("mixed", [*sequences, prompt], inputs, [1] * (decoding + 1)))

    (found[f"a mixed step of {decoding} decodes and {CHUNK} tokens"],) = measured(runtime, [mixed], rounds)
    return found


def prefill_one(driver: Driver, waiting: list[Stream]) -> Callable[[], object]:
    return lambda: driver.prefill([waiting.pop()])


def measured(runtime: ModelRuntime, steps: Sequence[Callable[[], object]], rounds: int) -> list[tuple[float, str]]:
    """For each kind of step, in turns: the least milliseconds of its launches, after a first step, and the counts
    of a pretended card in each step."""
    for step in steps:
        step()
    times, counts_of = [list[float]() for _ in steps], [Counter[str]() for _ in steps]
    timed = Timed(runtime)
    for _ in range(rounds):
        for step, spent, count in zip(steps, times, counts_of, strict=True):
            before = counted()
            spent.append(timed.of(step))
            count += counted() - before
    timed.end()
    return [(1e3 * min(spent), note(count, rounds)) for spent, count in zip(times, counts_of, strict=True)]


def note(found: Counter[str], rounds: int) -> str:
    if not found:
        return ""
    each = {name: f"{found[name] / rounds:.0f}" for name in ("replayed", "launched", "copied", "pageable")}
    graphs = f"{each['replayed']} graph, " if int(each["replayed"]) else ""
    return f"{graphs}{each['launched']} kernels, {each['copied']} copies, {each['pageable']} of pageable memory"


class Timed:
    """The processor's time in a runtime's launches, until `end`."""

    LAUNCHES = ("launch_forward", "launch_sampling")

    def __init__(self, runtime: ModelRuntime) -> None:
        self._runtime, self._seconds = runtime, 0.0
        for name in self.LAUNCHES:
            setattr(runtime, name, self._timed(getattr(runtime, name)))

    def of(self, step: Callable[[], object]) -> float:
        """Seconds."""
        self._seconds = 0.0
        step()
        return self._seconds

    def end(self) -> None:
        for name in self.LAUNCHES:
            delattr(self._runtime, name)

    def _timed(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            start = time.thread_time()
            try:
                return launch(*given)
            finally:
                self._seconds += time.thread_time() - start

        return call


if __name__ == "__main__":
    main()
