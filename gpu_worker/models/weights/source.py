"""A checkpoint as the source of a model's weights, in whatever formats its layers are stored."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

from torch import Tensor

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.weights.formats.find import format_of
from petiole.gpu_worker.models.weights.formats.layer_tensors import BlockReader, LayerTensors
from petiole.gpu_worker.models.weights.formats.quantization_config import QuantizationConfig
from petiole.gpu_worker.models.weights.formats.reader import WeightFormat
from petiole.gpu_worker.models.weights.fused import ExpertTensors
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QuantisedLayer:
    """A layer that a checkpoint stores quantised. form: its checked form."""

    format: WeightFormat
    form: CodeLayout
    beside: LayerTensors

    def fills(self, form: CodeLayout) -> bool:
        """Whether `read` fills memory of this form."""
        return form.of(0) == self.form.of(0) or self.format.fills(self.beside, form)

    def read(self, into: Coded) -> int:
        """into: of a form that it `fills`. Returns the bytes read."""
        return self.format.read(self.beside, into)


class CheckpointWeights:
    """The tensors of a checkpoint whose configuration declares these formats. compiled, scanned: see
    `LayerTensors`."""

    def __init__(
        self,
        checkpoint: ExpertTensors,
        declared: QuantizationConfig,
        compiled: BlockReader | None = None,
        *,
        scanned: bool = False,
    ) -> None:
        self._checkpoint, self._declared = checkpoint, declared
        self._compiled, self._scanned = compiled, scanned
        self._found: dict[tuple[str, int, int], QuantisedLayer] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._checkpoint

    def copy(self, name: str, into: Tensor) -> int:
        return self._checkpoint.copy(name, into)

    def quantised(self, name: str, outputs: int, inputs: int) -> QuantisedLayer | None:
        """The layer of this name; None if its weights are plain. Raises ModelError for what is wrong with it."""
        if (known := self._found.get((name, outputs, inputs))) is not None:
            return known
        beside = LayerTensors(
            self._checkpoint, name, outputs, inputs, self._declared, self._compiled, self._scanned
        )
        found = format_of(beside)
        if found is None:
            return None
        layer = self._found[name, outputs, inputs] = QuantisedLayer(found, found.form(beside), beside)
        return layer

    def check(self) -> None:
        """After all layers have been looked up. Raises ModelError if the configuration declares a format that none
        of them has."""
        if self._declared.method and not self._found:
            raise ModelError(
                f"config.json: quant_method must be absent beside plain weights, got {self._declared.method}"
            )

    def log(self, in_memory: int, in_files: int) -> None:
        """Say which formats were read, and the bytes of all tensors in memory and in the files."""
        if self._found:
            counts = Counter(found.format.name for found in self._found.values())
            formats = ", ".join(f"{n} in {name}" for name, n in sorted(counts.items()))
            memory, files = in_memory / 1e6, in_files / 1e6
            logger.info("quantised layers: %s; %.1f MB in memory, %.1f MB in files", formats, memory, files)
