"""Random workloads over small models whose layers keep a state of each kind, or latents, in compiled code, against
each request alone: preemption, prefix hits, cuts of prompts, cancels, and faults of the host change no token.

    python -m tests.gpu_worker.engine.test_stress_of_states --seed 17 --family granite4-h [--faults]
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from petiole.cache.groups import recurrent_states
from petiole.gpu_worker import Engine, EngineConfig, EngineError, FinishReason, Request, SamplingParams
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from petiole.gpu_worker.scheduling.priorities import admission
from tests.support.families import build_model
from tests.support.swept import Swept, at_random, is_injected

KINDS = ("granite4-h", "nemotron-h-moe", "qwen3.5", "lfm2", "deepseek-v3")
WORKLOADS, OFTEN, LONGEST = 8, 0.0005, 40


def draw(seed: int) -> tuple[dict[str, Any], list[Request]]:
    """The settings, and requests of which some share the beginnings of their prompts."""
    rng = random.Random(seed)
    bases = [[rng.randrange(3, 320) for _ in range(LONGEST)] for _ in range(2)]
    requests = [
        Request(
            prompt=rng.choice(bases)[: rng.randint(1, LONGEST)] + [rng.randrange(3, 320)] * rng.randint(0, 3),
            sampling=SamplingParams(
                temperature=rng.choice([0.0, 0.8]), seed=i, max_tokens=rng.choice([1, 30, 40]), ignore_eos=True
            ),
            priority=rng.choice([0, 0, 1, -1]),
            request_id=str(i),
        )
        for i in range(rng.randint(6, 12))
    ]
    cache = rng.choice(["radix", "radix", "block", "off"])
    page_size = {"radix": 1, "block": 16, "off": 4}[cache]
    settings = {
        "prefix_cache": cache,
        "page_size": page_size,
        "num_pages": 8 + (LONGEST + 40) * rng.choice([10, 10, 13, 60]) // (10 * page_size),
        "max_num_seqs": rng.randint(3, 6),
        "chunk_size": rng.choice([1, 7, 32]),
        "max_num_batched_tokens": rng.choice([8, 40, 512]),
        "prefill_policy": rng.choice(["drain", "pipelined", "mixed"]),
        "reserve": rng.choice(["demand", "demand", "demand", "full"]),
        "pipeline": rng.choice(["on", "on", "off"]),
    }
    return settings, requests


def opened(folder: Path, **settings: Any) -> Engine:
    config = EngineConfig(model=str(folder), device="cpu", dtype="float32", max_model_len=128, **settings)
    return Engine(config, runtime=ModelRuntime(config))


def alone(folder: Path, requests: Sequence[Request]) -> list[tuple[int, ...]]:
    with opened(folder, prefix_cache="off", pipeline="off", max_num_seqs=1) as engine:
        return [engine.generate([one])[0].token_ids for one in requests]


def run(folder: Path, seed: int, harm: Callable[[Engine], Swept] | None = None) -> Counter[str]:
    """Returns what happened."""
    settings, requests = draw(seed)
    wanted, cancelled = alone(folder, requests), random.Random(f"cancels {seed}")
    admission.RUN_TOKENS, recurrent_states.EVERY, before = 4, 8, (admission.RUN_TOKENS, recurrent_states.EVERY)
    try:
        with opened(folder, debug=True, **settings) as engine:
            swept, failed = None if harm is None else harm(engine), 0
            handles = [engine.submit(one) for one in requests]
            for handle in cancelled.sample(handles, len(handles) // 6):
                handle.cancel()
            for handle, tokens in zip(handles, wanted, strict=True):
                try:
                    result = handle.result(timeout=60)
                except EngineError as error:
                    if not is_injected(error):
                        raise
                    failed += 1
                    continue
                whole = result.finish_reason is not FinishReason.CANCELLED
                assert result.token_ids == (tokens if whole else tokens[: len(result.token_ids)])
            if swept is not None:
                swept.stop()
            longest = max(range(len(requests)), key=lambda i: len(requests[i].prompt))
            for n in range(2):  # the second one finds what the first has left
                [again] = engine.generate([replace(requests[longest], request_id=f"again {n}")])
                assert again.token_ids == wanted[longest]
            engine.check_invariants()
            found = {name: int(engine.stats()[name]) for name in ("preemptions", "prefix_hit_tokens")}
    except BaseException:
        print(f"stress workload over {folder} failed: --seed {seed}\n{settings}\n{requests}")
        raise
    finally:
        admission.RUN_TOKENS, recurrent_states.EVERY = before
    assert failed <= (0 if swept is None else swept.raised.total()), "a fault ends one request at most"
    return Counter(found) + Counter(raised=0 if swept is None else swept.raised.total())


def harmed(folder: Path, seed: int) -> Counter[str]:
    with pytest.MonkeyPatch.context() as patch:

        def harm(engine: Engine) -> Swept:
            swept = Swept(engine, at_random(seed, OFTEN))
            swept.patch_classes(patch)
            return swept

        return run(folder, seed, harm)


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("faults", [False, True], ids=["plain", "faults"])
def test_a_row_with_a_state_gets_the_tokens_that_it_gets_alone(
    family: str, faults: bool, checkpoint: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, _ = checkpoint(family)
    one = harmed if faults else run
    found = sum((one(folder, seed) for seed in range(WORKLOADS)), Counter[str]())
    assert found["raised" if faults else "preemptions"]
    assert found["prefix_hit_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Run stress workloads over a model that keeps states.")
    parser.add_argument("--family", choices=KINDS, required=True)
    parser.add_argument("--seed", type=int, default=0, help="the first workload")
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--faults", action="store_true", help="with faults of the host")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build_model(arguments.family).save_pretrained(folder)
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            print(seed, dict((harmed if arguments.faults else run)(Path(folder), seed)), flush=True)


if __name__ == "__main__":
    main()
