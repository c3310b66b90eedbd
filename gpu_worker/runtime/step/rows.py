"""Sampling state of each row: parameters, penalty counts and logit bias.

Parameters are stored on the host and copied into a step at launch, so a row can be rebound while steps of its last
sequence are in flight. State that depends on sampled tokens (penalty counts) and the dense bias of rows that bias,
ban or allow tokens are stored on the device and accessed in stream order only. Both are allocated on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.cache import ragged_arange
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.runtime.device.device import upload
from petiole.gpu_worker.runtime.interface import Int32Array, RowBinding, StepBatch, TokenMask
from petiole.gpu_worker.runtime.step.inputs import StepInputs
from petiole.gpu_worker.runtime.step.noise import noise_keys
from petiole.gpu_worker.runtime.step.pending import PendingInputs
from petiole.gpu_worker.runtime.step.sampling import NEG_INF, Penalties, SamplingMetadata
from petiole.gpu_worker.runtime.step.verify import draft_pairs, drafts_of, following_of

_PARAMETERS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("seed", np.uint64),
        ("logprobs", np.int32),
        ("biased", np.bool_),
        ("first_end", np.int64),  # the first position at which the sequence may end
    ],
    align=True,  # torch takes a field's array only if its stride is a multiple of its element
)


class Uses:
    """Bit flags: the sampling stages that a row uses. A step's flags are those of its outputs, ORed."""

    DRAW, TOP_K, TOP_P, MIN_P, PENALTIES, BIAS, LOGPROBS, MIN_TOKENS, NAMED = (1 << bit for bit in range(9))


_FILTERS = {"top_k": Uses.TOP_K, "top_p": Uses.TOP_P, "min_p": Uses.MIN_P}
_COLDEST = 1e-6
_NO_TOKENS = np.empty(0, np.int64)
_NO_ROWS = torch.empty(0, dtype=torch.int64)
_NO_PAIRS = np.empty((0, 2), np.int64)


