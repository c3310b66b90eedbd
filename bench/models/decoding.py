"""Decode and prefill on the CPU: tokens a second beside transformers and llama.cpp.

The models are random weights in the shapes of Qwen3-0.6B (bf16), of a 6.8 M-parameter model and of a mixture of
16 experts, of which a token takes 4 (float32). The first also runs in four bits, without transformers.
Each side computes the same prompts once. In every round it decodes the same number of tokens after them. Sides
alternate in one run, on the same number of threads, each with its faster attention. llama.cpp takes part if
`llama-cpp-python` and `gguf` are installed. The peer of a row is the best of the others."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from bench.harness import floors, load
from bench.harness.checkpoints.decoders import MIXTURE, QWEN3_06B, QWEN3_06B_INT4, SMALL, Shape, checkpoint, config
from bench.harness.driver import Driver
from bench.harness.report import NotAvailableError, Report, arguments
from bench.peers.llama_cpp import open_peer
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.runtime.runtime import ModelRuntime

Prompts = Sequence[Sequence[int]]
Work = Callable[[], float]
"""Does a round's work and gives the seconds that it took."""


@dataclass(frozen=True)
class Goal:
    """The ratio to the best peer that must be reached, and the ratio aimed at. `against`: the name of another
    peer. `floors`: how many times its floor a decode step may take, or the share of its floor that a prefill must
    reach."""

    size: int
    least: float
    aim: str
    against: str | None = None
    floors: float | None = None


@dataclass(frozen=True)
class Saving:
    """Settings with which a decode step of `size` sequences after prompts of `prompt` tokens should be shorter.
    most: the share of a step without them that it may take."""

    name: str
    settings: Mapping[str, Any]
    size: int
    prompt: int
    most: float | None = None


@dataclass(frozen=True)
class Case:
    """The measurements of a shape: decodes by batch size, one prompt by its length, and what settings save."""

    shape: Shape
    prompt: int
    n_tokens: int
    decode: tuple[Goal, ...]
    prefill: Goal | None = None
    savings: tuple[Saving, ...] = ()


FLOOR = "floor"
"""A side that takes what the hardware needs at least, at the rates of its turn."""

LARGE = Case(
    QWEN3_06B,
    128,
    12,
    decode=(
        Goal(1, 1.25, "the best peer", "transformers", floors=1.4),
        Goal(8, 1.0, "1.3", floors=1.4),
        Goal(16, 1.2, "1.5", floors=1.4),
        Goal(64, 1.2, "1.5", floors=2),
    ),
    prefill=Goal(512, 1.1, "1.3", floors=0.75),
    savings=(
        Saving("int8", {"weight_quantization": "int8"}, 1, 128, 0.75),
        Saving("int4", {"weight_quantization": "int4", "head_quantization": "int8"}, 1, 128),
        Saving("eight-bit cache", {"kv_dtype": "fp8"}, 8, 896),
    ),
)
CASES = {
    "small": Case(SMALL, 64, 64, decode=(Goal(1, 0.6, "1.0"), Goal(8, 1.2, "2"), Goal(32, 2.0, "3"))),
    "mixture": Case(MIXTURE, 64, 32, decode=(Goal(1, 1.0, "2"), Goal(8, 1.2, "2"), Goal(32, 1.2, "2"))),
    "large": LARGE,
    "int4": Case(
        QWEN3_06B_INT4,
        128,
        12,
        decode=(Goal(1, 1.3, "1.3", floors=1.25), *(Goal(size, 1.3, "1.3") for size in (8, 16, 64))),
        savings=tuple(Saving("int8 inputs", {"activation_quantization": "int8"}, size, 128) for size in (1, 8)),
    ),
}
TINIEST = Case(SMALL, 64, 8, decode=(Goal(8, 1.2, "2"),))


class Side(Protocol):
    name: str

    def decode(self, prompts: Prompts, n_tokens: int) -> Work: ...

    def prefill(self, prompt: Sequence[int]) -> Work: ...


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(CASES))
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    report = Report("Models on the CPU (output tokens a second; peer: the best of transformers and llama.cpp)")
    for key, case in {"quick": TINIEST}.items() if options.quick else CASES.items():
        if options.quick or options.only in (None, key):
            measure(case, report, 1 if options.quick else options.rounds, options.threads, options.json)
    report.finish(options.json)


