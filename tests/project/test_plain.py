"""What comes from outside stays in its line: in the log of a worker and of the gateway, and on a terminal."""

from __future__ import annotations

import ast
import io
import logging
from collections.abc import Iterator
from functools import cache
from typing import Any, TypeGuard

import pytest

from petiole import plain
from petiole.tasks.commands import cli
from petiole.tasks.commands.terminal import Plain, print_table, table_text
from petiole.tasks.worker.boot import log_redaction
from tests.project.test_structure import MODULES
from tests.support.hostile import FORGED
from tests.support.parsing import parsed

LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """The log of a worker."""
    make = logging.getLogRecordFactory()
    logging.setLogRecordFactory(logging.LogRecord)
    log_redaction.install()
    logging.getLogger().addHandler(handler := logging.StreamHandler(written := io.StringIO()))
    handler.setFormatter(logging.Formatter("[2026-01-01] %(message)s"))
    yield written
    logging.getLogger().removeHandler(handler)
    logging.setLogRecordFactory(make)


class Odd:
    def __str__(self) -> str:
        return FORGED

    __repr__ = __str__


def call(logger: logging.Logger, text: str, *args: Any, error: Exception | None = None) -> None:
    logger.error(text, *args, exc_info=error)


@pytest.mark.parametrize("name", ["petiole.tasks", "celery.worker", "an.application", "kombu"])
@pytest.mark.parametrize(
    ("text", "args"),
    [
        ("task %s", (FORGED,)),
        ("task %r and %d", (FORGED, 5)),
        ("task %s", (Odd(),)),
        ("task %a %.1f", (Odd(), 0.5)),
        ("task %(id)s %(n)d", ({"id": FORGED, "n": 1},)),
        ("task %s", (ValueError(FORGED),)),
        ("task %s", ([FORGED, "\ud800"],)),
    ],
)
def test_a_message_of_the_log_is_a_line(log: io.StringIO, name: str, text: str, args: Any) -> None:
    call(logging.getLogger(name), text, *args)
    (line, end) = log.getvalue().split("\n")
    assert plain.is_plain(line)
    assert line.startswith("[2026-01-01] task ")
    assert end == ""


@pytest.mark.parametrize("name", ["petiole.tasks", "celery.worker", "an.application"])
@pytest.mark.parametrize("error", [ValueError(FORGED), OSError(FORGED), Exception(FORGED)])
def test_an_exception_begins_no_line_of_the_log(log: io.StringIO, name: str, error: Exception) -> None:
    error.__cause__ = KeyError(FORGED)
    call(logging.getLogger(name), "failed", error=error)
    assert all(map(plain.is_plain, log.getvalue().split("\n")))
    assert "\n[2026" not in log.getvalue()


def test_a_message_that_has_lines_keeps_them(log: io.StringIO) -> None:
    logging.getLogger("an.application").error("a\n\tb\x1b[1m %d%%", 5)
    assert log.getvalue() == "[2026-01-01] a\n\tb\\x1b[1m 5%\n"


def test_the_loggers_of_tasks_begin_no_line_with_an_id() -> None:
    from celery.app.log import TaskFormatter

    from petiole.tasks.worker.boot import program

    stock = vars(TaskFormatter).get("formatMessage")
    program.task_in_a_line()
    try:
        formatter = TaskFormatter("%(task_name)s[%(task_id)s] %(message)s", use_color=False)
        record = logging.makeLogRecord({"msg": "said", "task_id": FORGED, "task_name": "t"})
        shown = formatter.format(record)
    finally:
        del TaskFormatter.formatMessage
    assert stock is None
    assert "\n" not in shown
    assert plain.is_plain(shown)


def logged(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logger" | "access"), attr=level), args=[text, *_]):
                if level in LEVELS:
                    yield text


TREES = cache(
    lambda: {name: parsed(path.read_text()) for name, path in MODULES.items() if name.startswith("petiole")}
)


def test_what_is_logged_is_an_argument_and_not_part_of_the_message() -> None:
    """Only an argument is known to be from outside."""
    for name, tree in TREES().items():
        for text in logged(tree):
            assert isinstance(text, ast.Constant), f"{MODULES[name]}:{text.lineno}"


def test_whoever_sets_up_a_log_sets_up_one_of_lines() -> None:
    for name, tree in TREES().items():
        calls = {ast.unparse(node.func) for node in ast.walk(tree) if is_call(node)}
        if calls & {"logging.basicConfig", "logging.config.dictConfig"}:
            assert "plain.install" in calls, name


def is_call(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call)


# ---------------------------------------------------------------- terminals


def test_a_cell_begins_no_row() -> None:
    table = table_text(["name", "state"], [[FORGED, "lost"]])
    assert len(table.splitlines()) == 2
    assert plain.is_plain(table)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rich_gets_plain_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stdout", Plain(terminal := Terminal()))
    print_table(["name"], [[FORGED]])
    assert "\x1b[2J" not in terminal.getvalue()
    assert r"\x1b[2J" in terminal.getvalue()


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_every_command_prints_plainly(monkeypatch: pytest.MonkeyPatch, stream: type[io.StringIO]) -> None:
    """A pipe gets the output as it is: it is data. Standard error is for people, wherever it goes."""
    out, err = stream(), stream()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr(cli, "show_settings", lambda options: print(FORGED) or 0)
    monkeypatch.setattr(cli.settings, "misspelt", lambda: [FORGED])
    assert cli.main(["settings"]) == 0
    assert plain.is_plain(err.getvalue())
    assert plain.is_plain(out.getvalue()) == out.isatty()


@pytest.mark.parametrize("name", [name for name in sorted(MODULES) if name.startswith("petiole.tasks.commands")])
def test_whatever_rich_shows_it_shows_on_the_one_console(name: str) -> None:
    """Its codes are not escaped: so another console would be a way around."""
    for node in ast.walk(parsed(MODULES[name].read_text())):
        match node:
            case ast.Call(func=ast.Name(id="Console")):
                assert name.endswith(".terminal")
            case ast.Call(func=ast.Name(id="Live" | "Bar"), keywords=given):
                assert "console" in {keyword.arg for keyword in given}
            case ast.Attribute(value=ast.Name(id="sys"), attr="__stdout__" | "__stderr__"):
                raise AssertionError(f"{name} writes around what escapes")
