"""A fault of the host at any call between the plan of a step and its dispatch: it is undone, and all go on.

The faults are enumerated: each place from which the engine calls a function raises, at occurrences that a seed
chooses. The debug mode checks the books after every round of the loop.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from petiole.cache import KVAllocation, KVCacheManager
from petiole.gpu_worker import Constraint, Engine, EngineError, Request
from petiole.gpu_worker.scheduling.launching import Preparation
from petiole.gpu_worker.scheduling.priorities import admission
from petiole.gpu_worker.scheduling.scheduler import Scheduler
from tests.gpu_worker.engine.test_images import (
    OpenEngine,
    asked,
    expected as seen_by_the_oracle,
    image,
    open_engine,
)
from tests.support import trials
from tests.support.interrupted import Interrupted
from tests.support.swept import Swept, at_random, is_injected
from tests.support.toy_engine import Expected, expected, request, toy_engine
from tests.support.trials import rest

__all__ = ["open_engine"]  # a fixture

TIMES, PATIENCE = (1, 4) if trials.short else (2, 8)
"""How often each place raises, and after how many workloads without a fault all places have raised."""

MACHINES: dict[str, dict[str, Any]] = {
    "radix": {"prefix_cache": "radix", "chunk_size": 18},
    "radix of few pages": {"prefix_cache": "radix", "chunk_size": 18, "prefix_cache_max_pages": 50},
    "radix, drafts": {"prefix_cache": "radix", "speculative_tokens": 3, "prefill_policy": "mixed"},
    "blocks": {"prefix_cache": "block", "page_size": 16, "chunk_size": 18},
    "blocks, drafts": {"prefix_cache": "block", "page_size": 16, "speculative_tokens": 3, "chunk_size": 18},
    "blocks of one, mixed": {"prefix_cache": "block", "chunk_size": 18, "prefill_policy": "mixed"},
    "full reserve": {"prefix_cache": "block", "page_size": 16, "reserve": "full", "prefill_policy": "drain"},
    "no cache": {"prefix_cache": "off", "page_size": 4, "chunk_size": 18},
    "states": {"prefix_cache": "radix", "chunk_size": 18, "machine": {"snapshots": 6}},
    "states, blocks": {
        "prefix_cache": "block",
        "page_size": 16,
        "chunk_size": 18,
        "prefill_policy": "mixed",
        "machine": {"snapshots": 6},
    },
}


class Faults:
    """Chooses where the next fault is: a place that has raised less than `TIMES` times, at a random occurrence.
    None comes after one that has left the books wrong: a request ends at its second one."""

    def __init__(self, seed: int) -> None:
        self.raised = Counter[str]()
        self._dice = random.Random(seed)
        self._had_one = False

    def __call__(self, place: str) -> bool:
        return not self._had_one and self.raised[place] < TIMES and self._dice.random() < 0.3

    def everywhere(self, patch: pytest.MonkeyPatch, serve: Callable[[int], None]) -> None:
        """Serve until every place has raised. One fault in a launch."""
        interrupted, attempt, launch = Interrupted(self), Preparation.prepare, Scheduler.launch_forward_async

        def launched(scheduler: Scheduler, *how: Any) -> Any:
            interrupted.place, resets = None, scheduler.state.counters.resets
            handle = launch(scheduler, *how)
            if interrupted.place is not None:
                self.raised[interrupted.place] += 1
                self._had_one |= scheduler.state.counters.resets > resets
            return handle

        patch.setattr(Preparation, "prepare", lambda self, *how: interrupted(attempt, self, *how))
        patch.setattr(Scheduler, "launch_forward_async", launched)
        quiet = 0
        for round_ in count():
            before, self._had_one = self.raised.total(), False
            serve(round_)
            quiet = quiet + 1 if self.raised.total() == before else 0
            if quiet == PATIENCE:
                return


def workload(round_: int) -> list[Request]:
    """Prompts with a long common beginning, in one step; a fork of the first answer; a constraint. They share
    nothing with other rounds."""
    shared, salt = [1 + i % 40 for i in range(41)], str(round_)
    first = request([*shared, 7], 40, ignore_eos=True)
    answer = expected(first).token_ids[:8]
    made = [
        first,
        request([*shared, 7, 8, 9], 12, ignore_eos=True, temperature=0.5, seed=3),
        request([*shared, 3, 3, 3], 12, constraint=Constraint("regex", 9)),
        request(shared[:20], 12, ignore_eos=True),
        request([*shared, 7, *answer, 5], 6, ignore_eos=True),
    ]
    return [replace(one, salt=salt, request_id=f"{round_}.{i}") for i, one in enumerate(made)]


def served(engine: Engine, requests: list[Request]) -> list[Expected | BaseException]:
    """Their outcomes. All but the last begin at once; the last begins once the first has made some tokens."""
    read = threading.Event()
    seen = lambda _, delta: delta.index + len(delta.token_ids) > 8 and read.set()  # noqa: E731
    engine.pause()
    handles = [engine.submit(one, on_delta=seen, on_done=lambda _: read.set()) for one in requests[:-1]]
    while engine.stats()["waiting"] < len(handles):
        engine._call(lambda: None)
    engine.resume()
    assert read.wait(30)
    handles.append(engine.submit(requests[-1]))
    found: list[Expected | BaseException] = []
    for handle in handles:
        try:
            found.append(Expected.of(handle.result(timeout=30)))
        except EngineError as error:
            found.append(error)
    return found


def nothing_is_held(engine: Engine) -> None:
    while engine.stats()["rows_held"]:
        engine._call(lambda: None)
    engine.check_invariants()
    assert engine.stats()["pages_private"] == 0
    assert engine.healthy


@pytest.mark.parametrize("config", rest(MACHINES.values()), ids=MACHINES.keys())
def test_after_a_fault_anywhere_before_dispatch_every_request_is_answered(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "RUN_TOKENS", 2)
    faults = Faults(seed=1)
    with toy_engine(max_num_batched_tokens=128, **config) as engine:

        def serve(round_: int) -> None:
            requests = workload(round_)
            assert served(engine, requests) == [expected(one) for one in requests]
            nothing_is_held(engine)

        faults.everywhere(monkeypatch, serve)
    places = " ".join(faults.raised)
    for name in ("reserve_many", "schedule_prefill", "schedule_decode", "make_batch", "insert"):
        assert name in places
    assert "schedule_speculative" in places or not config.get("speculative_tokens")


@pytest.mark.parametrize(("cache", "page_size"), rest([("radix", 1), ("block", 1), ("block", 16)]))
def test_after_a_fault_anywhere_before_dispatch_images_are_seen_as_without_it(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, cache: str, page_size: int
) -> None:
    faults = Faults(seed=2)
    with open_engine(prefix_cache=cache, page_size=page_size, chunk_size=25) as engine:
        picture, other = image(1, 20), image(2, 3)
        more = [9, 8, 7, 3, 2, 1, 4, 9, 8, 2, 3, 4]
        prompts = [[1, picture, *more], [1, picture, *more, 4], [7, other, 8, picture, *more[:9]], [1, 2, 3]]
        answers = [seen_by_the_oracle(prompt, 4) for prompt in prompts]

        def serve(round_: int) -> None:
            handles = [engine.submit(asked(prompt, 4, salt=str(round_))) for prompt in prompts]
            assert [handle.result(timeout=60).token_ids for handle in handles] == answers
            nothing_is_held(engine)
            assert not engine.runtime._features  # type: ignore[attr-defined]

        faults.everywhere(monkeypatch, serve)
    places = " ".join(faults.raised)
    for name in ("encode_batch", "_images", "insert"):
        assert name in places


@pytest.mark.parametrize("config", [MACHINES["radix"], MACHINES["blocks, drafts"]], ids=["radix", "blocks"])
def test_a_request_whose_own_part_of_each_step_raises_fails_alone(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps that it shares with others are launched without it."""
    prepare = Preparation.prepare

    def fails(self: Preparation, *how: int) -> Any:
        payload = prepare(self, *how)
        if any(seq.request.request_id.endswith(".1") and len(seq.generated) >= n for seq in payload.plan.members):
            raise RuntimeError("a defect that one request brings out")
        return payload

    monkeypatch.setattr(Preparation, "prepare", fails)
    with toy_engine(max_num_batched_tokens=128, **config) as engine:
        for n in range(4):
            requests = workload(n)
            found = served(engine, requests)
            assert "that one request brings out" in str(found.pop(1))
            requests.pop(1)
            assert found == [expected(one) for one in requests]
            nothing_is_held(engine)


