"""Whose fault is whose: a host-side fault ends one request, a fault before dispatch its step, a device's all."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from petiole.cache import WindowPages
from petiole.gpu_worker import AdapterError, Constraint, Engine, EngineError, Request
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.scheduling import launching
from petiole.gpu_worker.scheduling.priorities import admission
from petiole.gpu_worker.speculation import Launched, Price
from petiole.gpu_worker.threads import detokenization as text_thread
from tests.support.interrupted import Interrupted
from tests.support.toy_engine import VOCAB, Expected, expected, request, toy_engine
from tests.support.toy_runtime import ToyRuntime
from tests.support.trials import rest

GOOD = [request([1 + i, 2], 15, ignore_eos=True, request_id=str(i)) for i in range(4)]


def outcomes(handles: list[Handle]) -> list[Expected | type[BaseException]]:
    found: list[Expected | type[BaseException]] = []
    for handle in handles:
        try:
            found.append(Expected.of(handle.result(timeout=30)))
        except Exception as error:
            found.append(type(error))
    return found


def others_are_unharmed(engine: Engine, bad: Any) -> EngineError:
    handles = [engine.submit(r) for r in (*GOOD[:2], bad, *GOOD[2:])]
    found = outcomes(handles)
    error = handles[2].error
    assert isinstance(error, EngineError)
    assert [*found[:2], *found[3:]] == [expected(r) for r in GOOD]
    engine.check_invariants()
    assert engine.healthy
    return error


# ---------------------------------------------------------------- one request's own


@pytest.mark.parametrize("fail_at", [0, 3])
def test_a_mask_that_raises_fails_its_request_alone(fail_at: int) -> None:
    with toy_engine() as engine:
        bad = request([3, 3], 20, constraint=Constraint("regex", (12, fail_at)), request_id="bad")
        assert "broken grammar" in str(others_are_unharmed(engine, bad))


def test_a_constraint_that_refuses_what_was_sampled_fails_its_request_alone() -> None:
    class Denier:
        finished = False

        def fill_mask(self, out: Any) -> None:
            out[:] = -1

        def consume(self, token_id: int) -> bool:
            return False

        def rollback(self, n: int) -> None: ...

    with toy_engine() as engine:
        others_are_unharmed(engine, request([3], constraint=Denier(), request_id="bad"))


class FaultyDrafter:
    """Drafts nothing. The prompt [3, 3] breaks it: told of tokens, or asked for drafts or their number while a
    step is in flight."""

    def __init__(self, prompt: list[int], fails: str) -> None:
        self.fails = fails if list(prompt) == [3, 3] else "never"

    def extend(self, tokens: list[int], n_drafts: int = 0, n_held: int = 0) -> None:
        if self.fails == "told":
            raise RuntimeError("a broken draft model")

    def worth(self, price: Price, *, in_flight: bool) -> int:
        if self.fails == "weighed" and in_flight:
            raise RuntimeError("a broken draft model")
        return 8

    def rests(self, price: Price, *, in_flight: bool) -> int:
        return 0

    def expects(self, n: int) -> float:
        return 8

    def propose(self, count: int, launched: Launched | None = None) -> list[int]:
        if self.fails == "asked" and launched is not None:
            raise RuntimeError("a broken draft model")
        return []


@pytest.mark.parametrize("fails", ["told", "weighed", "asked"])
def test_a_drafter_that_raises_fails_its_request_alone(fails: str) -> None:
    class Proposer:
        def drafter(self, prompt: list[int]) -> FaultyDrafter:
            return FaultyDrafter(prompt, fails)

    with toy_engine(speculative_tokens=2, proposer=Proposer()) as engine:
        assert "broken draft" in str(others_are_unharmed(engine, request([3, 3], request_id="bad")))


class Panic(BaseException):
    """What a panic of native code looks like: no Exception."""


@pytest.mark.parametrize("error", [RuntimeError, Panic])
@pytest.mark.parametrize("fails", ["push", "flush", "open"])
def test_a_detokenizer_that_raises_fails_its_request_alone(fails: str, error: type[BaseException]) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            if name == fails:
                raise error("a broken detokenizer")
            return lambda *_: ""

    with toy_engine() as engine:
        prepare = engine._intake.preparer.prepare

        def sabotage(stream: Any, arrival: int, arrival_s: float) -> Any:
            seq = prepare(stream, arrival, arrival_s)
            if seq.request.request_id == "bad":
                stream.text._detokenizer = Broken()
                if fails == "open":
                    raise error("a broken detokenizer")
            return seq

        engine._intake.preparer.prepare = sabotage  # type: ignore[method-assign]
        bad = request([3], 60, ignore_eos=True, request_id="bad")
        handles = [engine.submit(r) for r in (GOOD[0], bad, bad, bad, GOOD[1])]
        assert outcomes([handles[0], handles[-1]]) == [expected(r) for r in GOOD[:2]]
        for handle in handles[1:4]:
            with pytest.raises((EngineError, error), match="a broken detokenizer"):
                handle.result(timeout=30)
        while engine.stats()["rows_held"]:
            engine._call(lambda: None)
        assert engine.healthy


def test_a_result_that_cannot_be_made_fails_its_request_alone() -> None:
    with toy_engine() as engine:
        prepare = engine._intake.preparer.prepare

        def sabotage(stream: Any, arrival: int, arrival_s: float) -> Any:
            seq = prepare(stream, arrival, arrival_s)
            if seq.request.request_id == "bad":
                stream.texts.append(None)
            return seq

        engine._intake.preparer.prepare = sabotage  # type: ignore[method-assign]
        others_are_unharmed(engine, request([3], 5, request_id="bad"))


# ---------------------------------------------------------------- the text thread's


def test_a_text_thread_that_fails_answers_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends handles: without it all would wait for ever."""
    told: list[BaseException] = []
    collect, calls = text_thread._collect, 0

    def once(*args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise Panic("a bug in the thread")
        collect(*args)

    monkeypatch.setattr(text_thread, "_collect", once)
    engine = toy_engine()
    engine.on_fatal = told.append
    engine.start()
    handles = [engine.submit(request([1 + i, 2], 60, ignore_eos=True)) for i in range(8)]
    for handle in handles:
        with pytest.raises(EngineError, match="a bug in the thread"):
            handle.result(timeout=30)
    engine._thread.join(30)
    assert [str(error) for error in told] == ["a bug in the thread"]
    assert not engine.healthy
    with pytest.raises(EngineError, match="has failed"):
        engine.submit(request()).result(timeout=30)
    engine.shutdown()


def test_a_tokenizer_that_panics_fails_its_requests_alone() -> None:
    with toy_engine() as engine:

        def panic(*args: Any, **options: Any) -> Any:
            raise Panic("an index out of range")

        engine.tokenizer.encode = panic  # type: ignore[union-attr, method-assign]
        for _ in range(3):  # more than there are threads for it
            with pytest.raises(EngineError, match="failed: Panic"):
                engine.submit(Request(prompt="abc")).result(timeout=30)
        assert outcomes([engine.submit(r) for r in GOOD]) == [expected(r) for r in GOOD]


def test_an_adapter_that_cannot_be_loaded_fails_its_request_alone() -> None:
    class Picky(ToyRuntime):
        def load_adapter(self, adapter: str, slot: int) -> None:
            raise AdapterError(f"{adapter} is truncated")

    with toy_engine(runtime=Picky(), lora_slots=1) as engine:
        handles = [engine.submit(r) for r in (GOOD[0], request([3], adapter="bad"), GOOD[1])]
        assert outcomes(handles) == [expected(GOOD[0]), AdapterError, expected(GOOD[1])]


def test_an_adapter_that_cannot_be_loaded_is_told_to_one_who_waits_alone() -> None:
    class Broken(ToyRuntime):
        def load_adapter(self, adapter: str, slot: int) -> None:
            raise OSError("the disk is gone")

    with toy_engine(runtime=Broken(), lora_slots=1) as engine:
        with pytest.raises(AdapterError, match="the disk is gone"):
            engine.submit(request([3], adapter="bad")).result(timeout=5)
        assert outcomes([engine.submit(GOOD[0])]) == [expected(GOOD[0])]


# ---------------------------------------------------------------- admission

CACHES: dict[str, dict[str, Any]] = {
    "radix": {"prefix_cache": "radix", "speculative_tokens": 3, "lora_slots": 1},
    "blocks": {"prefix_cache": "block", "page_size": 16, "lora_slots": 1, "reserve": "full"},
    "drained": {"prefix_cache": "block", "prefill_policy": "drain", "lora_slots": 1},
    "windows": {"prefix_cache": "radix", "lora_slots": 1, "machine": {"windows": [WindowPages(8, 300)]}},
    "states": {"prefix_cache": "block", "lora_slots": 1, "machine": {"snapshots": 12}},
    "windows and states": {
        "prefix_cache": "radix",
        "lora_slots": 1,
        "machine": {"n_pages": 120, "windows": [WindowPages(8, 90), WindowPages(20, 150)], "snapshots": 4},
    },
    "few pages": {"prefix_cache": "radix", "lora_slots": 1, "machine": {"n_pages": 120}},
    "few blocks": {"prefix_cache": "block", "page_size": 16, "lora_slots": 1, "machine": {"n_pages": 14}},
}


@pytest.mark.parametrize("config", rest(CACHES.values()), ids=CACHES.keys())
def test_a_fault_anywhere_in_an_admission_fails_that_request_alone(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every call that the engine makes to accept a request and to start it: a fork of a running one, with an
    adapter and a deadline."""
    monkeypatch.setattr(admission, "RUN_TOKENS", 2)
    answer = list(expected(request([5, 6, 7], 30, ignore_eos=True)).token_ids)
    origin = request([5, 6, 7], 60, ignore_eos=True)
    bad = request([5, 6, 7, *answer], 3, ignore_eos=True, request_id="bad", deadline_s=100.0, adapter="a")
    fork = replace(bad, adapter=None)
    with toy_engine(**config) as engine:
        planner, places = engine.scheduler.planner, set[str]()
        interrupted, quiet = Interrupted(lambda place: place not in places), 0

        def watch(owner: Any, name: str) -> None:
            inner = getattr(owner, name)

            def call(seq: Any, *args: Any) -> Any:
                if seq.request.request_id == "bad" and seq.allocation is None:
                    return interrupted(inner, seq, *args)
                return inner(seq, *args)

            setattr(owner, name, call)

        watch(engine._requests, "_accept")
        watch(planner.prefill, "_admit")
        for part, names in {
            "_candidates": ("awaits_chunks", "is_long"),
            "_pages": ("suffice", "to_start"),
        }.items():
            for name in names:
                watch(getattr(planner, part), name)
        for at in count(1):
            interrupted.place = None
            read = threading.Event()
            seen = lambda _, d, read=read: d.index + len(d.token_ids) > 30 and read.set()  # noqa: E731
            first = engine.submit(origin, on_delta=seen)
            second = engine.submit(GOOD[0])
            assert read.wait(30)
            this = replace(fork if at % 2 else bad, request_id="bad")
            handle, last = engine.submit(this), engine.submit(GOOD[1])
            assert outcomes([first, second, last]) == [expected(r) for r in (origin, *GOOD[:2])]
            (found,) = outcomes([handle])
            engine.check_invariants()
            assert engine.healthy
            if interrupted.place is None:
                assert found == expected(this)
                quiet += 1
                if quiet == 8:  # no place is left
                    break
                continue
            quiet = 0
            places.add(interrupted.place)
            assert found in (EngineError, AdapterError), interrupted.place
            assert "InjectedFault" in repr(handle.error)
        while engine.stats()["rows_held"]:
            engine._call(lambda: None)
        assert engine.stats()["pages_private"] == 0
        assert engine.scheduler.state.adapters.held == 0
    assert any("enqueue" in place for place in places)
    assert any("KVCacheManager.start" in place for place in places)


# ---------------------------------------------------------------- before dispatch


@pytest.mark.parametrize("fail_at", [1, 4])
def test_after_a_passing_fault_before_dispatch_the_step_is_launched_again(
    fail_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_batch, calls = launching.make_batch, 0

    def once(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == fail_at:
            raise RuntimeError("a bug in the batch")
        return make_batch(*args)

    monkeypatch.setattr(launching, "make_batch", once)
    with toy_engine() as engine:
        assert outcomes([engine.submit(r) for r in GOOD]) == [expected(r) for r in GOOD]
        assert engine.healthy
    assert calls > fail_at


def test_a_fault_before_the_last_dispatch_of_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a bug in the batch")

    monkeypatch.setattr(launching, "make_batch", broken)
    engine = toy_engine().start()
    engine.pause()
    handle = engine.submit(GOOD[0])
    while not engine.stats()["waiting"]:
        engine._call(lambda: None)
    engine.shutdown()
    with pytest.raises(EngineError, match="a bug in the batch"):
        handle.result(timeout=30)


# ---------------------------------------------------------------- the device's


@pytest.mark.parametrize("step", [1, 2, 7])
@pytest.mark.parametrize("pipeline", ["on", "off"])
def test_a_device_error_answers_everybody_then_gives_everything_back(step: int, pipeline: str) -> None:
    told: list[tuple[BaseException, bool]] = []
    engine = toy_engine(
        runtime=ToyRuntime(vocab_size=VOCAB, fail_forward_at=step, rows=3), max_num_seqs=3, pipeline=pipeline
    )
    done = threading.Event()
    handles: list[Handle] = []

    def on_fatal(error: BaseException) -> None:
        told.append((error, all(handle.done() for handle in handles)))
        done.set()

    engine.on_fatal = on_fatal
    engine.start()
    engine.pause()
    handles += [engine.submit(request([1 + i, 2], 15, ignore_eos=True)) for i in range(8)]
    engine.resume()
    assert done.wait(30)
    engine._thread.join(30)
    assert [answered for _, answered in told] == [True], "everybody is answered first, and it is told once"
    assert outcomes(handles) == [EngineError] * 8
    assert "told to fail" in str(handles[0].error)
    assert not engine.healthy
    manager = engine.scheduler.manager
    manager.check()
    assert manager.usage().rows_held == manager.usage().pages_private == 0
    assert engine.scheduler.state.adapters.held == 0
    with pytest.raises(EngineError, match="has failed"):
        engine.submit(request()).result(timeout=30)
    engine.shutdown()


@pytest.mark.parametrize("step", [2, 3, 5])
def test_a_device_error_under_a_step_that_waits_for_its_mask(step: int) -> None:
    """It shows when an earlier step is committed, with a forward launched behind it that is not yet sampled."""
    seen: list[tuple[bool, int]] = []
    engine = toy_engine(runtime=ToyRuntime(vocab_size=VOCAB, fail_forward_at=step, rows=3), max_num_seqs=3)
    engine.on_fatal = lambda error: seen.append(
        (engine._loop.pipeline.launch_handle is not None, engine._loop.pipeline.in_flight)
    )
    engine.start()
    engine.pause()
    choice = Constraint("regex", 12)
    handles = [engine.submit(request([1 + i, 2], 15, constraint=choice if i % 2 else None)) for i in range(6)]
    while engine.stats()["waiting"] != len(handles):
        engine._call(lambda: None)
    engine.resume()
    assert outcomes(handles) == [EngineError] * 6
    engine._thread.join(30)
    assert seen == [(True, 2)], "two steps were in flight, one of them without its mask"
    manager = engine.scheduler.manager
    manager.check()
    assert manager.usage().rows_held == manager.usage().pages_private == 0
    assert engine._loop.pipeline.is_empty
    engine.shutdown()


def test_a_launch_that_raises_is_the_devices_fault() -> None:
    class Broken(ToyRuntime):
        def launch_sampling(self, *args: Any) -> Any:
            raise RuntimeError("no kernel image")

    engine = toy_engine(runtime=Broken()).start()
    with pytest.raises(EngineError, match="no kernel image"):
        engine.submit(request()).result(timeout=30)
    engine._thread.join(30)
    assert not engine.healthy
    engine.shutdown(drain=False)
