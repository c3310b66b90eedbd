"""Decode and prefill on the CPU: tokens a second beside transformers.

Random weights in the shapes of Qwen3-0.6B (bf16) and of a 6.8 M-parameter model (float32). Each side decodes the
same number of tokens after the same prompts; sides alternate in one run, on the same number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bench import floors
from bench.checkpoints import QWEN3_06B, SMALL, Shape, checkpoint
from bench.driver import Driver
from bench.report import Report, arguments, compare
from gpu_worker.config import EngineConfig
from gpu_worker.runtime.runtime import ModelRuntime


@dataclass(frozen=True)
class Case:
    """What is measured with a shape: (batch or length, least ratio to transformers)."""

    shape: Shape
    prompt: int
    n_tokens: int
    decode: tuple[tuple[int, float], ...]
    prefill: tuple[int, float] | None = None


LARGE = Case(QWEN3_06B, 128, 12, decode=((1, 1.25), (8, 1.9), (16, 2.3)), prefill=(512, 1.1))
TINIEST = Case(SMALL, 64, 8, decode=((8, 2.6),))
CASES = {"large": LARGE, "small": Case(SMALL, 64, 64, decode=((1, 5.2), (8, 2.6), (32, 2.0)))}


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=list(CASES))
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    report = Report("Models on the CPU (output tokens a second; peer: transformers)")
    for key, case in {"quick": TINIEST}.items() if options.quick else CASES.items():
        if options.quick or options.only in (None, key):
            measure(case, report, 1 if options.quick else options.rounds, options.threads)
    report.finish(options.json)


def measure(case: Case, report: Report, rounds: int, threads: int) -> None:
    from transformers import AutoModelForCausalLM

    shape, machine = case.shape, floors.measure(case.shape, report)
    with checkpoint(shape) as folder:
        peer = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, shape.dtype))
        peer.eval()
        config = EngineConfig(
            model=folder,
            device="cpu",
            dtype=shape.dtype,  # type: ignore[arg-type]
            max_num_seqs=max(batch for batch, _ in case.decode),
            max_model_len=1024,
            num_threads=threads,
        )
        runtime = ModelRuntime(config)
        try:
            for batch, target in case.decode:
                ours, theirs, spread = compare(
                    partial(our_decode, runtime, case, batch),
                    partial(peer_decode, peer, case, batch),
                    rounds=rounds,
                )
                best = batch / machine.decode_step_s(shape, batch, case.prompt + case.n_tokens // 2)
                name = f"{shape.name}, batch {batch}"
                report.add(name, ours, "tokens/s", peer=theirs, floor=best, spread=spread, target=target)
            if case.prefill is not None:
                length, target = case.prefill
                ours, theirs, spread = compare(
                    partial(our_prefill, runtime, length),
                    partial(peer_prefill, peer, length),
                    rounds=max(2, rounds // 2),
                )
                best = length / machine.prefill_s(shape, length)
                name = f"{shape.name}, prefill {length}"
                report.add(name, ours, "tokens/s", peer=theirs, floor=best, spread=spread, target=target)
        finally:
            runtime.close()


def prompts(batch: int, length: int) -> list[list[int]]:
    return torch.randint(3, 8000, (batch, length), generator=torch.Generator().manual_seed(1)).tolist()


def our_decode(runtime: ModelRuntime, case: Case, batch: int) -> float:
    driver = Driver(runtime)
    sequences = [driver.sequence(p) for p in prompts(batch, case.prompt)]
    driver.prefill(sequences)
    driver.decode_many(sequences, 2)
    return _rate(lambda: driver.decode_many(sequences, case.n_tokens), batch * case.n_tokens)


@torch.inference_mode()
def peer_decode(model: Any, case: Case, batch: int) -> float:
    out = model(torch.tensor(prompts(batch, case.prompt)), use_cache=True, logits_to_keep=1)
    state = {"cache": out.past_key_values, "token": out.logits[:, -1:].argmax(-1)}

    def steps(n: int) -> None:
        for _ in range(n):
            out = model(state["token"], past_key_values=state["cache"], use_cache=True)
            state["cache"], state["token"] = out.past_key_values, out.logits[:, -1:].argmax(-1)

    steps(2)
    return _rate(lambda: steps(case.n_tokens), batch * case.n_tokens)


def our_prefill(runtime: ModelRuntime, length: int) -> float:
    driver = Driver(runtime)
    sequence = driver.sequence(prompts(1, length)[0])
    return _rate(lambda: driver.prefill([sequence]), length)


@torch.inference_mode()
def peer_prefill(model: Any, length: int) -> float:
    ids = torch.tensor(prompts(1, length))
    return _rate(lambda: model(ids, use_cache=True, logits_to_keep=1), length)


def _rate(work: Callable[[], object], tokens: int) -> float:
    start = time.perf_counter()
    work()
    return tokens / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
