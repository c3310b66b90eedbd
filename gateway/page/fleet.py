"""What is shown of the fleet. Pure.

A generation has no id here, because whoever has an id may read the answer: it has a *handle*, which is enough to
cancel it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from petiole.gateway.core.caller import ANYBODY, Caller
from petiole.gateway.core.record import RequestRecord
from petiole.tasks.fleet.models import ModelFacts
from petiole.tasks.fleet.queues import QueueReport
from petiole.tasks.fleet.reports import WorkerReport
from petiole.tasks.settings import settings

_SHOWN = (
    "worker", "version", "device", "model", "weight_format", "kernels", "running", "waiting", "slots",
    "pages_total", "pages_used", "hit_rate", "tokens_per_s", "generated_tokens", "memory_bytes", "age_s",
)  # fmt: skip
_TAKES = ("chat", "images", "tools", "reasoning", "embeddings")


class RunningGeneration(NamedTuple):
    """One that runs now."""

    task_id: str
    worker: str
    model: str
    age_s: float

    @property
    def handle(self) -> str:
        return hashlib.sha256(self.task_id.encode()).hexdigest()[:16]

    @property
    def record(self) -> str:
        """The name of the request's record, if it came through a gateway."""
        return re.sub(r"-\d+$", "", self.task_id)


def generations(workers: Iterable[WorkerReport]) -> list[RunningGeneration]:
    """Oldest first."""
    found = [
        RunningGeneration(one.task_id, worker.worker, worker.model, one.age_s)
        for worker in workers
        if not worker.lost
        for one in worker.generations
    ]
    return sorted(found, key=lambda one: -one.age_s)


def shown(
    workers: Sequence[WorkerReport],
    queues: Sequence[QueueReport] | None,
    models: Sequence[ModelFacts],
    records: Mapping[str, RequestRecord],
    of: Caller = ANYBODY,
) -> dict[str, Any]:
    """`queues`: None if they cannot be counted. `records`: by their names, those of the generations that came
    through a gateway. `of`: a tenant sees its own generations and queues, and the models and workers that it may
    ask."""
    if of.name:
        asked = [model for model in models if model.names or model.adapters]
        models, served = asked, {model.fingerprint for model in asked}
        workers = [worker for worker in workers if worker.fingerprint in served]
        queues = queues and [queue for queue in queues if queue.queue in _queues_of(of, models)]
    return {
        "workers": [_worker(worker) for worker in workers],
        "queues": None if queues is None else [queue.model_dump() for queue in queues],
        "models": [_model(model) for model in models],
        "generations": [
            _generation(one, records.get(one.record)) for one in generations(workers) if is_shown(one, records, of)
        ],
    }


def _queues_of(of: Caller, models: Sequence[ModelFacts]) -> set[str]:
    """The tenant's only queue, or else those of the models that it may ask; and where its tasks wait in turn."""
    known, only = settings().queue, of.tenant.queue
    names = {known, *(name for model in models for name in model.queues)} if only is None else {only}
    return names | {f"{known}.{of.name}"}


def is_shown(one: RunningGeneration, records: Mapping[str, RequestRecord], of: Caller) -> bool:
    """`records`: those that the caller finds."""
    return not of.name or one.record in records


def _worker(worker: WorkerReport) -> dict[str, Any]:
    known = {name: getattr(worker, name) for name in _SHOWN}
    return {**known, "state": "lost" if worker.lost else worker.state}


def _model(model: ModelFacts) -> dict[str, Any]:
    return {
        "names": model.names,
        "queues": [*model.queues],
        "takes": [name for name in _TAKES if getattr(model, name)],
        "adapters": [*model.adapters],
        "max_model_len": model.max_model_len,
        "live": model.live,
    }


def _generation(one: RunningGeneration, record: RequestRecord | None) -> dict[str, Any]:
    return {
        "handle": one.handle,
        "kind": "task" if record is None else record.kind,
        "model": one.model if record is None else record.model,
        "worker": one.worker,
        "age_s": one.age_s,
    }
