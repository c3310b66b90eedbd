"""`petiole status`: the workers, and the queues that they serve. `petiole doctor`: what is wrong with them.
`petiole task`: the story of one task. `petiole replay`: messages that were put aside."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime
from typing import Any

import redis
from kombu.exceptions import OperationalError

from petiole.tasks.app.application import app as celery_app
from petiole.tasks.commands.terminal import error_text, live, print_table, table_text
from petiole.tasks.fleet import availability, queues, reports, restarts
from petiole.tasks.fleet.repair import diagnosis, probes, quarantined, story
from petiole.tasks.servers import connections

UNREACHABLE = (OperationalError, redis.RedisError, OSError)


def show(options: argparse.Namespace) -> int:
    if sys.stdout.isatty() and not (options.once or options.json):
        return live(_status_now, every_s=reports.REPORT_INTERVAL_S / 2)
    workers = reports.workers()
    if options.json:
        elsewhere = [worker.worker for worker in _elsewhere(workers)]
        shown: dict[str, Any] = {
            "workers": [
                worker.model_dump(exclude={"generations"})
                | {"lost": worker.lost, "results_elsewhere": worker.worker in elsewhere}
                for worker in workers
            ],
            "queues": None,
        }
        try:
            shown["queues"] = [queue.model_dump() for queue in queues.report_queues(workers)]
        except UNREACHABLE as error:
            print(f"petiole: the queues cannot be counted: {error}", file=sys.stderr)
        print(json.dumps(shown, indent=2))
    else:
        print(_status(workers))
    return 0 if workers else 1


def doctor(options: argparse.Namespace) -> int:
    """Exit status 1 if there is a problem. Remarks alone are no failure."""
    facts = diagnosis.gather(options.gateway)
    found = diagnosis.diagnose(facts)
    if options.json:
        print(json.dumps([finding._asdict() for finding in found], indent=2))
    elif found:
        rows = [(finding.grade, finding.name, finding.what) for finding in found]
        print(table_text(("grade", "finding", "what is wrong"), rows))
        print("The page Runbooks, docs/runbooks.md in Petiole's repository, has a section for each.")
    else:
        print("Nothing is wrong." if facts.workers else "Nothing is wrong, but no worker is running.")
    return int(any(finding.grade == "problem" for finding in found))


STATUS_COLUMNS = (
    *("worker", "state", "version", "model", "device", "running", "waiting", "slots"),
    *("held", "to store", "pages used", "hit rate", "tokens/s", "texts/s", "lease", "starts", "seen"),
)


COMPUTING_COLUMNS = ("worker", "weights", "size", "kernels", "instructions", "threads")


def _computing_row(worker: reports.WorkerReport) -> tuple[str, ...] | None:
    """How a live worker computes its model; None if it does not say so."""
    if worker.lost or not worker.weight_bytes:
        return None
    size = f"{worker.weight_bytes / 1e9:.2f} GB"
    return (
        *(worker.worker, worker.weight_format, size, worker.kernels, worker.instructions),
        str(worker.threads or ""),
    )


TIER_COLUMNS = (
    "worker",
    "KV in files",
    "tokens restored",
    "saved",
    "chunks dropped",
    "reads given up",
    "failures",
)


def _tier_row(worker: reports.WorkerReport) -> tuple[str, ...] | None:
    """What a live worker has of KV in files; None without a tier."""
    if worker.lost or worker.kv_tier_bytes is None:
        return None
    counts = worker.kv_tier_dropped_chunks, worker.kv_tier_given_up, worker.kv_tier_failed
    files, saved = (f"{n / 1e9:.2f} GB" for n in (worker.kv_tier_bytes, worker.kv_tier_saved_bytes))
    return worker.worker, files, str(worker.kv_tier_restored_tokens), saved, *map(str, counts)


def _status_now() -> str:
    """The table, or the error while Redis is unreachable."""
    try:
        return _status(reports.workers())
    except connections.LOST as error:
        return error_text(error)


def _status(workers: list[reports.WorkerReport]) -> str:
    table, started = "No worker is running.", restarts.lives()
    if workers:
        rows = [_status_row(worker, started.get(worker.worker)) for worker in workers]
        table = table_text(STATUS_COLUMNS, rows)
        for columns, row_of in ((COMPUTING_COLUMNS, _computing_row), (TIER_COLUMNS, _tier_row)):
            found = [row for worker in workers if (row := row_of(worker)) is not None]
            table += "\n\n" + table_text(columns, found) if found else ""
    lines = [table, *_silent(workers, started), *_refused_writes()]
    if elsewhere := _elsewhere(workers):
        lines.append(availability.complaint_of_results(celery_app, elsewhere))
    return "\n".join(lines) + f"\n\n{_queues(workers)}"


def _silent(workers: list[reports.WorkerReport], started: dict[str, restarts.Life]) -> list[str]:
    """A line for each worker name whose last process failed and that does not report: perhaps a crash loop."""
    reporting = {worker.worker for worker in workers}
    return [
        f"{name} has not reported; started {life.starts} times, the previous process ended: {life.last_exit}"
        for name, life in started.items()
        if life.failed and name not in reporting
    ]


def _refused_writes() -> list[str]:
    try:
        answers = probes.answers()
    except UNREACHABLE:  # as the queues' table says
        return []
    return [
        f"The Redis of the {name} takes no writes, so workers cannot report: {said.refusal}"
        for name, said in answers.items()
        if said.refusal
    ]


def _elsewhere(workers: list[reports.WorkerReport]) -> list[reports.WorkerReport]:
    """The workers that store their results where this process does not look for them."""
    try:
        return availability.storing_elsewhere(celery_app, workers)
    except Exception:  # any backend's, or no right to read results: no answer
        return []


QUEUE_COLUMNS = ("queue", "waiting", "by priority", "workers")


def _queues(workers: list[reports.WorkerReport]) -> str:
    """The table of queues, or why there is none: the broker may be another server, and unreachable."""
    try:
        counted = queues.report_queues(workers)
    except UNREACHABLE as error:
        return f"The queues cannot be counted: {error}"
    return table_text(QUEUE_COLUMNS, [_queue_row(queue) for queue in counted])


def _queue_row(queue: queues.QueueReport) -> tuple[str, ...]:
    parts = [f"{priority}: {length}" for priority, length in queue.by_priority.items() if length]
    known = queue.by_priority.keys() != {None}
    return queue.queue, str(queue.waiting), ", ".join(parts) if known else "", str(queue.workers)


def _status_row(worker: reports.WorkerReport, life: restarts.Life | None) -> tuple[str, ...]:
    starts = f"{life.starts} ({life.last_exit})" if life and life.last_exit else str(life.starts) if life else ""
    seen = f"{worker.age_s or 0:.0f} s ago"
    if worker.lost:  # its last figures are out of date
        known = (worker.worker, "lost", worker.version, worker.model, worker.device)
        return (*known, *[""] * (len(STATUS_COLUMNS) - len(known) - 2), starts, seen)
    return (
        worker.worker,
        worker.state,
        worker.version,
        worker.model,
        worker.device,
        str(worker.running),
        str(worker.waiting),
        str(worker.slots),
        str(worker.held_messages),
        str(worker.pending_completions),
        f"{worker.pages_used / worker.pages_total:.0%}" if worker.pages_total else "",
        f"{worker.hit_rate:.0%}",
        f"{worker.tokens_per_s:.0f}",
        f"{worker.texts_per_s:.0f}",
        f"{worker.lease_age_s:.1f} s",
        starts,
        seen,
    )


def show_task(options: argparse.Namespace) -> int:
    """Exit status 1 if nothing is known of the task."""
    found = story.of(options.task_id)
    if options.json:
        attempts = [one._asdict() for one in found.attempts]
        print(json.dumps({"task": found.task_id, "state": found.state, **found.facts, "attempts": attempts}))
    elif found.known:
        print(f"{found.task_id}: {found.state}")
        for name, value in found.facts.items():
            print(f"  {name}: {_when(value) if name.endswith('_at') else value}")
        rows = [(str(one.number), one.worker, _when(one.began_at), one.end) for one in found.attempts]
        if rows:
            print_table(("attempt", "worker", "began", "end"), rows)
    else:
        print(f"petiole: {found.task_id} is not known: it waits, is forgotten, or never was", file=sys.stderr)
    return 0 if found.known else 1


def replay(options: argparse.Namespace) -> int:
    """Without tasks, list what was put aside. Otherwise send the newest one of each task again. Exit status 1
    if one could not be sent."""
    found = quarantined.listed()
    if not (options.task_id or options.all):
        rows = [(one.task_id or "-", one.queue, _when(one.at), one.reason[:100]) for one in found]
        print_table(("task", "queue", "put aside", "reason"), rows)
        return 0
    wanted = set(options.task_id)
    unknown, failed = wanted - {one.task_id for one in found}, list[str]()
    for name in sorted(unknown):
        print(f"{name}: was not put aside, or is forgotten")
    newest = {one.task_id or one.entry: one for one in reversed(found)}  # the oldest first
    for one in newest.values():
        if not (options.all or one.task_id in wanted):
            continue
        name = one.task_id or "a message without an id"
        try:
            quarantined.replay(one)
            print(f"{name}: sent again to {one.queue}")
        except (OperationalError, *connections.LOST):  # it would be the same with the others
            raise
        except Exception as error:
            print(f"{name}: {error_text(error)}")
            failed.append(name)
    if failed:
        print(f"not sent again: {', '.join(failed)}")
    return int(bool(unknown or failed))


def _when(at: Any) -> str:
    """A time for people; as it is if it is none."""
    try:
        return datetime.fromtimestamp(at).isoformat(" ", "milliseconds")
    except (ValueError, TypeError, OverflowError, OSError):
        return str(at)
