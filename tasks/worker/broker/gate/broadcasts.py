"""The gate for messages that are no tasks: control commands, events of other workers, replies to this worker.

Everybody who may publish on such a channel reaches all workers at once. So whatever is wrong here is dropped, with
a line in the log; nothing is stored. Only fields that Celery reads are passed on, because Celery makes attributes
of the fields of events.

A logical clock out of range is left out. Each worker goes on from the highest clock that it has seen: a single
huge one would reach all workers, and be too large for their own messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from petiole.contract.tasks import TASKS
from petiole.tasks.wire.headers import (
    FARTHEST_S,
    ID_BYTES,
    LARGEST_INT,
    are_names,
    encodes,
    is_id,
    is_int,
    is_limit,
    is_number,
)
from petiole.tasks.worker.broker.gate import task_message
from petiole.tasks.worker.broker.gate.bodies import MiB, RefusedError, RefusedMessage, named, shown

LARGEST_BYTES = 4 * MiB
"""Maximum size of a broadcast on Redis. A worker that starts sends the ids of up to 50,000 revoked tasks."""

HIGHEST_CLOCK = 2**53
MOST_IDS = 10_000
"""Maximum number of tasks in a command. To revoke one takes a round trip to the result backend."""


class BroadcastMessage(Protocol):
    """The part of kombu's `Message` that is read here."""

    headers: Any
    delivery_info: Any

    @property
    def payload(self) -> Any: ...


Rule = tuple[Callable[[object], bool], str]


def is_clock(value: object) -> bool:
    return is_int(value, 0, HIGHEST_CLOCK)


def _is_ids(value: object) -> bool:
    return is_id(value) or (isinstance(value, list | tuple) and len(value) <= MOST_IDS and all(map(is_id, value)))


def _is_rate(value: object) -> bool:
    if isinstance(value, str):
        return re.fullmatch(r"[0-9]{0,9}\.?[0-9]{1,9}(/[smh])?", value) is not None
    return value is None or is_number(value, 0, LARGEST_INT)


def _is_stamps(value: object) -> bool:
    if isinstance(value, dict):
        return all(is_id(name) and _is_ids(stamps) for name, stamps in value.items())
    return are_names(value) and all(one.count("=") == 1 for one in value)  # type: ignore[attr-defined]


_NAME = is_id, f"must be text of 1 to {ID_BYTES} bytes as UTF-8"
_MAYBE_NAME = (lambda value: value is None or is_id(value)), f"{_NAME[1]}, or null"
_SIGNAL = (
    (lambda value: value is None or is_id(value) or is_int(value, 1, 64)),
    "must be the name or the number of a signal",
)
_OBJECT = (lambda value: isinstance(value, dict)), "must be an object"
_BOOL = (lambda value: isinstance(value, bool | None)), "must be true or false"
_IDS = _is_ids, f"must be the id of a task, or a list of at most {MOST_IDS}"
_NAMES = are_names, "must be a list of names"
_COUNT = is_int, f"must be a whole number from 0 to {LARGEST_INT}"
_MAYBE_COUNT = (lambda value: value is None or is_int(value)), f"{_COUNT[1]}, or null"
_LIMIT = is_limit, "must be a number of seconds, or null"
_NUMBER = (lambda value: is_number(value, -FARTHEST_S, FARTHEST_S)), f"must be a number to {FARTHEST_S}"


def envelope(raw: bytes) -> RefusedMessage | None:
    """Check a message on a channel of Redis."""
    if len(raw) > LARGEST_BYTES:
        return RefusedMessage(f"the message must have at most {LARGEST_BYTES} bytes, got {len(raw)}")
    read = task_message.envelope(raw)
    if isinstance(read, RefusedMessage):
        return read
    tag = read.payload["properties"].get("delivery_tag")
    return None if encodes(tag) else RefusedMessage(f"properties.delivery_tag must be text, got {shown(tag)}")


# ---------------------------------------------------------------- control commands

_CONTROL: dict[str, Rule] = {
    "method": _NAME,
    "arguments": (lambda value: isinstance(value, dict) and all(map(encodes, value)), "must be an object"),
    "destination": _NAMES,
    "pattern": _NAME,
    "matcher": (
        lambda value: value == "glob",
        "must be glob: a regular expression may take a worker's time without end",
    ),
    "ticket": _NAME,
    "reply_to": (
        lambda value: (
            isinstance(value, dict) and all(is_id(value.get(one)) for one in ("exchange", "routing_key"))
        ),
        "must be an object with an exchange and a routing key",
    ),
}

_OWN_TASK: Rule = (
    lambda value: is_id(value) and value not in TASKS,
    "must be a task of the application's own: the engine's places and the tenants' shares limit Petiole's tasks",
)
"""A rate limit makes a worker hold messages that it has taken, and looks like a worker that is ready."""

