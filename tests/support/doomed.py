"""A fake engine whose worker dies, stops, or fails at one point on the way of a message through it.

`DOOM` is "POINT KILL", "POINT STOP" or "POINT RAISE"; the point is one of `POINTS`, and is met once.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from petiole.contract.settings.engine import EngineConfig
from petiole.tasks.wire.keys import MARKER_PREFIX
from tests.support.fake_engine import FakeEngine

MET = "meets its doom"
"""Printed by the worker."""


@dataclass(frozen=True)
class Point:
    """Before or after a call of `path`, if `met` says so of its arguments (and its value)."""

    module: str
    path: str
    before: bool
    met: Callable[..., Any] = lambda *_: True


def _of_a_result(backend: Any, key: Any, value: Any, *_: Any) -> bool:
    """Of a task's end: neither STARTED nor the marker that a worker stores when it starts."""
    of_a_task = MARKER_PREFIX not in (key.decode() if isinstance(key, bytes) else key)
    return of_a_task and b'"STARTED"' not in (value if isinstance(value, bytes) else value.encode())


def _has_links(request: Any, _: Any) -> bool:
    from petiole.tasks.worker.completion.claims import linked

    return linked(request)


def _says(word: bytes, args: Sequence[object]) -> bool:
    """Whether one of the operations of a call of the script is this one."""
    return any(word in arg.split() for arg in args if isinstance(arg, bytes))


def _announces(pipe: Any, keys: Any, args: Any, *_: Any) -> bool:
    return _says(b"prepared", args)


def _announced(publisher: Any, outbox: Any, operations: str, *_: Any) -> bool:
    return "prepared" in operations


def _ends(pipe: Any, keys: Any, args: Any, *_: Any) -> bool:
    return _says(b"last", args)


POINTS = {
    "taken": Point("petiole.tasks.worker.broker.ledger", "Ledger.take", False, lambda *call: call[-1]),
    "to be begun": Point("petiole.tasks.worker.generation.intake", "Intake._take", True),
    "begun": Point("petiole.tasks.worker.generation.intake", "Intake._start", True),
    "prepared": Point("petiole.tasks.worker.output.publisher", "Outbox.prepare", False),
    "announcement on its way": Point("petiole.tasks.worker.scripts", "Pipe.send", False, _announces),
    "announcement written": Point("petiole.tasks.worker.output.publisher", "Publisher._done", False, _announced),
    "admitted": Point("petiole.tasks.worker.output.publisher", "Outbox.admit", False),
    "first token written": Point("petiole.tasks.worker.output.publisher", "Publisher._answered", False),
    "end known": Point("petiole.tasks.worker.output.publisher", "Outbox.finish", True),
    "end on its way": Point("petiole.tasks.worker.scripts", "Pipe.send", False, _ends),
    "end written": Point("petiole.tasks.worker.generation.attempts", "OutboxListener.on_finished", True),
    "to be stored together": Point("petiole.tasks.worker.completion.threads", "store_together", True),
    "stored together": Point("petiole.tasks.worker.completion.threads", "store_together", False),
    "to be completed": Point("petiole.tasks.worker.completion.completion", "Completion._trace", True),
    "to be forgotten": Point("petiole.tasks.worker.generation.settlement", "Settlement.forget", True),
    "to be acknowledged": Point("petiole.tasks.worker.broker.ledger", "Ledger.ack", True),
    "acknowledged here": Point("petiole.tasks.worker.broker.ledger", "Ledger.ack", False),
    "acknowledged there": Point("redis", "Redis.hdel", False),
}

OF_A_REVOCATION = {
    "to be flagged": Point("petiole.tasks.fleet.control", "flag_cancel", True),
    "flagged": Point("petiole.tasks.fleet.control", "flag_cancel", False),
    "to be announced": Point("petiole.tasks.worker.delivery.delivery", "Request.announce", True),
    "to be stored": Point("petiole.tasks.app.backend", "RedisBackend._set", True, _of_a_result),
    "stored": Point("petiole.tasks.app.backend", "RedisBackend._set", False, _of_a_result),
    "announced": Point("petiole.tasks.worker.delivery.delivery", "Request.announce", False),
}

OF_A_FAILURE = {
    "errors to be linked": Point("celery.backends.base", "Backend._call_task_errbacks", True),
}

OF_A_LINK = {
    "completed": Point("petiole.tasks.worker.completion.claims", "mark", False, _has_links),
}

OF_A_CHORD = {
    "body to be sent": Point("celery.backends.redis", "RedisBackend._chord_publish_claim_expires", True),
}


class DoomedEngine(FakeEngine):
    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        name, _, how = os.environ["DOOM"].rpartition(" ")
        if name:
            install((POINTS | OF_A_REVOCATION | OF_A_FAILURE | OF_A_LINK | OF_A_CHORD)[name], how)


def _below(owner: type) -> Iterator[type]:
    for one in owner.__subclasses__():
        yield one
        yield from _below(one)


def install(point: Point, how: str) -> None:
    owner: Any = import_module(point.module)
    *outer, name = point.path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    original = getattr(owner, name)
    if isinstance(owner, type):
        overriding = [one for one in _below(owner) if name in vars(one)]
        assert not overriding, f"{point.path} is not what runs: {overriding} override it"

    def doomed(*args: Any, **options: Any) -> Any:
        if not point.before:
            value = original(*args, **options)
            meet(*args, value)
            return value
        meet(*args)
        return original(*args, **options)

    def meet(*call: Any) -> None:
        if point.met(*call):
            setattr(owner, name, original)
            print(MET, flush=True)
            if how == "RAISE":
                raise AssertionError("this should never happen")
            os.kill(os.getpid(), getattr(signal, f"SIG{how}"))

    setattr(owner, name, doomed)
