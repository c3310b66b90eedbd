"""Values beside tokens: lines of numbers as inputs, and lines that are made with sampled tokens.

Only the device knows which tokens of a step carry a value. On a CPU the code looks at the tokens, and computes
only their values (`embed_found`, `made_found`). On CUDA the host may not look: the values of every kind are
computed for every position, and each position takes its own (`embed_all`, `made_of_all`). So lines can be made
before a token is sampled, in the graph of the forward.

A line is int32 [width], with columns for every kind (`ValueKinds`). Numbers of other kinds than the token's are
arbitrary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from petiole.gpu_worker.models.decoder import ValueDecoder
from petiole.gpu_worker.request.values import NO_NUMBER, ValueKind, ValueKinds


class ValuedDecoder(ValueDecoder, Protocol):
    """The part of a decoder that is used here."""

    @property
    def value_tokens(self) -> ValueKinds: ...

    def embed(self, token_ids: Tensor) -> Tensor: ...


def embed_found(decoder: ValuedDecoder, token_ids: Tensor, lines: Tensor) -> Tensor:
    """int64 [T], lines [T] -> [T, hidden]. A token of a kind without its numbers is text."""
    embedded = decoder.embed(token_ids)
    for kind, columns, carry in _carriers(decoder.value_tokens, token_ids, lines):
        rows = carry.nonzero()[:, 0]
        if len(rows):
            embedded[rows] = decoder.embed_value(kind.name, lines[rows, columns])
    return embedded


def embed_all(decoder: ValuedDecoder, token_ids: Tensor, lines: Tensor) -> Tensor:
    """`embed_found`, without looking at the data."""
    embedded, known = decoder.embed(token_ids), lines.clamp(min=0)
    for kind, columns, carry in _carriers(decoder.value_tokens, token_ids, lines):
        embedded = torch.where(carry[:, None], decoder.embed_value(kind.name, known[:, columns]), embedded)
    return embedded


def _carriers(kinds: ValueKinds, token_ids: Tensor, lines: Tensor) -> Iterator[tuple[ValueKind, slice, Tensor]]:
    """Each kind, its columns and bool [T]: which tokens carry numbers of this kind."""
    for kind in kinds.kinds:
        columns = kinds.columns(kind)
        yield kind, columns, (token_ids == kind.token_id) & (lines[:, columns.start] != NO_NUMBER)


def made_found(decoder: ValuedDecoder, hidden: Tensor, token_ids: Tensor) -> Tensor:
    """Hidden states whose logits gave `token_ids`: [O, hidden], int [O] -> lines [O]."""
    kinds = decoder.value_tokens
    lines = torch.zeros((len(hidden), kinds.width), dtype=torch.int32)
    for kind in kinds.kinds:
        rows = (token_ids == kind.token_id).nonzero()[:, 0]
        if len(rows):
            lines[rows, kinds.columns(kind)] = decoder.made_value(kind.name, hidden[rows]).int()
    return lines


def made_of_all(decoder: ValuedDecoder, hidden: Tensor) -> Tensor:
    """`made_found`, whatever is sampled: [O, hidden] -> lines [O]."""
    kinds = decoder.value_tokens.kinds
    return torch.cat([decoder.made_value(kind.name, hidden) for kind in kinds], dim=1).int()