def measure(case: Case, report: Report, rounds: int, threads: int, json_path: str | None) -> None:
    shape = case.shape
    floors.measure(shape, report)
    with checkpoint(shape) as folder:
        runtime = opened(case, folder, threads)
        llama = open_peer(config(shape), shape.dtype, threads, report, four_bits=shape.four_bits)
        sides: list[Side] = [Ours(runtime), *([] if shape.four_bits else [Transformers(folder, shape)])]
        sides += [llama] if llama else []
        load.settle()
        try:
            for goal in case.decode:
                work: dict[str, Work] = {FLOOR: partial(least_decode_s, case, goal.size)}
                asked = prompts(goal.size, case.prompt)
                work |= works(sides, partial(_decodes, asked, case.n_tokens), report)
                name = f"{shape.name}, batch {goal.size}"
                rates = in_turns(work, goal.size * case.n_tokens, rounds, report)
                judge(report, name, goal, rates)
                if goal.floors:
                    against_floor(report, name, goal.size, rates, goal.floors)
                report.save(json_path)
            if case.prefill is not None:
                length = case.prefill.size
                work = {FLOOR: lambda: floors.measure(shape).prefill_s(shape, length)}
                [one] = prompts(1, length)
                work |= works(sides, lambda side: side.prefill(one), report)
                rates = in_turns(work, length, rounds, report)
                name = f"{shape.name}, prefill {length}"
                judge(report, name, case.prefill, rates)
                if case.prefill.floors:
                    rate, most = (statistics.median(rates[side]) for side in (Ours.name, FLOOR))
                    name = f"{name}: against the matrix rate"
                    report.add(name, rate, "tokens/s", floor=most, target=case.prefill.floors)
            for saving in case.savings:
                measure_saving(case, saving, report, runtime, folder, rounds, threads)
        finally:
            runtime.close()
            if llama:
                llama.close()


def opened(case: Case, folder: str, threads: int, **options: Any) -> ModelRuntime:
    return ModelRuntime(
        EngineConfig(
            model=folder,
            device="cpu",
            max_num_seqs=max(goal.size for goal in case.decode),
            max_model_len=1024,
            num_threads=threads,
            **{**case.shape.settings, **options},
        )
    )


def measure_saving(
    case: Case, saving: Saving, report: Report, runtime: ModelRuntime, folder: str, rounds: int, threads: int
) -> None:
    changed = opened(case, folder, threads, **saving.settings)
    try:
        sides = {"without": Ours(runtime), "with": Ours(changed)}
        asked = prompts(saving.size, saving.prompt)
        work = {name: side.decode(asked, case.n_tokens) for name, side in sides.items()}
        rates = in_turns(work, saving.size * case.n_tokens, rounds, report)
    finally:
        changed.close()
    steps = {name: 1e3 * saving.size / statistics.median(found) for name, found in rates.items()}
    ratios = [a / b for a, b in zip(rates["without"], rates["with"], strict=True)]
    report.add(
        f"{case.shape.name}, {saving.name}, batch {saving.size}: a step against one without",
        steps["with"],
        "ms",
        peer=steps["without"],
        spread=(min(ratios), max(ratios)),
        target=saving.most,
        better="lower",
    )


