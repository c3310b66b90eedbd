"""The options of a submission: options of Celery that `delay` and `stream` take, and four of Petiole's: `model`,
`require_worker`, `confirm` and `registered`.

This is their only declaration. `python -m docs.render` writes their table in docs/requests.md from it.
"""

from datetime import datetime
from typing import Any, TypedDict


class Submission(TypedDict, total=False):
    """Options of `delay`, `stream` and their asynchronous forms. `model` and the last three are Petiole's, the
    others Celery's."""

    priority: int
    """On Redis 0, the default, is served first. On RabbitMQ the highest number is."""
    queue: str
    """The queue of other workers, such as those of another model."""
    model: str
    """The model, by one of its names: decides the queue, and the adapter if it is an adapter's name. See
    docs/models.md#asking-for-a-model-by-name."""
    countdown: float
    """Seconds until the task may begin."""
    eta: datetime | str
    """The time at which the task may begin."""
    expires: float | datetime
    """Revoke the task if it has not begun by then."""
    headers: dict[str, Any]
    """Headers of the message, such as `{"tenant": "acme"}`."""
    task_id: str
    """The id of the task. By default a new one."""
    link: Any
    """Signatures to submit when the task has succeeded."""
    link_error: Any
    """Signatures to submit when the task has failed."""
    soft_time_limit: float
    """The generation ends with the output that it has this many seconds after its admission."""
    time_limit: float
    """The generation fails this many seconds after its admission."""
    ignore_result: bool
    """Store no result. The output is in the stream only."""
    retry: bool
    """False: if the broker cannot be reached, do not try again."""
    require_worker: bool
    """Raise `NoWorker` if no worker of the queue has been seen within six seconds."""
    confirm: int
    """Raise `Unconfirmed` unless this many replicas of the broker's Redis have the task. See
    docs/reliability.md#a-submission-that-outlives-the-primary."""
    registered: bool
    """Note the task in Redis before it is sent. Then `end` tells it from an unknown one while it waits in its
    queue. It costs a round trip."""


SUBMISSION = frozenset(Submission.__annotations__)
