"""Compiles and renders chat templates, one after the other, from standard input to standard output.

`sandbox` runs this module as a script, with nothing but pipes. All limits are set in here. jinja2's immutable
sandbox keeps a template from everything but plain data. A timer of the kernel ends the process once a template has
computed for `CPU_S`, even inside one long operation (a product of text, a regular expression). The process gets no
more than `MEMORY_BYTES` of address space. Both limits hold for compiling, too, because jinja2 then computes
constants.

A message, in either direction, is its length (8 bytes, little-endian) and JSON. The script imports nothing of
Petiole, so it starts at once."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
from collections import OrderedDict
from datetime import datetime
from typing import IO, Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S = 2.0
MEMORY_BYTES = 2**30
MAX_LETTERS = 2**24
_COMPILED = 64
"""How many compiled templates are kept."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here its content is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's `namespace()` without underscore names, which the sandbox does not check there."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, given = args[0], dict(*args[1:], **kwargs)
        for name in given:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, given)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace's name must not start with an underscore: {name!r}")


class _Dict:
    """`dict(...)` for templates, without the type's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own, this does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


def _problem(error: Exception) -> dict[str, Any]:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return {"refused": f"line {error.lineno}: {error.message}"}
    if isinstance(error, jinja2.TemplateError):
        return {"refused": str(error)}
    if isinstance(error, MemoryError):
        return {"failed": f"the chat template takes more than {MEMORY_BYTES} bytes of memory"}
    return {"failed": f"the chat template failed on them: {type(error).__name__}: {error}"}


def _answer(compiled: OrderedDict[str, jinja2.Template], source: str, variables: dict[str, Any] | None) -> Any:
    """The answer to a message. A message without `variables` only compiles its template."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        if source not in compiled:
            compiled[source] = _environment().from_string(source)
        compiled.move_to_end(source)
        if len(compiled) > _COMPILED:
            compiled.popitem(last=False)
        text = "" if variables is None else compiled[source].render(variables)
        if len(text) > MAX_LETTERS:
            return {"failed": f"the chat template must make at most {MAX_LETTERS} letters, got {len(text)}"}
        return {"text": text}
    except Exception as error:  # a template runs arbitrary expressions on the messages
        return _problem(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def read(pipe: IO[bytes]) -> Any:
    """The next message. Raises EOFError."""
    head = pipe.read(8)
    body = pipe.read(int.from_bytes(head, "little")) if len(head) == 8 else b""
    if not body:
        raise EOFError
    return json.loads(body)


def write(pipe: IO[bytes], message: Any) -> None:
    body = json.dumps(message).encode()
    pipe.write(len(body).to_bytes(8, "little") + body)
    pipe.flush()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # nothing else writes there
    compiled: OrderedDict[str, jinja2.Template] = OrderedDict()
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            source, variables = read(sys.stdin.buffer)
            write(answers, _answer(compiled, source, variables))


if __name__ == "__main__":
    main()
