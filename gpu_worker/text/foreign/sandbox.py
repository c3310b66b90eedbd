"""Runs chat templates in a process of their own, so that no template can block this process or fill its memory.

The other process has limits of time and memory (`children`). A template that takes more ends it, and fails its
request alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from petiole.gpu_worker.children import Child, ChildEnded
from petiole.gpu_worker.text.foreign import _template_process
from petiole.gpu_worker.text.foreign._template_process import CPU_S, MEMORY_BYTES


class TemplateFailed(Exception):  # noqa: N818
    """A template does not compile or gave no text. `refused`: the template or jinja2 raised an error."""

    def __init__(self, problem: str, *, refused: bool = False) -> None:
        super().__init__(problem)
        self.refused = refused


_child = Child(_template_process.__file__)


def compile_template(source: str) -> None:
    """Check that a template compiles. Raises TemplateFailed."""
    _ask([source, None])


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a template renders from plain data. Raises TemplateFailed."""
    return _ask([source, variables])


def _ask(question: list[Any]) -> str:
    try:
        answer = _child.ask(question)
    except ChildEnded:
        limits = f"at most {CPU_S:g} s and {MEMORY_BYTES} bytes of memory"
        raise TemplateFailed(f"the chat template must take {limits}: it took more and was stopped") from None
    except (ValueError, RecursionError) as error:  # a number too long for JSON; nothing was sent
        raise TemplateFailed(f"they cannot be passed to the chat template: {error}") from error
    if "text" in answer:
        return str(answer["text"])
    raise TemplateFailed(str(answer.get("refused") or answer.get("failed")), refused="refused" in answer)
