"""The gate: every byte that a worker decodes passes it. It lets a message through as well-formed, or refuses it
with a reason.

bodies        what a body may cost: bytes when inflated, values, depth; its encoding. Inflates with these limits,
              and so do kombu's messages
task_message  messages of tasks: what kombu and Celery read before the trace. A new reason goes here; a reason
              about a header goes into `tasks.wire.headers`
broadcasts    control commands, events of other workers, replies to this worker
"""

from petiole.tasks.wire.headers import is_id
from petiole.tasks.worker.broker.gate import broadcasts
from petiole.tasks.worker.broker.gate.bodies import RefusedError, RefusedMessage
from petiole.tasks.worker.broker.gate.task_message import (
    MessageArguments,
    Task,
    envelope,
    task,
    undecodable,
    unhandled,
)

__all__ = [
    "MessageArguments",
    "RefusedError",
    "RefusedMessage",
    "Task",
    "broadcasts",
    "envelope",
    "is_id",
    "task",
    "undecodable",
    "unhandled",
]
