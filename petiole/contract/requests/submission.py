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
    """On Redis 0, the default, goes first; on RabbitMQ the highest number."""
    queue: str
    """The queue of other workers."""
    model: str
    """A name of a model or a named adapter, which decides the queue. See
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
    """The task's id; by default a new one. The same id again is the same task. See
    docs/reliability.md#attempts."""
    link: Any
    """Signatures to submit when the task has succeeded."""
    link_error: Any
    """Signatures to submit when the task has failed."""
    soft_time_limit: float
    """The generation ends this many seconds after admission, as with `deadline_s`."""
    time_limit: float
    """The generation fails this many seconds after its admission."""
    ignore_result: bool
    """Store no result. The output is in the stream only."""
    retry: bool
    """False: do not try again to reach the broker."""
    require_worker: bool
    """Raise `NoWorker` if no worker of the queue has been seen within six seconds."""
    confirm: int
    """Raise `Unconfirmed` unless this many replicas have the task. See
    docs/reliability.md#a-submission-that-outlives-the-primary."""
    registered: bool
    """Note the task in Redis first, for one more round trip: then `end` and `sse` tell a waiting task from an
    unknown one."""


class Reading(TypedDict, total=False):
    """Options of `stream` and `astream` alone."""

    timeout_s: float | None
    """The longest wait for a delta."""
    heartbeat_s: float | None
    """After this many seconds without a delta there is an empty one, whose `is_heartbeat` is true."""
    prepared: bool
    """See `petiole.stream`."""
    parsed: bool
    """See `petiole.stream`."""


SUBMISSION = frozenset(Submission.__annotations__)
