"""A worker without a model: real messages, streams, results, links and chords, and answers that a test scripts.

It runs on threads of the test's process and needs no torch. One thread takes messages from the queue with stock
kombu. Each task then has a thread, which writes its stream (`stream`) and runs Celery's trace with the outcome, as
a worker does. Celery's process-wide flag that forbids `get()` inside a task belongs to its own workers, so it is
never set here.

In memory there are no messages: tasks are eager, and their bodies take the scripted answers."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from unittest import mock

from celery import current_task
from celery.app.task import Context
from celery.app.trace import build_tracer
from celery.signals import after_task_publish
from kombu.exceptions import ChannelError

from petiole.contract.requests.count import queue_of
from petiole.contract.requests.generation import Common
from petiole.contract.results.outputs import Timing
from petiole.contract.tasks import COUNT, TASKS
from petiole.tasks.app import worker_side
from petiole.tasks.app.application import app as celery_app
from petiole.tasks.app.configuration import celery_url
from petiole.tasks.errors import PetioleError, describe, rebuild
from petiole.tasks.fleet import models, reports
from petiole.tasks.fleet.models import ModelRoute
from petiole.tasks.fleet.reports import REPORT_INTERVAL_S, WorkerReport
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.submission.options import parse
from petiole.tasks.submission.task import offered
from petiole.tasks.wire.record import codec
from petiole.testing import here, script
from petiole.testing.script import MODEL, Received, Scripted, ScriptedOutput
from petiole.testing.stream import StreamWriter

logger = logging.getLogger(__name__)

POLL_S = 0.05
ANSWERED = {*TASKS, COUNT}
"""By name. Celery shares the tasks of other apps, so the registry does not tell them apart."""
UNREAD_S = 2.0
"""After this time a message in another queue is reported as one that nobody takes."""


class _Outcome(NamedTuple):
    result: dict[str, Any] | None
    error: Exception | None


class FakeWorker:
    """The fake, for the tests: what it has had, and what it shall answer. `url`: of its Redis, for the app and the
    worker of a test's own tasks; None in memory."""

    def __init__(self, url: str | None = None) -> None:
        self.url = url
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self.reset()

    def reset(self) -> None:
        """Forget the tasks and the answers of the test before."""
        self.received: list[Received] = []
        self._script: list[Scripted] = ["This is a scripted answer."]

    def answers(self, first: Scripted, *more: Scripted) -> None:
        """Answer the next tasks with these, in this order, and all further tasks with the last."""
        checked = [script.checked(scripted) for scripted in (first, *more)]
        with self._lock:
            self._script = checked

    def _next(self, received: Received) -> script.Answer:
        with self._lock:
            self.received.append(received)
            scripted = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        return script.answer_of(scripted, received)

    def run(self, request: Common, task_id: str, name: str, stream: StreamWriter | None) -> _Outcome:
        """Answer a task."""
        began = time.monotonic()
        received = Received(name, task_id, request.model_dump(exclude_unset=True), request)
        answer = self._next(received)
        made = ScriptedOutput(received, answer)
        asked = getattr(request, "max_tokens", None)  # or "rest", or no such field
        most = asked if isinstance(asked, int) else script.CONTEXT
        if stream is not None:
            stream.announce(made.prepared)
        for piece in answer.pieces:
            if answer.delay_s:
                self._ending.wait(answer.delay_s)
            words = script.words_of(piece)
            text = "".join(kept := words[: most - len(made.token_ids)])
            tokens = script.tokens_of(text)
            if stream is not None:
                stream.push(tokens, text)
                if stream.cancelled:
                    return self._revoked(stream)
            made.text, made.token_ids = made.text + text, [*made.token_ids, *tokens]
            if len(kept) < len(words):
                made.stop_reason = "max_tokens"
                break
        if answer.error is not None:
            if stream is not None:
                stream.finish({"finish_reason": "error", "error": describe(_public(answer.error))})
            return _Outcome(None, _public(answer.error))
        total_ms = 1000 * (time.monotonic() - began)
        known = {"timing": Timing(0.0, 0.0, 0.0, total_ms), "attempt": stream.attempt if stream else 1}
        result = codec.result(made, **known, **made.shown(), **answer.more)
        if stream is not None:
            stream.finish(codec.end_of(result))
        return _Outcome(result, None)

    @staticmethod
    def _revoked(stream: StreamWriter) -> _Outcome:
        stream.finish({"finish_reason": "cancelled", "stop_reason": "revoked"})
        return _Outcome(None, None)

    def here(self, request: Common, task_id: str) -> dict[str, Any]:
        """Answer an eager task."""
        outcome = self.run(request, task_id, current_task.name, None)
        if outcome.error is not None:
            raise outcome.error
        assert outcome.result is not None
        return outcome.result


