"""Models whose weights are random: their values do not change the speed. They are made where they go, so that a
model needs the memory of its weights once, and no file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.codes import E2M1
from petiole.gpu_worker.models.weights.formats.unread import is_beside_codes
from petiole.gpu_worker.models.weights.quantization import int4_form
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout
from petiole.gpu_worker.models.weights.source import QuantisedLayer


def mxfp4_form(outputs: int, inputs: int) -> CodeLayout:
    return CodeLayout(outputs, inputs, 32, E2M1, scales=torch.float8_e8m0fnu)


class RandomWeights:
    """See `gpu_worker.models.weights.copying.TensorSource`."""

    def __contains__(self, name: str) -> bool:
        return not is_beside_codes(name)

    def copy(self, name: str, into: Tensor) -> int:
        is_norm = "norm" in name or re.search(r"ln\d?\.weight$", name)
        into.fill_(1.0) if is_norm else into.normal_(0, 0.02)
        return into.nbytes

    def quantised(self, name: str, outputs: int, inputs: int) -> QuantisedLayer | None:
        return None


class FourBitWeights(RandomWeights):
    """Linear layers, whose names contain `coded`, in four bits of this form."""

    def __init__(self, form: Callable[[int, int], CodeLayout] = int4_form, coded: str = "") -> None:
        self._form, self._coded = form, coded

    def quantised(self, name: str, outputs: int, inputs: int) -> QuantisedLayer | None:
        if self._coded not in name:
            return None
        return cast(QuantisedLayer, _RandomCodes(self._form(outputs, inputs)))


@dataclass(frozen=True)
class _RandomCodes:
    form: CodeLayout

    def fills(self, form: CodeLayout) -> bool:
        return form.of(0) == self.form.of(0)

    def read(self, into: Coded) -> int:
        codes: Any = into.codes
        codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8, device=codes.device))
        into.scales.fill_(2.0**-8)
        if into.multiplier is not None:
            into.multiplier.fill_(1.0)
        return int(codes.nbytes + into.scales.nbytes)