_ARGUMENTS: dict[str, dict[str, Rule]] = {
    "query_task": {"ids": _IDS},
    "revoke": {"task_id": _IDS, "terminate": _BOOL, "signal": _SIGNAL},
    "terminate": {"task_id": _IDS, "signal": _SIGNAL},
    "revoke_by_stamped_headers": {
        "headers": (_is_stamps, "must be an object of names and stamps, or a list of name=stamp"),
        "terminate": _BOOL,
        "signal": _SIGNAL,
    },
    "rate_limit": {"task_name": _OWN_TASK, "rate_limit": (_is_rate, "must be a rate, such as 5/m")},
    "time_limit": {"task_name": _NAME, "soft": _LIMIT, "hard": _LIMIT},
    "election": {"id": _NAME, "topic": _NAME},
    "hello": {"from_node": _NAME, "revoked": (lambda value: not value or are_names(value), _NAMES[1])},
    "registered": {"taskinfoitems": _NAMES, "builtins": _BOOL},
    "dump_tasks": {"taskinfoitems": _NAMES, "builtins": _BOOL},
    "objgraph": {"num": _COUNT, "max_depth": _COUNT, "type": _NAME},
    "memdump": {"samples": _COUNT},
    "pool_grow": {"n": _COUNT},
    "pool_shrink": {"n": _COUNT},
    "autoscale": {"max": _MAYBE_COUNT, "min": _MAYBE_COUNT},
    "shutdown": {"msg": (encodes, "must be text")},
    "add_consumer": {
        "queue": _NAME,
        "exchange": _MAYBE_NAME,
        "exchange_type": _MAYBE_NAME,
        "routing_key": _MAYBE_NAME,
    },
    "cancel_consumer": {"queue": _NAME},
}
"""By Celery's command, the arguments that it stores, or uses when no error of it would be caught any more. Errors
of others are caught, and answered."""


def control(message: BroadcastMessage) -> RefusedMessage | None:
    """Check a control command, and leave out of it what Celery does not read."""
    return _checked(message, "the command", _control)


def _control(message: BroadcastMessage, body: dict[str, Any]) -> None:
    if not isinstance(message.headers, dict):
        raise RefusedError("headers", "must be an object", message.headers)
    if not is_clock(message.headers.get("clock")):
        message.headers.pop("clock", None)
    _keep(body, _CONTROL)
    if "method" not in body:
        raise RefusedError("method", _NAME[1], None)


def arguments(method: str, given: Mapping[str, Any]) -> None:
    """Check the arguments of a control command. Raises RefusedError."""
    for name, (right, limit) in _ARGUMENTS.get(method, {}).items():
        if name in given and not right(given[name]):
            raise RefusedError(f"{method}: {name}", limit, given[name])


# ---------------------------------------------------------------- events

_EVENT: dict[str, Rule] = {
    "type": (lambda value: is_id(value) and str(value).startswith("worker-"), "must be an event of a worker"),
    "hostname": _NAME,
    "pid": _COUNT,
    "timestamp": (lambda value: is_number(value, 0, FARTHEST_S), "must be a time in seconds"),
    "utcoffset": _NUMBER,
    "freq": (lambda value: is_number(value, 0, FARTHEST_S), "must be a number of seconds"),
    "active": _COUNT,
    "processed": _COUNT,
    "loadavg": (
        lambda value: isinstance(value, list) and all(is_number(one, 0, FARTHEST_S) for one in value),
        "must be a list of numbers",
    ),
    "sw_ident": _NAME,
    "sw_ver": _NAME,
    "sw_sys": _NAME,
}
_ELECTION: dict[str, Rule] = {
    **_EVENT,
    "id": _NAME,
    "topic": _NAME,
    "action": _OBJECT,
    "cver": _COUNT,
}
_NEEDED = {
    "worker.elect": ("id", "clock", "hostname", "pid", "topic", "action", "cver"),
    "worker.elect.ack": ("id", "hostname"),
}


def is_of_a_worker(message: BroadcastMessage) -> bool:
    """Whether Celery's consumer of events reads a message: it reads the events of workers only, but on Redis it
    receives those of tasks, too."""
    where = message.delivery_info
    return isinstance(where, dict) and str(where.get("routing_key")).startswith("worker.")


def event(message: BroadcastMessage) -> RefusedMessage | None:
    """Check an event of a worker, and leave out of it what Celery does not read."""
    return _checked(message, "the event", _event)


def _event(message: BroadcastMessage, body: dict[str, Any]) -> None:
    if not isinstance(message.headers, dict):
        raise RefusedError("headers", "must be an object", message.headers)
    clock, needed = body.get("clock"), _NEEDED.get(message.delivery_info["routing_key"], ())
    _keep(body, _ELECTION if needed else _EVENT)
    if is_clock(clock):
        body["clock"] = clock
    for name in ("type", "hostname", *needed):
        if name not in body:
            raise RefusedError(name, "must be in this event", None)


# ---------------------------------------------------------------- replies


_HELLO: dict[str, Rule] = {
    "clock": (is_clock, f"must be a whole number from 0 to {HIGHEST_CLOCK}"),
    "revoked": (lambda value: isinstance(value, list | dict) and all(map(is_id, value)), "must be a list of ids"),
}


def hello(replies: object) -> dict[str, dict[str, Any]]:
    """The valid ones among the replies of other workers to one that starts: by their names, `clock` and
    `revoked`."""
    return {
        name: {field: reply[field] for field, (right, _) in _HELLO.items() if right(reply.get(field))}
        for name, reply in (replies.items() if isinstance(replies, dict) else ())
        if is_id(name) and isinstance(reply, dict)
    }


# ---------------------------------------------------------------- all


def _checked(
    message: BroadcastMessage, what: str, check: Callable[[BroadcastMessage, dict[str, Any]], None]
) -> RefusedMessage | None:
    try:
        body = message.payload
        if not isinstance(body, dict):
            raise RefusedError(what, "must be an object", body)
        check(message, body)
    except RefusedError as refused:
        return RefusedMessage(str(refused))
    except Exception as error:
        return RefusedMessage(f"{what} cannot be read: {named(error)}")
    return None


def _keep(body: dict[str, Any], rules: Mapping[str, Rule]) -> None:
    """Leave in `body` only the fields that have a rule and a value."""
    kept = {name: body[name] for name in rules if body.get(name) is not None}
    for name, value in kept.items():
        right, limit = rules[name]
        if not right(value):
            raise RefusedError(name, limit, value)
    body.clear()
    body.update(kept)
