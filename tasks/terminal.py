"""Tables and live views: with rich where it is installed and somebody is looking, as plain text otherwise."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Row = Sequence[str]


def is_rich() -> bool:
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def print_table(columns: Row, rows: Sequence[Row]) -> None:
    if not is_rich():
        print(table_text(columns, rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


def table_text(columns: Row, rows: Sequence[Row]) -> str:
    """Columns as wide as their widest cell."""
    widths = [max(len(row[column]) for row in [columns, *rows]) for column in range(len(columns))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *rows]
    )
    return "\n".join(line.rstrip() for line in lines)


def live(text: Callable[[], str], *, every_s: float) -> int:
    """Show `text()` anew, in place where rich is installed, until interrupted: Ctrl-C is how it ends."""
    try:
        if not is_rich():
            while True:
                print(text(), flush=True)
                time.sleep(every_s)
        from rich.live import Live

        with Live(_dimmed(text()), auto_refresh=False, screen=False) as view:
            while True:
                time.sleep(every_s)
                view.update(_dimmed(text()), refresh=True)
    except KeyboardInterrupt:
        return 0


def _dimmed(text: str) -> Any:
    """Lines about what is lost, dim."""
    from rich.text import Text

    shown = Text(text, no_wrap=True)
    shown.highlight_regex(r"(?m)^\S+ +lost .*$", "dim")
    return shown