def _public(error: Exception) -> Exception:
    """As a producer gets it."""
    return error if isinstance(error, PetioleError) else rebuild(describe(error))


class _Loop:
    """Takes messages from `queues`, and runs their tasks."""

    def __init__(self, fake: FakeWorker, queues: Sequence[str]) -> None:
        self.fake, self.queues, self.name = fake, queues, f"{queues[0]}@localhost"
        self._read = {*queues, *map(queue_of, queues)}
        self._sent: dict[str, tuple[str, float]] = {}  # by queue, the first task whose message nobody may take
        self._started, self._failed = threading.Event(), list[BaseException]()
        self._thread = threading.Thread(target=self._run, name="petiole-fake", daemon=True)

    def start(self) -> None:
        after_task_publish.connect(self._note)
        self._thread.start()
        self._started.wait()
        for error in self._failed:
            raise error

    def stop(self) -> None:
        self.fake._ending.set()
        self._thread.join()
        after_task_publish.disconnect(self._note)

    def _note(self, sender: str, routing_key: str, **_: object) -> None:
        if routing_key not in self._read and _current[-1:] == [self.fake]:
            self._sent.setdefault(routing_key, (sender, time.monotonic()))

    def _report_unread(self, channel: Any) -> None:
        for queue, (task, since) in list(self._sent.items()):
            if time.monotonic() < since + UNREAD_S:
                continue
            del self._sent[queue]
            with contextlib.suppress(ChannelError):  # it is empty
                if channel.queue_declare(queue=queue, passive=True).message_count:
                    logger.warning(
                        "petiole.testing: %s waits in the queue %r, which nobody seems to read: start a worker of"
                        " your app there, on %s (petiole_fake.url), or use petiole_in_memory with your app eager",
                        *(task, queue, self.fake.url),
                    )

    def _run(self) -> None:
        try:
            self._consume()
        except BaseException as error:
            logger.exception("petiole.testing: the fake worker has ended")
            self._failed.append(error)
        finally:
            self._started.set()

    def _consume(self) -> None:
        client, report_at = connections.streams(), 0.0
        report = WorkerReport(worker=self.name, model=MODEL, queues=[*self.queues], slots=1024)
        with celery_app.connection_for_read() as connection:
            queues = [celery_app.amqp.queues[name] for name in self._read]
            with connection.Consumer(queues, accept=["json"], on_message=self._take):
                while not self.fake._ending.is_set():
                    if time.monotonic() >= report_at:
                        reports.report(client, report)
                        report_at = time.monotonic() + REPORT_INTERVAL_S
                        self._started.set()
                    with contextlib.suppress(socket.timeout):
                        connection.drain_events(timeout=POLL_S)
                    self._report_unread(connection.default_channel)
        reports.withdraw(client, self.name)

    def _take(self, message: Any) -> None:
        """Acknowledged at once: this worker does not die alone."""
        if message.headers["task"] not in ANSWERED:
            self._forward(message)
            return
        (args, kwargs, embed), headers = message.decode(), message.headers
        message.ack()
        request = {**headers, **embed, "hostname": self.name, "delivery_info": message.delivery_info}
        request |= {name: message.properties.get(name) for name in ("reply_to", "correlation_id")}
        threading.Thread(target=self._work, args=(args, kwargs, request), daemon=True).start()

    def _forward(self, message: Any) -> None:
        """Send a task of another app to its queue, as a worker does when it sends such a link."""
        queue = settings().linked_queue
        form = {"content_type": message.content_type, "content_encoding": message.content_encoding}
        kept = {name: message.properties.get(name) for name in ("reply_to", "correlation_id", "priority")}
        with celery_app.producer_pool.acquire(block=True) as producer:
            producer.publish(message.body, routing_key=queue, exchange="", headers=message.headers, **form, **kept)
        message.ack()
        self._note(message.headers["task"], queue)

    def _work(self, args: Sequence[Any], kwargs: dict[str, Any], request: dict[str, Any]) -> None:
        try:
            if request.get("eta"):
                eta = datetime.fromisoformat(request["eta"])
                left = eta - datetime.now(UTC if eta.tzinfo else None)
                self.fake._ending.wait(max(0.0, left.total_seconds()))
            task = celery_app.tasks[request["task"]]
            trace = build_tracer(task.name, task, app=celery_app)
            if task.name == COUNT:
                trace(request["id"], args, kwargs, request)
                return
            outcome = self._outcome(task.name, request, args, kwargs)
            if outcome == (None, None):
                context = Context(request, args=args, kwargs=kwargs, called_directly=False)
                task.backend.mark_as_revoked(request["id"], "revoked", request=context)
                return
            with offered(request["id"], outcome):
                trace(request["id"], args, kwargs, request)
        except Exception:
            logger.exception("petiole.testing: the fake worker failed at task %s", request.get("id"))

    def _outcome(self, name: str, headers: Mapping[str, Any], args: Any, kwargs: Any) -> _Outcome:
        ttl_s = settings().stream_ttl_s
        stream = StreamWriter(connections.streams(), headers["id"], MODEL, headers.get("retries") or 0, ttl_s)
        if stream.record is not None:  # submitted a second time, or retried
            if "error" in stream.record:
                return _Outcome(None, rebuild(stream.record["error"]))
            return _Outcome(stream.written.result(stream.record), None)
        if stream.cancelled:
            return self.fake._revoked(stream)
        try:
            asked = parse(name, args, kwargs)
        except PetioleError as error:
            stream.finish({"finish_reason": "error", "error": describe(error)})
            return _Outcome(None, error)
        try:
            return self.fake.run(asked, headers["id"], name, stream)
        except Exception as error:  # of a function of the script, say
            logger.exception("petiole.testing: no answer to task %s", headers["id"])
            stream.finish({"finish_reason": "error", "error": describe(_public(error))})
            return _Outcome(None, _public(error))


