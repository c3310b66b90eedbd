"""`petiole.batch`. Importing it imports nothing else of this folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from petiole import _lazy
from petiole.tasks.app.application import app as celery_app

if TYPE_CHECKING:
    from petiole.tasks.submission.batches import batch as loop, journal, progress
    from petiole.tasks.submission.batches.batch import Batch
    from petiole.tasks.submission.batches.durable import fair_share
    from petiole.tasks.submission.batches.rows import frames, row_types, sources
else:
    loop = _lazy.module("petiole.tasks.submission.batches.batch")
    row_types = _lazy.module("petiole.tasks.submission.batches.rows.row_types")
    journal = _lazy.module("petiole.tasks.submission.batches.journal")
    progress = _lazy.module("petiole.tasks.submission.batches.progress")
    frames = _lazy.module("petiole.tasks.submission.batches.rows.frames")
    fair_share = _lazy.module("petiole.tasks.submission.batches.durable.fair_share")
    sources = _lazy.module("petiole.tasks.submission.batches.rows.sources")

ALLOWED = frozenset({"queue", "model", "priority", "headers", "time_limit", "soft_time_limit", "confirm"})
"""The options of a submission that a batch takes."""


def batch(
    rows: str | Path | Iterable[Mapping[str, Any] | str] | Any,
    output: str | Path | None = None,
    *,
    task: str = "generate",
    prompt: str | None = None,
    system: str | None = None,
    columns: Mapping[str, str] | None = None,
    fields: Sequence[str] | None = None,
    format: Literal["jsonl", "csv", "tsv", "parquet"] | None = None,
    file_encoding: str = "utf-8",
    lines: Literal["auto", "requests", "openai"] = "auto",
    order: Literal["input", "ended"] = "input",
    sort: Literal["prefix", "length"] | None = None,
    retry_failed: bool = False,
    keep_going: bool = False,
    app: Any = celery_app,
    **options: Any,
) -> Batch:
    """Many rows as tasks of the lowest priority, each exactly once. `run()` runs the batch; iterating yields
    results as rows end.

        petiole.batch("in.jsonl", "out.jsonl", max_tokens=64).run()
        for result in petiole.batch(rows, prompt="Summarize: {text}"):
            print(result.row, result.line)

    rows        the path of a JSONL, CSV, TSV or Parquet file, of `file_encoding` if it is text; a frame, table or
                data set of pandas, polars, pyarrow or datasets; or an iterable of objects. Read as they are sent
    output      a path, whose name says its format, as above. Its journal beside it says which rows have ended, so
                the same call goes on where a killed process stopped. Without `output` the results are in this
                process alone, and rows on their way are cancelled when the caller stops
    task        of rows that name none
    options     of all rows; a row's own win. Of a submission's a batch takes those that `ALLOWED` names
    prompt      rows are data, and this is the prompt, with columns in braces. `system`: for `chat`, a message
                before it. `columns`: by option, the column that it is taken from
    fields      the parts of a result that lines have
    lines       `openai` for OpenAI's batch lines; `auto` looks at the first row
    order       of the output's lines
    sort        in which order rows are sent: `prefix` puts those together that begin alike, so that the cache has
                their beginning; `length` begins with the longest. All rows go through temporary files first
    retry_failed  send rows again that failed in an earlier run
    keep_going  although the first ten rows fail alike, which otherwise ends the batch with a `BatchError`

    Raises `InvalidRequest`, and `BatchError` where an output is of another batch. See docs/batch.md."""
    from petiole.tasks.errors import InvalidRequest
    from petiole.tasks.submission.options import apart

    try:
        request, submission = apart(frames.plain(options))
    except RecursionError:
        raise InvalidRequest("options", "must be nested less deeply", sorted(options)) from None
    for name in sorted(submission.keys() - ALLOWED):
        raise InvalidRequest(
            name, f"is not for a batch, which takes {', '.join(sorted(ALLOWED))}", submission[name]
        )
    for name, given, known in (
        ("order", order, ("input", "ended")),
        ("lines", lines, ("auto", "requests", "openai")),
        ("sort", sort, (None, "prefix", "length")),
    ):
        if given not in known:
            raise InvalidRequest(name, f"must be one of {', '.join(filter(None, known))}", given)
    written = None if output is None else journal.OutputFiles(str(output))
    if written is not None:
        written.check()
    source = sources.source_of(rows, format, file_encoding)
    plain = prompt is None and not columns
    if lines == "openai" or (
        lines == "auto" and plain and (row := source.peek()) and row_types.is_openai_line(row)
    ):
        form = row_types.openai_lines(options=request)
    else:
        form = row_types.RequestRows(task, request, prompt, columns or {}, system, fields)
        form.check(source.columns)
    return loop.Batch(
        app,
        source,
        form,
        written,
        submission,
        in_order=order == "input",
        sort=sort,
        again=retry_failed,
        first=None if keep_going else progress.FirstRows(),
        sharing=fair_share.SharingWithOthers(),
    )
