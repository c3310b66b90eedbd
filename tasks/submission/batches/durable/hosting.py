"""Which open batches this machine may run. A host claims a batch for the runner that it starts."""

from __future__ import annotations

import random
from collections.abc import Iterator

from petiole.tasks.errors import InvalidRequest, PetioleError
from petiole.tasks.submission.batches import storage, tape
from petiole.tasks.submission.batches.durable import records
from petiole.tasks.submission.batches.durable.records import Lease, Record
from petiole.tasks.submission.batches.durable.runner import form_of


def claimed(worker: str, ttl_s: float) -> Iterator[Lease]:
    """The leases of open batches that nobody runs, and that can be run here. Of the others it is noted why not."""
    open_ids = records.open_ids()
    random.shuffle(open_ids)  # hosts share the batches out
    for record in records.several(open_ids):
        if record.has_runner:
            continue
        try:
            why = blindness(record)
        except Exception as error:  # of a later version, say: another host may know it
            why = f"{record.id}: {type(error).__name__}: {error}"
        if why != record.blind.get(worker, ""):
            records.tell_blind(record.id, worker, why)
        if not why and (lease := Lease.claim(record.id, ttl_s)) is not None:
            yield lease


def blindness(record: Record) -> str:
    """Why this process cannot run the batch; empty: it can."""
    try:
        form_of(record.spec)
        unseen = tape.sees(record.spec.output, record.spec.marker) if record.spec.marker else ""
        if storage.size(record.spec.input) is None and (unseen or not record.spec.beside):
            return f"{record.spec.input}: no such file here"
    except InvalidRequest:
        return ""  # the runner says what is wrong
    except PetioleError as error:
        return str(error)
    return unseen
