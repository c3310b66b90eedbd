"""`petiole batch --detach`, and `list`, `show`, `cancel`, `resume` of such batches; `run` is a worker's runner."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from datetime import datetime
from typing import Any

from petiole.tasks.app.application import app
from petiole.tasks.commands.terminal import print_table
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.settings import settings
from petiole.tasks.submission.batches.batch import Batch
from petiole.tasks.submission.batches.durable import records, submitting, watchdog
from petiole.tasks.submission.batches.durable.current_row import CurrentRow
from petiole.tasks.submission.batches.durable.records import BatchRecord, Lease
from petiole.tasks.submission.batches.durable.runner import Runner
from petiole.tasks.submission.batches.durable.watchdog import Watchdog
from petiole.tasks.submission.batches.files import storage
from petiole.tasks.traces import exporting

VERBS = ("list", "show", "cancel", "resume", "run")
FOREVER_S = 10.0**9
_COUNTS = ("rows", "ended", "failed", "prompt_tokens", "cached_prompt_tokens", "completion_tokens")


def run(options: argparse.Namespace) -> int:
    if options.input == "list":
        return show_list(options)
    if options.id is None:
        raise InvalidRequest("ID", f"must follow {options.input}", "nothing")
    if options.input == "run":
        return host(options)
    record = submitting.known(options.id if records.is_id(options.id) else named(options.id))
    match options.input:
        case "cancel":
            if record.ended:
                print(f"{record.id}: has ended ({record.status})")
                return 0
            submitting.cancel(record)
            record = submitting.until(record.id, lambda one: one.ended)
        case "resume":
            record = submitting.taken(submitting.resume(record, _seconds(options), options.retry_failed))
    return show(record, options)


def named(output: str) -> str:
    return submitting.name_of(storage.absolute(output))


def detach(made: Batch, options: argparse.Namespace) -> int:
    record = submitting.begin(submitting.spec_of(made), _seconds(options), options.retry_failed)
    return show(submitting.taken(record), options)


def _seconds(options: argparse.Namespace) -> int | None:
    return None if options.expires_after is None else max(1, round(3600 * options.expires_after))


def show_list(options: argparse.Namespace) -> int:
    found = records.listed()
    if options.json:
        print(json.dumps([facts(record) for record in found]))
        return 0
    rows = [
        (record.id, status(record), f"{record.number('ended'):,} of {record.number('rows'):,}", record.spec.output)
        for record in found
    ]
    print_table(("batch", "status", "rows", "output"), rows)
    return 0


def show(record: BatchRecord, options: argparse.Namespace) -> int:
    if options.wait:
        record = submitting.until(record.id, lambda one: one.ended, FOREVER_S)
    if options.json:
        print(json.dumps(facts(record)))
    else:
        for name, value in facts(record).items():
            print(f"{name}: {value if isinstance(value, str | int) else json.dumps(value)}")
    return 1 if record.status == "failed" or (record.ended and record.number("failed")) else 0


def status(record: BatchRecord) -> str:
    if record.ended or record.has_runner:
        return record.status
    return f"{record.status}, without a runner"


def facts(record: BatchRecord) -> dict[str, Any]:
    """What an operator is shown."""
    times = {name: record.time_of(name) for name in ("created", "in_progress", "expires", *records.ENDED)}
    shown = {
        "id": record.id,
        "status": status(record),
        "input": record.spec.input,
        "output": record.spec.output,
        **{name: record.number(name) for name in _COUNTS},
        **{f"{name}_at": datetime.fromtimestamp(at).isoformat(" ") for name, at in times.items() if at},
    }
    more = {"note": record.facts.get("note"), "errors": record.errors, "cannot_run_it": record.blind}
    return {**shown, **{name: value for name, value in more.items() if value}}


def host(options: argparse.Namespace) -> int:
    """Run a batch in this process. `--leased`: its host has claimed it, and says so on standard input; when that
    ends, its host is gone."""
    if options.leased:
        watchdog.limit_memory()
        told = json.loads(sys.stdin.readline())
        parent, current = told.pop("host"), CurrentRow(told.pop("hand"))
        lease: Lease | None = Lease.taken_over(options.id, **told)
    else:
        parent, current = os.getppid(), CurrentRow()
        lease = Lease.claim(options.id, settings().visibility_timeout_s)
    record = records.get(options.id)
    if lease is None or record is None:
        print(f"petiole: {options.id} is not open, or has a runner", file=sys.stderr)
        return 1
    leashed = Watchdog(lease, parent)
    runner = Runner(app, record, lease, current, leashed.renew)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: runner.stop())
    if options.leased:
        lease.hold()
        print("begun", flush=True)  # from now on this process renews the lease
        leashed.watch(runner.stop)
    exporting.start("petiole-batch")
    began_at = time.monotonic()
    left = runner.run()
    print(f"petiole: {options.id}: {left}, after {time.monotonic() - began_at:.0f} s here", file=sys.stderr)
    return 0
