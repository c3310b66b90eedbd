"""What a batch says while it runs: how far it is, in a line or a bar, and whether all of it is a mistake."""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)

SHOWN_EVERY_S = 0.25
MOST_ALIKE = 10
"""Rows that fail alike, from the first one on, before a batch ends."""


@dataclass
class Progress:
    """How far a batch is. `rows`: how many there are, if that is known. `ended`: with those of earlier runs, and
    `before`: those alone. `failure`: of the first row here that has failed. `note`: why nothing goes on."""

    rows: int | None = None
    ended: int = 0
    failed: int = 0
    before: int = 0
    on_their_way: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    rows_per_s: float = 0.0
    seconds: float = 0.0
    failure: str = ""
    note: str = ""

    @property
    def remaining_s(self) -> float | None:
        if self.rows is None or not self.rows_per_s:
            return None
        return max(self.rows - self.ended, 0) / self.rows_per_s


@dataclass
class FirstRows:
    """How the first `MOST_ALIKE` rows have ended, whatever ended before them. If all have failed alike, the others
    would, too: the mistake is the batch's."""

    whys: dict[int, str] = field(default_factory=dict)
    failure: str = ""
    """What a terminal shows of the first row, if it has failed."""

    def ended(self, row: int, why: str, failure: str = "") -> None:
        """`why`: of rows that fail alike the same; empty: this row is good, or nobody knows."""
        if row < MOST_ALIKE:
            self.whys[row] = why
        if row == 0:
            self.failure = failure

    @property
    def alike(self) -> bool:
        return len(self.whys) == MOST_ALIKE and all(self.whys.values()) and len({*self.whys.values()}) == 1


# ------------------------------------------------------------ in a line, or a bar

Watch = Callable[[Progress], None]


def line_of(progress: Progress) -> str:
    rows = f"{progress.ended:,}" + (f" of {progress.rows:,}" if progress.rows is not None else "")
    return ", ".join([f"{rows} rows", *_beside(progress)])


def _beside(progress: Progress) -> list[str]:
    parts = [f"{progress.rows_per_s:,.1f} rows/s"]
    if progress.remaining_s is not None:
        parts.append(f"{duration(progress.remaining_s)} left")
    parts.append(f"{progress.prompt_tokens:,} + {progress.completion_tokens:,} tokens")
    parts += [f"{progress.failed:,} failed"] if progress.failed else []
    parts += [progress.note] if progress.note else []
    return parts


def duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


@contextmanager
def watched(name: str, watch: Watch | None) -> Iterator[Watch]:
    """`watch`; without one, in a notebook, a bar of tqdm or rich if one of them is there; else the log."""
    if watch is not None:
        yield watch
    elif not _is_notebook():
        yield standstills(name)
    elif importlib.util.find_spec("tqdm") is not None:
        with tqdm_bar(name) as shown:
            yield shown
    elif importlib.util.find_spec("rich") is not None:
        with rich_bar(name) as shown:
            yield shown
    else:
        yield standstills(name)


def standstills(name: str) -> Watch:
    """Logs why nothing goes on: once, until it goes on again."""
    told = False

    def tell(progress: Progress) -> None:
        nonlocal told
        if progress.note and not told:
            logger.warning("%s: %s", name, progress.note)
        told = bool(progress.note)

    return tell


def _is_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    python = sys.modules.get("IPython")
    shell = None if python is None else python.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


@contextmanager
def tqdm_bar(name: str) -> Iterator[Watch]:
    from tqdm.auto import tqdm

    with tqdm(desc=name, unit="rows") as bar:

        def draw(progress: Progress) -> None:
            bar.total, bar.n = progress.rows, progress.ended
            bar.set_postfix_str(", ".join(_beside(progress)[1:]), refresh=False)
            bar.refresh()

        with _now_and_then(draw) as show:
            yield show


@contextmanager
def rich_bar(name: str) -> Iterator[Watch]:
    from rich.progress import BarColumn, Progress as Bar, TaskProgressColumn, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
    with Bar(*columns, TextColumn("{task.fields[said]}", markup=False), auto_refresh=False) as bar:
        shown = bar.add_task(name, total=None, said="")

        def draw(progress: Progress) -> None:
            bar.update(shown, total=progress.rows, completed=progress.ended, said=line_of(progress))
            bar.refresh()

        with _now_and_then(draw) as show:
            yield show


@contextmanager
def _now_and_then(draw: Watch) -> Iterator[Watch]:
    """Draws every `SHOWN_EVERY_S`, and at the end."""
    latest: Progress | None = None
    drawn_at = float("-inf")

    def show(progress: Progress) -> None:
        nonlocal latest, drawn_at
        latest = progress
        if time.monotonic() - drawn_at >= SHOWN_EVERY_S:
            drawn_at = time.monotonic()
            draw(progress)

    try:
        yield show
    finally:
        if latest is not None:
            draw(latest)
