"""The worker side: the only part of Petiole that imports both Celery and the engine.

`celery -A tasks worker` calls `configure` first, in the worker process only. Producers never import this
package.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from tasks.settings import settings

LOOK_AHEAD = 4
"""Tasks that a worker holds beyond its engine slots, so that a free slot is filled at once."""

ETA_TASKS = 10_000
"""Limit on held tasks with an `eta`: each raises the prefetch by one and uses about 9 KB."""

STORE_RETRIES = 40
"""With Celery's pauses of up to 10 s, a result backend may be unreachable for about five minutes."""


def configure(app: Any) -> None:
    """Configure `app` to run Petiole's worker."""
    from tasks.worker import damage, limits, prefetch, program, transport  # noqa: F401 - a control command is one once imported
    from tasks.worker.fairness import tenant_queues
    from tasks.worker.quarantine import put_aside
    from tasks.worker.steps import EngineStep

    conf = app.conf
    if not conf.worker_concurrency:
        conf.worker_concurrency = settings().max_num_seqs + LOOK_AHEAD
    if not conf.worker_eta_task_limit:
        conf.worker_eta_task_limit = ETA_TASKS
    if settings().weights and not conf.task_queues:  # -Q can still select some of them
        names = tenant_queues(conf.task_default_queue, settings().weights)
        conf.task_queues = {name: {"exchange": name, "routing_key": name} for name in names}
    conf.broker_connection_max_retries = None
    conf.worker_cancel_long_running_tasks_on_connection_loss = False
    conf.worker_enable_prefetch_count_reduction = False
    conf.result_backend_always_retry = True
    if conf.result_backend_max_retries == float("inf"):  # a result that is too large would be retried for ever
        conf.result_backend_max_retries = STORE_RETRIES
    conf.worker_consumer = "tasks.worker.consumer:Consumer"
    app.amqp.Connection = program.Connection
    app.steps["worker"].add(EngineStep)
    for name in program.LOGGERS:
        logging.getLogger(name).addFilter(program.figures_for_text)
    transport.install()
    prefetch.install()
    damage.quarantine = partial(put_aside, app)
