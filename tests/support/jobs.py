"""Jobs whose threads are turned by hand, and outcomes and messages for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery import Celery
from celery.worker.request import Request
from kombu.message import Message
from kombu.serialization import dumps

from petiole.contract.settings.engine import EngineConfig
from petiole.tasks.settings import Settings
from petiole.tasks.worker.completion.completion import Completion
from petiole.tasks.worker.delivery.delivery import Delivery
from petiole.tasks.worker.generation.driver import Services
from petiole.tasks.worker.output.outcomes import Ending, Outcome
from petiole.tasks.worker.output.publisher import Publisher
from petiole.tasks.worker.reports.histograms import TaskHistograms
from tests.support.fake_engine import FakeEngine

RESULT = {"text": "some", "token_ids": [1, 2], "finish_reason": "length"}
SUCCESS = Outcome(RESULT, finish_reason="length")
LARGE = 2**20


def nothing(*_: Any) -> None: ...


class Turned:
    """Stands for a thread or several: what is put waits until the test turns it."""

    def __init__(self) -> None:
        self.waiting: deque[Callable[[], object]] = deque()
        self.later: list[Callable[[], object]] = []

    def put(self, work: Callable[[], object]) -> None:
        self.waiting.append(work)

    post = run = put

    def run_later(self, work: Callable[[], object]) -> None:
        self.later.append(work)

    def take(self, completion: Completion) -> None:
        self.put(completion.take)

    def turn(self) -> None:
        while self.waiting:
            self.waiting.popleft()()


def services(publisher: Publisher) -> Services:
    """Those of a worker; of its threads, `events`, `completions` and `mailbox` are turned by hand."""
    threads: Any = [Turned() for _ in range(3)]
    completions, mailbox, events = threads
    engine = FakeEngine(EngineConfig(model="model"))
    return Services(
        Settings(), engine, publisher, completions, mailbox, TaskHistograms(), lambda: LARGE, events=events
    )


def turn(services: Services) -> None:
    """Let all threads work until none has anything to do."""
    threads: list[Any] = [services.events, services.completions, services.mailbox]
    while any(thread.waiting for thread in threads):
        for thread in threads:
            thread.turn()


@dataclass
class Asked:
    """Of Celery's request, what a driver uses."""

    ending: Ending | None = None
    hostname: str = "w@test"
    ignore_result: bool = True

    def revoked(self) -> bool:
        return False


@dataclass
class Delivered:
    """A `Delivery` of no broker. `answers`: what was done with its message."""

    task_id: str = "a"
    held: bool = True
    request: Asked = field(default_factory=Asked)
    answers: list[str] = field(default_factory=list)
    task_name = "tasks.generate"
    message_name = ""
    redelivered = False
    priority_step = 0
    soft_timeout_s = timeout_s = ending = None
    retries = 0

    @property
    def message(self) -> dict[str, Any]:
        return {"args": [], "kwargs": {"prompt": "p"}, "retries": 0}

    def broker_s(self, taken_at: float) -> None:
        return None

    def begun(self) -> None:
        self.answers.append("begun")

    def accept_callback(self, pid: int, at: float) -> None:
        self.answers.append("accepted")

    def callback(self, outcome: tuple[bool, Any, float]) -> None:
        self.answers.append("settled")

    def acknowledge(self) -> None:
        self.answers.append("acknowledged")

    def requeue(self) -> None:
        self.answers.append("requeued")


def delivery_of(
    app: Celery,
    target: Callable[..., Any] = nothing,
    timeout_callback: Callable[..., Any] = nothing,
    task_id: str = "a",
    **options: Any,
) -> Delivery:
    """A message as `apply_async` with `options` makes it, as Celery passes it to the pool."""
    sent = app.amqp.as_task_v2(task_id, "tasks.test", (), {}, **options)
    content_type, encoding, body = dumps(sent.body, "json")
    message = Message(
        body=body,
        headers=sent.headers,
        content_type=content_type,
        content_encoding=encoding,
        properties=sent.properties,
        delivery_info={},
    )
    request = Request(message, app=app, task=app.tasks["tasks.test"])
    args = "tasks.test", task_id, {}
    return Delivery(target, args, request.on_accepted, request.on_success, timeout_callback, None, None)
