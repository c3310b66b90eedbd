"""A runner: runs one batch for as long as it has the lease.

    validating ──► in_progress ──► finalizing ──► completed
        │              │  └──► cancelling ──► cancelled        the client's wish
        └──► failed    └──► expired                            its time is over

One thread renews the lease, writes the counts, and hears of a cancellation; the caller's thread runs the loop. A
runner that dies, stops or cannot write leaves the batch open. The next one reads the pages and goes on. It opens
files below the worker's roots alone.

Whoever dies does not say so. So the record has that a runner runs, until it says that it ends; the next claim
counts a death. A batch whose runners die one after the other, while nothing goes on, has failed."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import redis

from petiole.tasks.app.application import App
from petiole.tasks.errors import BatchError, InvalidRequest
from petiole.tasks.servers.failover import refusals_are_losses
from petiole.tasks.settings import settings
from petiole.tasks.submission.batches.batch import Batch, Host
from petiole.tasks.submission.batches.client import AWAY
from petiole.tasks.submission.batches.durable import fair_share, records
from petiole.tasks.submission.batches.durable.current_row import SET_ASIDE, CurrentRow, TrackedRowType, without
from petiole.tasks.submission.batches.durable.records import BatchRecord, Lease, LeaseLost, Spec
from petiole.tasks.submission.batches.files import roots, storage
from petiole.tasks.submission.batches.files.storage import StorageError
from petiole.tasks.submission.batches.journal import OutputFiles
from petiole.tasks.submission.batches.rows import row_types, sources
from petiole.tasks.submission.batches.rows.row_types import Fault, NotRun, RowType
from petiole.tasks.submission.batches.rows.sources import Source
from petiole.tasks.submission.batches.segments import PageStore
from petiole.tasks.traces import carried

logger = logging.getLogger(__name__)

RENEWALS_A_LEASE = 4
MOST_FAULTS = 100
"""The most faults that a batch's record names."""
MOST_CHARACTERS = 500
"""The most characters of a fault's text, which may be of the client's file."""
MOST_DEATHS = 5
"""Runners that die or break one after the other, while nothing goes on, before the batch has failed."""
MOST_ASIDE = 100
"""Rows that are set aside before the batch has failed."""

CANCELLED = NotRun("batch_cancelled", "This request was not run before the batch was cancelled.")
EXPIRED = NotRun("batch_expired", "This request was not run before the batch expired.")


def form_of(spec: Spec) -> RowType:
    """Raises `InvalidRequest`, and `PetioleError` where packages are missing."""
    arguments = {name: value for name, value in spec.form.items() if name != "sort"}
    if spec.lines == "openai":
        return row_types.openai_lines(**arguments, **({"caller": spec.caller} if spec.caller else {}))
    return row_types.RequestRows(**arguments)


class _Stopped(Exception):  # noqa: N818
    """The runner was stopped while it checked the rows."""


class Runner(Host):
    outlived = True

    def __init__(
        self,
        app: App,
        record: BatchRecord,
        lease: Lease,
        current: CurrentRow | None = None,
        renewed: Callable[[], object] = lambda: None,
    ) -> None:
        """`current`: where it says which row it handles. `renewed`: called whenever the lease is renewed."""
        self._app, self._record, self._lease = app, record, lease
        self._current, self._renewed = current or CurrentRow(), renewed
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
            with roots.only(settings().batch_roots), carried.following(self._record.trace):
                return self._run()
        except _Stopped:
            self._lease.release()
            return self._record.status
        except StorageError as error:  # no release: the next try is when the lease has ended
            logger.warning("%s: %s", self._record.id, error)
            self._lease.hold(note=str(error), stuck="1", running="")
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
        """Another runner tries it when the lease has ended, and counts this one among the dead."""
        logger.exception("%s: the runner breaks", self._record.id)
        records.tell_death(self._record.id, f"a runner has broken: {type(error).__name__}", self._current.row)
        self._lease.hold(stuck="1")
        return self._record.status

    def gives_up(self) -> bool:
        """Whether no runner should try it again: the batch has failed then. Reads no file: its host asks, because
        a runner may die before it does."""
        if (fault := self._hopeless()) is not None:
            self._failed([fault])
        return fault is not None

    def _hopeless(self) -> Fault | None:
        deaths, aside = self._record.deaths, len(self._record.aside)
        last = self._record.facts.get("note") or "nobody saw why"
        if deaths >= MOST_DEATHS:
            return Fault("runner_died", f"{deaths} runners have died one after the other. The last one: {last}")
        if aside > MOST_ASIDE:
            return Fault("runner_died", f"runners have died of {aside} rows. The last one: {last}")
        return None

    def _run(self) -> str:
        if self.gives_up():
            return "failed"
        spec, form = self._record.spec, TrackedRowType(form_of(self._record.spec), self._current)
        if storage.size(spec.input) is None:  # its host has seen the folder
            return self._failed([Fault("input_file_missing", "the input was removed, or has expired")])
        again = self._record.facts.get("again") == "1"
        self._hear(self._record.status)
        if self._record.status == "validating":
            checks = spec.checks_first and self._ending is None
            if checks and (faults := list(islice(self._faults(form), MOST_FAULTS))):
                return self._failed(faults, rows=0)
            self._move(("validating",), "in_progress")
        self._batch = batch = Batch(
            self._app,
            self.rows(),
            form,
            OutputFiles(spec.output, spec.failures),
            spec.submission,
            in_order=spec.in_order,
            sort=spec.sort,
            again=again,
            host=self,
            sharing=fair_share.SharingWithOthers(self._record.id, spec.tenant),
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

    def line_store(self, output: str) -> PageStore:
        return PageStore(output, self._lease)

    def opened(self, ended: int) -> None:
        self._lease.hold(again="", stuck="", ended=ended)

    def joining(self) -> None:
        """A batch whose time is over is not `finalizing`: the next runner must see that it is over."""
        if self._ending is None:
            self._move(("in_progress",), "finalizing")

    def rows(self) -> Source:
        source = sources.source_of(self._record.spec.input, self._record.spec.format)
        return without(source, self._record.aside)

    def _faults(self, form: RowType) -> Any:
        source, rows, most = self.rows(), 0, self._record.spec.most_rows

        def counted() -> Any:
            nonlocal rows
            for row in source:
                rows += 1
                if self._stopping.is_set() or self._ending is not None:
                    raise _Stopped
                if row.fault != SET_ASIDE:
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
        """The rows of the tenant's other batches. If two are checked at the same time, the older one is first."""
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
        """Tells that the batch has ended. A failure here changes nothing."""
        try:
            form_of(self._record.spec).told(self._record.id, status, int(time.time()))
        except Exception:
            logger.warning("%s: nobody could be told that it is %s", self._record.id, status, exc_info=True)

    # ------------------------------------------------------------ the other thread

    def _keep(self) -> None:
        while not self._over.wait(self._lease.ttl_s / RENEWALS_A_LEASE):
            try:
                with refusals_are_losses():
                    status = self._lease.hold(**self._facts())
            except AWAY:
                if not self._lease.held:
                    self.stop()
                continue
            if status is None:
                self.stop()
                return
            self._renewed()
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
            "note": shown.note,
            **{
                name: before.number(name) + getattr(shown, name)
                for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens")
            },
        }


def _short(fault: Fault) -> Fault:
    param = fault.param and fault.param[:MOST_CHARACTERS]
    return fault._replace(message=fault.message[:MOST_CHARACTERS], param=param)
