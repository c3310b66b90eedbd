"""From logits to tokens: pure functions over tensors, the same on every device.

The order is the field's: bias and bans, repetition, frequency and presence penalties, masks (here
log-probabilities are read), temperature, top-k, top-p of what is left, min-p, and the Gumbel maximum of the rest.
Each stage is skipped when no output of the step uses it; with none used, sampling is one argmax.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_worker.runtime.native.draw import draw
from gpu_worker.runtime.noise import gumbel

_PREFIXES = (512, 8192)
"""Candidates to try before a CPU sorts a whole vocabulary."""

NEG_INF = float("-inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """How each of O outputs is drawn; None where no output uses it.

    temperature: float32 [O], 0 greedy. keys: int32 [O, 2]. top_k: int64 [O], 0 off. top_p, min_p: float32 [O].
    `every_top_k`: all drawn outputs have a top_k, the largest of which is `max_top_k`.
    """

    temperature: Tensor
    keys: Tensor
    top_k: Tensor | None
    top_p: Tensor | None
    min_p: Tensor | None
    every_top_k: bool
    max_top_k: int

    def at(self, outputs: Tensor) -> Choice:
        """The same for some of the outputs."""

        def some(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[outputs]

        return replace(
            self,
            temperature=self.temperature[outputs],
            keys=self.keys[outputs],
            top_k=some(self.top_k),
            top_p=some(self.top_p),
            min_p=some(self.min_p),
        )


@dataclass(frozen=True, slots=True)
class Penalties:
    """repetition, presence, frequency: float32 [O]. seen: bool [O, V] in prompt or output. counts: int32 [O, V] in
    the output."""

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
    """Forbid what a packed mask does not allow. outputs: int64 [M]; bits: int32 [M, ceil(V / 32)]."""
    allowed = (bits.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32, device=bits.device)) & 1
    allowed = allowed.view(len(bits), -1)[:, : logits.shape[-1]].bool()
    logits[outputs] = logits[outputs].masked_fill(~allowed, NEG_INF)
    return logits


def choose(logits: Tensor, choice: Choice | None) -> Tensor:
    """int64 [O] from float32 [O, V]."""
    if choice is not None and logits.device.type == "cuda":
        from gpu_worker.runtime.fused.choose import choose as choose_on_cuda

        return choose_on_cuda(logits, choice)
    best = likeliest(logits)
    if choice is None:
        return best
    drawn = choice.temperature > 0
    scaled = logits / torch.where(drawn, choice.temperature, 1.0)[:, None]
    if choice.every_top_k:
        values, ids = scaled.topk(min(choice.max_top_k, logits.shape[-1]), dim=-1)
        noise = gumbel(choice.keys, ids.int())
        sampled = ids.gather(1, (_keep(values, choice, values) + noise).argmax(-1, keepdim=True)).squeeze(1)
    else:
        sampled = draw_token(_filter(scaled, choice), choice.keys)
    return torch.where(drawn, sampled, best)


def draw_token(scores: Tensor, keys: Tensor) -> Tensor:
    """int64 [O]: argmax of scores [O, V] plus noise."""
    drawn = draw(scores, keys)
    if drawn is not None:
        return drawn
    token_ids = torch.arange(scores.shape[-1], dtype=torch.int32, device=scores.device)
    return (scores + gumbel(keys, token_ids)).argmax(-1)


def likeliest(logits: Tensor) -> Tensor:
    """int64 [O]: argmax of each row. Numpy's is ten times as fast as torch's on a CPU."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(dim=-1)


def _filter(scaled: Tensor, choice: Choice) -> Tensor:
    """-inf where top-k, top-p or min-p says no; [O, V]."""
    kept = scaled if choice.top_k is None and choice.top_p is None else _filter_by_rank(scaled, choice)
    if choice.min_p is not None:
        floor = scaled.amax(-1, keepdim=True) + choice.min_p.log()[:, None]
        kept = kept.masked_fill(scaled < floor, NEG_INF)
    return kept


def _filter_by_rank(scaled: Tensor, choice: Choice) -> Tensor:
    """Top-k and top-p, with as few candidates as the rows that want them need."""
    ranked = (choice.temperature > 0) & (_limited(choice) | _nucleus(choice))
    if not bool(ranked.all()):
        rows = ranked.nonzero().squeeze(1)
        kept = scaled.clone()
        if len(rows):
            kept[rows] = _filter_by_rank(scaled[rows], choice.at(rows))
        return kept
    values, ids = _enough(scaled, choice)
    return torch.full_like(scaled, NEG_INF).scatter_(1, ids, _keep(values, choice, scaled))


def _limited(choice: Choice) -> Tensor:
    """bool [O]: has a top-k."""
    return torch.zeros_like(choice.temperature, dtype=torch.bool) if choice.top_k is None else choice.top_k > 0


def _nucleus(choice: Choice) -> Tensor:
    """bool [O]: has a top-p."""
    return torch.zeros_like(choice.temperature, dtype=torch.bool) if choice.top_p is None else choice.top_p < 1


def _enough(scaled: Tensor, choice: Choice) -> tuple[Tensor, Tensor]:
    """The likeliest tokens in descending order, as many as every row's top-k or top-p can want."""
    total = scaled.logsumexp(-1)
    for few in _PREFIXES:
        few = max(few, choice.max_top_k)
        if 2 * few > scaled.shape[-1]:
            break
        values, ids = scaled.topk(few, dim=-1)
        mass = (values.logsumexp(-1) - total).exp()
        if choice.top_p is None or bool((_limited(choice) | (mass > choice.top_p)).all()):
            return values, ids
    return scaled.sort(dim=-1, descending=True)


def _keep(values: Tensor, choice: Choice, scaled: Tensor) -> Tensor:
    """Descending candidates [O, K] with -inf for those that the filters drop; `scaled` is what they came from."""
    rank = torch.arange(values.shape[-1], device=values.device)
    limited = _limited(choice)
    if choice.top_k is not None:
        values = values.masked_fill(limited[:, None] & (rank >= choice.top_k[:, None]), NEG_INF)
    if choice.top_p is not None:
        total = torch.where(limited, values.logsumexp(-1), scaled.logsumexp(-1))
        probabilities = (values - total[:, None]).exp()
        before = probabilities.cumsum(-1) - probabilities
        values = values.masked_fill((before >= choice.top_p[:, None]) & (rank > 0), NEG_INF)
    if choice.min_p is not None:
        values = values.masked_fill(values < values[:, :1] + choice.min_p.log()[:, None], NEG_INF)
    return values


def logprobs(logits: Tensor, token_ids: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """(chosen [O], top ids [O, k], their log-probabilities [O, k])."""
    table = logits.log_softmax(-1)
    top, ids = table.topk(k, dim=-1)
    return table.gather(1, token_ids[:, None]).squeeze(1), ids, top


def count_accepted(token_ids: Tensor, next_drafts: Tensor, cells: Tensor, width: int, outputs: Tensor) -> Tensor:
    """int64 [B]: leading drafts that sampling confirmed, plus the one token that always holds; 0 without outputs.

    next_drafts: int64 [O], what was proposed in the place of each sampled token, -1 for a row's last.
    cells: int64 [O], where each output lies in a [B, width] matrix. outputs: int64 [B].
    """
    confirmed = torch.zeros(len(outputs) * width, dtype=torch.int64, device=token_ids.device)
    confirmed[cells] = (token_ids == next_drafts).long()
    leading = confirmed.view(-1, width).cumprod(dim=1).sum(dim=1)
    return torch.minimum(leading + 1, outputs)