def least_decode_s(case: Case, size: int) -> float:
    machine = floors.measure(case.shape)
    return case.n_tokens * machine.decode_step_s(case.shape, size, case.prompt + case.n_tokens // 2)


def _decodes(prompts: Prompts, n_tokens: int, side: Side) -> Work:
    return side.decode(prompts, n_tokens)


def works(sides: Iterable[Side], of: Callable[[Side], Work], report: Report) -> dict[str, Work]:
    """The work of each side. A peer that dies on its way to it is left out, and the report says why."""
    found: dict[str, Work] = {}
    for side in sides:
        try:
            found[side.name] = of(side)
        except NotAvailableError as error:
            report.absent[side.name] = str(error)
    return found


def in_turns(work: Mapping[str, Work], tokens: int, rounds: int, report: Report) -> dict[str, list[float]]:
    """Tokens a second of each side in each round. Every other round runs in the opposite order. A peer that dies
    is left out, and the report says why."""
    rates: dict[str, list[float]] = {name: [] for name in work}
    for i in range(rounds):
        for name in reversed(list(work)) if i % 2 else work:
            if name not in rates:
                continue
            if rounds > 1:
                load.rest()
            try:
                rates[name].append(tokens / work[name]())
            except NotAvailableError as error:
                report.absent[name] = str(error)
                del rates[name]
    return rates


def judge(report: Report, name: str, goal: Goal, rates: dict[str, list[float]]) -> None:
    medians = {side: statistics.median(found) for side, found in rates.items()}
    others = {side: rate for side, rate in medians.items() if side not in (Ours.name, FLOOR)}
    if not others:
        report.add(name, medians[Ours.name], "tokens/s", floor=medians.get(FLOOR))
        return
    peer = goal.against or max(others, key=lambda side: others[side])
    ratios = [a / b for a, b in zip(rates[Ours.name], rates[peer], strict=True)]
    report.add(
        name,
        medians[Ours.name],
        "tokens/s",
        peer=medians[peer],
        floor=medians.get(FLOOR),
        spread=(min(ratios), max(ratios)),
        target=goal.least,
        note=", ".join(f"{side} {rate:,.1f}" for side, rate in others.items()) + f"; aim {goal.aim}",
    )


def against_floor(report: Report, name: str, size: int, rates: dict[str, list[float]], most: float) -> None:
    """How long a decode step of `size` sequences takes. most: how many times its floor it may take."""
    step = 1e3 * size / statistics.median(rates[Ours.name])
    ratios = [least / found for found, least in zip(rates[Ours.name], rates[FLOOR], strict=True)]
    report.add(
        f"{name}: a step against its floor",
        step,
        "ms",
        floor=step / statistics.median(ratios),
        spread=(min(ratios), max(ratios)),
        target=most,
        better="lower",
    )


def prompts(batch: int, length: int) -> list[list[int]]:
    return torch.randint(3, 8000, (batch, length), generator=torch.Generator().manual_seed(1)).tolist()


class Ours:
    name = "petiole"

    def __init__(self, runtime: ModelRuntime) -> None:
        self._runtime = runtime

    def decode(self, prompts: Prompts, n_tokens: int) -> Work:
        driver = Driver(self._runtime)
        sequences = [driver.sequence(p) for p in prompts]
        driver.prefill(sequences)
        driver.decode_many(sequences, 2)
        rewinds = not self._runtime.limits.snapshots  # a state cannot be taken back

        def work() -> float:
            seconds = _seconds(lambda: driver.decode_many(sequences, n_tokens))
            for sequence in sequences if rewinds else ():
                sequence.length -= n_tokens
            return seconds

        return work

    def prefill(self, prompt: Sequence[int]) -> Work:
        def work() -> float:
            driver = Driver(self._runtime)
            sequence = driver.sequence(prompt)
            return _seconds(lambda: driver.prefill([sequence]))

        work()
        return work


class Transformers:
    name = "transformers"

    def __init__(self, folder: str, shape: Shape) -> None:
        from transformers import AutoModelForCausalLM

        dtype = getattr(torch, shape.dtype)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        self._model.eval()

    @torch.inference_mode()
    def decode(self, prompts: Prompts, n_tokens: int) -> Work:
        out = self._model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        state = {"cache": out.past_key_values, "token": out.logits[:, -1:].argmax(-1)}

        @torch.inference_mode()
        def steps(n: int) -> None:
            for _ in range(n):
                out = self._model(state["token"], past_key_values=state["cache"], use_cache=True)
                state["cache"], state["token"] = out.past_key_values, out.logits[:, -1:].argmax(-1)

        steps(2)

        def work() -> float:
            seconds = _seconds(lambda: steps(n_tokens))
            state["cache"].crop(-n_tokens)
            return seconds

        return work

    def prefill(self, prompt: Sequence[int]) -> Work:
        ids = torch.tensor([prompt])

        @torch.inference_mode()
        def work() -> float:
            return _seconds(lambda: self._model(ids, use_cache=True, logits_to_keep=1))

        work()
        return work


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
