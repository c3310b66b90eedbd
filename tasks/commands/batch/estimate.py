"""What a batch would cost: all its rows are checked, and some of them are run."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from petiole.contract.tasks import TASKS
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.submission.batches.batch import Batch
from petiole.tasks.submission.batches.rows.sources import Row, Source
from petiole.tasks.submission.options import apart, parse

SHOWN = 5
SMALLEST_SAMPLE = 64


@dataclass
class Estimate:
    """`rows`: all; `refused`: those that no worker would take, and `refusals`, the first of these with what is
    wrong. `sampled` rows were run, of which `failed` failed; the other figures are for all rows that are not
    refused."""

    rows: int = 0
    refused: int = 0
    refusals: list[tuple[int, str]] = field(default_factory=list)
    sampled: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0


def estimate(batch: Batch, sample: int | None = None) -> Estimate:
    """Check all rows, and run `sample` of them, chosen at random: by default as many as the workers hold twice, so
    that they are as full as the batch will make them. Uses the rows of an iterable up. Their results are
    dropped."""
    found, chosen = Estimate(), list[Row]()
    drawn = random.Random(0)  # the same rows each time
    if sample is None:
        sample = max(SMALLEST_SAMPLE, 2 * (batch.exchange.fleet().places or 0))
    for row in batch.source:
        found.rows += 1
        try:
            _check(batch, row)
        except InvalidRequest as error:
            found.refused += 1
            if len(found.refusals) < SHOWN:
                found.refusals.append((row.number, str(error)))
            continue
        good = found.rows - found.refused
        if len(chosen) < sample:
            chosen.append(row)
        elif (place := drawn.randrange(good)) < sample:
            chosen[place] = row
    ran = Batch(batch.app, Source("sample", iter(chosen), len(chosen)), batch.form, None, batch.submission).run()
    scale = (found.rows - found.refused) / max(ran.ended, 1)
    found.sampled, found.failed = ran.ended, ran.failed
    found.prompt_tokens, found.completion_tokens = (
        round(scale * ran.prompt_tokens),
        round(scale * ran.completion_tokens),
    )
    found.seconds = scale * ran.seconds
    return found


def _check(batch: Batch, row: Row) -> None:
    """Raises `InvalidRequest`."""
    for call in batch.form.work(row).calls:
        batch.exchange.task(call.task)
        if call.task in TASKS:
            parse(call.task, (), apart(call.options)[0])
