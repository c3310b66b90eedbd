"""The gate for messages of tasks.

`envelope` and `task` are pure: they let a message through as well-formed or refuse it, for any input. Only they
know which messages of tasks would make kombu or Celery fail.

    bytes of Redis ──envelope──► kombu's Message ──task──► Celery's strategy, request, pool
                      │                            │
                      └────────────refused─────────┴──────► quarantine, and the task fails

`envelope` checks what kombu reads before it calls a consumer. RabbitMQ's messages have no envelope: they come from
kombu as `TaskMessage`. `task` checks what Celery reads between its consumer and its trace. It takes all messages
that stock producers send: those of protocol 2, and those of protocol 1, whose headers are in the body.

The gate does not read a task's options: the intake checks them.

All names and texts of a message but those of its arguments can be encoded, whoever reads them later: Redis, a
header, the log.

Harmless deviations are mended, not refused: headers that would replace attributes of Celery's request are left
out, and so is a wrong header of Petiole's own."""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from celery.canvas import Signature

from petiole.contract.requests.bounds import MOST_NAMES
from petiole.tasks.wire.headers import (
    ID,
    ID_LIMIT,
    KNOWN,
    LARGEST_INT,
    OWN,
    RESERVED,
    SHOWN,
    TASK,
    Header,
    encodes,
    first_wrong,
    is_id,
    is_int,
    wrong_text,
)
from petiole.tasks.worker.broker.gate.bodies import (
    RefusedError,
    RefusedMessage,
    check_depth,
    named,
    parse,
)

_BODY = "body", "must be [args, kwargs, embed]: a list and two objects"
_EMBED = ("callbacks", "errbacks", "chain", "chord")
_OLDER = (*KNOWN, "args", "kwargs", "callbacks", "errbacks", "chord", "utc")
"""The fields that Celery reads in a body of protocol 1. Its `group` may also be called `taskset`."""


@dataclass(frozen=True, slots=True)
class MessageArguments:
    """The arguments of kombu's `Message`; the body is decoded."""

    payload: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A message's headers and decoded body for Celery. The body is a list; in protocol 1, an object."""

    headers: dict[str, Any]
    body: list[Any] | dict[str, Any]

    @property
    def name(self) -> str:
        return self._said(TASK)

    @property
    def task_id(self) -> str:
        return self._said(ID)

    def _said(self, header: Header[str]) -> str:
        where = self.body if header.name not in self.headers and isinstance(self.body, dict) else self.headers
        return str(header.of(where))


class TaskMessage(Protocol):
    """The part of kombu's `Message` that `task` reads. `payload` decodes the body within limits (`messages`), and
    may raise anything."""

    headers: Any
    properties: Any
    delivery_info: Any
    content_type: Any
    content_encoding: Any
    body: Any

    @property
    def payload(self) -> Any: ...


# ---------------------------------------------------------------- what kombu reads


def envelope(raw: bytes) -> MessageArguments | RefusedMessage:
    """Check an entry that a producer has put into a Redis list."""
    said: list[Any] = []
    try:
        return MessageArguments(_envelope(raw, said))
    except RefusedError as refused:
        reason = str(refused)
    except Exception as error:
        reason = f"the message cannot be read: {named(error)}"
    headers = next((one.get("headers") for one in said if isinstance(one, dict)), None)
    return RefusedMessage(reason, _id_of(*said), headers)


def _envelope(raw: bytes, said: list[Any]) -> dict[str, Any]:
    payload, nested = parse("the message", raw)
    said.append(payload)
    check_depth("the message", payload, nested)
    if not isinstance(payload, dict):
        raise RefusedError("the message", "must be an object", payload)
    properties, headers = payload.get("properties"), payload.get("headers")
    if not isinstance(properties, dict):
        raise RefusedError("properties", "must be an object", properties)
    if not isinstance(headers, dict | None):
        raise RefusedError("headers", "must be an object", headers)
    for name in ("content-type", "content-encoding"):
        if not (payload.get(name) is None or encodes(payload[name])):
            raise RefusedError(name, "must be text", payload[name])
    return {
        "body": _body(payload.get("body"), properties.get("body_encoding")),
        "content-type": payload.get("content-type"),
        "content-encoding": payload.get("content-encoding"),
        "headers": headers or {},
        "properties": _properties(properties),
    }


def _body(body: object, encoding: object) -> bytes:
    if not isinstance(body, str):
        raise RefusedError("body", "must be text", body)
    if encoding is not None and encoding != "base64":
        raise RefusedError("properties.body_encoding", "must be base64 or null", encoding)
    try:
        return base64.b64decode(body) if encoding else body.encode()
    except ValueError as error:
        raise RefusedError("body", f"cannot be decoded: {named(error)}") from None


