"""What a task is submitted with: options of the request, and options of the submission.

`model` decides the queue, and the adapter if it is an adapter's name. `affinity` says which tasks should run on
one worker, because the prefix cache of that worker has their beginning: its key travels in a message's headers.
Workers on a Redis broker obey it when they take messages (`tasks/worker/broker/lua/take.lua`). On other brokers
nobody reads it.

A worker turns a message's arguments into the request again. In a chain, the result of the previous task is among
them."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from petiole import _lazy
from petiole.contract.requests import images
from petiole.contract.requests.bounds import check_values
from petiole.contract.requests.generation import ChatRequest, Common
from petiole.contract.requests.submission import SUBMISSION
from petiole.contract.requests.validation import validate
from petiole.contract.tasks import TASKS
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.wire.keys import AFFINITY_HEADER

if TYPE_CHECKING:
    from celery import Celery

    from petiole.tasks.fleet import models
else:
    models = _lazy.module("petiole.tasks.fleet.models")

_MOST_GROUPS = 64


def apart(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a request, and the options of its submission."""
    request = {name: value for name, value in options.items() if name not in SUBMISSION}
    return request, {name: options[name] for name in options.keys() - request.keys()}


def parse(name: str, given: Sequence[object], options: Mapping[str, Any]) -> Common:
    """The request in a message's arguments. Raises `InvalidRequest`."""
    check_values(options)
    options = dict(options)
    if given:
        if len(given) > 1:
            raise InvalidRequest("args", "must be empty, or the previous task's result", f"{len(given)} of them")
        if _is_conversation(given[0]):
            limit = "must be named: chat.delay(messages=[...])"
            raise InvalidRequest("messages", limit, given[0])
        options |= _filled(TASKS[name].filled, given[0], options)
    return validate(TASKS[name].request, options)


def _filled(option: str | None, result: object, options: Mapping[str, Any]) -> dict[str, Any]:
    """The option that takes the previous task's result."""
    if option is None:
        raise InvalidRequest("args", "must be empty: this task takes no text", "a result")
    before = options.get(option, [] if option in ("messages", "texts") else "")
    match option:
        case "messages":
            if not isinstance(before, list):
                raise InvalidRequest(option, "must be a list", before)
            return {option: [*before, {"role": "user", "content": text_of(result)}]}
        case "texts":
            if not isinstance(before, list):
                limit = "must be a list if the previous task's result is appended"
                raise InvalidRequest(option, limit, before)
            return {option: [*before, *map(text_of, result if isinstance(result, list) else [result])]}
    if not isinstance(before, str):
        raise InvalidRequest(option, "must be text if the previous task's result is appended", before)
    return {option: before + text_of(result)}


def _is_conversation(given: object) -> bool:
    return isinstance(given, list) and any(isinstance(one, dict) and "role" in one for one in given)


def text_of(result: object, depth: int = 0) -> str:
    """The text of a previous task's result: text, a generation's result, or a list of either (a group's results,
    in which there may be groups)."""
    if depth > _MOST_GROUPS:
        raise InvalidRequest("args[0]", f"must be nested at most {_MOST_GROUPS} deep", "deeper")
    match result:
        case str():
            return result
        case {"text": str(text)}:
            return text
        case list():
            return "\n".join(text_of(one, depth + 1) for one in result)
    raise InvalidRequest("args[0]", "must be text, a generation's result, or a list of these", result)


def choose_model(app: Celery, kwargs: Mapping[str, Any], options: MutableMapping[str, Any]) -> Mapping[str, Any]:
    """Replace `model` among the submission's options by the queue. Returns the task's own options, with the
    adapter if the name means one. May read Redis. Raises `InvalidRequest`, or `Unavailable`.

    A queue among the options is the only one to look at. The producer's default queue stays unset, so that a
    tenant's task still finds the way to its own queue."""
    name = options.pop("model", None)
    if name is None:
        return kwargs
    own, given = str(app.conf.task_default_queue), options.get("queue")
    found = models.directory.find(name, own, given)
    if found.queue != own:
        options["queue"] = found.queue
    if found.adapter is None:
        return kwargs
    if kwargs.get("adapter") is not None:
        raise InvalidRequest("adapter", f"must not be given: model {name} is an adapter itself", kwargs["adapter"])
    return {**kwargs, "adapter": found.adapter}


def affinity_key(request: Common) -> str | None:
    """16 hexadecimal digits, the same for all turns of a conversation; None if the task may run anywhere.

    It is made from `affinity`; without it, from the images; without images, from the messages of a chat up to the
    first one of its user. Adapter and salt are part of it, because they separate prefixes in the cache."""
    if request.affinity is not None:
        common: object = request.affinity
    elif found := request.images():
        common = [images.identity("image", image) for image in found]
    elif isinstance(request, ChatRequest):
        roles = [message["role"] for message in request.messages]
        common = request.messages[: roles.index("user") + 1 if "user" in roles else None]
    else:
        return None
    apart = getattr(request, "adapter", None), request.salt
    return blake2b(json.dumps([*apart, common]).encode(), digest_size=8).hexdigest()


def affinity_headers(request: Common) -> dict[str, str]:
    """The headers that the affinity adds to the message of this task."""
    made = affinity_key(request)
    return {} if made is None else {AFFINITY_HEADER: made}
