"""The tests of an application that uses the fake worker, run as `tests/tasks/testing/test_fake.py` runs them."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
from typing import Any
from uuid import uuid4

import pytest
from celery import Celery, chord, group
from celery.contrib.testing.worker import start_worker

from petiole import InvalidRequest, cancel, chat, count, end, generate, query, sse, stream
from petiole.tasks.settings import settings
from petiole.testing import Answer, FakeWorker, fake
from tests.support.site import REPOSITORY

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}


def test_an_answer_is_in_the_stream_and_the_result(petiole_fake: FakeWorker) -> None:
    petiole_fake.answers("Hello, dear reader.")
    result = generate.delay(prompt="Greet.")
    deltas = list(stream(result, timeout_s=60))
    assert "".join(delta.text for delta in deltas) == "Hello, dear reader."
    assert result.get(timeout=60)["text"] == "Hello, dear reader."
    assert deltas[-1].finish_reason == "stop"
    assert [task.options for task in petiole_fake.received] == [{"prompt": "Greet."}]
    assert "torch" not in sys.modules


def test_answers_come_in_turn_and_from_functions(petiole_fake: FakeWorker) -> None:
    petiole_fake.answers("one", lambda task: task.options["prompt"].upper())
    assert [generate.delay(prompt=p).get(timeout=60)["text"] for p in "axy"] == ["one", "X", "Y"]


def test_a_failure_is_that_of_stream_and_result(petiole_fake: FakeWorker) -> None:
    error = InvalidRequest("adapter", "must be one that can be loaded", "x")
    petiole_fake.answers(Answer("So ", "far", error=error))
    result = generate.delay(prompt="a")
    with pytest.raises(InvalidRequest, match="adapter"):
        result.get(timeout=60)
    ended = end(result.id)
    assert ended is not None
    assert ended.finish_reason == "error"


def test_a_function_that_raises_fails_its_task(petiole_fake: FakeWorker) -> None:
    petiole_fake.answers(lambda task: task.options["no such option"])
    with pytest.raises(Exception, match="no such option"):
        generate.delay(prompt="a").get(timeout=60)


def test_tools_and_reasoning_are_read_as_a_models_are(petiole_fake: FakeWorker) -> None:
    petiole_fake.answers(Answer("Let me look.", reasoning="Hm.", calls=[("weather", {"city": "Rome"})]))
    tools = [{"type": "function", "function": WEATHER}]
    result = chat.delay(messages=[{"role": "user", "content": "Rome?"}], tools=tools)
    value: Any = result.get(timeout=60)
    [call] = value["tool_calls"]
    assert (call["name"], call["arguments"]) == ("weather", '{"city": "Rome"}')
    assert value["reasoning"]["text"].strip() == "Hm."
    assert value["content"].strip() == "Let me look."
    parsed = list(stream(result, timeout_s=60, parsed=True))
    assert "".join(delta.reasoning or "" for delta in parsed).strip() == "Hm."


def test_the_tools_of_the_docs(petiole_fake: FakeWorker, capsys: pytest.CaptureFixture[str]) -> None:
    petiole_fake.answers(Answer(calls=[("weather", {"city": "Rome"})]), "It is 20 degrees warm.")
    printed = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "tools.md").read_text(), re.DOTALL)
    exec(printed[0], {})
    assert capsys.readouterr().out == "It is 20 degrees warm.\n"
    assert [task.options["max_tokens"] for task in petiole_fake.received] == ["rest", "rest"]
    assert petiole_fake.received[1].options["messages"][-1]["content"] == '{"celsius": 20}'


def test_a_stream_is_cancelled(petiole_fake: FakeWorker) -> None:
    petiole_fake.answers(Answer(*["word "] * 200, delay_s=0.01))
    result = generate.delay(prompt="a", max_tokens=200)
    reasons = []
    for delta in stream(result, timeout_s=60):
        reasons.append(delta.finish_reason)
        cancel(result.id)
    assert reasons[-1] == "cancelled"
    with pytest.raises(Exception, match="revoked"):
        result.get(timeout=60)


def test_the_output_has_at_most_its_tokens(petiole_fake: FakeWorker) -> None:
    petiole_fake.answers("a b c d e f")
    value = generate.delay(prompt="a", max_tokens=3).get(timeout=60)
    assert (value["text"], value["finish_reason"], value["usage"]["completion_tokens"]) == ("a b c ", "length", 3)


def test_chains_groups_and_chords(petiole_fake: FakeWorker) -> None:
    petiole_fake.answers(lambda task: f"<{task.options['prompt']}>")
    chain = generate.s(prompt="a") | generate.s(prompt="b:")
    assert chain.apply_async().get(timeout=60)["text"] == "<b:<a>>"
    many = group(generate.s(prompt=str(n)) for n in range(8)).apply_async()
    assert [value["text"] for value in many.get(timeout=60)] == [f"<{n}>" for n in range(8)]
    body = chord([generate.s(prompt="a"), generate.s(prompt="b")], generate.s(prompt="all:"))()
    assert body.get(timeout=60)["text"] == "<all:<a>\n<b>>"


def test_an_id_that_is_submitted_twice_is_one_generation(petiole_fake: FakeWorker) -> None:
    task_id = str(uuid4())
    for _ in range(2):
        assert generate.delay(prompt="a", task_id=task_id).get(timeout=60)["text"]
    assert len(petiole_fake.received) == 1


def test_there_is_a_worker_and_it_counts(petiole_fake: FakeWorker) -> None:
    assert generate.delay(prompt="a", require_worker=True).get(timeout=60)["model"] == "petiole-fake"
    assert count.delay(texts=["a b c"]).get(timeout=60)["counts"] == [3]


def test_a_view_with_asyncio_and_one_with_events(petiole_fake: FakeWorker) -> None:
    async def answer() -> Any:
        return await (await generate.adelay(prompt="a")).aget(timeout=60)

    assert asyncio.run(answer())["text"] == "This is a scripted answer."
    task_id = generate.delay(prompt="a", registered=True).id
    assert b"".join(sse(task_id)).count(b"scripted") == 1


def test_a_skill_has_its_field(petiole_fake: FakeWorker) -> None:
    petiole_fake.answers("A cat.")
    assert query.delay(question="What?").get(timeout=60)["answer"] == "A cat."


def test_in_memory(petiole_in_memory: FakeWorker) -> None:
    petiole_in_memory.answers("Hello there.")
    assert generate.delay(prompt="Greet.").get()["text"] == "Hello there."
    assert "".join(delta.text for delta in generate.stream(prompt="x")) == "Hello there."
    petiole_in_memory.answers(ValueError("no"))
    with pytest.raises(Exception, match="no"):
        generate.delay(prompt="Greet.").get()


def test_beside_an_eager_app_and_another_fake(petiole_fake: FakeWorker, recwarn: pytest.WarningsRecorder) -> None:
    shop = Celery("shop", set_as_current=False)
    shop.conf.task_always_eager = True
    assert generate.delay(prompt="a").get(timeout=60)["text"]
    with fake() as other:
        other.answers("The other.")
        assert generate.delay(prompt="a").get(timeout=60)["text"] == "The other."
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]


def _shop(worker: FakeWorker) -> tuple[Celery, Any]:
    """A team's own app on the Redis of the fake, and a task of it."""
    shop = Celery("shop", broker=worker.url, backend=worker.url, set_as_current=False)
    shop.conf.task_default_queue = settings().linked_queue

    @shop.task(name="shop.note", shared=False)  # type: ignore[untyped-decorator]
    def note(given: Any) -> str:
        return "+".join(one["text"] for one in (given if isinstance(given, list) else [given]))

    return shop, note


