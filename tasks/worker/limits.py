"""`celery control time_limit`, with effect: a stock worker replies that it did so, but keeps the old limits."""

from __future__ import annotations

from typing import Any

from celery.worker import control


@control.control_command(  # type: ignore[untyped-decorator]
    args=[("task_name", str), ("soft", float), ("hard", float)],
    signature="<task_name> <soft_secs> [hard_secs]",
)
def time_limit(
    state: Any, task_name: str | None = None, hard: float | None = None, soft: float | None = None, **_: object
) -> Any:
    """Tell worker(s) to modify the time limit for task by type."""
    reply = control.time_limit(state, task_name, hard, soft)
    state.consumer.update_strategies()  # new requests read their limits from the strategies
    return reply
