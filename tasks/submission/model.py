"""The option `model` of a submission: it decides the queue, and the adapter if it is an adapter's name."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from petiole import _lazy
from petiole.tasks.errors import InvalidRequest

if TYPE_CHECKING:
    from celery import Celery

    from petiole.tasks.fleet import models
else:
    models = _lazy.module("petiole.tasks.fleet.models")


def choose(app: Celery, kwargs: Mapping[str, Any], options: MutableMapping[str, Any]) -> Mapping[str, Any]:
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