@pytest.mark.parametrize("config", [MACHINES["radix"], MACHINES["blocks"]], ids=["radix", "blocks"])
def test_who_has_matched_what_a_failed_launch_published_starts_anew(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare, held = Preparation.prepare, list[Any]()
    monkeypatch.setattr(KVCacheManager, "check_running", lambda self: None)  # the lock below is no sequence's

    def fails(self: Preparation, *how: int) -> Any:
        payload, cache = prepare(self, *how), self._manager.cache
        chunk = next((seq for seq in payload.plan.chunks if seq.published > self._manager.table.page_size), None)
        if not held and chunk is not None:
            held.append(cache.match_prefix(chunk.cache_tokens.prefix(chunk.published), chunk.namespace).last_node)
            cache.lock(held[0])
            raise RuntimeError("a fault behind a match")
        return payload

    monkeypatch.setattr(Preparation, "prepare", fails)
    with toy_engine(max_num_batched_tokens=128, **config) as engine:
        requests = workload(0)
        assert served(engine, requests) == [expected(one) for one in requests]
        assert engine.stats()["preemptions"]
        engine._call(lambda: engine.scheduler.manager.cache.unlock(held[0]))
        nothing_is_held(engine)


@pytest.mark.parametrize("config", [MACHINES["radix"], MACHINES["blocks, drafts"]], ids=["radix", "blocks"])
def test_nobody_matches_what_a_launch_published_that_could_not_be_undone(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The books are right then, but no kernel has computed this KV."""
    prepare, withdraw, faults = Preparation.prepare, KVAllocation.unpublish, list[str]()

    def fails(self: Preparation, *how: int) -> Any:
        payload = prepare(self, *how)
        if not faults and any(seq.published > self._manager.table.page_size for seq in payload.plan.chunks):
            faults.append("prepare")
            raise RuntimeError("a fault behind a match")
        return payload

    def kept(self: KVAllocation, keep_kv: int) -> bool:
        if faults == ["prepare"]:
            faults.append("undo")
            raise RuntimeError("and another one")
        return withdraw(self, keep_kv)

    monkeypatch.setattr(Preparation, "prepare", fails)
    monkeypatch.setattr(KVAllocation, "unpublish", kept)
    with toy_engine(max_num_batched_tokens=128, **config) as engine:
        requests = workload(0)
        assert served(engine, requests) == [expected(one) for one in requests]
        assert faults == ["prepare", "undo"]
        assert engine.stats()["resets"] == 1
        assert served(engine, requests) == [expected(one) for one in requests]
        nothing_is_held(engine)


@pytest.mark.parametrize(("cache", "page_size"), rest([("radix", 1), ("block", 16)]))
def test_faults_of_the_host_harm_no_other_image(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, cache: str, page_size: int
) -> None:
    with open_engine(prefix_cache=cache, page_size=page_size, chunk_size=25) as engine:
        swept = Swept(engine, at_random(5, 0.0005))
        swept.patch_classes(monkeypatch)
        picture, other = image(1, 20), image(2, 3)
        more = [9, 8, 7, 3, 2, 1, 4, 9, 8, 2, 3, 4]
        prompts = [[1, picture, *more], [1, picture, *more, 4], [7, other, 8, picture, *more[:9]], [1, 2, 3]]
        answers = [seen_by_the_oracle(prompt, 4) for prompt in prompts]
        failed = 0
        for round_ in range(40):
            handles = [engine.submit(asked(prompt, 4, salt=str(round_ // 2))) for prompt in prompts]
            for handle, answer in zip(handles, answers, strict=True):
                try:
                    found = handle.result(timeout=60).token_ids
                except EngineError:
                    failed += is_injected(handle.error)
                    found = answer if is_injected(handle.error) else ()
                assert found == answer
            nothing_is_held(engine)
            engine._call(engine.runtime.synchronize)
            assert not engine.runtime._features  # type: ignore[attr-defined]
        assert len(swept.raised) > 20
        assert failed <= swept.raised.total()