def _properties(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The message's properties: without the body's encoding, because the body is decoded; the priority as a
    number."""
    where = properties.get("delivery_info")
    _check_delivery_info(where)
    for name in ("correlation_id", "reply_to"):
        if not (properties.get(name) is None or encodes(properties[name])):
            raise RefusedError(f"properties.{name}", "must be text that UTF-8 can encode", properties[name])
    _check_texts("properties", properties)
    mended = {name: value for name, value in properties.items() if name not in {"body_encoding", "priority"}}
    mended["delivery_info"] = {name: value for name, value in (where or {}).items() if name != "consumer_tag"}
    if properties.get("priority") is not None:
        mended["priority"] = _priority(properties["priority"])
    return mended


def _check_delivery_info(where: object) -> None:
    if where is None:
        return
    if not isinstance(where, dict):
        raise RefusedError("properties.delivery_info", "must be an object", where)
    for name in ("exchange", "routing_key"):
        if not (where.get(name) is None or encodes(where[name])):
            raise RefusedError(f"properties.delivery_info.{name}", "must be text", where[name])


def _priority(given: object) -> int:
    """The priority as kombu reads it: text will do, too."""
    try:
        priority = int(given)  # type: ignore[call-overload]
    except (ValueError, TypeError, OverflowError):
        priority = None
    if not is_int(priority, -LARGEST_INT):
        raise RefusedError("properties.priority", f"must be a whole number to {LARGEST_INT}", given)
    return int(priority)


# ---------------------------------------------------------------- what Celery reads


def task(message: TaskMessage) -> Task | RefusedMessage:
    """Check a message from a queue of tasks."""
    said: list[Any] = [{"headers": message.headers, "properties": message.properties}]
    try:
        return _task(message, said)
    except RefusedError as refused:
        return RefusedMessage(str(refused), _id_of(*said))
    except Exception as error:
        return RefusedMessage(f"the message cannot be handled: {named(error)}", _id_of(*said))


def undecodable(message: TaskMessage, error: Exception) -> RefusedMessage:
    """A message that kombu cannot decompress, for this error."""
    found = task(message)
    if isinstance(found, RefusedMessage) and found.reason.startswith("headers"):
        return found
    return RefusedMessage(f"body cannot be decoded: {type(error).__name__}: {error}", found.task_id)


def unhandled(found: Task, error: Exception) -> RefusedMessage:
    """A well-formed message whose consumer has raised this error."""
    return RefusedMessage(f"the message cannot be handled: {type(error).__name__}", found.task_id)


def _task(message: TaskMessage, said: list[Any]) -> Task:
    headers = message.headers
    if not isinstance(headers, dict):
        raise RefusedError("headers", "must be an object", headers)
    if not isinstance(message.properties, dict):
        raise RefusedError("properties", "must be an object", message.properties)
    _check_delivery_info(message.delivery_info)
    _properties(message.properties)
    check_depth("headers", headers)
    _check_known("headers", headers)
    headers = _mended(headers)
    _check_texts("headers", headers)
    body = _decoded(message)
    if isinstance(body, dict) and ("args" in body or "task" not in headers):
        said.append(body)
        body = _older(body)
        _check_named({**body, **headers})
        _check_arguments(body["args"], body["kwargs"], body)
        return Task(headers, body)
    _check_named(headers)
    if not (isinstance(body, list | tuple) and len(body) == 3):
        raise RefusedError(*_BODY, body)
    args, kwargs, embed = body
    if not isinstance(embed, dict | None):
        raise RefusedError(*_BODY, embed)
    _check_arguments(args, kwargs, embed or {})
    for name in embed or {}:
        if name not in _EMBED and (name in KNOWN or name in RESERVED):
            raise RefusedError("body.embed", f"must have no more than {', '.join(_EMBED)}", name)
    _check_texts("body.embed", {name: value for name, value in (embed or {}).items() if name not in _EMBED})
    return Task(headers, [args, kwargs, embed or {}])


def _decoded(message: TaskMessage) -> Any:
    for name, value in (("content_type", message.content_type), ("content_encoding", message.content_encoding)):
        if not isinstance(value, str | None):
            raise RefusedError(name, "must be text", value)
    try:
        return message.payload
    except Exception as error:
        raise RefusedError("body", f"cannot be decoded: {named(error)}") from None


def _older(body: Mapping[str, Any]) -> dict[str, Any]:
    """A body of protocol 1, with the fields that Celery reads."""
    fields = {name: body[name] for name in _OLDER if body.get(name) is not None}
    if body.get("taskset") is not None:
        fields["group"] = body["taskset"]
    _check_known("body", fields)
    fields |= _escaped(fields)
    return {"args": [], "kwargs": {}, **fields}


def _check_known(where: str, headers: Mapping[str, Any]) -> None:
    if wrong := first_wrong(headers):
        name, limit = wrong
        raise RefusedError(f"{where}.{name}", limit, headers[name])


def _check_texts(where: str, value: object) -> None:
    if limit := wrong_text(value):
        raise RefusedError(where, limit)


def _check_named(headers: Mapping[str, Any]) -> None:
    if "task" not in headers:
        raise RefusedError("headers.task", "must name a task", None)
    if "id" not in headers:
        raise RefusedError("headers.id", ID_LIMIT, None)


def _check_arguments(args: object, kwargs: object, embed: Mapping[str, Any]) -> None:
    if not isinstance(args, list | tuple):
        raise RefusedError(*_BODY, args)
    if not isinstance(kwargs, dict):
        raise RefusedError(*_BODY, kwargs)
    if len(kwargs) > MOST_NAMES:  # Celery and the task copy them, again and again
        raise RefusedError("body.kwargs", f"must have at most {MOST_NAMES} names", len(kwargs))
    for name in ("callbacks", "errbacks", "chain"):
        signatures = embed.get(name)
        if not isinstance(signatures, list | tuple | None):
            raise RefusedError(f"body.embed.{name}", "must be a list of signatures", signatures)
        for signature in signatures or ():
            _check_signature(f"body.embed.{name}", signature)
    if embed.get("chord") is not None:
        _check_signature("body.embed.chord", embed["chord"])


_SIGNATURE: dict[str, tuple[type | tuple[type, ...], str]] = {
    "args": ((list, tuple), "a list"),
    "kwargs": (dict, "an object"),
    "options": (dict, "an object"),
    "subtask_type": (str, "text"),
    "immutable": (bool, "true or false"),
}


def _check_signature(where: str, given: object) -> None:
    """Check that Celery can make a signature of it. Whether its task can run is not checked."""
    if not isinstance(given, dict):
        raise RefusedError(where, "must be a signature: an object", given)
    if not encodes(given.get("task")):
        raise RefusedError(f"{where}.task", "must name a task", given.get("task"))
    for name, (kinds, expected) in _SIGNATURE.items():
        if given.get(name) is not None and not isinstance(given[name], kinds):
            raise RefusedError(f"{where}.{name}", f"must be {expected}", given[name])
    options = given.get("options") or {}
    _check_texts(f"{where}.options", options)
    if options.get("task_id") is not None and not is_id(options["task_id"]):
        raise RefusedError(f"{where}.options.task_id", ID_LIMIT, options["task_id"])
    if given.get("chord_size") is not None and not is_int(given["chord_size"], -1):
        raise RefusedError(f"{where}.chord_size", "must be a whole number", given["chord_size"])
    try:
        Signature.from_dict(copy.deepcopy(given))
    except Exception as error:
        raise RefusedError(where, f"must be a signature: {named(error)}", given) from None


_NEVER_NULL = frozenset({"task", "id", "retries", "replaced_task_nesting"})
"""Headers that are left out if they are null: null would replace the value that Celery uses for a missing
header."""


def _mended(headers: Mapping[str, Any]) -> dict[str, Any]:
    """The headers without reserved ones, harmful nulls and wrong ones of Petiole's own."""
    kept = {
        name: value
        for name, value in headers.items()
        if name not in RESERVED
        and not (value is None and name in _NEVER_NULL)
        and (name not in OWN or OWN[name].right(value))
    }
    return {**kept, **_escaped(headers)}


def _escaped(headers: Mapping[str, Any]) -> dict[str, str]:
    """The representations of arguments, which are logged, without lone surrogates."""
    return {
        name: value.encode(errors="backslashreplace").decode()
        for name in SHOWN
        if (value := headers.get(name)) is not None
    }


# ---------------------------------------------------------------- the id


def _id_of(*said: Any) -> str | None:
    """The task's id, wherever the message has it."""
    for one in said:
        if not isinstance(one, dict):
            continue
        headers, properties = one.get("headers"), one.get("properties")
        for where, name in ((headers, "id"), (one, "id"), (properties, "correlation_id")):
            if isinstance(where, dict) and is_id(where.get(name)):
                return str(where[name])
    return None
