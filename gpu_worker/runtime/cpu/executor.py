"""The CPU executor: a step over the paged KV cache, in native code if the model has some, else in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.contract.settings.engine import switch
from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.decoder import Decoder, Forward, ImageDecoder
from petiole.gpu_worker.models.fast_paths import tower_of, with_known_crops
from petiole.gpu_worker.models.parts.layered import LayeredVision
from petiole.gpu_worker.request.prepared_images import PreparedImage
from petiole.gpu_worker.request.values import NO_NUMBER
from petiole.gpu_worker.runtime.cpu.attention import PagedAttention, TextAttention
from petiole.gpu_worker.runtime.cpu.head import Floats, Head, Places
from petiole.gpu_worker.runtime.cpu.native.build import instructions, load_library
from petiole.gpu_worker.runtime.cpu.native.encoder import native_encoder, native_tower
from petiole.gpu_worker.runtime.cpu.native.forward import native_decoder
from petiole.gpu_worker.runtime.interface import (
    FEATURES,
    OF_TOKENS,
    VALUES,
    VECTORS,
    Int64Array,
    Progress,
    nothing,
)
from petiole.gpu_worker.runtime.memory.kv import KVCache
from petiole.gpu_worker.runtime.memory.states import StatePool
from petiole.gpu_worker.runtime.step import sampling
from petiole.gpu_worker.runtime.step.inputs import StepInputs, StepStates, adding_behind
from petiole.gpu_worker.runtime.step.pending import PendingInputs
from petiole.gpu_worker.runtime.step.sampling import SamplingMetadata
from petiole.gpu_worker.runtime.step.terms import GroupedTerms
from petiole.gpu_worker.runtime.step.token_values import ValuedDecoder, embed_found, made_found


def draw(scores: Tensor, keys: Tensor) -> Tensor | None:
    """int64 [n]: argmax of scores + noise; None if there is no compiled code for it.

    scores: float32 [n, V]; keys: int32 [n, 2]; see `noise.gumbel`.
    """
    library = load_library() if scores.device.type == "cpu" and switch("native") == "on" else None
    if library is None:
        return None
    scores, keys = scores.contiguous(), keys.contiguous()
    tokens = torch.empty(len(scores), dtype=torch.int64)
    library.petiole_draw(
        c_int64(scores.shape[0]),
        c_int64(scores.shape[1]),
        c_void_p(scores.data_ptr()),
        c_void_p(keys.data_ptr()),
        c_void_p(tokens.data_ptr()),
        c_int32(torch.get_num_threads()),
    )
    return tokens


def choose(logits: Tensor, choice: SamplingMetadata | None) -> Tensor:
    """`sampling.choose`, with its slowest part in compiled code where that is available."""
    return sampling.choose(logits, choice, draw)


class CpuExecutor:
    """Forward and logits of one decoder over one KV pool. See `platform.Executor`. Long steps
    call `progress`, except for those of torch's encoder of crops."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        bank: AdapterBank | None,
        pending: PendingInputs,
        progress: Progress = nothing,
        *,
        recurrent: StatePool | None = None,
    ) -> None:
        self._recurrent = recurrent
        self._decoder, self._cache, self._bank, self._progress = decoder, cache, bank, progress
        self._pending = pending
        self._text_only = decoder.value_tokens is None and decoder.plan.pooling is None
        self._whole = decoder.plan.whole_texts
        states = () if recurrent is None else recurrent.layers
        self._native = native_decoder(decoder, cache, bank, progress, states)
        self._drafter = None if decoder.drafting is None else decoder.drafter
        self._head: Head | None = None
        if self._drafter is not None:
            self._head = Head(self._draft if self._native is None else self._native.draft)
        self._seeing: LayeredVision | None = with_known_crops(decoder)
        self._encoder = None if self._seeing is None else native_encoder(self._seeing.vision, progress)
        self._tower = tower_of(decoder)
        self._native_tower = None if self._tower is None else native_tower(self._tower, progress)

    @property
    def kernels(self) -> str:
        return "torch" if self._native is None else "compiled"

    @property
    def instructions(self) -> str:
        if self._native is None:
            return torch.backends.cpu.get_cpu_capability().lower()
        return instructions(half=self._decoder.dtype == torch.bfloat16)

    def forward(self, slot_id: int, inputs: StepInputs) -> StepStates:
        if self._head is not None:
            self._head.begin(inputs)
        if self._whole:  # position t of a step lies in slot t
            self._cache.table.numpy()[inputs.rows, inputs.positions] = np.arange(len(inputs.rows))
        else:
            self._cache.update(inputs.pages)
        at = inputs.pending_inputs
        inputs.token_ids[at] = self._pending.token_ids.numpy()[inputs.rows[at]]
        token_ids, outputs = torch.from_numpy(inputs.token_ids), torch.from_numpy(inputs.output_inputs)
        if self._whole:
            outputs = torch.arange(len(token_ids))
        rows, positions = torch.from_numpy(inputs.rows), torch.from_numpy(inputs.positions)
        adapters = None
        if self._bank is not None and inputs.adapters.any():
            adapters = np.repeat(inputs.adapters, inputs.lengths)
        rotary = None if inputs.rotary is None else torch.from_numpy(inputs.rotary)
        limits = None if inputs.limits is None else torch.from_numpy(inputs.limits)
        types = None if inputs.types is None else torch.from_numpy(inputs.types)
        if self._native is not None:
            copies = None
            if self._recurrent is not None and inputs.states is not None:
                found = self._recurrent.begin(inputs.batch_rows, inputs.starts, inputs.lengths, inputs.states)
                copies = None if found is None else torch.from_numpy(found)
            step = partial(
                self._native.forward, slot_id, token_ids, positions, rows, outputs, adapters,
                copies=copies, rotary=rotary, limits=limits,
            )  # fmt: skip
            if self._text_only:
                logits = step(features=inputs.kept.get(FEATURES, ()))
                head = None if self._head is None else self._head.behind(inputs, self._native.made(slot_id))
                return StepStates(lambda: logits, head=head)
            hidden = self._embed(inputs, token_ids).float()
            logits = step(hidden=hidden, types=types)
            made = hidden[: len(outputs)]
            return self._made(inputs, lambda: logits, made if self._whole else made.to(self._decoder.dtype))
        if self._whole:
            return self._text_by_text(inputs, token_ids, types)
        attention = PagedAttention(
            cache=self._cache,
            plan=self._decoder.plan.mixers,
            rows=torch.from_numpy(inputs.batch_rows),
            starts=inputs.starts,
            lengths=inputs.lengths,
            slots=[self._cache.slots(rows, positions, group) for group in range(len(self._cache.tables))],
            limits=limits,
            progress=self._progress,
        )
        terms = None if self._bank is None or adapters is None else GroupedTerms(self._bank, adapters)
        states = None
        if self._recurrent is not None and inputs.states is not None:
            states = self._recurrent.advance(
                inputs.batch_rows, inputs.starts, inputs.lengths, inputs.states, self._progress
            )
        behind = adding_behind(inputs.kept.get(FEATURES, ()))
        turning = positions if rotary is None else rotary
        forward = Forward(turning, attention, terms, token_ids, types, states, behind=behind)
        every = self._decoder.forward(self._embed(inputs, token_ids), forward)
        hidden = every[outputs]
        results = self._made(inputs, lambda: self._decoder.head_output(hidden).float(), hidden)
        if self._head is None:
            return results
        return replace(results, head=self._head.behind(inputs, every.float().numpy()))

    def catch_up(self) -> None:
        if self._head is not None:
            self._head.catch_up()

    def _draft(
        self, known: Floats, token_ids: Int64Array, places: Places, at: Int64Array, *, chained: bool
    ) -> tuple[Tensor, Floats]:
        """See `Draft`."""
        decoder, drafter, cache = self._decoder, self._drafter, self._cache
        assert drafter is not None
        rows, positions = torch.from_numpy(places.rows), torch.from_numpy(places.positions)
        own, counts = torch.unique_consecutive(rows, return_counts=True)
        attention = PagedAttention(
            cache=cache.of_layer(-1),
            plan=drafter.plan.mixers,
            rows=own,
            starts=positions[counts.cumsum(0) - counts].int().numpy(),
            lengths=counts.int().numpy(),
            slots=[cache.slots(rows, positions, group) for group in range(len(cache.tables))],
            progress=self._progress,
        )
        turning = positions if places.rotary is None else torch.from_numpy(places.rotary)
        before = (drafter if chained else decoder).normed(torch.from_numpy(known).to(decoder.dtype))
        inputs = decoder.drafting_inputs(decoder.embed(torch.from_numpy(token_ids)), before)
        made = drafter.forward(inputs, Forward(turning, attention))[torch.from_numpy(at)]
        return drafter.head_output(made).float(), made.float().numpy()

    def _made(self, inputs: StepInputs, logits: Callable[[], Tensor], hidden: Tensor) -> StepStates:
        """hidden: of the outputs, or of all positions where texts are computed whole."""
        decoder = self._decoder
        if decoder.plan.pooling is not None:
            lengths = inputs.lengths.tolist() if self._whole else None
            vectors = decoder.vectors(hidden, lengths, inputs.unpooled)
            sides: dict[str, Callable[[Tensor], Any]] = {VECTORS: lambda _: vectors}
            if decoder.plan.pooling.of_tokens:
                of_tokens = self._of_tokens(inputs, hidden)
                sides[OF_TOKENS] = lambda _: of_tokens
            return StepStates(lambda: torch.zeros(len(vectors), 1), sides)
        if decoder.value_tokens is None:
            return StepStates(logits)
        return StepStates(logits, {VALUES: partial(made_found, cast(ValuedDecoder, decoder), hidden)})

    def _of_tokens(self, inputs: StepInputs, hidden: Tensor) -> npt.NDArray[Any]:
        """hidden: of all positions. Each text alone: the size of a product decides its last bits."""
        found, at = np.empty(len(inputs.lengths), object), 0
        for k, n in enumerate(inputs.lengths.tolist()):
            made: tuple[Tensor | None, ...] = (None, None)
            if inputs.of_tokens is not None and inputs.of_tokens[k]:
                made = self._decoder.of_tokens(hidden[at : at + n], inputs.of_tokens[k])
            found[k] = tuple(None if one is None else one.numpy() for one in made)
            at += n
        return found

    def _text_by_text(self, inputs: StepInputs, token_ids: Tensor, types: Tensor | None) -> StepStates:
        """In torch each text is computed alone: the size of a product decides its last bits."""
        made, at = [], 0
        for n in inputs.lengths.tolist():
            positions = torch.arange(n)
            own = None if types is None else types[at : at + n]
            attention, ids = TextAttention(self._decoder.plan.attentions, self._progress), token_ids[at : at + n]
            forward = Forward(positions, attention, token_ids=ids, types=own)
            made.append(self._decoder.forward(self._decoder.embed(ids), forward))
            at += n
        return self._made(inputs, lambda: torch.zeros(len(made), 1), torch.cat(made))

    def encode(self, slot_id: int, images: Sequence[PreparedImage]) -> Sequence[Tensor]:
        crops = [(torch.from_numpy(image.pixels), image.tiling) for image in images]
        encoder, seeing = self._encoder, self._seeing
        if self._native_tower is not None:
            return self._native_tower.encode(crops)
        if self._tower is not None:
            return self._tower.encode(crops, progress=self._progress)
        if encoder is None or seeing is None:
            return cast(ImageDecoder, self._decoder).encode(crops)
        return [seeing.image_features(encoder.features(pixels), at) for pixels, at in crops]

    def _embed(self, inputs: StepInputs, token_ids: Tensor) -> Tensor:
        """[T, hidden] in the model's type."""
        may_have_values = inputs.values is not None or len(inputs.pending_inputs) > 0
        if self._decoder.value_tokens is not None and may_have_values:
            embedded = self._embed_values(inputs, token_ids)
        else:
            embedded = self._decoder.embed(token_ids)
        for begin, features in inputs.kept.get(FEATURES, ()):
            embedded[begin : begin + features.shape[1]] = features[0]
        return embedded

    def _embed_values(self, inputs: StepInputs, token_ids: Tensor) -> Tensor:
        lines, at, pending = inputs.values, inputs.pending_inputs, self._pending.values.numpy()
        if lines is None:
            lines = np.full((len(token_ids), pending.shape[1]), NO_NUMBER, np.int32)
        lines[at] = pending[inputs.rows[at]]
        return embed_found(cast(ValuedDecoder, self._decoder), token_ids, torch.from_numpy(lines))
