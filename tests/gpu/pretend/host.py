"""What the host does for a step, over a pretended card: `python -m tests.gpu.pretend python -m
tests.gpu.pretend.host [--json PATH]`.

For decode and verify steps at several batch sizes, and for a prefill of 512 tokens: kernels launched (those of a
graph too, though the host launches it as one), copies, copies of pageable memory, for which a real card may wait,
and the processor's time in the runtime's `launch_forward` and `launch_sampling`. The model has the shape of
Qwen3-0.6B. Tokens are drawn with its recommended settings.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cuda import SMALL, opened, tokens
from bench.driver import Driver, Stream
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from tests.gpu.pretend.check import counts

SIZES, DRAFTS, ROUNDS, STEPS = (4, 64, 256), 5, 7, 10
SAMPLING = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)


@dataclass(frozen=True)
class Step:
    """Of one step. us: the least of `ROUNDS`, on a machine that others use as well."""

    name: str
    us: float
    kernels: float
    replays: float
    copies: float
    pageable: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    settings = {"max_num_seqs": SIZES[-1], "graph_batch_sizes": SIZES, "speculative_tokens": DRAFTS}
    with opened(SMALL, max_model_len=2048, **settings) as runtime:
        found = [step for size in SIZES for step in of_size(runtime, size)]
        found.append(of_prefill(runtime))
    for step in found:
        print(f"{step.name:24s} {step.us:7.0f} us {step.kernels:6.0f} kernels {step.replays:3.0f} graphs ", end="")
        print(f"{step.copies:4.0f} copies, {step.pageable:.0f} of pageable memory")
    if options.json:
        options.json.write_text(json.dumps([asdict(step) for step in found], indent=1))


def of_size(runtime: ModelRuntime, size: int) -> list[Step]:
    driver = Driver(runtime)
    sequences = [driver.sequence(tokens(32), SAMPLING) for _ in range(size)]
    driver.prefill(sequences)
    drafts = [[7] * DRAFTS] * size

    def decode() -> None:
        driver.decode_many(sequences, STEPS)

    def verify() -> None:
        for _ in range(STEPS):
            driver.verify(sequences, drafts)

    steps = {f"decode, {size} rows": decode, f"verify, {size} rows": verify}
    return [measured(runtime, name, work, STEPS) for name, work in steps.items()]


def of_prefill(runtime: ModelRuntime, length: int = 512) -> Step:
    driver = Driver(runtime)
    waiting: list[Stream] = [driver.sequence(tokens(length), SAMPLING) for _ in range(ROUNDS + 2)]
    return measured(runtime, f"prefill of {length}", lambda: driver.prefill([waiting.pop()]), 1)


def measured(runtime: ModelRuntime, name: str, work: Callable[[], object], steps: int) -> Step:
    work()
    timed, rounds = Timed(runtime), list[float]()
    before = counts()
    for _ in range(ROUNDS):
        timed.seconds = 0.0
        work()
        rounds.append(timed.seconds / steps)
    after = counts()
    timed.end()

    def each(count: str) -> float:
        return float(getattr(after, count) - getattr(before, count)) / (ROUNDS * steps)

    return Step(name, min(rounds) * 1e6, *(each(c) for c in ("launched", "replayed", "copied", "pageable")))


class Timed:
    """The processor's time in a runtime's launches, until `end`."""

    def __init__(self, runtime: ModelRuntime) -> None:
        self.seconds, self._runtime = 0.0, runtime
        for name in ("launch_forward", "launch_sampling"):
            setattr(runtime, name, self._timed(getattr(runtime, name)))

    def end(self) -> None:
        for name in ("launch_forward", "launch_sampling"):
            delattr(self._runtime, name)

    def _timed(self, launch: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            start = time.thread_time()
            try:
                return launch(*given)
            finally:
                self.seconds += time.thread_time() - start

        return call


if __name__ == "__main__":
    main()
