"""`petiole batch`: the rows of a file through the fleet, with a bar, until all have ended or Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import redis
from kombu.exceptions import OperationalError

from petiole.tasks.commands.batch import durable
from petiole.tasks.commands.batch.estimate import Estimate, estimate
from petiole.tasks.commands.terminal import is_rich
from petiole.tasks.errors import InvalidRequest, PetioleError
from petiole.tasks.submission.batches.api import batch
from petiole.tasks.submission.batches.batch import Batch
from petiole.tasks.submission.batches.progress import Progress, duration, line_of, rich_bar
from petiole.tasks.submission.batches.rows import formats, sorting

TOLD_EVERY_S = 10.0
_SHOWN = 200


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "input",
        help="JSONL, CSV, TSV or Parquet; .gz, too; -: JSONL from standard input. Or, of batches with --detach: "
        "list, or show, cancel or resume with an ID",
    )
    command.add_argument("id", nargs="?", help="with show, cancel and resume: of a batch, or its output")
    command.add_argument("-o", "--output", help="a line for each row; JSONL, CSV, TSV or Parquet, by its name")
    command.add_argument("--task", default="generate", help="of rows that name none (default: %(default)s)")
    command.add_argument(
        "--prompt", help="with columns in braces, such as 'Summarize: {text}'; the rows are data then"
    )
    command.add_argument("--system", help="with --prompt and --task chat: a system message before it")
    command.add_argument(
        "--column", action="append", default=[], metavar="OPTION=COLUMN", help="take an option from a column"
    )
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an option of all rows, such as max_tokens=64: JSON, or text; @FILE: what the file has; @@ is an @",
    )
    command.add_argument("--fields", help="parts of the results to write, with commas, such as text,usage")
    command.add_argument("--order", choices=("input", "ended"), default="input", help="of the output's lines")
    command.add_argument(
        "--sort",
        choices=sorting.SORTS,
        help="prefix: rows that begin alike together, for the cache; length: the longest first",
    )
    command.add_argument("--format", choices=formats.KINDS, help="of the input (default: by its name)")
    command.add_argument("--encoding", help="of an input of text (default: utf-8)")
    command.add_argument(
        "--lines", choices=("auto", "requests", "openai"), default="auto", help="openai: OpenAI's batch lines"
    )
    command.add_argument("--queue", help="of other workers")
    command.add_argument("--model", help="by one of its names: chooses the queue")
    command.add_argument("--priority", type=int, help="default: the lowest")
    command.add_argument(
        "--dry-run", action="store_true", help="check all rows, run a sample, and estimate tokens and time"
    )
    command.add_argument("--sample", type=int, metavar="ROWS", help="with --dry-run (default: twice the places)")
    command.add_argument("--detach", action="store_true", help="let the workers run it, without this process")
    command.add_argument(
        "--expires-after", type=float, metavar="HOURS", help="with --detach: end it then (default: never)"
    )
    command.add_argument("--wait", action="store_true", help="with --detach, resume and show: until it has ended")
    command.add_argument("--json", action="store_true", help="with list and show: print JSON")
    command.add_argument("--leased", action="store_true", help=argparse.SUPPRESS)
    command.add_argument(
        "--keep-going", action="store_true", help="although the first ten rows fail alike, which ends it otherwise"
    )
    command.add_argument("--retry-failed", action="store_true", help="send rows again that have failed")


def run(options: argparse.Namespace) -> int:
    if options.input in durable.VERBS:
        return durable.run(options)
    if options.id is not None:
        raise InvalidRequest("ID", f"is for {', '.join(durable.VERBS)} alone", options.id)
    if options.detach and options.input == "-":
        raise InvalidRequest("input", "must be a file, with --detach", "-")
    if options.detach and options.encoding is not None:
        raise InvalidRequest("--encoding", "has no place with --detach, whose inputs are UTF-8", options.encoding)
    if options.output is None and not options.dry_run:
        raise InvalidRequest("--output", "must be given, unless --dry-run is", "nothing")
    submission = {name: getattr(options, name) for name in ("queue", "model", "priority")}
    made = batch(
        options.input,
        None if options.dry_run else options.output,
        task=options.task,
        prompt=options.prompt,
        system=options.system,
        columns=dict(_pair("--column", one) for one in options.column),
        fields=options.fields and options.fields.split(","),
        format=options.format,
        file_encoding=options.encoding or "utf-8",
        keep_going=options.keep_going,
        lines=options.lines,
        order=options.order,
        sort=options.sort,
        retry_failed=options.retry_failed,
        **{name: _value(name, text) for name, text in (_pair("--set", one) for one in options.set)},
        **{name: value for name, value in submission.items() if value is not None},
    )
    if options.detach and not options.dry_run:
        return durable.detach(made, options)
    try:
        if options.dry_run:
            return show_estimate(estimate(made, options.sample))
        with stopped_by_signals(made), watching(options.output) as watch:
            progress = made.run(watch)
    except (PetioleError, OperationalError, redis.RedisError, OSError):
        raise
    except Exception as error:
        goes_on = "" if options.dry_run else ". The same command goes on"
        print(f"petiole: {fault(error)}{goes_on}", file=sys.stderr)
        return 1
    print(summary(made, options.output), file=sys.stderr)
    if not made.complete:
        return 130
    return 1 if progress.failed else 0


def fault(error: Exception) -> str:
    """An error of the code, in one line, which says where the traceback is."""
    lines = str(error).strip().splitlines() or [""]
    with tempfile.NamedTemporaryFile("w", prefix="petiole-batch-", suffix=".log", delete=False) as log:
        log.writelines(traceback.format_exception(error))
    what = f"{type(error).__name__}: {lines[0][:_SHOWN]}"
    return f"stopped by a fault of the code, {what}. {log.name} has its traceback"


def show_estimate(found: Estimate) -> int:
    for row, why in found.refusals:
        print(f"row {row}: {why}")
    if found.refused > len(found.refusals):
        print(f"... and {found.refused - len(found.refusals):,} more")
    print(f"{found.rows:,} rows, {found.refused:,} of them refused")
    print(f"of {found.sampled:,} sampled rows {found.failed:,} failed")
    print(
        f"about {found.prompt_tokens:,} tokens in prompts, {found.completion_tokens:,} made, in "
        f"{duration(found.seconds)}, while the fleet is as busy as now"
    )
    return 1 if found.refused or found.failed else 0


def _pair(option: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InvalidRequest(option, "must be NAME=VALUE", text)
    return name, value


def _value(option: str, text: str) -> Any:
    if option in inspect.signature(batch).parameters:
        raise InvalidRequest(f"--set {option}", "is no option of a task here: the command has its own", text)
    if text.startswith("@@"):
        text = text[1:]
    elif text.startswith("@"):
        try:
            text = Path(text[1:]).read_text("utf-8-sig")
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"--set {option}", f"must name a file of text ({error})", text) from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@contextlib.contextmanager
def stopped_by_signals(made: Batch) -> Iterator[None]:
    """The first Ctrl-C, or SIGTERM, stops the batch; the second one ends the process."""

    def stop(number: int, _: object) -> None:
        made.stop()
        signal.signal(number, before[number])

    before = {int(number): signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def watching(name: str) -> Iterator[Callable[[Progress], None]]:
    """Shows progress: a bar on a terminal, otherwise a line now and then."""
    if not is_rich():
        told_at = time.monotonic()

        def tell(progress: Progress) -> None:
            nonlocal told_at
            if time.monotonic() - told_at >= TOLD_EVERY_S:
                told_at = time.monotonic()
                print(f"{name}: {line_of(progress)}", file=sys.stderr, flush=True)

        yield tell
        return
    with rich_bar(name) as show:
        yield show


def summary(made: Batch, output: str) -> str:
    """What a run has done, in one line."""
    progress = made.progress
    ran = progress.ended - progress.before
    if made.complete and not ran:
        return f"petiole: {output} is complete: {progress.ended:,} rows, {progress.failed:,} failed"
    rate = ran / progress.seconds if progress.seconds else 0.0
    did = (
        f"{ran:,} rows in {duration(progress.seconds)} ({rate:,.1f} rows/s), {progress.failed:,} of "
        f"{progress.ended:,} failed; tokens: {progress.prompt_tokens:,} in prompts, "
        f"{progress.cached_prompt_tokens:,} of them cached, {progress.completion_tokens:,} made"
    )
    if made.sort == "prefix" and progress.prompt_tokens:
        saved = progress.cached_prompt_tokens / progress.prompt_tokens
        did += f". Sorted by prefix: {saved:.0%} of the prompts' tokens were not computed"
    if progress.failure:
        did += f". The first that failed: {progress.failure}"
    if made.complete:
        return f"petiole: {output}: {did}"
    return (
        f"petiole: stopped: {did}. {progress.on_their_way:,} tasks go on in the workers. The same command finds "
        f"their results and goes on"
    )
