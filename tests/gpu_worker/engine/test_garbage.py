"""Requests that have ended are freed at once: a garbage collection that found them would stop all streams."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator

import pytest

from petiole.gpu_worker import FinishReason
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from tests.support.toy_engine import request, toy_engine

OURS = {
    "petiole.cache.tokens",
    "petiole.gpu_worker.request.handle",
    "petiole.gpu_worker.request",
    "petiole.gpu_worker.scheduling.scheduled_sequence",
    "petiole.gpu_worker.text.assembler",
    "petiole.gpu_worker.threads.detokenization",
}


@pytest.fixture
def collector() -> Iterator[None]:
    """Without automatic collections; one by hand keeps what it finds in `gc.garbage`."""
    gc.collect()
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    gc.unfreeze()


@pytest.mark.parametrize("options", [{}, {"speculative_tokens": 4}, {"machine": {"n_pages": 48}}], ids=str)
@pytest.mark.usefixtures("collector")
def test_a_request_that_has_ended_leaves_no_garbage(options: dict[str, int]) -> None:
    requests = [request([1 + i, 2, 3, 2, 3], 20 + i, temperature=0.5, logprobs=i % 2 or None) for i in range(12)]
    with toy_engine(**options) as engine:
        handles = [engine.submit(one) for one in requests]
        for handle in handles[::4]:
            handle.cancel()
        for handle in handles[1::4]:
            handle.hand_back()
        for handle in handles[2::4]:
            handle.result()
        del handle, handles
        while engine.stats()["open"]:
            pass
        gc.collect()
        found = Counter(type(one).__qualname__ for one in gc.garbage if type(one).__module__ in OURS)
    assert not found


def test_a_result_that_is_kept_keeps_no_engine() -> None:
    """Which would keep its weights and its cache, and a next engine would find no memory."""
    with toy_engine() as engine:
        handles = [engine.submit(request([1, 2, 3], 8)) for _ in range(3)]
        handles[0].cancel()
        results = [handle.result() for handle in handles]
        left = weakref.ref(engine)
    del engine
    gc.collect()
    assert left() is None
    assert [handle.result() for handle in handles] == results
    handles[1].cancel()  # too late, which is no error


def test_a_request_that_ends_before_its_deadline_is_not_kept_until_then() -> None:
    """Although the engine is never idle."""

    def again(ended: Handle) -> None:
        if ended.error is None and ended.result().finish_reason is FinishReason.LENGTH:
            engine.submit(ended.request, on_done=again)

    with toy_engine() as engine:
        for i in range(2):
            engine.submit(request([1, 2, 3 + i], 60 + 20 * i, ignore_eos=True), on_done=again)
        for _ in range(20):
            engine.submit(request([4, 5], 4, deadline_s=3600.0)).result(timeout=30)
        engine.submit(request([4, 5], 4)).result(timeout=30)
        gc.collect()
        sequences = [one for one in gc.get_objects() if type(one) is ScheduledSequence]
        engine.shutdown(drain=False)
        assert not [one for one in sequences if one.request.deadline_s is not None]