@dataclass(frozen=True, slots=True)
class BoundRows:
    """What the rows of a step are bound to when it is launched. Later launches may bind them anew. All [B]; ends,
    named: int64, tokens; without any if no row uses them."""

    parameters: npt.NDArray[np.void]
    uses: npt.NDArray[np.int64]
    adapters: Int32Array
    rotary_offsets: npt.NDArray[np.int64]
    ends: Sequence[npt.NDArray[np.int64]]
    named: Sequence[npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class ScorePlan:
    """Given tokens to score: see `ScoredTokens`. at: int64 [S], their places among the outputs. token_ids: int64
    [S]."""

    at: npt.NDArray[np.int64]
    token_ids: npt.NDArray[np.int64]
    top: int

    @property
    def n(self) -> int:
        return len(self.at)


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """The outputs of one step, on the host. O outputs over B rows; `uses`: their `Uses` flags, ORed.

    rows: int64 [O]. positions: int64 [O], of the tokens to be sampled. drafts: see `drafts_of`; None if nothing
    is verified. draft_pairs: int64 [n, 2], (output, token) for each draft that precedes an output in its row, if
    the row has penalties. ends: int64 [n, 2], (output, token) for each end token of an output before `min_tokens`.
    named: int64 [n, 3], (output, place, token) for each token that is reported in place of a likely one;
    None if there is none.
    sampled: see `StepInputs`. scores: of the prompts; None if none is scored. following: int64 [T], the token
    after each input, which sampling decides for `sampled_inputs`, [O]; None if nobody drafts.
    """

    rows: npt.NDArray[np.int64]
    parameters: npt.NDArray[np.void]
    positions: npt.NDArray[np.int64]
    drafts: npt.NDArray[np.int64] | None
    draft_pairs: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    uses: int
    vocab_size: int
    named: npt.NDArray[np.int64] | None = None
    sampled: npt.NDArray[np.int64] | None = None
    scores: ScorePlan | None = None
    following: npt.NDArray[np.int64] | None = None
    sampled_inputs: npt.NDArray[np.int64] = field(default_factory=lambda: _NO_TOKENS)

    @property
    def n(self) -> int:
        return len(self.rows)

    @property
    def top_logprobs(self) -> int | None:
        """The largest k that an output requests, or None."""
        return int(self.parameters["logprobs"].max()) if self.uses & Uses.LOGPROBS else None

    def narrowed(self, mask: TokenMask | None) -> npt.NDArray[np.int64]:
        """int64 [m]: the outputs of `ends` that may be left with no other token: they have a mask or a bias, or
        all their tokens are end tokens."""
        outputs, counts = np.unique(self.ends[:, 0], return_counts=True)
        limited = self.parameters["biased"][outputs] | (counts >= self.vocab_size)
        if mask is not None:
            limited |= np.isin(outputs, mask.outputs)
        return outputs[limited]


class RowStates:
    """The state of all rows. Host methods run on the engine thread, device methods in stream order.

    values_width: numbers of a line, 0 for a model without values. n_drafts: how many
    tokens a head drafts at most behind each step.
    """

    def __init__(
        self,
        n_rows: int,
        vocab_size: int,
        device: torch.device,
        values_width: int = 0,
        *,
        n_drafts: int = 0,
    ) -> None:
        self.n_drafts = n_drafts
        self._n_rows, self._vocab_size, self._device = n_rows, vocab_size, device
        self._parameters = np.zeros(n_rows, dtype=_PARAMETERS)
        self._uses = np.zeros(n_rows, dtype=np.int64)  # more room than the flags will ever need
        self._adapters = np.zeros(n_rows, dtype=np.int32)
        self._rotary_offsets = np.zeros(n_rows, dtype=np.int64)
        self._ends = [_NO_TOKENS] * n_rows
        self._named = [_NO_TOKENS] * n_rows
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        self._bias: Tensor | None = None
        self.pending = PendingInputs(
            torch.zeros(n_rows, dtype=torch.int64, device=device),
            torch.zeros((n_rows, values_width), dtype=torch.int32, device=device),
        )

    # -- host

    def bind(self, bindings: Sequence[RowBinding]) -> None:
        for binding in bindings:
            s = binding.sampling
            greedy = is_greedy(s)
            self._parameters[binding.row] = (
                0.0 if greedy else s.temperature,
                0 if greedy else min(s.top_k, self._vocab_size),
                1.0 if greedy else s.top_p,
                0.0 if greedy else s.min_p,
                s.repetition_penalty,
                s.presence_penalty,
                s.frequency_penalty,
                binding.seed & 0xFFFFFFFFFFFFFFFF,
                -1 if s.beside is None else s.beside,
                is_biased(s),
                len(binding.prompt_token_ids) + s.min_tokens,
            )
            self._uses[binding.row] = uses_of(s)
            self._adapters[binding.row] = binding.adapter_slot
            self._rotary_offsets[binding.row] = binding.rotary_offset
            self._ends[binding.row] = self._known(binding.end_token_ids) if s.min_tokens else _NO_TOKENS
            self._named[binding.row] = np.array(s.logprob_token_ids, dtype=np.int64)

    def bound(self, rows: Int32Array) -> BoundRows:
        uses = self._uses[rows]
        used = int(np.bitwise_or.reduce(uses))
        return BoundRows(
            self._parameters.take(rows),  # indexing can be slow
            uses,
            self._adapters[rows],
            self._rotary_offsets[rows],
            [self._ends[row] for row in rows.tolist()] if used & Uses.MIN_TOKENS else (),
            [self._named[row] for row in rows.tolist()] if used & Uses.NAMED else (),
        )

    def plan_outputs(self, batch: StepBatch, inputs: StepInputs, bound: BoundRows) -> OutputPlan:
        """inputs: those of the batch. bound: its rows. Of any thread: it reads nothing that a launch changes."""
        rows, positions = inputs.of_outputs(inputs.rows), inputs.of_outputs(inputs.positions) + 1
        verifies = batch.kind != "decode" and bool((batch.outputs > 1).any())
        drafts = drafts_of(batch, inputs) if verifies else None
        of = np.arange(batch.size).repeat(batch.outputs)
        used = bound.uses[of]
        uses = int(np.bitwise_or.reduce(used))
        parameters, pairs, ends = bound.parameters.take(of), _NO_PAIRS, _NO_PAIRS
        if drafts is not None and uses & Uses.PENALTIES:
            pairs = draft_pairs(batch, inputs, (used & Uses.PENALTIES) != 0)
        if uses & Uses.MIN_TOKENS:
            early = np.flatnonzero(positions < parameters["first_end"])
            ends = _early_ends(early, [bound.ends[i] for i in of[early].tolist()])
        named = None
        if uses & Uses.NAMED:
            naming = np.flatnonzero(used & Uses.NAMED)
            named = _named_at(naming, [bound.named[i] for i in of[naming].tolist()])
        following = following_of(batch, inputs) if self.n_drafts and batch.kind != "encode" else None
        plan = OutputPlan(
            rows,
            parameters,
            positions,
            drafts,
            pairs,
            ends,
            uses,
            self._vocab_size,
            named,
            following=following,
            sampled_inputs=inputs.sampled_inputs,
        )
        if (scored := batch.scored) is None or inputs.scored is None:
            return plan
        scores = ScorePlan(inputs.scored, scored.token_ids.astype(np.int64), scored.top)
        return replace(plan, sampled=inputs.sampled, scores=scores if scores.n else None)

    def _known(self, token_ids: Iterable[int]) -> npt.NDArray[np.int64]:
        """int64 [n], sorted: the distinct ids that the model has. The tokenizer may have others."""
        return np.array(sorted({t for t in token_ids if 0 <= t < self._vocab_size}), dtype=np.int64)

    # -- device, in stream order

    def apply_bindings(self, bindings: Sequence[RowBinding]) -> None:
        for binding in bindings:
            if is_penalized(binding.sampling):
                self._set_counts(binding)
            if is_biased(binding.sampling):
                self._set_bias(binding.row, binding.sampling)

    def bias(self, rows: Tensor, biased: Tensor) -> Tensor:
        """float32 [O, V]; zero for rows without a bias."""
        assert self._bias is not None
        return self._bias[rows].masked_fill(~biased[:, None], 0.0)

    def penalties(self, rows: Tensor, numbers: Tensor, draft_pairs: Tensor | None) -> Penalties:
        """The penalties of O outputs. numbers: float32 [3, O], repetition, presence, frequency; neutral for rows
        without penalties, whose counts are undefined."""
        assert self._counts is not None
        assert self._seen is not None
        counts, seen = self._counts[rows], self._seen[rows]
        if draft_pairs is not None and len(draft_pairs):
            at = (draft_pairs[:, 0], draft_pairs[:, 1])
            counts.index_put_(at, torch.ones_like(draft_pairs[:, 0], dtype=counts.dtype), accumulate=True)
        return Penalties(numbers[0], numbers[1], numbers[2], seen | (counts > 0), counts)

    def count(self, rows: Tensor, token_ids: Tensor, accepted: Tensor | None) -> None:
        """Add sampled tokens to the counts. `accepted`: bool [O] for a verify, else None."""
        assert self._counts is not None
        ones = torch.ones_like(token_ids) if accepted is None else accepted
        self._counts.index_put_((rows, token_ids), ones.to(self._counts.dtype), accumulate=True)

    def _set_counts(self, binding: RowBinding) -> None:
        shape = (self._n_rows, self._vocab_size)
        if self._counts is None or self._seen is None:
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=self._device)
        counts = np.bincount(binding.output_token_ids, minlength=self._vocab_size)[: self._vocab_size]
        self._counts[binding.row] = upload(counts.astype(np.int32), self._device)
        prompt = binding.prompt_token_ids.astype(np.int64)  # ids that only the tokenizer has are left out
        known = prompt[(prompt >= 0) & (prompt < self._vocab_size)]
        self._seen[binding.row].zero_().index_fill_(0, upload(known, self._device), True)

    def _set_bias(self, row: int, sampling: SamplingParams) -> None:
        if self._bias is None:
            self._bias = torch.zeros((self._n_rows, self._vocab_size), dtype=torch.float32, device=self._device)
        dense = np.zeros(self._vocab_size, dtype=np.float32)
        if sampling.allowed_token_ids is not None:
            dense[:] = NEG_INF
            dense[np.asarray(sampling.allowed_token_ids, dtype=np.int64)] = 0.0
        for token, value in sampling.logit_bias.items():
            dense[token] += value
        dense[np.asarray(sampling.banned_token_ids, dtype=np.int64)] = NEG_INF
        self._bias[row] = upload(dense, self._device)


