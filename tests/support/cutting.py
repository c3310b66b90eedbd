"""A fake engine in a worker that loses its connection before or after the n-th command of a completion.

The prompt of a task says which: "before 3 of x" or "after 3 of x", with anything behind it. With "failover 3 of x"
the command waits until the test has failed over, and has made the file `CUTTING_FOLDER/ID`. A command is whatever
the completion of the task sends to a server, on whatever thread: to the result backend, the streams or the broker,
and at last the acknowledgement. So a new command has a number without being listed here. (What makes and checks a
connection is no command.) The socket is closed; if the cut is to come after the command, then after the reply has
come, which is lost. Each cut happens once. When a task is acknowledged, the worker prints how many commands its
completion had. Tasks are to be completed one at a time.
"""

from __future__ import annotations

import os
import re
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

import amqp
import redis
from amqp.transport import _AbstractTransport as AmqpTransport

from petiole.contract.settings.engine import EngineConfig
from petiole.tasks.servers.failover import MasterPool
from petiole.tasks.worker.broker.ledger import Ledger
from petiole.tasks.worker.completion import threads
from petiole.tasks.worker.completion.completion import Completion
from petiole.tasks.worker.generation.settlement import Settlement
from tests.support.fake_engine import FakeEngine
from tests.support.site import eventually

PLAN = re.compile(r"(before|after|failover) (\d+) of ")
REPLY_S = 1.0
"""RabbitMQ does not reply to an acknowledgement."""


class Plan:
    """Which command of a task is cut. `commands`: what its completion has sent so far."""

    def __init__(self, task_id: str, prompt: str) -> None:
        self.task_id, found = task_id, PLAN.match(prompt)
        self.when, self.number = (found[1], int(found[2])) if found else ("never", 0)
        self.commands: list[str] = []

    def meet(self, command: str, sock: Any, send: Callable[[], Any], cut: Callable[[], Exception]) -> Any:
        """Send a command, and cut its connection if it is the one."""
        self.commands.append(command)
        if self.when == "never" or len(self.commands) != self.number:
            return send()
        print(f"cut {self.when} {self.number} of {self.task_id}: {command}", flush=True)
        if self.when == "failover":
            eventually((Path(os.environ["CUTTING_FOLDER"]) / self.task_id).exists, "it has failed over")
            return send()
        if self.when == "after":
            send()
            select.select([sock], [], [], REPLY_S)
        raise cut()


plans: dict[str, Plan] = {}
acknowledging: list[Plan] = []
"""Of tasks whose message is to be acknowledged next."""
_here = threading.local()


@contextmanager
def of(plan: Plan | None) -> Iterator[None]:
    """In this context, what this thread sends belongs to the completion of the plan's task."""
    outer, _here.plan = sending(), plan
    try:
        yield
    finally:
        _here.plan = outer


def sending() -> Plan | None:
    return getattr(_here, "plan", None)


def plan_of(messages: Any) -> Plan:
    delivery = messages.current
    prompt = str(delivery.message["kwargs"].get("prompt"))
    return plans.setdefault(delivery.task_id, Plan(delivery.task_id, prompt))


class CuttingEngine(FakeEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        for method in ("settle", "leave"):
            around(Settlement, method, settled)
        around(Completion, "take", completed)
        around(threads, "store_together", stored)
        around(Ledger, "flush", flushed)
        around(redis.connection.AbstractConnection, "send_packed_command", sent_to_redis)
        around(redis.connection.AbstractConnection, "connect", connected)
        around(MasterPool, "get_connection", connected)
        threads.LATER_S = 0.05
        around(AmqpTransport, "write", sent_to_rabbitmq)
        around(amqp.Channel, "basic_ack", acknowledged)


def around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def called(*args: Any, **options: Any) -> Any:
        return wrapper(lambda: original(*args, **options), *args)

    setattr(owner, name, called)


def completed(take: Callable[[], Any], completion: Completion) -> None:
    plan, request = plan_of(completion._messages), completion.request
    with of(plan):
        take()
    if request.acknowledged:  # by Celery, which has reported a time limit or a revocation
        acknowledging.append(plan)


def stored(store: Callable[[], Any], backend: Any, successes: Any) -> None:
    known = [plans.setdefault(one.task_id, Plan(one.task_id, one.context.kwargs["prompt"])) for one in successes]
    with of(known[0]):
        store()


def settled(settle: Callable[[], Any], settlement: Settlement, *_: object) -> None:
    plan = plan_of(settlement.messages)
    with of(plan):
        settle()
    acknowledging.append(plan)


def flushed(flush: Callable[[], Any], ledger: Ledger, *_: object) -> None:
    if not (ledger._acknowledged and acknowledging):
        return flush()
    with of(acknowledging[0]):
        flush()
    tell()


def acknowledged(acknowledge: Callable[[], Any], *_: object) -> None:
    if not acknowledging:
        return acknowledge()
    try:
        with of(acknowledging[0]):
            acknowledge()
    finally:  # after a cut, RabbitMQ may have it, and then the message does not come again
        tell()


def tell() -> None:
    while acknowledging:
        plan = acknowledging.pop(0)
        print(f"completed {plan.task_id} by {len(plan.commands)}: {', '.join(plan.commands)}", flush=True)


def connected(connect: Callable[[], Any], *_: object) -> Any:
    with of(None):
        return connect()


def sent_to_redis(send: Callable[[], Any], connection: Any, command: Any, *_: object) -> Any:
    if (plan := sending()) is None:
        return send()
    packed = command if isinstance(command, bytes | str) else b"".join(command)

    def cut() -> Exception:
        connection.disconnect()
        return redis.ConnectionError("Connection reset by peer")

    return plan.meet(words(packed), connection._sock, send, cut)


def words(packed: Any) -> str:
    """The names of the commands, as far as they are at the beginning."""
    parts = packed.encode() if isinstance(packed, str) else packed
    return b"+".join(re.findall(rb"\*\d+\r\n\$\d+\r\n(\w+)", parts)).decode()


def sent_to_rabbitmq(send: Callable[[], Any], transport: Any, *_: object) -> Any:
    if (plan := sending()) is None:
        return send()

    def cut() -> Exception:
        with suppress(OSError):
            transport.sock.shutdown(socket.SHUT_RDWR)
        return ConnectionResetError(104, "Connection reset by peer")

    return plan.meet("amqp", transport.sock, send, cut)
