"""Orders in which formats pack codes into words, and the order of the canonical form (`weights.coded`). Pure
functions of tensors.

Words are int32 and are read as four bytes, the lowest bits first, so most orders of four-bit codes differ from the
canonical one by a permutation of whole bytes."""

from __future__ import annotations

import torch
from torch import Tensor

from petiole.gpu_worker.models.checkpoint.codes import nibbles

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of a word holds this one of eight outputs."""
_OF_OUTPUT = tuple(_AWQ_ORDER.index(output) for output in range(8))


def bytes_of(words: Tensor) -> Tensor:
    """int32 [..., n] -> uint8 [..., n, 4], the lowest byte first."""
    return words.contiguous().view(torch.uint8).view(*words.shape, 4)


def along_inputs(words: Tensor, code_bytes: int) -> Tensor:
    """int32 [outputs, words] with codes along the inputs (compressed-tensors) -> uint8 [outputs, code_bytes]."""
    return bytes_of(words).flatten(1)[:, :code_bytes]


def along_first(words: Tensor, code_bytes: int) -> Tensor:
    """int32 [words, outputs] with codes along the inputs (GPTQ) -> uint8 [outputs, code_bytes]."""
    return bytes_of(words).permute(1, 0, 2).flatten(1)[:, :code_bytes]


def awq_codes(words: Tensor) -> Tensor:
    """int32 [rows, outputs / 8] in AWQ's order of outputs -> uint8 [outputs, rows], one code a byte."""
    in_words = nibbles(bytes_of(words).flatten(-2)).view(*words.shape, 8)
    return in_words[..., _OF_OUTPUT].flatten(1).t()


def along_outputs(words: Tensor, bits: int) -> Tensor:
    """int32 [groups, words] with zeros along the outputs (GPTQ) -> uint8 [outputs, groups]."""
    flat = bytes_of(words).flatten(1)
    return (nibbles(flat) if bits == 4 else flat).t()


def over_outputs(words: Tensor, bits: int, outputs: int) -> Tensor:
    """int32 [words, groups] with zeros along the outputs (compressed-tensors) -> uint8 [outputs, groups]."""
    found = bytes_of(words)
    found = nibbles(found) if bits == 4 else found
    return found.permute(0, 2, 1).flatten(0, 1)[:outputs]


def signed(unsigned: Tensor) -> Tensor:
    """uint8 codes whose zero is 128 -> int8 codes whose zero is 0."""
    return (unsigned ^ 128).view(torch.int8)
