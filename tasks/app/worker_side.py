"""The names of the worker's classes and functions that are used outside `tasks.worker`.

The producer side never imports the worker side. In a worker, Celery resolves these names. `load` resolves the
functions that run in any process with the worker's packages."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from click import ClickException

POOL = "petiole.tasks.worker.pool.pool:EnginePool"
PROGRAM = "petiole.tasks.worker.boot.program:Worker"
CONFIGURE = "petiole.tasks.worker.boot.configure:configure"
CONSUMER = "petiole.tasks.worker.broker.consumer:Consumer"
REQUEST = "petiole.tasks.worker.delivery.delivery:Request"
RUN_HERE = "petiole.tasks.worker.generation.local:run"
COUNT = "petiole.tasks.worker.generation.counting:answer"
TRACE = "petiole.tasks.worker.reports.inspection:trace"
SERVED = "petiole.tasks.worker.reports.inspection:served"
PLAN = "petiole.tasks.worker.reports.inspection:plan"


class PackagesMissingError(ClickException, ImportError):
    """The worker side cannot be imported where only a producer is installed. `celery worker` prints one line."""

    def __init__(self, packages: Sequence[str]) -> None:
        super().__init__(
            f"a worker needs more than a producer: pip install 'petiole[worker]' (no {', '.join(packages)})"
        )


def load(name: str) -> Any:
    """The function of this name. Raises ImportError if the worker's packages are missing."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
