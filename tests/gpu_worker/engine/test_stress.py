"""Random workloads, pipelined and blocking, against an oracle that has no engine in it.

Each workload draws a machine (pages, rows, cache, policies), requests (shared prompts, forks of running answers,
stops, constraints, priorities, cancels, deadlines, handbacks) and what the operator does meanwhile (pause,
reload), runs them with random delays at every stream and thread boundary, and demands: the oracle's tokens,
exactly one end for each request, deltas that join without a seam, and a clean conservation check after every step
and at the end.

    pytest tests/gpu_worker/engine/test_stress.py                        300 workloads
    PETIOLE_STRESS_SECONDS=3600 pytest tests/gpu_worker/engine/test_stress.py -k hour
    python tests/gpu_worker/engine/test_stress.py --seed 17              one workload again
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))

from petiole.cache import WindowPages, most_pages
from petiole.cache.groups import recurrent_states
from petiole.gpu_worker import (
    AdapterError,
    Constraint,
    Engine,
    EngineConfig,
    EngineError,
    FinishReason,
    HandedBack,
    Request,
    SamplingParams,
)
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.runtime.interface import DRAFTED, LoadWeights, Progress, nothing
from petiole.gpu_worker.runtime.memory import chunk_files, kv_tier
from petiole.gpu_worker.scheduling.priorities import admission
from tests.support.failing_os import FailingOs
from tests.support.swept import Swept, at_random, is_injected
from tests.support.toy_engine import EOS, NAPS, VOCAB, BoldHeadProposer, BoldProposer, Expected, Watch, expected
from tests.support.toy_runtime import ToyRuntime
from tests.support.toy_text import LETTERS, ToyTokenizer, compile_toy
from tests.support.trials import rest

WORKLOADS = 300
RUN_TOKENS, EVERY, CHUNK = admission.RUN_TOKENS, recurrent_states.EVERY, kv_tier.CHUNK


@dataclass
class Workload:
    seed: int
    machine: dict[str, Any]
    config: dict[str, Any]
    requests: list[Request]
    disturb: dict[int, str] = field(default_factory=dict)  # request index -> cancel | handback
    delays: float = 0.0
    control: dict[int, str] = field(default_factory=dict)  # after which submission -> pause | reload
    forks: dict[int, int] = field(
        default_factory=dict
    )  # request index -> of the request whose answer it goes on with
    run_tokens: int = 64
    every: int = recurrent_states.EVERY
    tier: dict[str, Any] = field(default_factory=dict)  # settings
    chunk: int = 4


# ---------------------------------------------------------------- drawing


def draw(seed: int) -> Workload:
    rng, windows = random.Random(seed), random.Random(f"windows {seed}")
    cache = rng.choice(["radix", "radix", "block", "off"])
    page_size = {"radix": 1, "block": rng.choice([1, 16]), "off": rng.choice([1, 4, 16])}[cache]
    rows = rng.randint(1, 8)
    max_model_len = rng.choice([40, 64, 96])
    requests = _requests(rng, max_model_len)
    alone = max(-(-_positions(r, max_model_len) // page_size) for r in requests)
    n_pages = 1 + alone + rng.choice([0, 1, alone // 2, 3 * alone, 20 * alone])
    spec = rng.choice([0, 0, 2, 5])
    config = {
        "chunk_size": rng.choice([1, 3, 8, 64]),
        "max_num_batched_tokens": rng.choice([8, 24, 512]),
        "max_num_seqs": rows,
        "prefix_cache": cache,
        "page_size": page_size,
        "prefix_cache_max_pages": rng.choice([None, None, None, 0, n_pages // 3]),
        "prefill_policy": rng.choice(["drain", "pipelined", "mixed"]),
        "reserve": rng.choice(["demand", "demand", "full"]),
        "speculative_tokens": spec,
        "lora_slots": rng.choice([1, 2]),
        "debug": True,
    }
    disturb = {i: rng.choice(["cancel", "handback"]) for i in range(len(requests)) if rng.random() < 0.12}
    machine = {"rows": rows, "n_pages": n_pages, "page_size": page_size, "max_model_len": max_model_len}
    longest = EngineConfig(chunk_size=config["chunk_size"], speculative_tokens=spec).longest_step
    machine["windows"] = [
        WindowPages(window, 1 + most_pages(window, page_size, longest) + spare)
        for window in windows.choice([[], [], [7], [3, 30]])
        for spare in [windows.choice([0, 10, n_pages])]
    ]
    shares = random.Random(f"budget {seed}")
    if config["prefill_policy"] != "drain":
        config["batch_step_budget"] = shares.choice(["off", 1, 1.25, 3])
    kept = random.Random(f"states {seed}")
    machine["snapshots"] = kept.choice([0, 0, 2, 5, 40])
    if spec:
        guesses = random.Random(f"drafts {seed}")
        machine |= {"drafts": guesses.choice([0, 1, spec]), "right": guesses.choice([0, 0.7, 0.95, 1])}
        machine["goes_ahead"] = guesses.choice([True, True, False])
    tiers = random.Random(f"tier {seed}")
    tier = tiers.choice([{}, {"kv_tier_gib": tiers.choice([1e-5, 5e-5, 1.0]), "kv_tier_salted": True}])
    machine["ring"] = tiers.choice([1000, 3, 1])
    delays = rng.choice([0.0, 0.0002, 0.001])
    control = {i: rng.choice(["pause", "reload"]) for i in range(len(requests)) if rng.random() < 0.06}
    config["stream_interval_ms"] = rng.choice([0.0, 0.0, 2.0, 60_000.0])
    forks = {i: rng.randrange(i) for i in range(1, len(requests)) if rng.random() < 0.35}
    return Workload(
        seed,
        machine,
        config,
        requests,
        disturb,
        delays,
        control,
        forks,
        rng.choice([1, 2, 6]),
        kept.choice([5, 16, 2048]),
        tier,
        tiers.choice([1, 2, 5, 16]),
    )


def _positions(request: Request, max_model_len: int) -> int:
    n = len(request.prompt or ())
    return n + min(request.sampling.max_tokens, max_model_len - n) - 1


def _requests(rng: random.Random, max_model_len: int) -> list[Request]:
    bases = [[rng.randrange(1, VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(rng.randint(1, 3))]
    requests = []
    for i in range(rng.randint(1, 12)):
        prompt = list(rng.choice(bases))
        if rng.random() < 0.6:
            prompt = prompt[: rng.randint(1, len(prompt))]
            prompt += [rng.randrange(1, VOCAB) for _ in range(rng.randint(0, 6))]
        constrained = rng.random() < 0.25
        requests.append(
            Request(
                prompt=prompt,
                sampling=_sampling(rng, max_model_len),
                constraint=Constraint("regex", rng.randint(1, 12)) if constrained else None,
                adapter=rng.choice([None, None, None, "a", "bb", "ccc"]),
                priority=rng.choice([0, 0, 0, 1, -1]),
                deadline_s=0.02 if rng.random() < 0.05 else None,
                salt=rng.choice(["", "", "", "tenant"]),
                request_id=f"{i}-{rng.random()}",
            )
        )
    return requests


def _sampling(rng: random.Random, max_model_len: int) -> SamplingParams:
    def sometimes(p: float, value: Callable[[], Any], otherwise: Any) -> Any:
        return value() if rng.random() < p else otherwise

    max_tokens = rng.choice([1, 2, 5, 12, 25, max_model_len])
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=sometimes(0.3, lambda: rng.randint(1, max_tokens), 0),
        temperature=rng.choice([0.0, 0.0, 0.7, 2.0]),
        seed=sometimes(0.5, lambda: rng.randrange(1 << 32), None),
        presence_penalty=sometimes(0.2, lambda: 0.5, 0.0),
        frequency_penalty=sometimes(0.3, lambda: rng.choice([-0.5, 1.0]), 0.0),
        ignore_eos=rng.random() < 0.3,
        stop=sometimes(0.2, lambda: ["".join(rng.choices(LETTERS[:VOCAB], k=rng.choice([1, 2])))], []),
        stop_token_ids=sometimes(0.2, lambda: [rng.randrange(VOCAB) for _ in range(3)], []),
        stop_token_sequences=sometimes(0.2, lambda: [[rng.randrange(VOCAB)] for _ in range(2)], []),
    )


# ---------------------------------------------------------------- running


class Delays:
    """Random pauses, a third of them long enough to let every other thread run."""

    def __init__(self, seed: int, longest_s: float) -> None:
        self._rng, self._longest_s = random.Random(seed), longest_s

    def __call__(self) -> None:
        if self._longest_s and self._rng.random() < 0.3:
            time.sleep(self._rng.random() * self._longest_s)

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def delayed(*args: Any, **kwargs: Any) -> Any:
            self()
            return function(*args, **kwargs)

        return delayed


class SteadyRuntime(ToyRuntime):
    """Reloads the weights that it has: everything is computed anew, and comes out the same."""

    def prepare_reload(self, model: str) -> LoadWeights:
        def load(progress: Progress = nothing, /) -> None:
            self.synchronize()
            self.kv[:] = 0

        return load


def fork_of(request: Request, origin: Handle, watch: Watch, n: int, workload: Workload) -> Request:
    """The request with the origin's prompt and what has been read of its answer, once `n` tokens have been read.
    Cut to what fits into the machine."""
    while sum(len(delta.token_ids) for delta in watch.deltas) < n and not origin.done():
        time.sleep(0)
    prompt = [*(origin.request.prompt or ()), *(t for delta in watch.deltas for t in delta.token_ids)]
    longest, machine = workload.machine["max_model_len"], workload.machine
    fork = replace(request, prompt=prompt, adapter=origin.request.adapter, salt=origin.request.salt)
    while len(prompt) >= longest or _positions(fork, longest) > (machine["n_pages"] - 1) * machine["page_size"]:
        prompt.pop()
    return fork


def operate(engine: Engine, what: str) -> None:
    if what == "reload":
        engine.reload("the same")
        return
    engine.pause()
    engine.check_invariants()
    assert engine._loop.pipeline.is_empty
    engine.resume()


def open_engine(workload: Workload, pipeline: str, delays: float) -> Engine:
    jitter = Delays(workload.seed, delays)
    runtime = SteadyRuntime(vocab_size=VOCAB, eos=frozenset({EOS}), jitter=jitter, **workload.machine)
    config = EngineConfig(pipeline=pipeline, **workload.config, **workload.tier)  # type: ignore[arg-type]
    tokenizer: Any = ToyTokenizer()
    engine = Engine(
        config,
        runtime=runtime,
        tokenizer=tokenizer,
        compile_constraint=compile_toy,
        proposer=BoldHeadProposer([DRAFTED] * runtime.limits.drafts)
        if runtime.limits.drafts
        else BoldProposer(NAPS if workload.seed % 2 else (0,)),
    ).start()
    for owner, name in (
        (engine._text, "_next"),
        (engine._loop, "_launch"),
        (engine._loop, "_commit_oldest"),
        (engine._intake.preparer, "prepare"),
    ):
        setattr(owner, name, Delays(workload.seed + 1, delays).before(getattr(owner, name)))
    return engine


def run(
    workload: Workload, pipeline: str, delays: float, harm: Callable[[Engine], Swept] | None = None
) -> Counter[str]:
    """harm: puts faults into the engine. Each ends one request at most. Returns where they were."""
    rng = random.Random(workload.seed)
    admission.RUN_TOKENS, recurrent_states.EVERY = workload.run_tokens, workload.every
    kv_tier.CHUNK = workload.chunk
    engine = open_engine(workload, pipeline, delays)
    swept, failed = None if harm is None else harm(engine), 0
    try:
        watches = [Watch() for _ in workload.requests]
        handles = []
        for i, (request, watch) in enumerate(zip(workload.requests, watches, strict=True)):
            if (origin := workload.forks.get(i)) is not None:
                request = fork_of(request, handles[origin], watches[origin], rng.randint(0, 12), workload)
            handles.append(engine.submit(request, on_delta=watch.on_delta, on_done=watch.on_done))
            if rng.random() < 0.2:
                time.sleep(rng.random() * 0.003)
            if i in workload.control:
                operate(engine, workload.control[i])
        for i, how in workload.disturb.items():
            handles[i].cancel() if how == "cancel" else handles[i].hand_back()
        for i, (handle, watch) in enumerate(zip(handles, watches, strict=True)):
            try:
                check(engine, handle, watch, workload, cancelled=workload.disturb.get(i) == "cancel")
            except (EngineError, AdapterError) as error:
                if not is_injected(error):
                    raise
                failed += 1
        engine._text.flush()
        engine.check_invariants()
        assert [watch.ends for watch in watches] == [1] * len(watches), "I8: every request ends exactly once"
        wait_until_released(engine)
        engine.check_invariants()
    finally:
        engine.shutdown(drain=False)
        admission.RUN_TOKENS, recurrent_states.EVERY, kv_tier.CHUNK = RUN_TOKENS, EVERY, CHUNK
    assert engine.failure is None, engine.failure
    raised = Counter[str]() if swept is None else swept.raised
    assert failed <= raised.total(), "a fault ends one request at most"
    return raised


def wait_until_released(engine: Engine) -> None:
    """Zombies give their rows back when their last step completes."""
    for _ in count():
        stats = engine.stats()
        if not (stats["rows_held"] or stats["pages_private"] or stats["open"]):
            return
        engine._call(lambda: None)


def check(engine: Engine, handle: Handle, watch: Watch, workload: Workload, *, cancelled: bool) -> None:
    request = handle.request
    want = expected(request, workload.machine["max_model_len"])
    try:
        result = handle.result(timeout=60)
    except HandedBack:
        sofar = [token for delta in watch.deltas for token in delta.token_ids]
        assert tuple(sofar) == want.token_ids[: len(sofar)]
        again = engine.submit(replace(request, resume_token_ids=sofar, deadline_s=None)).result(timeout=60)
        rest = tuple(sofar) + again.token_ids[len(sofar) :]
        got = (rest, again.text, again.finish_reason)
        assert got == (want.token_ids, want.text, want.finish_reason), (request, sofar, again, want)
        return
    deltas = [token for delta in watch.deltas for token in delta.token_ids]
    assert result.token_ids == tuple(deltas), "deltas join without a seam"
    assert "".join(delta.text for delta in watch.deltas) == result.text
    assert watch.deltas[-1].finish_reason == result.finish_reason
    if result.finish_reason in (FinishReason.CANCELLED, FinishReason.DEADLINE):
        assert result.token_ids == want.token_ids[: len(result.token_ids)]
        return
    got = Expected(result.token_ids, result.text, result.finish_reason, result.stop_reason)
    if (cancelled or request.deadline_s) and len(got.token_ids) < len(want.token_ids):
        want = expected(request, workload.machine["max_model_len"], cut=len(got.token_ids))
    assert got == want, f"{request}"


@contextmanager
def folder_of(workload: Workload) -> Iterator[None]:
    """A folder for the tier, if the workload has one."""
    with TemporaryDirectory() as folder:
        if workload.tier:
            workload.tier["kv_tier"] = folder
        yield


def run_both(seed: int) -> None:
    workload = draw(seed)
    try:
        with folder_of(workload):  # the second engine finds what the first one has left
            run(workload, "on", workload.delays)
            run(workload, "off", 0.0)
    except BaseException:
        print(f"stress workload failed: --seed {seed}\n{workload}")
        raise


# ---------------------------------------------------------------- tests


@pytest.mark.parametrize("batch", rest(range(10)))
def test_random_workloads_give_the_oracles_tokens(batch: int) -> None:
    share = WORKLOADS // 10
    for seed in range(batch * share, (batch + 1) * share):
        run_both(seed)


@pytest.mark.skipif("PETIOLE_STRESS_SECONDS" not in os.environ, reason="set PETIOLE_STRESS_SECONDS")
def test_for_an_hour() -> None:
    until = time.monotonic() + float(os.environ["PETIOLE_STRESS_SECONDS"])
    start = int(os.environ.get("PETIOLE_STRESS_SEED", time.time_ns() % (1 << 32)))
    print(f"seeds from {start}")
    for seed in count(start):
        if time.monotonic() > until:
            print(f"{seed - start} workloads")
            return
        run_both(seed)


def harmed(seed: int, often: float = 0.002) -> Counter[str]:
    """A workload with faults of the host."""
    workload = draw(seed)
    with pytest.MonkeyPatch.context() as patch:

        def harm(engine: Engine) -> Swept:
            swept = Swept(engine, at_random(seed, often))
            swept.patch_classes(patch)
            return swept

        disk = random.Random(f"disk {seed}")
        failing = FailingOs(disk, disk.choice([0.0, 0.02, 0.3]), workload.delays)
        patch.setattr(chunk_files, "os", failing)
        patch.setattr(chunk_files, "_PAUSE_S", disk.choice([0.0, 1.0]))
        try:
            with folder_of(workload):
                return run(workload, "off" if seed % 3 == 0 else "on", workload.delays, harm)
        except BaseException:
            print(f"stress workload with faults failed: --seed {seed} --faults\n{workload}")
            raise


@pytest.mark.parametrize("batch", rest(range(10)))
def test_faults_of_the_host_end_one_request_at_most_and_change_no_token(batch: int) -> None:
    raised = sum((harmed(seed) for seed in range(batch * 20, (batch + 1) * 20)), Counter[str]())
    assert len(raised) > 20


def main() -> None:
    parser = argparse.ArgumentParser(description="Run stress workloads.")
    parser.add_argument("--seed", type=int, help="one workload")
    parser.add_argument("--count", type=int, default=WORKLOADS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--faults", action="store_true", help="with faults of the host")
    arguments = parser.parse_args()
    seeds = (
        [arguments.seed]
        if arguments.seed is not None
        else range(arguments.first, arguments.first + arguments.count)
    )
    for seed in seeds:
        print(f"seed {seed}", flush=True)
        if arguments.faults:
            print(harmed(seed).total(), "faults")
        else:
            run_both(seed)


if __name__ == "__main__":
    main()
