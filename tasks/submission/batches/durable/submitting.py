"""For clients: begin a batch that goes on without them."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from petiole.tasks.errors import BatchError, InvalidRequest
from petiole.tasks.fleet import reports
from petiole.tasks.submission.batches import segments
from petiole.tasks.submission.batches.batch import Batch
from petiole.tasks.submission.batches.durable import records
from petiole.tasks.submission.batches.durable.records import ENDED, BatchRecord, Spec
from petiole.tasks.submission.batches.files import storage

WAIT_S = 20.0
"""For a worker that takes the batch."""
_PAUSE_S = 0.1


def spec_of(batch: Batch) -> Spec:
    """What this batch, of a file and with an output, is told. Raises `InvalidRequest`."""
    if not batch.source.format or batch.source.name == "-":
        raise InvalidRequest("input", "must be a file, for a batch that outlives its client", batch.source.name)
    if batch.output is None:
        raise InvalidRequest("output", "must be given, for a batch that outlives its client", None)
    form = batch.form.about()
    return Spec(
        input=storage.absolute(batch.source.name),
        output=storage.absolute(batch.output.location),
        lines=form.pop("lines", "requests"),
        form=form if batch.sort is None else {**form, "sort": batch.sort},
        format=batch.source.format,
        submission=dict(batch.submission),
        in_order=batch.in_order,
    )


def name_of(output: str) -> str:
    """The batch of an output: the same call again finds it."""
    return f"batch_{hashlib.sha256(output.encode()).hexdigest()[:24]}"


def begin(spec: Spec, expires_in_s: int | None = None, again: bool = False) -> BatchRecord:
    """Begin the batch of this output, or go on with it. `again`: send rows again that have failed. Raises
    `BatchError`."""
    name, token = name_of(spec.output), os.urandom(8).hex()
    if storage.size(spec.input) is None:
        raise BatchError(f"{spec.input}: no such file")
    if storage.size(spec.output + segments.ENDING) is not None:
        raise BatchError(f"{spec.output} is of a batch without --detach: finish it, or choose another output")
    found = records.get(name)
    if found is None:
        segments.mark(spec.output, token)
        if not records.create(name, replace(spec, marker=token), expires_in_s):
            segments.mark(spec.output, known(name).spec.marker)  # another client was first
    elif not _same(found.spec, spec):
        raise BatchError(f"{spec.output} is of {name}, which has other rows or options: choose another output")
    elif found.status in ENDED:
        return resume(found, expires_in_s, again)
    return known(name)


def _same(one: Spec, other: Spec) -> bool:
    return {**asdict(one), "marker": ""} == {**asdict(other), "marker": ""}


def resume(record: BatchRecord, expires_in_s: int | None = None, again: bool = False) -> BatchRecord:
    """Let a batch that has ended go on: after a cancellation, say. Finished rows are not run again."""
    if not record.ended:
        return record
    expires_at = "" if expires_in_s is None else int(time.time()) + expires_in_s
    records.move(
        record,
        ENDED,
        "validating",
        again="1" if again else "",
        note="",
        errors="",
        stuck="",
        expires_at=expires_at,
        **records.as_new(record),
    )
    return known(record.id)


def cancel(record: BatchRecord) -> str | None:
    """Ask its runner to end it. The batch's status then."""
    return records.move(record, ("validating", "in_progress"), "cancelling")


def until(name: str, condition: Callable[[BatchRecord], bool], wait_s: float = WAIT_S) -> BatchRecord:
    """The batch when this is so, or when the time is over."""
    give_up_at = time.monotonic() + wait_s
    while True:
        record = known(name)
        if condition(record) or time.monotonic() > give_up_at:
            return record
        time.sleep(_PAUSE_S)


def taken(record: BatchRecord) -> BatchRecord:
    """Wait until a worker has the batch. Raises `BatchError` if none of the workers can run it: then it is
    removed, unless it has had a runner."""
    found = until(record.id, lambda one: one.has_runner or one.ended or _hopeless(one))
    if not found.has_runner and not found.ended and _hopeless(found):
        if not found.number("generation"):
            records.remove(found)
            segments.unmark(found.spec.output)
        why = "; ".join(f"{worker}: {why}" for worker, why in sorted(found.blind.items()))
        raise BatchError(f"no worker can run a batch with these files: {why}")
    return found


def _hopeless(record: BatchRecord) -> bool:
    live = {one.worker for one in reports.workers() if not one.lost}
    return bool(live) and live <= record.blind.keys()


def known(name: str) -> BatchRecord:
    """Raises `BatchError`."""
    found = records.get(name)
    if found is None:
        raise BatchError(f"no batch {name!r} is known")
    return found
