"""A whole load at once, beside other engines: output tokens a second, with the time for the prompts.

On the CPU the peers are transformers (one padded batch of `generate`; with the small model also its continuous
batching), llama.cpp, OpenVINO GenAI and vLLM; on CUDA, transformers. In four bits they are llama.cpp (Q4_0) and
OpenVINO GenAI, which round inputs to eight bits. All sides take turns on the same threads. The peer of a row is
the best of the others. The report names peers that are not installed, or that refuse this device, with the
reason. `bench/peers/children/outside.py` says how to install peers that need an environment of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch

from bench.harness import load
from bench.harness.checkpoints.decoders import QWEN3_06B, QWEN3_06B_INT4, SMALL, Shape, checkpoint, config
from bench.harness.load import Case
from bench.harness.report import NotAvailableError, progress
from bench.harness.runs import OURS, Bench, arguments, in_turns, opened
from bench.peers.children.outside import EXACT, NAMES, Outside
from bench.peers.llama_cpp import LlamaCpp, open_peer
from bench.peers.transformers_peer import Transformers
from petiole.gpu_worker import Engine

_TARGET, _TARGET_INT4 = 1.3, 1.1

Side = Callable[[list[list[int]], int], float]
"""Output tokens a second of (prompts, output tokens of each)."""


ROUNDED = f"{OURS}, inputs in eight bits"


@dataclass(frozen=True)
class Loads:
    """Loads on one model. `outside`: the peers in processes of their own. rounded: settings that round inputs, as
    these peers do. Then two more rows compare with them, and their exact inputs with ours."""

    shape: Shape
    cases: tuple[Case, ...]
    outside: tuple[str, ...] = ()
    target: float | None = None
    rounded: Mapping[str, Any] = field(default_factory=dict)


def _large(n: int, prompt: int, output: int, shape: Shape = QWEN3_06B) -> Case:
    return Case(shape, n, prompt, output, n, rounds=3 if shape.four_bits and n > 16 else 7)


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
        rounded={"activation_quantization": "int8"},
    ),
}
TINIEST = Loads(SMALL, (Case(SMALL, 2, 64, 4, 2, 1),))


def measure(bench: Bench, loads: Loads) -> None:
    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(loads.shape))
        sides = peers(bench, loads, model, stack)
        most = max(case.n for case in loads.cases)
        ours: dict[str, Mapping[str, Any]] = {OURS: {}}
        if loads.rounded:
            ours[ROUNDED] = loads.rounded
        for name, settings in ours.items():
            engine = bench.engine(model, loads.shape, prefix_cache="off", max_num_seqs=most, **settings)
            sides[name] = partial(_ours, stack.enter_context(engine))
        for case in progress(loads.cases, "beside others"):
            compare(bench, case, sides, loads.target)


def _ours(engine: Engine, prompts: list[list[int]], output: int) -> float:
    asked = load.requests(len(prompts), len(prompts[0]), output)
    return load.at_concurrency(engine, asked, len(prompts)).tokens_per_s


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
    raw, dtype = config(loads.shape), loads.shape.dtype
    if (llama := open_peer(raw, dtype, threads, bench.report, four_bits=four_bits)) is not None:
        stack.enter_context(closing(llama))
        sides["llama.cpp"] = partial(_llama, llama)
    lengths = [(case.n, case.prompt + case.output) for case in loads.cases]
    most = (max(n for n, _ in lengths), max(each for _, each in lengths), max(n * each for n, each in lengths))
    inputs = (False, True) if loads.rounded else (False,)
    for kind, exact in product(loads.outside, inputs):
        name = NAMES[kind] + EXACT * exact
        try:
            outside = Outside(kind, model, threads=threads, most=most, four_bits=four_bits, exact_inputs=exact)
            sides[name] = stack.enter_context(closing(outside)).tokens_per_s
        except NotAvailableError as error:
            bench.report.absent[name] = str(error)
    return sides


def _llama(peer: LlamaCpp, prompts: list[list[int]], output: int) -> float:
    return len(prompts) * output / peer.whole(prompts, output)


def compare(bench: Bench, case: Case, sides: dict[str, Side], target: float | None) -> None:
    prompts = load.prompts(case.n, case.prompt)
    by_prompt = case.output == 1
    scale, unit = (case.prompt, "prompt tokens/s") if by_prompt else (1, "tokens/s")

    def rate(side: Side) -> float:
        return scale * side(prompts, case.output)

    exact = [name for name in sides if name.endswith(EXACT)]
    work = {name: partial(rate, side) for name, side in sides.items()}
    turns = in_turns(bench, work, case.rounds, stay=[*exact, *({ROUNDED} & sides.keys())])
    if turns.best is None:
        return

    def add(name: str, ours: str, peer: str) -> None:
        others = ", ".join(f"{side} {rate:,.1f}" for side, rate in turns.medians.items() if side != ours)
        bench.report.add(
            name,
            turns.medians[ours],
            unit,
            peer=turns.medians[peer],
            spread=turns.spread(ours, peer),
            target=target,
            note=others,
        )

    add(case.name, OURS, turns.best)
    if ROUNDED in sides:
        add(f"{case.name}, inputs in eight bits", ROUNDED, turns.best)
    for name in turns.rates.keys() & exact:
        add(f"{case.name}, exact inputs on both sides", OURS, name)


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
