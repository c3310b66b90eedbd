"""What a job, and the intake of jobs, use of the pool that they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from petiole.tasks.settings import Settings
from petiole.tasks.worker.completion.threads import Completions
from petiole.tasks.worker.delivery.mailbox import Mailbox
from petiole.tasks.worker.generation.attempts import Begun
from petiole.tasks.worker.generation.engines import EngineLike
from petiole.tasks.worker.output.publisher import Outbox, Publisher
from petiole.tasks.worker.reports.tally import Tally


class InHand(Protocol):
    """A job, as its pool counts it."""

    @property
    def task_id(self) -> str: ...

    @property
    def outbox(self) -> Outbox | None: ...

    @property
    def begun(self) -> Begun | None: ...

    @property
    def over(self) -> bool: ...


class Workplace(Protocol):
    """The pool. `hub` is kombu's event loop, in the consumer's thread."""

    settings: Settings
    engine: EngineLike
    publisher: Publisher
    completions: Completions
    mailbox: Mailbox
    tally: Tally
    hub: Any
    draining: bool
    result_max_bytes: int

    @property
    def jobs(self) -> Mapping[str, InHand]: ...

    def forget(self, job: InHand) -> None: ...

    def fail(self, error: BaseException) -> None: ...
