"""Tries a stranger's tokenizer.json in a process of its own before this process loads it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from petiole.gpu_worker.children import Child, ChildEnded
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_BYTES, check_file
from petiole.gpu_worker.text.foreign import _tokenizer_process
from petiole.gpu_worker.text.foreign._tokenizer_process import CPU_S, MEMORY_BYTES


def check_tokenizer(path: Path) -> None:
    """Raises ModelError for a tokenizer that would take too much of a text, or too much to be read."""
    check_file(path, MAX_BYTES)
    found = path.stat()
    _check(path, (found.st_ino, found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=64)
def _check(path: Path, content: tuple[int, ...]) -> None:
    """content: tells the file from another one of this name."""
    child = Child(_tokenizer_process.__file__)
    try:
        answer = child.ask(str(path.absolute()))
    except ChildEnded:
        limits = f"{CPU_S:g} s of processor time and {MEMORY_BYTES} bytes of memory"
        raise ModelError(f"{path}: must be read, and encode short texts, within {limits}: it took more") from None
    finally:
        child.close()
    if refused := answer.get("refused"):
        field, limit, value = refused
        raise ModelError(f"{path}: {field} {limit}, got {value}")
