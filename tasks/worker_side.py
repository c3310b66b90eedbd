"""The names of the worker's classes and functions that are used outside `tasks.worker`.

The producer side never imports the worker side. In a worker, Celery resolves these names. `load` resolves the
functions that run in any process with the worker's packages."""

from __future__ import annotations

from importlib import import_module
from typing import Any

POOL = "petiole.tasks.worker.pool.pool:EnginePool"
PROGRAM = "petiole.tasks.worker.boot.program:Worker"
CONFIGURE = "petiole.tasks.worker.boot.configure:configure"
CONSUMER = "petiole.tasks.worker.broker.consumer:Consumer"
REQUEST = "petiole.tasks.worker.delivery.revoking:Request"
RUN_HERE = "petiole.tasks.worker.generation.local:run"
TRACE = "petiole.tasks.worker.generation.local:trace"


def load(name: str) -> Any:
    """The function of this name. Raises ImportError if the worker's packages are missing."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)
