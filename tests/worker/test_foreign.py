"""Foreign tasks: what a failed one leaves behind."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
from celery import Celery
from celery.app.trace import build_tracer
from support.site import eventually

from tasks.worker.delivery import Delivery
from tasks.worker.foreign import ForeignTasks
from tasks.worker.mailbox import Mailbox


class TroubleError(Exception):
    pass


def test_a_foreign_task_that_failed_is_freed_without_the_garbage_collector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("celery.app.trace"), "disabled", True)  # pytest keeps records
    app = Celery(set_as_current=False, backend="cache+memory://", broker="memory://")
    raised: list[weakref.ref[TroubleError]] = []

    @app.task(name="fails")
    def fails() -> None:
        error = TroubleError("as it should")
        raised.append(weakref.ref(error))
        raise error

    trace = build_tracer("fails", fails, app=app)

    def target(*_: object) -> tuple[bool, object, float]:
        value, info, runtime, _text = trace("one", (), {}, {"id": "one"})
        return bool(info), value, runtime

    failures: list[bool] = []
    mailbox = Mailbox()
    foreign = ForeignTasks(mailbox)
    gc.collect()
    gc.disable()
    try:
        foreign.apply(
            Delivery(target, (), lambda *_: None, lambda it: failures.append(it[0]), lambda *_: None, None, None)
        )
        mailbox.wait(lambda: bool(failures), 30, lambda: None)
        assert failures == [True]
        eventually(lambda: raised[0]() is None, "the error is freed", 10)
    finally:
        gc.enable()
        foreign.close()
        mailbox.close()
