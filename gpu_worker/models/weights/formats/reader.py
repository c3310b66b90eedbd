"""What a format is: two functions of the tensors beside a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from petiole.gpu_worker.models.weights.coded import Coded, Form
from petiole.gpu_worker.models.weights.formats.beside import Beside


@dataclass(frozen=True, slots=True)
class Format:
    """kind: a value of `declared.METHODS`; name: for messages and logs. form: checks all but the codes, before
    memory is taken. read: fills memory of that form, and returns the bytes that it has read."""

    kind: str
    name: str
    form: Callable[[Beside], Form]
    read: Callable[[Beside, Coded], int]
