"""Text from outside, as a log or a terminal shows it: no character in it begins a line, moves the cursor, changes
the direction of writing, or cannot be encoded. Such characters are escaped as in Python, `\\n` or `\\x1b`.

    line, text   escape text: the first also newlines and tabs
    install      a process's log: what is put into a message is one line, whoever logs it. Called by a worker and
                 by the gateway

A terminal is `tasks.commands.terminal`'s."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Number
from typing import Any

_ODD = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT, _IN_LINE = re.compile(f"[{_ODD}]"), re.compile(f"[{_ODD}\\t\\n]")
MOST_CAUSES = 10


def text(said: str) -> str:
    """Text of several lines."""
    return _IN_TEXT.sub(_escaped, said)


def line(said: str) -> str:
    return _IN_LINE.sub(_escaped, said)


def is_plain(said: str) -> bool:
    return _IN_TEXT.search(said) is None


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


# ---------------------------------------------------------------- the log


class _Shown:
    """A value of a log message, in one line."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __str__(self) -> str:
        return line(str(self._value))

    def __repr__(self) -> str:
        return line(repr(self._value))


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802 - logging's name
        """The message. Every formatter asks for it before it looks for the text of an exception."""
        said = super().getMessage()
        if _IN_LINE.search(said) is not None:  # which of its parts have such characters is looked at only then
            said = self.msg if isinstance(self.msg, str) else line(str(self.msg))
            said = text(said % _shown(self.args) if self.args else said)
        if self.exc_info and not self.exc_text:
            self.exc_text = traceback_of(self.exc_info)
        return said


def _shown(args: Any) -> Any:
    if isinstance(args, Mapping):
        return {name: _value(value) for name, value in args.items()}
    return tuple(map(_value, args))


def _value(value: object) -> object:
    return value if isinstance(value, Number) else _Shown(value)


def traceback_of(exc_info: Any) -> str:
    """As Python shows it, but each message of an exception is one line."""
    shown = logging.Formatter().formatException(exc_info)
    error = exc_info[1]
    for _ in range(MOST_CAUSES):
        if error is None:
            break
        if "\n" in (message := str(error)):
            shown = shown.replace(message, line(message))
        error = error.__cause__ or error.__context__
    return text(shown)


@cache
def _kind(stock: Any) -> Any:
    """A class of records, made plain."""
    return type(stock.__name__, (_Record, stock), {})


def install() -> None:
    """From now on, for all records of this process, whoever makes them and however they are formatted."""
    make = logging.getLogRecordFactory()
    if not getattr(make, "plain", False):
        logging.setLogRecordFactory(factory(make))


def factory(make: Callable[..., logging.LogRecord]) -> Callable[..., logging.LogRecord]:
    def made(*args: Any, **options: Any) -> logging.LogRecord:
        record = make(*args, **options)
        record.__class__ = _kind(type(record))  # type: ignore[arg-type]
        return record

    made.plain = True  # type: ignore[attr-defined]
    return made
