"""A whole load at once, beside other engines: output tokens a second, with the time for the prompts.

On the CPU the peers are transformers (one padded batch of `generate`; with the small model also its continuous
batching), llama.cpp, OpenVINO GenAI and vLLM; in four bits, llama.cpp (Q4_0) and OpenVINO GenAI; on CUDA,
transformers. All sides take turns on the same threads. The peer of a row is the best of the others. The report
names peers that are not installed, or that refuse this device, with the reason. `bench/peers/outside.py` says how
to install peers that need an environment of their own.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial

import torch

from bench import load
from bench.checkpoints import QWEN3_06B, QWEN3_06B_INT4, SMALL, Shape, checkpoint, config
from bench.load import Case
from bench.peers.llama_cpp import LlamaCpp, open_peer
from bench.peers.outside import NAMES, Outside
from bench.peers.transformers_peer import Transformers
from bench.report import NotAvailableError, progress
from bench.runs import Bench, arguments, opened

OURS = "petiole"
_TARGET, _TARGET_INT4 = 1.3, 1.1
_FINALISTS = 2  # peers that go on after the first round

Side = Callable[[list[list[int]], int], float]
"""Output tokens a second of (prompts, output tokens of each)."""


@dataclass(frozen=True)
class Loads:
    """Loads on one model. `outside`: the peers in processes of their own."""

    shape: Shape
    cases: tuple[Case, ...]
    outside: tuple[str, ...] = ()
    target: float | None = None


def _large(n: int, prompt: int, output: int, shape: Shape = QWEN3_06B) -> Case:
    return Case(shape, n, prompt, output, n, rounds=7)


LOADS = {
    "small": Loads(SMALL, (Case(SMALL, 32, 64, 32, 32, 3),)),
    "large": Loads(
        QWEN3_06B,
        (
            _large(1, 128, 48),
            _large(8, 128, 32),
            _large(16, 128, 32),
            _large(32, 32, 24),
            _large(64, 64, 64),
            _large(8, 512, 1),
        ),
        outside=tuple(NAMES),
        target=_TARGET,
    ),
    "int4": Loads(
        QWEN3_06B_INT4,
        tuple(_large(n, 128, output, QWEN3_06B_INT4) for n, output in ((1, 48), (8, 32), (16, 32), (64, 64))),
        outside=("openvino",),
        target=_TARGET_INT4,
    ),
}
TINIEST = Loads(SMALL, (Case(SMALL, 2, 64, 4, 2, 1),))


def measure(bench: Bench, loads: Loads) -> None:
    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(loads.shape))
        sides = peers(bench, loads, model, stack)
        most = max(case.n for case in loads.cases)
        engine = stack.enter_context(bench.engine(model, loads.shape, prefix_cache="off", max_num_seqs=most))

        def ours(prompts: list[list[int]], output: int) -> float:
            asked = load.requests(len(prompts), len(prompts[0]), output)
            return load.at_concurrency(engine, asked, len(prompts)).tokens_per_s

        for case in progress(loads.cases, "beside others"):
            compare(bench, case, {OURS: ours, **sides}, loads.target)


def peers(bench: Bench, loads: Loads, model: str, stack: ExitStack) -> dict[str, Side]:
    """The peers that this machine has, by name."""
    sides: dict[str, Side] = {}
    four_bits = loads.shape.four_bits
    if not four_bits:
        try:
            peer = Transformers(model, loads.shape.dtype, bench.device)
            sides["transformers' generate"] = peer.generate
            if not loads.outside:
                sides["transformers' continuous batching"] = peer.continuous_batching
        except NotAvailableError as error:
            bench.report.absent["transformers"] = str(error)
    if bench.device != "cpu":
        return sides
    threads = bench.threads or torch.get_num_threads()
    llama = open_peer(config(loads.shape), loads.shape.dtype, threads, four_bits=loads.shape.four_bits)
    if llama is None:
        bench.report.absent["llama.cpp"] = "not installed"
    else:
        stack.enter_context(closing(llama))
        sides["llama.cpp"] = partial(_llama, llama)
    lengths = [(case.n, case.prompt + case.output) for case in loads.cases]
    most = (max(n for n, _ in lengths), max(each for _, each in lengths), max(n * each for n, each in lengths))
    for kind, name in ((kind, NAMES[kind]) for kind in loads.outside):
        try:
            outside = Outside(kind, model, threads=threads, most=most, four_bits=four_bits)
            sides[name] = stack.enter_context(closing(outside)).tokens_per_s
        except NotAvailableError as error:
            bench.report.absent[name] = str(error)
    return sides


def _llama(peer: LlamaCpp, prompts: list[list[int]], output: int) -> float:
    return len(prompts) * output / peer.whole(prompts, output)


def compare(bench: Bench, case: Case, sides: dict[str, Side], target: float | None) -> None:
    """Run one round of all sides, then the rest of the rounds of the best few, in turns. Every other round runs in
    the opposite order. A peer that fails is left out."""
    prompts = load.prompts(case.n, case.prompt)
    by_prompt = case.output == 1
    scale, unit = (case.prompt, "prompt tokens/s") if by_prompt else (1, "tokens/s")
    rates: dict[str, list[float]] = {name: [] for name in sides}
    turns = list(sides)
    for _ in range(case.rounds):
        for name in turns:
            if bench.device == "cpu" and not bench.quick:
                load.rest()
            try:
                rates[name].append(scale * sides[name](prompts, case.output))
            except NotAvailableError as error:
                bench.report.absent[name] = str(error)
                del rates[name]
        others = sorted(
            (name for name in turns if name in rates and name != OURS), key=lambda name: -_rate(rates, name)
        )
        if not others:
            return
        kept = (OURS, *others[:_FINALISTS])
        turns = [name for name in reversed(turns) if name in kept]
    best = others[0]
    ratios = [a / b for a, b in zip(rates[OURS], rates[best], strict=True)]
    bench.report.add(
        case.name,
        _rate(rates, OURS),
        unit,
        peer=_rate(rates, best),
        spread=(min(ratios), max(ratios)),
        target=target,
        note=", ".join(f"{name} {_rate(rates, name):,.1f}" for name in rates if name != OURS),
    )


def _rate(rates: Mapping[str, Sequence[float]], name: str) -> float:
    return statistics.median(rates[name])


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__, "cpu", "cuda")
    parser.add_argument("--only", choices=list(LOADS))
    options = parser.parse_args(argv)
    bench = opened("A whole load at once, beside others", options)
    for loads in [TINIEST] if options.quick else [v for k, v in LOADS.items() if options.only in (None, k)]:
        measure(bench, loads)
        bench.report.save(options.json)
    bench.report.finish(options.json)


if __name__ == "__main__":
    main()
