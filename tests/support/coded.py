"""Coded weights of all kinds, with random codes."""

from __future__ import annotations

import torch

from petiole.gpu_worker.models.checkpoint.codes import E2M1, SIGNED, UNSIGNED
from petiole.gpu_worker.models.checkpoint.gguf.blocks import IQ4
from petiole.gpu_worker.models.weights.quantized import Coded, CodeLayout

FORMS = {
    "one panel": CodeLayout(32, 32, 32, SIGNED, scales=torch.float16),
    "int4 as quantised here": CodeLayout(100, 608, 32, SIGNED, scales=torch.float16, multiplier=True),
    "groups of 16, zeros": CodeLayout(70, 304, 16, UNSIGNED, scales=torch.bfloat16, zeros=torch.uint8),
    "groups of 48": CodeLayout(64, 96, 48, SIGNED, scales=torch.float32),
    "groups of 64": CodeLayout(33, 320, 64, E2M1, scales=torch.float32),
    "groups of 128, zeros": CodeLayout(96, 512, 128, UNSIGNED, scales=torch.float16, zeros=torch.uint8),
    "zeros that are floats": CodeLayout(40, 256, 32, UNSIGNED, scales=torch.float32, zeros=torch.float32),
    "channels": CodeLayout(65, 296, 296, SIGNED, scales=torch.bfloat16),
    "channels, zeros": CodeLayout(40, 296, 296, UNSIGNED, scales=torch.float16, zeros=torch.uint8),
    "a short last group": CodeLayout(64, 200, 128, SIGNED, scales=torch.float16),
    "a table of integers": CodeLayout(40, 256, 32, IQ4, scales=torch.float16),
    "groups of 256": CodeLayout(40, 512, 256, SIGNED, scales=torch.float16),
    "nvfp4": CodeLayout(64, 320, 16, E2M1, scales=torch.float8_e4m3fn, multiplier=True),
    "mxfp4": CodeLayout(33, 320, 32, E2M1, scales=torch.float8_e8m0fnu),
    "int8 groups, zeros that are floats": CodeLayout(40, 256, 32, (), torch.int8, torch.float16, torch.float32),
    "int8 groups, zeros": CodeLayout(65, 384, 128, (), torch.int8, torch.float16, torch.int8),
    "int8 channels": CodeLayout(65, 384, 384, (), torch.int8, torch.float32),
    "fp8 blocks": CodeLayout(100, 384, 128, (), torch.float8_e4m3fn, torch.float32),
    "offsets": CodeLayout(40, 256, 32, UNSIGNED, scales=torch.float16, zeros=torch.float16, offsets=True),
    "steps": CodeLayout(40, 512, 16, SIGNED, scales=torch.int8, steps=16),
    "steps and offsets": CodeLayout(
        65, 512, 32, UNSIGNED, torch.uint8, torch.int8, torch.int8, offsets=True, steps=8
    ),
    "int8 groups, steps": CodeLayout(33, 512, 16, (), torch.int8, torch.int8, steps=16),
    "int8 groups, steps and offsets": CodeLayout(
        40, 256, 32, (), torch.int8, torch.int8, torch.int8, offsets=True, steps=8
    ),
    "six bits": CodeLayout(100, 72, 72, (), torch.uint8, torch.float16),
    "six bits, groups, offsets": CodeLayout(
        40, 608, 32, (), torch.uint8, torch.float16, torch.float16, offsets=True
    ),
    "six bits, steps": CodeLayout(70, 512, 16, (), torch.uint8, torch.int8, steps=16),
    "six bits, steps and offsets": CodeLayout(
        33, 768, 16, (), torch.uint8, torch.int8, torch.int8, offsets=True, steps=16
    ),
    "fp8 channels": CodeLayout(65, 72, 72, (), torch.float8_e4m3fn, torch.bfloat16),
}


def random_weight(form: CodeLayout, generator: torch.Generator) -> Coded:
    weight = form.empty(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    codes = torch.randint(0, 256, weight.codes.shape, generator=generator, dtype=torch.uint8)
    if form.codes == torch.float8_e4m3fn:
        codes[codes & 127 == 127] = 8  # not a number: readers refuse it
    weight.codes.view(torch.uint8).copy_(codes)
    powers = torch.randint(-20, 4, weight.scales.shape, generator=generator)  # subnormal as float16, too
    fractions = 1 if form.scales == torch.float8_e8m0fnu else torch.rand(weight.scales.shape, generator=generator)
    if form.steps:
        weight.scales.copy_(torch.randint(-32, 64, weight.scales.shape, generator=generator))
        for factors in (weight.factors, weight.zero_factors):
            if factors is not None:
                factors.copy_(torch.rand(factors.shape, generator=generator) / 64)
    else:
        weight.scales.copy_(2.0**powers * fractions)
    if weight.zeros is not None:
        fraction = 0.375 if form.zeros == torch.float32 else 0
        weight.zeros.copy_(torch.randint(-8, 16, weight.zeros.shape, generator=generator).clamp(min=0) + fraction)
    if weight.multiplier is not None:
        weight.multiplier.copy_(torch.rand(form.outputs, generator=generator) + 0.5)
    return weight
