"""Tables, live views and errors, with rich if it is installed and stdout is a terminal, otherwise as text."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from kombu.exceptions import OperationalError

from petiole import plain
from petiole.contract.settings.urls import redacted
from petiole.tasks import settings
from petiole.tasks.errors import PetioleError, Unavailable

Row = Sequence[str]


class Plain:
    """A stream whose text stays what it is: a model's or a tenant's name moves no cursor (`petiole.plain`)."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, said: str) -> int:
        self.stream.write(plain.text(said))
        return len(said)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def plainly() -> Iterator[None]:
    """All that is printed or logged here is plain. Standard output into a file or a pipe is data: it stays as
    it is."""
    plain.install()
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = Plain(out) if out.isatty() else out, Plain(err)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


def console() -> Any:
    """Rich's, which writes codes of its own: what is given to it must be plain."""
    from rich.console import Console

    return Console(file=getattr(sys.stdout, "stream", sys.stdout))


def is_rich() -> bool:
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def print_table(columns: Row, rows: Sequence[Row]) -> None:
    if not is_rich():
        print(table_text(columns, rows))
        return
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*map(plain.line, row))
    console().print(table, markup=False)


def table_text(columns: Row, rows: Sequence[Row]) -> str:
    """A table as text; columns are as wide as their widest cells."""
    rows = [[*map(plain.line, row)] for row in rows]
    widths = [max(len(row[column]) for row in [columns, *rows]) for column in range(len(columns))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *rows]
    )
    return "\n".join(line.rstrip() for line in lines)


def live(text: Callable[[], str], *, every_s: float) -> int:
    """Show `text()` every `every_s` seconds until Ctrl-C, in place if rich is available. Returns 0."""
    try:
        if not is_rich():
            while True:
                print(text(), flush=True)
                time.sleep(every_s)
        from rich.live import Live

        with Live(_dimmed(text()), console=console(), auto_refresh=False, screen=False) as view:
            while True:
                time.sleep(every_s)
                view.update(_dimmed(text()), refresh=True)
    except KeyboardInterrupt:
        return 0


def _dimmed(text: str) -> Any:
    """`text` with the rows of lost workers dimmed."""
    from rich.text import Text

    shown = Text(plain.text(text), no_wrap=True)
    shown.highlight_regex(r"(?m)^\S+ +lost .*$", "dim")
    return shown


def _away(url: str, said: str) -> str:
    """A line about the server at `url` that cannot be reached, and which variable may be missing."""
    line = f"{redacted(url)} is not available: {said.rstrip('.')}"
    if os.environ.get("DJANGO_SETTINGS_MODULE"):
        return line
    if Path("manage.py").is_file():
        return f"{line}. To read the settings of this Django project, set DJANGO_SETTINGS_MODULE"
    default = settings.Settings.model_fields["broker_url"].default
    return f"{line}. That is the default: PETIOLE_BROKER_URL is not set here" if url == default else line


def error_text(error: Exception) -> str:
    """The error; with the URL of the server that does not answer."""
    said, current = str(error) or type(error).__name__, settings.settings()
    match error:
        case Unavailable():
            return _away(error.url, error.reason)
        case PetioleError():
            return said
        case OperationalError():
            return _away(current.broker_url, said)
        case redis.ConnectionError() | redis.TimeoutError():
            return _away(current.streams_url, said)
    return said
