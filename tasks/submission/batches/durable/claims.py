"""Which open batches this machine may run, and in which turn. A host claims a batch for the runner that it starts.

Tenants share the hosts: a free host takes a batch of the tenant with the fewest runners, the oldest first. A full
host stops a runner of a tenant that has at least two more than one whose batch waits: the one that runs for
longest, so that they take turns. It makes no room for a batch whose last runner could not go on, because its disk
was full, say: that one is tried where there is room."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from petiole.contract.errors import shorten
from petiole.tasks.app.application import app
from petiole.tasks.errors import InvalidRequest, PetioleError
from petiole.tasks.settings import settings
from petiole.tasks.submission.batches import segments
from petiole.tasks.submission.batches.durable import records
from petiole.tasks.submission.batches.durable.records import BatchRecord, Lease, Spec
from petiole.tasks.submission.batches.durable.runner import Runner, form_of
from petiole.tasks.submission.batches.files import roots, storage

logger = logging.getLogger(__name__)


def claimed(worker: str, ttl_s: float) -> Iterator[Lease]:
    """The leases of open batches that nobody runs, and that can be run here. Of the others it is noted why not;
    one whose runners only die has failed."""
    for record in in_turn(records.several(records.open_ids())):
        if _can_run(worker, record) and (lease := Lease.claim(record.id, ttl_s)) is not None:
            now = records.get(record.id)
            if now is not None and not Runner(app, now, lease).gives_up():
                yield lease


def makes_room(worker: str, own: Iterable[str]) -> str | None:
    """The batch whose runner stops so that another tenant's batch runs, on a host that is full with its `own`
    batches, the one that runs for longest first."""
    found = records.several(records.open_ids())
    running, tenants = _runners(found), {one.id: one.spec.tenant for one in found}
    of_own = max((name for name in own if name in tenants), key=lambda name: running[tenants[name]], default=None)
    if of_own is None:
        return None
    for record in in_turn(found):
        if running[record.spec.tenant] + 2 > running[tenants[of_own]]:
            return None
        if not record.stuck and _can_run(worker, record):
            return of_own
    return None


def in_turn(found: Sequence[BatchRecord]) -> list[BatchRecord]:
    """The open batches that nobody runs, in the order in which they should be."""
    running = _runners(found)
    waiting = [record for record in found if not record.has_runner]
    return sorted(waiting, key=lambda record: (running[record.spec.tenant], record.stuck, record.age))


def _runners(found: Iterable[BatchRecord]) -> Counter[str]:
    """By tenant."""
    return Counter(record.spec.tenant for record in found if record.has_runner)


def _can_run(worker: str, record: BatchRecord) -> bool:
    """Whether this process can run it. If not, it is noted why."""
    try:
        why = blindness(record)
    except Exception as error:  # of a later version, say: another host may know it
        why = f"{record.id}: {type(error).__name__}: {error}"
    if why != record.blind.get(worker, ""):
        if why:
            logger.info("batch %s cannot be run here: %s", shorten(record.id), shorten(why))
        records.tell_blind(record.id, worker, why)
    return not why


def blindness(record: BatchRecord) -> str:
    """Why this process cannot run the batch; empty: it can."""
    spec = record.spec
    try:
        form_of(spec)
        with roots.only(settings().batch_roots):
            return _unseen(spec)
    except InvalidRequest:
        return ""  # the runner says what is wrong
    except PetioleError as error:
        return str(error)


def _unseen(spec: Spec) -> str:
    """Which of its files this process does not see, or must not. Raises `BatchError`."""
    made = [one for one in (spec.output, spec.failures) if one is not None]
    roots.check(spec.input, *made)
    for location in made:
        if not storage.is_url(location):
            storage.size(location)  # a link may lead there
    unseen = segments.sees(spec.output, spec.marker) if spec.marker else ""
    if storage.size(spec.input) is None and (unseen or not spec.beside):
        return f"{spec.input}: no such file here"
    return unseen
