"""Sampling as pure functions from logits to tokens, with the same results on every device.

Order: bias and bans; repetition, frequency and presence penalties; masks; end tokens before `min_tokens`
(log-probabilities are computed here); temperature; top-k; top-p of the remaining tokens; min-p; Gumbel-max over
the rest. A stage is skipped if no output of the step uses it; if none is used, sampling is one argmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from petiole.gpu_worker.runtime.step.noise import gumbel

_PREFIXES = (512, 8192)
"""Numbers of candidates to try before a CPU sorts the whole vocabulary."""

_SPARE = 8
"""Extra candidates after the k-th, in case some have an equal logit."""

NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Sampling parameters of O outputs; None if no output uses the filter.

    temperature: float32 [O], 0 greedy. keys: int32 [O, 2]. top_k: int64 [O], 0 off. top_p, min_p: float32 [O].
    """

    temperature: Tensor
    keys: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None

    def at(self, outputs: Tensor) -> SamplingMetadata:
        """The parameters of a subset of the outputs."""

        def select(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[outputs]

        filters = map(select, (self.top_k, self.top_p, self.min_p))
        return SamplingMetadata(self.temperature[outputs], self.keys[outputs], *filters)


@dataclass(frozen=True, slots=True)
class Penalties:
    """repetition, presence, frequency: float32 [O]. seen: bool [O, V], token occurs in the prompt or output.
    counts: int32 [O, V], occurrences in the output."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    seen: Tensor
    counts: Tensor


def apply_penalties(logits: Tensor, penalties: Penalties) -> Tensor:
    repetition = penalties.repetition[:, None]
    weakened = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(penalties.seen, weakened, logits)
    logits = logits - penalties.frequency[:, None] * penalties.counts
    return logits - penalties.presence[:, None] * (penalties.counts > 0)


def apply_bits(logits: Tensor, outputs: Tensor, bits: Tensor) -> Tensor:
    """Apply a packed token mask, in place. outputs: int64 [M]; bits: int32 [M, ceil(V / 32)]."""
    allowed = (bits.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=bits.device)) & 1
    allowed = allowed.view(len(bits), -1)[:, : logits.shape[-1]].bool()
    logits[outputs] = logits[outputs].masked_fill(~allowed, NEG_INF)
    return logits


def bar(logits: Tensor, banned: Tensor, narrowed: Tensor | None = None) -> Tensor:
    """Ban tokens, in place, except for outputs that have no other tokens left. banned: int64 [n, 2], (output,
    token).

    narrowed: int64 [m], the outputs that may have no other tokens left; None: no output. Only their rows are read.
    """
    at = banned[:, 0], banned[:, 1]
    if narrowed is None:
        logits[at] = NEG_INF
        return logits
    before = logits[at]
    logits[at] = NEG_INF
    none_left = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    none_left[narrowed] = logits[narrowed].amax(-1) == NEG_INF
    logits[at] = torch.where(none_left[at[0]], before, NEG_INF)
    return logits


Choose = Callable[[Tensor, SamplingMetadata | None], Tensor]
"""`choose`, implemented for a device; on CUDA for logits of any float type."""

Draw = Callable[[Tensor, Tensor], Tensor | None]
"""int64 [O]: argmax of scores [O, V] plus the noise of keys [O, 2]; None: the caller must compute it."""


def choose(logits: Tensor, choice: SamplingMetadata | None, draw: Draw = lambda scores, keys: None) -> Tensor:
    """Sample int64 [O] from float32 [O, V]. Each output depends only on its own logits and parameters."""
    best = likeliest(logits)
    if choice is None:
        return best
    drawn = choice.temperature > 0
    scaled = logits / torch.where(drawn, choice.temperature, 1.0)[:, None]
    ranked = _limited(choice) | _nucleus(choice)
    free = drawn & ~ranked
    if not bool(free.any()):
        sampled = _among_likeliest(scaled, choice)
    elif not bool(ranked.any()):
        sampled = _among_all(scaled, choice, draw)
    else:
        sampled = best.clone()
        at, others = ranked.nonzero().squeeze(1), free.nonzero().squeeze(1)
        sampled[at] = _among_likeliest(scaled[at], choice.at(at))
        sampled[others] = _among_all(scaled[others], choice.at(others), draw)
    return torch.where(drawn, sampled, best)


def likeliest(logits: Tensor) -> Tensor:
    """int64 [O]: argmax of each row. On a CPU, numpy's is about ten times as fast as torch's."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(dim=-1)


def _among_all(scaled: Tensor, choice: SamplingMetadata, draw: Draw) -> Tensor:
    """int64 [O]: Gumbel-max over scaled logits [O, V] with neither top-k nor top-p."""
    if choice.min_p is not None:
        floor = scaled.amax(-1, keepdim=True) + choice.min_p.log()[:, None]
        scaled = scaled.masked_fill(scaled < floor, NEG_INF)
    drawn = draw(scaled, choice.keys)
    if drawn is not None:
        return drawn
    token_ids = torch.arange(scaled.shape[-1], dtype=torch.int32, device=scaled.device)
    return (scaled + gumbel(choice.keys, token_ids)).argmax(-1)


def _among_likeliest(scaled: Tensor, choice: SamplingMetadata) -> Tensor:
    """int64 [O]: Gumbel-max over the tokens of [O, V] that pass top-k, top-p and min-p.

    A token passes if fewer than `top_k` tokens, and less than `top_p` of the mass, lie strictly above it, as on
    CUDA: tokens with equal logits pass or fail together. Tries small numbers of candidates first. A number is
    enough if the candidates reach below every row's floor."""
    vocab = scaled.shape[-1]
    most = 0 if choice.top_k is None else int(choice.top_k.max())
    few = most + _SPARE
    total = None
    if bool((_nucleus(choice) & ~_limited(choice)).any()):
        total = scaled.logsumexp(-1)
        few = max(few, _PREFIXES[0])
    for n in (few, max(few, _PREFIXES[1]), vocab):
        n = n if 2 * n <= vocab else vocab
        values, ids = scaled.topk(n, dim=-1) if n < vocab else scaled.sort(dim=-1, descending=True)
        floor = _floor(values, total, choice)
        if n == vocab or bool(((values[:, -1:] < floor) | (floor == NEG_INF)).all()):
            break
    kept = max(1, int((values >= floor).sum(-1).max()))  # the sum is 0 if logits are NaN
    values, ids = values[:, :kept], ids[:, :kept]
    scores = values.masked_fill(values < floor, NEG_INF) + gumbel(choice.keys, ids.int())
    return ids.gather(1, scores.argmax(-1, keepdim=True)).squeeze(1)


def _floor(values: Tensor, total: Tensor | None, choice: SamplingMetadata) -> Tensor:
    """float32 [O, 1]: the smallest logit that passes. values: [O, K], the largest logits, descending.

    total: float32 [O], the logsumexp of whole rows, used for rows with a top-p and no top-k.
    """
    limited, likeliest = _limited(choice)[:, None], values[:, :1]
    floor = torch.full_like(likeliest, NEG_INF)
    if choice.top_k is not None:
        last = choice.top_k.clamp(1, values.shape[-1]) - 1
        floor = torch.where(limited, values.gather(1, last[:, None]), floor)
    if choice.top_p is not None:
        weights = (values - likeliest).exp().masked_fill(values < floor, 0.0)
        running = weights.cumsum(-1)
        mass = running[:, -1:]
        if total is not None:
            mass = torch.where(limited, mass, (total[:, None] - likeliest).exp())
        inside = running - weights < choice.top_p[:, None] * mass
        last = inside.sum(-1, keepdim=True).clamp(min=1) - 1
        nucleus = torch.maximum(floor, values.gather(1, last))
        floor = torch.where(_nucleus(choice)[:, None], nucleus, floor)
    if choice.min_p is not None:
        floor = torch.maximum(floor, likeliest + choice.min_p.log()[:, None])
    return floor


def _limited(choice: SamplingMetadata) -> Tensor:
    """bool [O]: whether the output has a top-k."""
    return torch.zeros_like(choice.temperature, dtype=torch.bool) if choice.top_k is None else choice.top_k > 0


def _nucleus(choice: SamplingMetadata) -> Tensor:
    """bool [O]: whether the output has a top-p."""
    return torch.zeros_like(choice.temperature, dtype=torch.bool) if choice.top_p is None else choice.top_p < 1


def logprobs(
    logits: Tensor, token_ids: Tensor, k: int, named: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities of `token_ids` [O], top k ids [O, k], log-probabilities of the top k [O, k]).

    named: int64 [n, 3], (output, place, token): tokens to report in place of likely ones."""
    table = logits.log_softmax(-1)
    top, ids = _largest(table, k)
    if named is not None:
        output, place, token = named.unbind(1)
        ids[output, place], top[output, place] = token, table[output, token]
    return table.gather(1, token_ids[:, None]).squeeze(1), ids, top


def _largest(table: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest numbers of each row of [O, V], and their ids. On a CPU, of equal ones those with the smallest
    ids come first, as of all tokens that a mask forbids: others in the batch may ask for more, which would change
    the order."""
    if table.device.type != "cpu" or k == 0:
        top, ids = table.topk(k, dim=-1)
        return top, ids
    top, ids = table.topk(min(k + 1, table.shape[-1]), dim=-1)
    for i in (top[:, 1:] == top[:, :-1]).any(-1).nonzero().squeeze(1).tolist():
        row, least = table[i], top[i, k - 1]
        larger, equal = ((row > least).nonzero().squeeze(1), (row == least).nonzero().squeeze(1))
        found = torch.cat([larger, equal[: k - len(larger)]])
        ids[i, :k] = found[row[found].argsort(descending=True, stable=True)]
    return top[:, :k], ids[:, :k]
