"""Foreign tasks: what a failed one leaves behind."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import redis
from celery import Celery
from celery.app.trace import build_tracer

from petiole.tasks.worker.delivery.delivery import Delivery
from petiole.tasks.worker.delivery.mailbox import Mailbox
from petiole.tasks.worker.pool.foreign_tasks import Deaths, ForeignTasks
from tests.support.site import eventually


class TroubleError(Exception):
    pass


class Request:
    """What a foreign task asks of Celery's."""

    id, expires, ending = "one", None, None

    def __init__(self) -> None:
        self.failures: list[bool] = []

    def on_accepted(self, pid: int, at: float) -> None:
        pass

    def on_success(self, outcome: tuple[bool, object, float]) -> None:
        self.failures.append(outcome[0])


def test_a_foreign_task_that_failed_is_freed_without_the_garbage_collector(
    client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("celery.app.trace"), "disabled", True)  # pytest keeps records
    app = Celery(set_as_current=False, backend="cache+memory://", broker="memory://")
    raised: list[weakref.ref[TroubleError]] = []

    @app.task(name="fails", shared=False)
    def fails() -> None:
        error = TroubleError("as it should")
        raised.append(weakref.ref(error))
        raise error

    trace = build_tracer("fails", fails, app=app)

    def target(*_: object) -> tuple[bool, object, float]:
        value, info, runtime, _text = trace("one", (), {}, {"id": "one"})
        return bool(info), value, runtime

    request, mailbox = Request(), Mailbox()
    foreign = ForeignTasks(mailbox, Deaths(client, 3))
    delivery = Delivery(
        target, ("fails", "one", {}), request.on_accepted, request.on_success, lambda *_: None, None, None
    )
    gc.collect()
    gc.disable()
    try:
        foreign.apply(delivery)
        mailbox.wait(lambda: bool(request.failures), 30, lambda: None)
        assert request.failures == [True]
        eventually(lambda: raised[0]() is None, "the error is freed", 10)
    finally:
        gc.enable()
        foreign.close()
