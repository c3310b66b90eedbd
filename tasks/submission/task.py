"""What `delay`, `apply_async`, `stream` and `astream` of the tasks do: check a request, route it, send it.

A task's body gets its result by `take_result`. Celery's trace function runs the body after the generation has
ended. Around that call the worker offers the outcome, and the body takes it, on the same thread. So the body needs
nothing of the worker."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Never, Protocol

from celery import Task
from celery.canvas import Signature
from celery.utils import uuid

from petiole import _lazy
from petiole.contract.requests.generation import in_json
from petiole.contract.results.task_result import StreamDelta
from petiole.contract.settings.urls import redacted
from petiole.tasks.app import interop, worker_side
from petiole.tasks.app.application import app
from petiole.tasks.app.thread_executor import TooManyWait
from petiole.tasks.errors import GenerationFailed, InvalidRequest, Unavailable
from petiole.tasks.fleet import control
from petiole.tasks.fleet.availability import AvailabilityRouter, QueueWatch, look_for_results
from petiole.tasks.settings import MOST_REPLICAS, settings, warn_a_producer
from petiole.tasks.streams import readers
from petiole.tasks.streams.readers import AsyncGeneration, EagerGeneration
from petiole.tasks.submission.bundles import SUBMISSIONS, Bundles, reaching_the_broker, send
from petiole.tasks.submission.message_templates import OPTIONS, MessageTemplates
from petiole.tasks.submission.options import affinity_headers, apart, choose_model, parse
from petiole.tasks.submission.signatures import OwnQueue, sign
from petiole.tasks.traces import carried, spans
from petiole.tasks.wire.headers import check_submission
from petiole.tasks.wire.keys import SENT_HEADER

if TYPE_CHECKING:
    from petiole.tasks.app import redis_transport as publishing
else:
    publishing = _lazy.module("petiole.tasks.app.redis_transport")


_OF_TEMPLATES = OPTIONS | {"model", "confirm"}


class SubmittedTask(Task):  # type: ignore[misc]
    """A task that is checked where it is submitted. What `GenerationTask` and `counting.CountTask` have in
    common."""

    abstract = True
    acks_late = reject_on_worker_lost = acks_on_failure = acks_on_timeout = True
    typing = False  # `parse` checks the arguments, and names them
    resultrepr_maxsize = 256  # characters of a result in events, which Celery formats even if events are off
    throws = (InvalidRequest,)  # the caller's mistake: a worker logs one line at INFO, and no traceback

    @cached_property
    def templates(self) -> MessageTemplates:
        return MessageTemplates(self, self.headers_of)

    @abstractmethod
    def headers_of(self, args: Sequence[object], kwargs: Mapping[str, Any]) -> Mapping[str, str]:
        """The headers that a request with these arguments adds to its message. Raises `InvalidRequest`."""

    def result_of(self, task_id: str, queue: str) -> AsyncGeneration:
        """The result of a task that was sent to this queue."""
        result: AsyncGeneration = self.AsyncResult(task_id)
        result.submitted_to = queue
        return result

    def _send(
        self,
        args: Sequence[object] | None,
        kwargs: Mapping[str, Any],
        more: Sequence[Any],
        options: Mapping[str, Any],
        confirm: object,
        impatient: bool,
    ) -> AsyncGeneration:
        """`Task.apply_async`, which raises `Unavailable` if the broker is away. `impatient`: its failure says
        little, and others may still succeed. What becomes a template is no submission, and has no span."""
        is_template = getattr(options.get("producer"), "is_collecting", False)
        with (
            reaching_the_broker(self.app, breaker=not impatient),
            publishing.confirmed(self._confirmation(confirm)),
            spans.Submission() if is_template else spans.sending(self.name) as span,
        ):
            submitted: AsyncGeneration = Task.apply_async(self, args, kwargs, *more, **options)
            if isinstance(submitted, AsyncGeneration):  # not an eager one
                submitted.trace = carried.headers()
                queue = getattr(options.get("router"), "queue", None) or self.app.conf.task_default_queue
                span.sent(submitted.id, queue)
        return submitted

    @staticmethod
    def _confirmation(replicas: object) -> publishing.Confirmation | None:
        if replicas is None:
            replicas = settings().confirm_replicas
        if type(replicas) is not int or not 0 <= replicas <= MOST_REPLICAS:
            raise InvalidRequest("confirm", f"must be a number of replicas, 0 to {MOST_REPLICAS}", replicas)
        return publishing.Confirmation(replicas, settings().confirm_timeout_s) if replicas else None

    def delay(self, /, *given: object, **options: Any) -> AsyncGeneration:
        """Submit the task. `options` are the task's own and those of a `Submission`, such as `priority`.

        Raises `InvalidRequest`; `Unavailable` if the broker cannot be reached; with `require_worker`, `NoWorker`.
        """
        return self._submit(given, options)

    async def adelay(self, /, *given: object, **options: Any) -> AsyncGeneration:
        """`delay` for asyncio. It runs on a thread of Petiole's own, because it may wait for the broker. Callers
        who wait together are submitted together. Raises `Unavailable` at once if thousands wait already."""
        try:
            return await SUBMISSIONS.run(self._submit, given, options)
        except TooManyWait:
            reason = f"{SUBMISSIONS.most} submissions of this process wait already"
            raise Unavailable(redacted(str(self.app.conf.broker_url)), reason) from None

    def apply(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Any:
        result = super().apply(args, in_json(kwargs or {}), *more, **options)
        result.__class__ = EagerGeneration
        return result

    def _submit(
        self, given: Sequence[object], options: Mapping[str, Any], bundles: Bundles | None = None
    ) -> AsyncGeneration:
        """Submit it. With `bundles`, a message that a template makes is sent with those of others, later."""
        request, submission = apart(options)
        if not given and submission.keys() <= _OF_TEMPLATES:
            submitted = self._templated(request, submission, bundles)
            if submitted is not None:
                return submitted
        otherwise: AsyncGeneration = self.apply_async(given, request, **submission)
        return otherwise

    def _templated(
        self, request: Mapping[str, Any], submission: Mapping[str, Any], bundles: Bundles | None
    ) -> AsyncGeneration | None:
        """Submit it by a template. None: there is none."""
        options = dict(submission)
        request, confirm = self._for_model(request, options), options.pop("confirm", None)
        check_submission(options, ())  # a serializer is not among them
        if (template := self.templates.of(request, options)) is None:
            return None
        warn_a_producer()
        interop.tell_who_is_eager(self.app)
        confirmation, task_id = self._confirmation(confirm), options.get("task_id") or uuid()
        with template.sending(task_id, request, options.get("headers") or {}) as message:
            push = publishing.Push(template.list_name, message.text, confirmation)
            if bundles is None:
                send(self.app, [push])
            else:
                self.app.breaker.check()
                bundles.keep(self.app, push)
            if push.error is not None:
                raise push.error
        submitted = self.result_of(task_id, template.queue)
        submitted.trace = message.trace
        return submitted

    def _for_model(self, request: Mapping[str, Any], options: dict[str, Any]) -> Mapping[str, Any]:
        """The option `model`, out of the options."""
        return choose_model(self.app, request, options)


class GenerationTask(SubmittedTask):
    """A task whose output can be streamed.

    Its message is acknowledged after its result is stored, whatever the application's settings for other tasks. So
    a worker that shuts down can hand the message back to the queue.
    """

    abstract = True

    def headers_of(self, args: Sequence[object], kwargs: Mapping[str, Any]) -> Mapping[str, str]:
        return affinity_headers(parse(self.name, args, kwargs))

    def apply_async(
        self,
        args: Sequence[object] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *more: Any,
        **options: Any,
    ) -> AsyncGeneration:
        """`Task.apply_async`; raises `InvalidRequest` at once for an invalid request.

        A worker submits the next link of a chain and the body of a chord. The worker that receives such a task
        validates it: an invalid one must not fail the task before it.
        """
        kwargs, runs_here = in_json(kwargs or {}), self.app.current_worker_task
        if runs_here is None:
            warn_a_producer()
            interop.tell_who_is_eager(self.app)
        require_worker, confirm = options.pop("require_worker", False), options.pop("confirm", None)
        registered = options.pop("registered", False)
        interop.check(self.app, options)
        if isinstance(options.get("queue"), OwnQueue):  # here this app's router chooses the queue
            del options["queue"]
        kwargs = choose_model(self.app, kwargs, options)
        if "group_id" in options:  # the producer is that of the group's first task, perhaps of another app
            options.pop("producer", None)
        sent_on = "parent_id" in options or isinstance(runs_here, GenerationTask)
        if not sent_on:
            given = {**options, "task_id": more[0]} if more else options
            check_submission(given, self.app.conf.accept_content)
        options["headers"] = {**(options.get("headers") or {}), SENT_HEADER: round(time.time(), 3)}
        try:
            options["headers"] = {**self.headers_of(args or (), kwargs), **options["headers"]}
        except InvalidRequest:
            if not sent_on:
                raise
        router = options["router"] = AvailabilityRouter(
            options.get("router") or self.app.amqp.router, require_worker
        )
        if registered and not self.app.conf.task_always_eager:
            more = more or (options.pop("task_id", None) or uuid(),)
            control.register(more[0])
        impatient = sent_on or options.get("retry") is False
        submitted = self._send(args, kwargs, more, options, confirm, impatient)
        if isinstance(submitted, AsyncGeneration):  # not an eager one
            submitted.submitted_to = router.queue
            if not isinstance(runs_here, GenerationTask):
                look_for_results(self.app, router.queue)
        return submitted

    def delay_on_commit(self, /, *given: object, **options: Any) -> AsyncGeneration:
        """`delay` as soon as Django's transaction is committed; at once, if there is none. The result's id is
        known before. After a rollback nothing was submitted.

        Raises `InvalidRequest` at once. A submission that fails, with `Unavailable` for example, raises its error
        where the transaction is committed.
        """
        from django.db import transaction  # the application's

        request, submission = apart(options)
        task_id = submission.setdefault("task_id", uuid())
        check_submission(submission, self.app.conf.accept_content)
        request = in_json(request)
        parse(self.name, given, request)
        transaction.on_commit(partial(self.apply_async, given, request, **submission))
        result: AsyncGeneration = self.AsyncResult(task_id)
        return result

    async def adelay_on_commit(self, /, *given: object, **options: Any) -> AsyncGeneration:
        """`delay_on_commit` for asyncio, on the thread that has Django's connections to its databases."""
        from asgiref.sync import sync_to_async  # Django's

        on_commit = sync_to_async(self.delay_on_commit, thread_sensitive=True)
        result: AsyncGeneration = await on_commit(*given, **options)
        return result

    def _many(self, *_: object, **__: object) -> Never:
        """Raises `InvalidRequest`: Celery's `map`, `starmap` and `chunks` call bodies within one other task."""
        instead = f"use group({self.name.rpartition('.')[2]}.s(...) for ... in ...)"
        raise InvalidRequest("map", f"and starmap and chunks run in no engine: {instead}", self.name)

    map = starmap = chunks = _many

    def signature(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Signature:
        return sign(self, args, kwargs, *more, **{"app": self.app, **options})

    def __call__(self, /, *args: object, **options: Any) -> Any:
        """Call the task's body. Celery's own method takes no option called `self`; here it is refused by name."""
        return self.run(*args, **options)

    subtask = signature

    def stream(
        self,
        /,
        *,
        timeout_s: float | None = None,
        heartbeat_s: float | None = None,
        prepared: bool = False,
        parsed: bool = False,
        **options: Any,
    ) -> readers.Stream:
        """Submit the task, as `delay` does, and iterate over its deltas.

        Invalid options raise `InvalidRequest` at once. `timeout_s` limits the wait for each delta. After
        `heartbeat_s` seconds without a delta there is an empty one, whose `is_heartbeat` is true. `prepared`,
        `parsed`: as of `petiole.stream`.
        """
        cancel = bool(options.get("cancel_on_disconnect"))
        result = self.delay(**options)
        reader = readers.Stream(result, timeout_s, cancel, self.app, heartbeat_s, prepared=prepared, parsed=parsed)
        reader.open()  # subscribe while the engine works
        return reader

    async def astream(
        self,
        /,
        *,
        timeout_s: float | None = None,
        heartbeat_s: float | None = None,
        prepared: bool = False,
        parsed: bool = False,
        **options: Any,
    ) -> AsyncGenerator[StreamDelta, None]:
        """`stream` for asyncio."""
        cancel = bool(options.get("cancel_on_disconnect"))
        result = await self.adelay(**options)
        deltas = readers.AsyncStream(
            result, timeout_s, cancel, self.app, heartbeat_s, prepared=prepared, parsed=parsed
        )
        async with contextlib.aclosing(deltas):
            async for delta in deltas:
                yield delta

    if TYPE_CHECKING:

        def AsyncResult(self, task_id: str, **options: Any) -> AsyncGeneration: ...  # noqa: N802 - Celery's name

    def finished(self, given: Sequence[object], options: Mapping[str, Any]) -> dict[str, Any]:
        """The running task's result. In a worker the pool has it already; an eager task generates here."""
        if self.request.called_directly:
            raise GenerationFailed(
                f"{self.name} runs in a worker's engine: submit it with delay, apply_async or stream, and many of "
                f"them as a group, not with map, starmap or chunks"
            )
        if self.request.is_eager:
            result: dict[str, Any] = worker_side.load(worker_side.RUN_HERE)(
                parse(self.name, given, options), self.request.id
            )
            return result
        return take_result(self.request.id)


class Offer(Protocol):
    """A result, or the error that the task fails with."""

    @property
    def result(self) -> dict[str, Any] | None: ...

    @property
    def error(self) -> Exception | None: ...


_here = threading.local()


@contextlib.contextmanager
def offered(task_id: str, outcome: Offer) -> Iterator[None]:
    """In this context, `take_result` on this thread finds the outcome of task `task_id`."""
    _here.outcome = task_id, outcome
    try:
        yield
    finally:
        del _here.outcome


def take_result(task_id: str) -> dict[str, Any]:
    """For the body of a generation task: return its result or raise its error."""
    nothing: tuple[str, Offer | None] = ("", None)
    known, outcome = getattr(_here, "outcome", nothing)
    if known != task_id or outcome is None:
        raise GenerationFailed(
            "this worker does not run Petiole's app and pool: start it with celery -A petiole worker"
        )
    if outcome.error is not None:
        raise outcome.error
    assert outcome.result is not None
    return outcome.result


app.watcher = QueueWatch
interop.chord_of_both = look_for_results