def _early_ends(early: npt.NDArray[np.int64], tokens: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """`OutputPlan.ends` of the outputs `early`, each with its end tokens."""
    if not tokens:
        return _NO_PAIRS
    return np.stack([np.repeat(early, [len(ids) for ids in tokens]), np.concatenate(tokens)], axis=1)


def _named_at(outputs: npt.NDArray[np.int64], tokens: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """`OutputPlan.named` of these outputs, each with its tokens."""
    lengths = np.array([len(ids) for ids in tokens])
    places = ragged_arange(np.zeros_like(lengths), lengths)
    return np.stack([np.repeat(outputs, lengths), places, np.concatenate(tokens)], axis=1)


def uses_of(s: SamplingParams) -> int:
    """The `Uses` flags of a row. A greedy row uses no filters."""
    drawn = not is_greedy(s)
    return (
        Uses.DRAW * drawn
        | Uses.TOP_K * (drawn and s.top_k > 0)
        | Uses.TOP_P * (drawn and s.top_p < 1)
        | Uses.MIN_P * (drawn and s.min_p > 0)
        | Uses.PENALTIES * is_penalized(s)
        | Uses.BIAS * is_biased(s)
        | Uses.LOGPROBS * (s.logprobs is not None)
        | Uses.MIN_TOKENS * (s.min_tokens > 0)
        | Uses.NAMED * (s.logprobs is not None and len(s.logprob_token_ids) > 0)
    )


def is_greedy(s: SamplingParams) -> bool:
    """Whether the temperature is too low to sample: dividing logits by it could overflow float32."""
    return s.temperature < _COLDEST


def is_penalized(s: SamplingParams) -> bool:
    return s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0


def is_biased(s: SamplingParams) -> bool:
    return bool(s.logit_bias) or s.allowed_token_ids is not None or bool(s.banned_token_ids)


Upload = Callable[[Sequence[npt.NDArray[Any]]], Sequence[Tensor]]
"""Copies arrays to the device, in stream order."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """An `OutputPlan` on the device. rows: int64 [O]; empty if nothing reads them. choice: None if all outputs are
    greedy. drafts: see `drafts_of`; None if nothing is verified."""

    rows: Tensor
    choice: SamplingMetadata | None
    drafts: Tensor | None


def sampled_with(plan: OutputPlan, upload: Upload) -> Sampled:
    """Copy a plan to the device, in one copy. Called in stream order."""
    parameters = plan.parameters
    arrays: dict[str, npt.NDArray[Any]] = {}
    if plan.drafts is None or plan.uses & (Uses.PENALTIES | Uses.BIAS):
        arrays["rows"] = plan.rows
    if plan.drafts is not None:
        arrays["drafts"] = plan.drafts
    if plan.uses & Uses.DRAW:
        arrays |= {
            "keys": noise_keys(parameters["seed"], plan.positions),
            "temperature": parameters["temperature"],
        }
        arrays |= {name: parameters[name] for name, flag in _FILTERS.items() if plan.uses & flag}
    found = dict(zip(arrays, upload([*arrays.values()]), strict=True))
    choice = None
    if plan.uses & Uses.DRAW:
        choice = SamplingMetadata(found["temperature"], found["keys"], *(found.get(name) for name in _FILTERS))
    return Sampled(found.get("rows", _NO_ROWS), choice, found.get("drafts"))
