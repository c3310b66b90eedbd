"""Values beside tokens: bins as inputs, and bins of sampled tokens.

Only the device knows which tokens of a step are coordinates and sizes. On a CPU the code looks at the tokens, and
computes only their values (`embed_found`, `decode_found`). On CUDA the host may not look: coordinates and sizes
are computed for every position, and each position takes its own (`embed_all`, `decode_all`, `bins_of`). So bins
can be decoded before a token is sampled, in the graph of the forward.

Bins are int32 [n, N_BINS]. Bins that a token does not use are 0 when decoded, and arbitrary as inputs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from petiole.gpu_worker.models.decoder import ValueDecoder
from petiole.gpu_worker.request.values import N_BINS, NO_BIN, ValueTokens


class ValuedDecoder(ValueDecoder, Protocol):
    """The part of a decoder that is used here."""

    @property
    def value_tokens(self) -> ValueTokens: ...

    def embed(self, token_ids: Tensor) -> Tensor: ...


def embed_found(decoder: ValuedDecoder, token_ids: Tensor, bins: Tensor) -> Tensor:
    """int64 [T], bins [T] -> [T, hidden]. A value token with NO_BIN is text."""
    embedded = decoder.embed(token_ids)
    coordinates, sizes = (at.nonzero()[:, 0] for at in _valued(decoder.value_tokens, token_ids, bins))
    if len(coordinates):
        embedded[coordinates] = decoder.embed_coordinates(bins[coordinates, 0])
    if len(sizes):
        embedded[sizes] = decoder.embed_sizes(bins[sizes])
    return embedded


def embed_all(decoder: ValuedDecoder, token_ids: Tensor, bins: Tensor) -> Tensor:
    """`embed_found`, without looking at the data."""
    coordinates, sizes = _valued(decoder.value_tokens, token_ids, bins)
    known = bins.clamp(min=0)
    embedded = torch.where(sizes[:, None], decoder.embed_sizes(known), decoder.embed(token_ids))
    return torch.where(coordinates[:, None], decoder.embed_coordinates(known[:, 0]), embedded)


def _valued(tokens: ValueTokens, token_ids: Tensor, bins: Tensor) -> tuple[Tensor, Tensor]:
    """Two bool [T]: which tokens are coordinates with bins, and which are sizes with bins."""
    known = bins[:, 0] != NO_BIN
    return (token_ids == tokens.coordinate_id) & known, (token_ids == tokens.size_id) & known


def decode_found(decoder: ValuedDecoder, hidden: Tensor, token_ids: Tensor) -> Tensor:
    """Hidden states whose logits gave `token_ids`: [O, hidden], int [O] -> bins [O]."""
    bins, tokens = torch.zeros((len(hidden), N_BINS), dtype=torch.int32), decoder.value_tokens
    coordinates, sizes = ((token_ids == one).nonzero()[:, 0] for one in (tokens.coordinate_id, tokens.size_id))
    if len(coordinates):
        bins[coordinates, 0] = decoder.coordinate_bins(hidden[coordinates]).int()
    if len(sizes):
        bins[sizes] = decoder.size_bins(hidden[sizes]).int()
    return bins


def decode_all(decoder: ValueDecoder, hidden: Tensor) -> Tensor:
    """[O, hidden] -> int32 [O, 1 + N_BINS]: the bin if a coordinate is sampled, and the bins if a size is
    sampled."""
    return torch.cat([decoder.coordinate_bins(hidden)[:, None], decoder.size_bins(hidden)], dim=1).int()


def bins_of(decoded: Tensor, token_ids: Tensor, tokens: ValueTokens) -> Tensor:
    """The bins of the sampled tokens, from the result of `decode_all`: [O]."""
    coordinates, sizes = (token_ids == tokens.coordinate_id)[:, None], (token_ids == tokens.size_id)[:, None]
    both = torch.where(sizes, decoded[:, 1:], 0)
    return torch.cat([torch.where(coordinates, decoded[:, :1], both[:, :1]), both[:, 1:]], dim=1)
