"""Compiles and renders chat templates: a job of `children`, run in a process of its own.

jinja2's immutable sandbox keeps a template from everything but plain data. A timer of the kernel ends the process
once a template has computed for `CPU_S`, even inside one long operation (a product of text, a regular expression).
The process gets no more than `MEMORY_BYTES` of address space. Both limits hold for compiling, too, because jinja2
then computes constants. The file imports nothing of Petiole, so it starts at once."""

from __future__ import annotations

import json
import signal
from collections import OrderedDict
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S = 2.0
MEMORY_BYTES = 2**30
MAX_CHARACTERS = 2**24
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


_compiled: OrderedDict[str, jinja2.Template] = OrderedDict()


def answer(question: tuple[str, dict[str, Any] | None]) -> dict[str, str]:
    """The text of a template with these variables. Without variables the template is only compiled."""
    source, variables = question
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        if source not in _compiled:
            _compiled[source] = _environment().from_string(source)
        _compiled.move_to_end(source)
        if len(_compiled) > _COMPILED:
            _compiled.popitem(last=False)
        text = "" if variables is None else _compiled[source].render(variables)
        if len(text) > MAX_CHARACTERS:
            return {"failed": f"the chat template must make at most {MAX_CHARACTERS} characters, got {len(text)}"}
        return {"text": text}
    except Exception as error:  # a template runs arbitrary expressions on the messages
        return _problem(error)
