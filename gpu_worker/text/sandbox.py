"""Runs chat templates in one process of their own, so that no template can block this process or fill its memory.

The other process limits itself (`_template_process`): the kernel ends it when a template computes for too long,
and its memory is limited. It ends when its standard input closes, so it ends with this process. After it has
ended, the next template starts it anew. Threads take turns."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from petiole.gpu_worker.text import _template_process
from petiole.gpu_worker.text._template_process import CPU_S, MEMORY_BYTES, read, write


class TemplateFailed(Exception):  # noqa: N818
    """A template does not compile or gave no text. `refused`: the template or jinja2 raised an error."""

    def __init__(self, problem: str, *, refused: bool = False) -> None:
        super().__init__(problem)
        self.refused = refused


_lock = threading.Lock()
_process: subprocess.Popen[bytes] | None = None


def _after_fork() -> None:
    """Forget the parent's process: nobody but the parent may use its pipes."""
    global _lock, _process
    _lock, _process = threading.Lock(), None


os.register_at_fork(after_in_child=_after_fork)


def compile_template(source: str) -> None:
    """Check that a template compiles. Raises TemplateFailed."""
    _ask([source, None])


def render(source: str, variables: Mapping[str, Any]) -> str:
    """The text that a template renders from plain data. Raises TemplateFailed."""
    return _ask([source, variables])


def _ask(question: list[Any]) -> str:
    global _process
    with _lock:
        if _process is None or _process.poll() is not None:
            _process = _started()
        assert _process.stdin is not None
        assert _process.stdout is not None
        try:
            write(_process.stdin, question)
            answer = read(_process.stdout)
        except (EOFError, BrokenPipeError):
            _process.kill()
            _process.wait()
            _close(_process)
            _process = None
            limits = f"at most {CPU_S:g} s and {MEMORY_BYTES} bytes of memory"
            raise TemplateFailed(f"the chat template must take {limits}: it took more and was stopped") from None
        except (ValueError, RecursionError) as error:  # a number too long for JSON; nothing was sent
            raise TemplateFailed(f"they cannot be passed to the chat template: {error}") from error
    if "text" in answer:
        return str(answer["text"])
    raise TemplateFailed(str(answer.get("refused") or answer.get("failed")), refused="refused" in answer)


def _started() -> subprocess.Popen[bytes]:
    program = [sys.executable, "-P", _template_process.__file__]
    return subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # the unsent rest
                pipe.close()
