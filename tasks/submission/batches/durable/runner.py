"""A runner: runs one batch for as long as it has the lease.

    validating ──► in_progress ──► finalizing ──► completed
        │              │  └──► cancelling ──► cancelled        the client's wish
        └──► failed    └──► expired                            its time is over

One thread renews the lease, writes the counts, and hears of a cancellation; the caller's thread runs the loop. A
runner that dies, stops or cannot write leaves the batch open. The next one reads the pages and goes on."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any

import redis

from petiole.tasks.app.application import App
from petiole.tasks.errors import BatchError, InvalidRequest
from petiole.tasks.submission.batches import forms, storage
from petiole.tasks.submission.batches.batch import Batch
from petiole.tasks.submission.batches.durable import neighbours, records
from petiole.tasks.submission.batches.durable.records import Lease, LeaseLost, Record, Spec
from petiole.tasks.submission.batches.exchange import AWAY
from petiole.tasks.submission.batches.flight import Sharing
from petiole.tasks.submission.batches.forms import Fault, Form, NotRun
from petiole.tasks.submission.batches.journal import Output
from petiole.tasks.submission.batches.rows import sources
from petiole.tasks.submission.batches.rows.sources import Source
from petiole.tasks.submission.batches.storage import StorageError
from petiole.tasks.submission.batches.tape import PagedTape

logger = logging.getLogger(__name__)

RENEWALS_A_LEASE = 4
MOST_FAULTS = 100
"""That a batch's record names."""
MOST_CHARACTERS = 500
"""Of a fault's text, which may be of the client's file."""
MOST_BREAKS = 5
"""Runners that an error ends which nobody expects, before the batch has failed."""

CANCELLED = NotRun("batch_cancelled", "This request was not run before the batch was cancelled.")
EXPIRED = NotRun("batch_expired", "This request was not run before the batch expired.")


def form_of(spec: Spec) -> Form:
    """Raises `InvalidRequest`, and `PetioleError` where packages are missing."""
    arguments = {name: value for name, value in spec.form.items() if name != "sort"}
    if spec.lines == "openai":
        return forms.openai_lines(**arguments, **({"caller": spec.caller} if spec.caller else {}))
    return forms.Requests(**arguments)


