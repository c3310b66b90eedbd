"""What the engine answers, and how it is read: the oracle's tokens under every policy, deltas, handles, usage."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from petiole.gpu_worker import Delta, FinishReason, InvalidRequest
from petiole.gpu_worker.engine.loading import warm_up
from tests.support.toy_engine import Expected, Watch, expected, request, toy_engine
from tests.support.toy_runtime import ToyRuntime

SHARED = [9, 8, 7, 6, 5, 4, 3, 2, 1, 9, 8, 7]
REQUESTS = [
    request(
        SHARED[: 3 + i] + [20 + i] * (i % 3),
        8 + 2 * i,
        temperature=0.9 * (i % 2),
        frequency_penalty=0.5 * (i % 3),
        request_id=f"r{i}",
        ignore_eos=i % 4 == 0,
    )
    for i in range(10)
]

POLICIES: dict[str, dict[str, Any]] = {
    "pipelined": {},
    "blocking": {"pipeline": "off"},
    "drained prefill": {"prefill_policy": "drain"},
    "mixed steps": {"prefill_policy": "mixed"},
    "mixed steps, tiny chunks": {"prefill_policy": "mixed", "chunk_size": 2, "max_num_batched_tokens": 4},
    "mixed steps, tight pages": {"prefill_policy": "mixed", "machine": {"n_pages": 48}},
    "mixed steps, speculation": {"prefill_policy": "mixed", "speculative_tokens": 4, "chunk_size": 3},
    "tiny chunks": {"chunk_size": 2, "max_num_batched_tokens": 4},
    "no cache": {"prefix_cache": "off", "page_size": 4},
    "block cache": {"prefix_cache": "block", "page_size": 16},
    "capped cache": {"prefix_cache_max_pages": 5},
    "full reserve": {"reserve": "full"},
    "two rows": {"max_num_seqs": 2},
    "tight pages": {"machine": {"n_pages": 48}},
    "states": {"machine": {"snapshots": 9}},
    "states, mixed steps, tight pages": {"prefill_policy": "mixed", "machine": {"snapshots": 3, "n_pages": 48}},
    "states, block cache": {"prefix_cache": "block", "page_size": 16, "machine": {"snapshots": 9}},
    "states, no cache": {"prefix_cache": "off", "machine": {"snapshots": 2}},
    "speculation": {"speculative_tokens": 4},
    "speculation, tight pages": {"speculative_tokens": 4, "machine": {"n_pages": 48}},
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
def test_every_policy_gives_the_same_tokens(policy: dict[str, Any]) -> None:
    with toy_engine(**policy) as engine:
        answers = [Expected.of(result) for result in engine.generate(REQUESTS)]
        engine.check_invariants()
    assert answers == [expected(r) for r in REQUESTS]


def test_together_gives_what_each_gives_alone() -> None:
    with toy_engine() as engine:
        together = engine.generate(REQUESTS)
        alone = [engine.generate([r])[0] for r in REQUESTS]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]


def test_deltas_join_without_a_seam() -> None:
    watch = Watch()
    with toy_engine() as engine:
        result = engine.submit(REQUESTS[3], on_delta=watch.on_delta, on_done=watch.on_done).result()
    ends = [delta.index + len(delta.token_ids) for delta in watch.deltas]
    assert [delta.index for delta in watch.deltas[1:]] == ends[:-1]
    assert tuple(t for delta in watch.deltas for t in delta.token_ids) == result.token_ids
    assert "".join(delta.text for delta in watch.deltas) == result.text
    assert [d.finish_reason for d in watch.deltas[:-1]] == [None] * (len(watch.deltas) - 1)
    assert watch.deltas[-1].finish_reason is result.finish_reason
    assert watch.ends == 1


def test_callbacks_come_in_order_admitted_deltas_done() -> None:
    calls: list[str] = []
    with toy_engine() as engine:
        handle = engine.submit(
            REQUESTS[0],
            on_admitted=lambda _: calls.append("admitted"),
            on_delta=lambda *_: calls.append("delta"),
            on_done=lambda _: calls.append("done"),
        )
        handle.result()
        engine._text.flush()
    assert (calls[0], calls[-1]) == ("admitted", "done")
    assert set(calls[1:-1]) == {"delta"}
    assert handle.admitted


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_callback_that_raises_hurts_nobody(error: type[BaseException]) -> None:
    def broken(*_: object) -> None:
        raise error("a reader's own problem")

    with toy_engine() as engine:
        handle = engine.submit(REQUESTS[0], on_admitted=broken, on_delta=broken, on_done=broken)
        assert Expected.of(handle.result()) == expected(REQUESTS[0])
        assert Expected.of(engine.generate([REQUESTS[1]])[0]) == expected(REQUESTS[1])


def test_a_handle_is_iterated_by_any_number_of_readers() -> None:
    with toy_engine() as engine:
        handle = engine.submit(REQUESTS[0])
        readings = [[t for delta in handle for t in delta.token_ids] for _ in range(2)]
        assert readings == [list(handle.result().token_ids)] * 2


def test_a_handle_is_awaited_and_iterated_asynchronously() -> None:
    async def read() -> None:
        handles = [engine.submit(r) for r in REQUESTS]
        first: list[Delta] = [delta async for delta in handles[0]]
        results = await asyncio.gather(*handles)
        assert [Expected.of(r) for r in results] == [expected(r) for r in REQUESTS]
        assert tuple(t for delta in first for t in delta.token_ids) == results[0].token_ids

    with toy_engine() as engine:
        asyncio.run(read())


def test_an_error_reaches_every_kind_of_reader() -> None:
    async def read() -> None:
        with pytest.raises(InvalidRequest):
            await handle
        with pytest.raises(InvalidRequest):
            [delta async for delta in handle]

    with toy_engine() as engine:
        handle = engine.submit(request([]))
        with pytest.raises(InvalidRequest):
            handle.result()
        with pytest.raises(InvalidRequest):
            list(handle)
        asyncio.run(read())


def test_result_waits_no_longer_than_asked() -> None:
    with toy_engine() as engine:
        engine.pause()
        handle = engine.submit(REQUESTS[0])
        with pytest.raises(TimeoutError):
            handle.result(timeout=0.01)
        engine.resume()
        handle.result()


def test_usage_and_timing() -> None:
    with toy_engine() as engine:
        first, again = (engine.generate([REQUESTS[5]])[0] for _ in range(2))
    n = len(REQUESTS[5].prompt or ())
    assert (first.usage.prompt_tokens, first.usage.cached_prompt_tokens) == (n, 0)
    assert again.usage.cached_prompt_tokens == n - 1, "at least one position is computed"
    assert first.usage.completion_tokens == len(first.token_ids)
    timing = first.timing
    assert timing.ttft_ms is not None
    assert 0 <= timing.queue_ms <= timing.ttft_ms <= timing.total_ms
    rounded_ms = 0.0005  # each of the three
    assert timing.prefill_ms == pytest.approx(timing.ttft_ms - timing.queue_ms, abs=4 * rounded_ms)


def test_the_next_turn_of_a_conversation_is_a_hit() -> None:
    with toy_engine() as engine:
        first = engine.generate([request(SHARED, 20, ignore_eos=True)])[0]
        turn = [*SHARED, *first.token_ids, 30, 31]
        usage = engine.generate([request(turn)])[0].usage
    assert usage.cached_prompt_tokens == len(SHARED) + 19, "all but the last token, which never got KV"


def test_equal_prompts_at_once_are_prefilled_once() -> None:
    with toy_engine() as engine:
        engine.pause()
        handles = [engine.submit(request(SHARED, 5, request_id=str(i))) for i in range(6)]
        engine.resume()
        cached = [handle.result().usage.cached_prompt_tokens for handle in handles]
        computed = engine.stats()["prompt_tokens"]
    assert sorted(cached) == [0] + [len(SHARED) - 1] * 5
    assert computed == len(SHARED) + 5


def test_salts_and_adapters_keep_caches_apart() -> None:
    with toy_engine(lora_slots=2) as engine:
        for other in ({"salt": "tenant"}, {"adapter": "a"}, {}):
            result = engine.generate([request(SHARED, **other)])[0]
            assert result.usage.cached_prompt_tokens == 0
            assert Expected.of(result) == expected(request(SHARED, **other))


def test_more_adapters_than_slots_take_turns() -> None:
    requests = [request(SHARED, adapter="x" * (1 + i), request_id=str(i)) for i in range(5)]
    with toy_engine(lora_slots=2) as engine:
        answers = [Expected.of(result) for result in engine.generate(requests)]
        assert engine.scheduler.state.adapters.held == 0
    assert answers == [expected(r) for r in requests]


def test_only_adapters_wait_for_an_adapter_slot() -> None:
    order: list[str] = []

    def asked(name: str, max_tokens: int, **more: Any) -> Any:
        return request(SHARED, max_tokens, request_id=name, ignore_eos=True, **more)

    with toy_engine(lora_slots=1) as engine:
        engine.pause()
        for each in (
            asked("holds the slot", 40, adapter="a"),
            asked("wants it", 2, adapter="bb"),
            asked("would keep it", 2, adapter="a"),
            asked("needs none", 2),
        ):
            engine.submit(each, on_done=lambda handle: order.append(handle.request.request_id))
            while engine.stats()["waiting"] + engine.stats()["running"] < engine.stats()["open"]:
                engine._call(lambda: None)
        engine.resume()
    assert order == ["needs none", "holds the slot", "wants it", "would keep it"]


def test_priorities_go_first() -> None:
    order: list[str] = []
    with toy_engine(max_num_seqs=1) as engine:
        engine.pause()
        for name, priority in (("late", 5), ("normal", 0), ("urgent", -5)):
            engine.submit(
                request(request_id=name, priority=priority),
                on_done=lambda handle: order.append(handle.request.request_id),
            )
        engine._call(lambda: None)
        while engine.stats()["waiting"] != 3:
            engine._call(lambda: None)
        engine.resume()
        engine.shutdown()
    assert order == ["urgent", "normal", "late"]


def test_resumed_tokens_count_as_output_and_deltas_go_on_behind_them() -> None:
    whole = expected(REQUESTS[7])
    for taken in range(len(whole.token_ids)):
        watch = Watch()
        resumed = request(
            list(REQUESTS[7].prompt or ()),  # type: ignore[arg-type]
            REQUESTS[7].sampling.max_tokens,
            temperature=0.9,
            frequency_penalty=0.5,
            request_id="r7",
            resume_token_ids=whole.token_ids[:taken],
        )
        with toy_engine() as engine:
            result = engine.submit(resumed, on_delta=watch.on_delta).result()
        assert Expected.of(result) == whole
        assert watch.deltas[0].index == taken
        assert tuple(t for delta in watch.deltas for t in delta.token_ids) == whole.token_ids[taken:]


def test_a_resumed_output_that_had_ended_ends_at_once() -> None:
    whole = expected(request(max_tokens=6))
    with toy_engine() as engine:
        result = engine.generate([request(max_tokens=6, resume_token_ids=whole.token_ids)])[0]
        assert Expected.of(result) == whole
        assert engine.stats()["steps"] == 0


def test_a_resumed_output_that_had_ended_with_a_stop_token_has_the_same_text() -> None:
    """The token that ended it has no text, then or now."""
    stop = expected(request(max_tokens=6, ignore_eos=True)).token_ids[3]
    options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "stop_token_ids": [stop]}
    with toy_engine() as engine:
        whole = engine.generate([request(**options)])[0]
        again = engine.generate([request(**options, resume_token_ids=whole.token_ids)])[0]
    assert whole.token_ids[-1] == stop == whole.stop_reason
    assert Expected.of(again) == Expected.of(whole)


def test_an_engine_without_a_tokenizer_serves_token_ids() -> None:
    with toy_engine(text=False) as engine:
        result = engine.generate([request()])[0]
        with pytest.raises(InvalidRequest, match="stop"):
            engine.generate([request(stop=["a"])])
    assert (result.token_ids, result.text) == (expected(request()).token_ids, "")


def test_streams_wait_at_most_for_one_chunk() -> None:
    """Between two steps of a running stream lies at most one prefill, and it is no longer than a chunk."""
    kinds: list[tuple[str, int, bool]] = []
    with toy_engine(chunk_size=4, max_num_batched_tokens=64) as engine:
        launch = engine.scheduler.runtime.launch_forward

        def watch(slot_id: int, batch: Any) -> None:
            kinds.append((batch.kind, int(batch.lengths.sum()), bool(engine.scheduler.state.running)))
            launch(slot_id, batch)

        engine.scheduler.runtime.launch_forward = watch  # type: ignore[method-assign]
        stream = engine.submit(request([1], 60, ignore_eos=True))
        next(iter(stream))
        for i in range(6):
            engine.submit(request([10 + i] * 30, 2, request_id=str(i)))
        stream.result()
    prefills = [n for kind, n, streaming in kinds if kind == "prefill" and streaming]
    assert len(prefills) > 6
    assert max(prefills) <= 4
    assert not any(a[0] == b[0] == "prefill" and b[2] for a, b in pairwise(kinds))


def test_finish_reasons() -> None:
    eos = expected(request([5, 6], 90))
    assert eos.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    first = expected(request([5, 6], 5, ignore_eos=True)).token_ids
    cases = {
        "max_tokens": request([5, 6], 3, ignore_eos=True),
        "max_model_len": request([5] * 90, 50, ignore_eos=True),
        first[2]: request([5, 6], 20, ignore_eos=True, stop_token_ids=[first[2]]),
        str([first[1], first[2]]): request([5, 6], 20, ignore_eos=True, stop_token_sequences=[first[1:3]]),
    }
    with toy_engine() as engine:
        for reason, r in cases.items():
            result = engine.generate([r])[0]
            assert result.stop_reason == reason
            assert Expected.of(result) == expected(r)


def test_a_warm_up_leaves_no_trace() -> None:
    runtime = ToyRuntime()
    warm_up(runtime)
    assert runtime.steps == 8, "with log probabilities, and without"
    with toy_engine(runtime=runtime) as engine:
        assert [Expected.of(result) for result in engine.generate(REQUESTS)] == [expected(r) for r in REQUESTS]