def test_tasks_of_ones_own_follow_generations(petiole_fake: FakeWorker) -> None:
    with fake(linked_queue=f"shop-{uuid4()}") as worker:
        worker.answers(lambda task: f"<{task.options['prompt']}>")
        shop, note = _shop(worker)
        with start_worker(shop, perform_ping_check=False):
            assert (generate.s(prompt="a") | note.s()).apply_async().get(timeout=60) == "<a>"
            both = chord([generate.s(prompt="a"), generate.s(prompt="b")])(note.s())
            assert both.get(timeout=60) == "<a>+<b>"


def test_a_task_that_nobody_takes_is_reported(petiole_fake: FakeWorker, caplog: pytest.LogCaptureFixture) -> None:
    reported = threading.Event()

    def report(record: logging.LogRecord) -> bool:
        reported.set()
        return True

    caplog.set_level(logging.WARNING, logger="petiole.testing.fake")  # Celery's test worker sets the root's
    caplog.handler.addFilter(report)
    with fake(linked_queue=f"shop-{uuid4()}") as worker:
        _, note = _shop(worker)
        (generate.s(prompt="a") | note.s()).apply_async()
        assert reported.wait(60)
    message = caplog.messages[-1]
    assert message.startswith("petiole.testing: shop.note waits in the queue 'shop-")
    assert str(worker.url) in message


def test_every_model_is_served(petiole_fake: FakeWorker) -> None:
    assert generate.delay(prompt="a", model="any-model").get(timeout=10)["text"] == "This is a scripted answer."


def test_every_model_is_served_in_memory(petiole_in_memory: FakeWorker) -> None:
    assert generate.delay(prompt="a", model="any-model").get()["text"] == "This is a scripted answer."