class Runner:
    def __init__(self, app: App, record: Record, lease: Lease) -> None:
        self._app, self._record, self._lease = app, record, lease
        self._batch: Batch | None = None
        self._ending: NotRun | None = None
        self._stopping = threading.Event()
        self._over = threading.Event()

    def stop(self) -> None:
        """End soon, and leave the batch to another runner. May be called from any thread."""
        self._stopping.set()
        if self._batch is not None:
            self._batch.stop()

    def run(self) -> str:
        """Returns the status in which the batch is left."""
        keeper = threading.Thread(target=self._keep, name="petiole-lease", daemon=True)
        keeper.start()
        try:
            return self._run()
        except StorageError as error:  # no release: the next try is when the lease has ended
            logger.warning("%s: %s", self._record.id, error)
            self._lease.hold(note=str(error), stuck="1")
            return self._record.status
        except (InvalidRequest, BatchError) as error:
            return self._failed([Fault("invalid_batch", str(error))])
        except LeaseLost as error:
            logger.warning("%s", error)
            return self._record.status
        except (*AWAY, redis.RedisError) as error:
            logger.warning("%s: %s", self._record.id, error)
            return self._record.status
        except Exception as error:
            return self._broken(error)
        finally:
            self._over.set()
            keeper.join()

    def _broken(self, error: Exception) -> str:
        """Another runner tries it when the lease has ended. A batch that breaks each of them must not do so for
        ever."""
        logger.exception("%s: the runner breaks", self._record.id)
        breaks = self._record.number("breaks") + 1
        if breaks >= MOST_BREAKS:
            return self._failed([Fault("internal_error", f"{breaks} runners have broken: {type(error).__name__}")])
        self._lease.hold(breaks=breaks, stuck="1", note=f"a runner has broken: {type(error).__name__}")
        return self._record.status

    def _run(self) -> str:
        spec, form = self._record.spec, form_of(self._record.spec)
        if storage.size(spec.input) is None:  # its host has seen the folder
            return self._failed([Fault("input_file_missing", "the input was removed, or has expired")])
        again = self._record.facts.get("again") == "1"
        self._hear(self._record.status)
        if self._record.status == "validating":
            if spec.checks_first and (faults := list(islice(self._faults(form), MOST_FAULTS))):
                return self._failed(faults, rows=0)
            self._move(("validating",), "in_progress")
        self._batch = batch = Batch(
            self._app,
            self._source(),
            form,
            Output(spec.output, spec.failures),
            spec.submission,
            in_order=spec.in_order,
            sort=spec.sort,
            again=again,
            tape=lambda: PagedTape(spec.output, self._lease),
            reread=self._source,
            opened=lambda: self._lease.hold(again="", stuck=""),
            joining=self._joining,
            sharing=self._sharing,
        )
        if self._ending is not None:
            batch.cancel(self._ending)
        if self._stopping.is_set():
            batch.stop()
        batch.run()
        self._lease.hold(**self._facts())
        if batch.complete:
            return self._move(("validating", "in_progress", "finalizing", "cancelling"), "completed")
        if self._ending is None or not batch.joined:
            self._lease.release()
            return self._record.status
        ended = "expired" if self._ending is EXPIRED else "cancelled"
        return self._move(("in_progress", "finalizing", "cancelling"), ended)

    def _joining(self) -> None:
        """A batch whose time is over is not `finalizing`: the next runner must see that it is over."""
        if self._ending is None:
            self._move(("in_progress",), "finalizing")

    def _sharing(self) -> Sharing:
        assert self._batch is not None
        return neighbours.sharing(self._record.id, self._record.spec.tenant, self._batch.queue)

    def _source(self) -> Source:
        return sources.source_of(self._record.spec.input, self._record.spec.format)

    def _faults(self, form: Form) -> Any:
        source, rows, most = self._source(), 0, self._record.spec.most_rows

        def counted() -> Any:
            nonlocal rows
            for row in source:
                rows += 1
                yield row
                if most is not None and rows > most:
                    return

        checked = counted()
        yield from form.faults(checked)
        deque(checked, maxlen=0)  # those that the form has not looked at
        if rows == 0:
            yield Fault("empty_file", "the input has no rows")
        self._lease.hold(rows=rows)
        if most is not None and rows + (others := self._rows_of_others()) > most:
            limit = f"open batches of a tenant must have at most {most} rows in all"
            own = f"more than {most}" if rows > most else rows
            yield Fault("row_limit_exceeded", f"{limit}, got {own}, and {others} in the other batches")

    def _rows_of_others(self) -> int:
        """Of two that are checked at the same time the older one is first."""
        mine = self._record
        return sum(
            one.rows_left
            for one in records.listed(mine.spec.tenant)
            if one.id != mine.id and not one.ended and (one.status != "validating" or one.age < mine.age)
        )

    def _failed(self, faults: Sequence[Fault], **facts: Any) -> str:
        errors = json.dumps([_short(fault)._asdict() for fault in faults])
        return self._move(
            ("validating", "in_progress", "finalizing", "cancelling"), "failed", errors=errors, **facts
        )

    def _move(self, of: Sequence[str], to: str, **facts: Any) -> str:
        """Raises `LeaseLost`."""
        status = records.move(self._record, of, to, self._lease.token, **facts)
        if status is None:
            raise LeaseLost(f"{self._record.id}: another runner has this batch, or it was removed")
        if status in records.ENDED:
            self._tell(status)
        return status

    def _tell(self, status: str) -> None:
        """It is over: what fails here changes nothing."""
        try:
            form_of(self._record.spec).told(self._record.id, status, int(time.time()))
        except Exception:
            logger.warning("%s: nobody could be told that it is %s", self._record.id, status, exc_info=True)

    # ------------------------------------------------------------ the other thread

    def _keep(self) -> None:
        while not self._over.wait(self._lease.ttl_s / RENEWALS_A_LEASE):
            try:
                status = self._lease.hold(**self._facts())
            except AWAY:
                if not self._lease.held:
                    self.stop()
                continue
            if status is None:
                self.stop()
                return
            self._hear(status)

    def _hear(self, status: str) -> None:
        """End the batch if its client wants that, or if its time is over."""
        if self._ending is not None:
            return
        expires_at = self._record.number("expires_at")
        if status == "cancelling":
            self._ending = CANCELLED
        elif expires_at and time.time() >= expires_at and status != "finalizing":
            self._ending = EXPIRED
        if self._ending is not None and self._batch is not None:
            self._batch.cancel(self._ending)

    def _facts(self) -> dict[str, Any]:
        if self._batch is None:
            return {}
        shown = self._batch.progress
        before = self._record
        return {
            **({} if shown.rows is None or before.spec.checks_first else {"rows": shown.rows}),
            "ended": shown.ended,
            "failed": shown.failed,
            "on_their_way": shown.on_their_way,
            "rows_per_s": round(shown.rows_per_s, 2),
            "note": shown.note,
            "queue": self._batch.queue,
            **{
                name: before.number(name) + getattr(shown, name)
                for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")
            },
        }


def _short(fault: Fault) -> Fault:
    param = fault.param and fault.param[:MOST_CHARACTERS]
    return fault._replace(message=fault.message[:MOST_CHARACTERS], param=param)
