"""Tensors of GGUF files: from blocks to numbers. A block holds neighbouring inputs of one output.

Q4_0   32 inputs: d (float16), 16 bytes; byte j holds the codes of inputs j (low half) and j + 16. d * (code - 8)
Q8_0   32 inputs: d (float16), 32 signed bytes. d * code
Q4_K   256 inputs: d, dmin (float16), 12 bytes with a scale and a minimum of six bits for each 32 inputs, 128 bytes
       with two runs of 32 codes each 32 bytes, that of the low halves first. d * scale * code - dmin * minimum
Q6_K   256 inputs: 128 bytes with the low four bits, 64 with the high two, 16 signed scales of 16 inputs, d. Each
       half of the inputs is four runs of 32; the low bits of runs 0 and 2, and of 1 and 3, share bytes, and the
       high bits of all four do. d * scale * (code - 32)"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.gguf.types import TYPES


@dataclass(frozen=True, slots=True)
class Codes:
    """Of [n, inputs]: codes as bytes, [n, inputs]; scales [n, groups]; zeros, if there are any, likewise.
    weight = (code - zero) * scale. four_bits: the codes are from 0 to 15, and without zeros stand for code - 8;
    otherwise they are signed."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    four_bits: bool = False

    def values(self) -> Tensor:
        """float32 [n, inputs]."""
        group = self.codes.shape[1] // self.scales.shape[1]
        codes = self.codes.float() - (8 if self.four_bits and self.zeros is None else 0)
        if self.zeros is not None:
            codes = codes - self.zeros.repeat_interleave(group, 1)
        return codes * self.scales.float().repeat_interleave(group, 1)


def _float16(raw: Tensor) -> Tensor:
    """Two bytes -> float16, the last dimension gone."""
    return raw.contiguous().view(torch.float16).squeeze(-1)


def _split(raw: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The last dimension as several."""
    return raw.reshape(*raw.shape[:-1], *sizes)


def _q4_0(blocks: Tensor) -> Codes:
    packed = blocks[..., 2:]
    codes = torch.cat((packed & 15, packed >> 4), -1)
    return Codes(codes.flatten(1), _float16(blocks[..., :2]), four_bits=True)


def _q8_0(blocks: Tensor) -> Codes:
    return Codes(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), _float16(blocks[..., :2]))


def _q4_k(blocks: Tensor) -> Codes:
    d, least = _float16(blocks[..., :2]).float(), _float16(blocks[..., 2:4]).float()
    low, high, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    steps = torch.cat((low & 63, rest & 15 | (low >> 6) << 4), -1)
    minimums = torch.cat((high & 63, rest >> 4 | (high >> 6) << 4), -1)
    scales, offsets = d[..., None] * steps, least[..., None] * minimums
    runs = _split(blocks[..., 16:], (4, 32))
    codes = torch.stack((runs & 15, runs >> 4), -2).flatten(-3, -2)  # [n, blocks, 8, 32]
    # A group without a scale is minus its minimum, whatever its codes are: (0 - 1) * minimum.
    flat = scales == 0
    codes = torch.where(flat[..., None], torch.zeros_like(codes), codes)
    zeros = torch.where(flat, (offsets != 0).float(), offsets / torch.where(flat, 1.0, scales))
    return Codes(codes.flatten(1), torch.where(flat, offsets, scales).flatten(1), zeros.flatten(1), four_bits=True)


def _q6_k(blocks: Tensor) -> Codes:
    low, high = _split(blocks[..., :128], (2, 1, 64)), _split(blocks[..., 128:192], (2, 1, 32))
    steps, d = blocks[..., 192:208].contiguous().view(torch.int8), _float16(blocks[..., 208:]).float()
    low = _split(torch.cat((low & 15, low >> 4), -2), (2, 32)).flatten(-3, -2)  # [n, blocks, 2, 4, 32]
    high = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], -2)
    codes = (low | high << 4).view(torch.int8) - 32
    return Codes(codes.flatten(1), (d[..., None] * steps).flatten(1))


CODES: dict[str, Callable[[Tensor], Codes]] = {"Q4_0": _q4_0, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k}
"""By type of tensor: from blocks, uint8 [n, blocks, bytes], to codes."""
_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def in_blocks(raw: Tensor, kind: str) -> Tensor:
    """uint8 [n, bytes of a row] -> [n, blocks, bytes of a block]."""
    return _split(raw, (-1, TYPES[kind].n_bytes))


def values_of(raw: Tensor, kind: str) -> Tensor:
    """uint8 [n, bytes of a row] -> numbers [n, inputs], in float32 if the type is quantised."""
    if kind in _PLAIN:
        return raw.contiguous().view(_PLAIN[kind])
    return CODES[kind](in_blocks(raw, kind)).values()
