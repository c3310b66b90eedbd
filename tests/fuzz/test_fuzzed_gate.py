"""Whatever the gate lets through, kombu and Celery handle without an exception: from the list's bytes over kombu's
`Message`, Celery's strategy and request to the pool, and through the trace.

The seed is printed with a failure; `PETIOLE_FUZZ_SEED` and `PETIOLE_FUZZ_MESSAGES` set it and the number."""

from __future__ import annotations

import logging
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer, trace_task_ret
from celery.worker.request import Request

from petiole.contract.tasks import COUNT, TASKS
from petiole.tasks.worker.broker import gate
from petiole.tasks.worker.broker.gate import bodies
from petiole.tasks.worker.completion import claims
from tests.support import hostile
from tests.support.hostile import Hostile, message, raw, received

SEED = int(os.environ.get("PETIOLE_FUZZ_SEED") or random.SystemRandom().randrange(2**31))
MESSAGES = int(os.environ.get("PETIOLE_FUZZ_MESSAGES", 3000))


TASK = "fuzz.generate"


class Handle:
    """What Celery keeps a weak reference to."""


class Pipeline:
    """What a worker does with a message, without a broker, a thread or a clock."""

    def __init__(self) -> None:
        self.app = app = Celery("fuzz", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.accept_content = ["json"]
        app.conf.task_publish_retry = False
        self.ran: list[str] = []

        @app.task(name=TASK, bind=True, shared=False)
        def generate(task: Any, /, *args: Any, **kwargs: Any) -> str:
            self.ran.append(task.request.id)
            return "text"

        app.finalize()
        self.task = app.tasks[TASK]
        self.task.__trace__ = build_tracer(TASK, self.task, app=app)
        self.pool = SimpleNamespace(apply_async=self._apply)
        consumer = SimpleNamespace(
            hostname="fuzz@host",
            connection_errors=(OSError,),
            event_dispatcher=SimpleNamespace(enabled=True, send=lambda *_, **__: None),
            timer=SimpleNamespace(call_at=lambda eta, fun, args, priority: fun(*args)),
            apply_eta_task=self._execute,
            disable_rate_limits=True,
            task_buckets=defaultdict(lambda: None),
            on_task_request=self._execute,
            _limit_task=None,
            _limit_post_eta=None,
            pool=self.pool,
            controller=SimpleNamespace(state=SimpleNamespace(revoked=set())),
            qos=SimpleNamespace(increment_eventually=lambda: None),
        )
        self.strategy = self.task.start_strategy(app, consumer)

    def _execute(self, request: Request) -> None:
        request.execute_using_pool(self.pool)
        assert isinstance(claims.linked(request), bool)
        assert isinstance(request.stamps, dict)
        assert [request.chord, request.errbacks, request.group, request.group_index, request.reply_to]
        assert request._context.as_execution_options()["task_id"] == request.id
        assert request._context.children == []
        assert request._context.get("id") == request.id
        assert not request._context.is_eager

    def _apply(self, trace: Any, args: tuple[Any, ...], **options: Any) -> Handle:
        name, task_id, request, body, content_type, content_encoding = args
        for limit in (options["soft_timeout"], options["timeout"]):
            time.monotonic() + (limit or 0)
        failed, value, _ = trace_task_ret(
            name, task_id, request, body, content_type, content_encoding, app=self.app
        )
        assert not failed or value.exception is not None
        return Handle()

    def run(self, text: bytes) -> gate.RefusedMessage | str:
        read = gate.envelope(text)
        if isinstance(read, gate.RefusedMessage):
            return read
        arrived = received(read.payload)
        if arrived.errors:
            assert "compression" in arrived.headers
            return gate.RefusedMessage("compression")
        admitted = gate.task(arrived)
        if isinstance(admitted, gate.RefusedMessage):
            return admitted
        arrived.headers, arrived._decoded_cache = admitted.headers, admitted.body
        assert gate.is_id(admitted.task_id)
        if admitted.name == TASK:
            payload = None if "task" in admitted.headers else admitted.body
            self.strategy(arrived, payload, lambda *_: None, lambda *_: None, ())
        return admitted.task_id


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    bodies.install()
    logging.disable(logging.CRITICAL)
    yield Pipeline()
    logging.disable(logging.NOTSET)


def test_what_the_gate_lets_through_is_handled(pipeline: Pipeline) -> None:
    print(f"PETIOLE_FUZZ_SEED={SEED}")
    supply, refused, passed = Hostile(SEED, task=TASK), 0, 0
    for number in range(MESSAGES):
        text = supply.message(f"id-{number}")
        try:
            outcome = pipeline.run(text)
        except BaseException as error:
            raise AssertionError(f"seed {SEED}, message {number}: {text[:3000]!r}") from error
        if isinstance(outcome, gate.RefusedMessage):
            refused += 1
            assert outcome.reason
            outcome.reason.encode()
        else:
            passed += 1
    print(f"{passed} passed, {refused} were refused, {len(pipeline.ran)} ran")
    assert passed > MESSAGES / 10 < refused


def test_every_task_has_its_turn() -> None:
    assert {"tasks.generate", *hostile.NEEDED} == {*TASKS, COUNT}


def test_a_valid_message_runs_as_it_is(pipeline: Pipeline) -> None:
    for task_id in ("an-id", "ä" * 127, "x" * 255):
        assert pipeline.run(raw(message(task_id, "hello", task=TASK))) == task_id
        assert pipeline.ran[-1] == task_id
