"""What a format is: two functions of the tensors beside a name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from petiole.gpu_worker.models.weights.formats.layer_tensors import LayerTensors
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """kind: a value of `declared.METHODS`; name: for messages and logs. form: checks all but the codes, before
    memory is taken. read: fills memory of that form, and returns the bytes that it has read. fills: whether it
    fills memory of another form, too."""

    kind: str
    name: str
    form: Callable[[LayerTensors], CodeLayout]
    read: Callable[[LayerTensors, Coded], int]
    fills: Callable[[LayerTensors, CodeLayout], bool] = lambda beside, form: False