@contextlib.contextmanager
def fake(*, in_memory: bool = False, queues: Sequence[str] = (), **changed: object) -> Iterator[FakeWorker]:
    """Run the fake worker, and make this process submit to it.

    With the embedded Redis, tasks are messages. `in_memory`: without a Redis; tasks are eager, so they run where
    they are submitted. `queues`: more queues to take from. `changed`: settings, such as `max_model_len=512`."""
    made = FakeWorker(None if in_memory else celery_url("embedded://"))
    if in_memory:
        eager = celery_app.conf.task_always_eager
        celery_app.conf.task_always_eager = True
        try:
            with _answering(made):
                yield made
        finally:
            celery_app.conf.task_always_eager = eager
        return
    queue = f"petiole-fake-{os.getpid()}-{id(made):x}"
    with here.submitting(queue, changed), _answering(made):
        loop = _Loop(made, [queue, *queues])
        loop.start()
        try:
            yield made
        finally:
            loop.stop()


_current: list[FakeWorker] = []


def run_here(request: Common, task_id: str) -> dict[str, Any]:
    """Stands for `worker_side.RUN_HERE`."""
    return _current[-1].here(request, task_id)


def _serves(name: object, own_queue: str, queue: str | None = None) -> ModelRoute:
    """Stands for `Directory.find`: the fake is every model."""
    return ModelRoute(queue or own_queue, adapter=None)


@contextlib.contextmanager
def _answering(made: FakeWorker) -> Iterator[None]:
    """The bodies of eager tasks, and of counts, find the fake, and so do those who ask for a model by its name."""
    _current.append(made)
    try:
        with (
            mock.patch.object(worker_side, "RUN_HERE", f"{__name__}:run_here"),
            mock.patch.object(worker_side, "COUNT", f"{script.__name__}:count"),
            mock.patch.object(models.directory, "find", _serves),
        ):
            yield
    finally:
        _current.remove(made)
