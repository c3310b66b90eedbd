"""`NativeDecoder`: a decoder over one KV pool, computed by `layers/`.

Activations are float32 whatever the weights are. A product that the processor makes in bfloat16
rounds its inputs to bfloat16.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.recurrent.states import LayerState
from petiole.gpu_worker.models.plan import Layer
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.models.weights.quantized import CodedLinear, CodedTable
from petiole.gpu_worker.runtime.cpu.head import Floats, Places
from petiole.gpu_worker.runtime.cpu.native.layers.structures import EmbeddingAndHead, KVPointers, PerLayer
from petiole.gpu_worker.runtime.cpu.native.products.adapters import NativeAdapters
from petiole.gpu_worker.runtime.cpu.native.products.weights import described
from petiole.gpu_worker.runtime.cpu.native.stack import Stack, at_least, library_for
from petiole.gpu_worker.runtime.cpu.native.supported import support
from petiole.gpu_worker.runtime.interface import Int32Array, Int64Array, Progress, nothing
from petiole.gpu_worker.runtime.memory.kv import KVCache
from petiole.gpu_worker.runtime.step.inputs import Parts, adding_behind

log = logging.getLogger(__name__)


class NativeDecoder:
    """One decoder over one KV pool. It takes over the decoder's weights. Make it with `native_decoder`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        decoder: Decoder,
        cache: KVCache,
        bank: AdapterBank | None,
        progress: Progress = nothing,
        states: Sequence[LayerState | None] = (),
    ) -> None:
        self._decoder, self._cache, self._library = decoder, cache, library
        self._adapters = NativeAdapters(library, bank) if bank is not None else None
        head, plan = decoder.head, decoder.plan
        table = decoder.embedding
        if isinstance(table, CodedTable):
            self._tied = isinstance(head, CodedLinear) and head.weight is table.weight
        else:
            self._tied = isinstance(head, DenseLinear) and head.weight.is_set_to(table)
        self._bidirectional = any(mixer.mask == "bidirectional" for _, mixer in plan.attending)
        per_layer = None
        if plan.per_layer is not None and decoder.per_layer is not None:
            per_layer = PerLayer(plan.per_layer, decoder.per_layer)
        self._stack = Stack(
            library,
            _layers(decoder),
            KVPointers(cache.keys, cache.values, [cache.tables[i] for i in cache.groups], cache.page_size, states),
            plan.hidden_size,
            decoder.dtype,
            tables=decoder.tables if decoder.drafting is None else (*decoder.tables, decoder.drafting.table),
            ends=EmbeddingAndHead(
                decoder.embedding_factor,
                plan.embedding_norm,
                decoder.embedding_norm,
                plan.norm,
                decoder.norm,
                head,
                plan.logits_factor,
                plan.logits_softcap,
            ),
            per_layer=per_layer,
            reduced=NativeAdapters.reduced_width(bank) if bank is not None else 0,
            progress=progress,
            drafting=decoder.drafting,
        )
        self._drafter = None if decoder.drafting is None else decoder.drafter
        self._drafted: Tensor | None = None
        """Memory for logits of drafts."""
        self._made: dict[int, Tensor] = {}
        """By slot: what the layers made of all inputs, for the head that drafts."""
        self._logits: dict[int, Tensor] = {}
        self._first_type: Tensor | None = None
        """float32 [positions, hidden]: what is added at each position to a token of the first type."""
        if decoder.positions is not None and decoder.token_types is not None:
            self._first_type = decoder.positions.float() + decoder.token_types[0].float()

    def forward(
        self,
        slot_id: int,
        token_ids: Tensor,
        positions: Tensor,
        rows: Tensor,
        outputs: Tensor,
        adapter_slots: Int32Array | None = None,
        *,
        hidden: Tensor | None = None,
        features: Parts = (),
        copies: Tensor | None = None,
        rotary: Tensor | None = None,
        limits: Tensor | None = None,
        types: Tensor | None = None,
    ) -> Tensor:
        """Logits, float32 [O, vocab], for O outputs of T inputs; of a model that pools, nothing that was computed.
        The slot's next step overwrites this memory: a new allocation in each step would cost more than the
        arithmetic of a small batch.

        token_ids, positions, rows: int64 [T]. The inputs of a row are neighbours, and their positions ascend.
        outputs: int64 [O], strictly ascending: the inputs whose logits are wanted. adapter_slots: [T]. The forward
        writes the KV of every input, and reads the KV of the positions that the input sees. It advances the states
        of the rows. copies: int64 [T], the place to which the states after each input are copied, or -1.

        hidden: float32 [T, hidden], the inputs' embeddings; None: the embeddings of the token ids. The forward
        overwrites its first O rows with the outputs' hidden states before the final norm. features: of images, in
        place of the embeddings of their tokens, and what is added behind the first layers. rotary: int64 [T] or
        [axes, T], rotary positions; None: the positions. types: int64 [T], rows of token types; None: the first.
        limits: int64 [T]: an input sees the positions before its limit; None: all up to its own."""
        model, decoder = self._stack.model, self._decoder
        tables: Sequence[Tensor | None] = ()
        if rotary is not None and rotary.ndim > 1:
            tables = decoder.tables_by_axes(rotary)
            rotary = torch.arange(rotary.shape[1])
        if features and hidden is None:
            hidden = self._embed(token_ids)
        for begin, own in features:
            assert hidden is not None
            hidden[begin : begin + own.shape[1]] = own[0]
        deep = max((len(own) - 1 for _, own in features), default=0)
        by_ids, per_layer = self._tied and hidden is None, None
        if hidden is None:
            hidden = torch.empty(len(token_ids), model.hidden) if by_ids else decoder.embed(token_ids).float()
        if decoder.per_layer is not None:
            per_layer = torch.nn.functional.embedding(token_ids, decoder.per_layer.table).float()
        if self._bidirectional:
            limits = _ends_of_rows(positions, rows)
        shape = len(outputs), model.head.n
        self._logits[slot_id] = memory = at_least(self._logits.get(slot_id), shape[0] * shape[1])
        adapters = None
        if self._adapters is not None and adapter_slots is not None and adapter_slots.any():
            adapters = self._adapters.addresses(adapter_slots)
        self._stack.run(
            hidden,
            positions,
            rows,
            outputs,
            keep=partial(self._made.__setitem__, slot_id) if decoder.drafting is not None else None,
            token_ids=token_ids if by_ids else None,
            copies=copies,
            rotary=rotary,
            limits=limits,
            extra=self._extra(positions if rotary is None else rotary, types),
            per_layer=per_layer,
            logits=memory if decoder.plan.pooling is None else None,
            adapters=adapters,
            tables=tables,
            behind=adding_behind(features),
            stops=range(deep),
        )
        return memory[: shape[0] * shape[1]].view(shape)

    def made(self, slot_id: int) -> Floats:
        """What the layers made of all inputs of the slot's last forward, for the head that drafts. Given once."""
        return self._made.pop(slot_id).numpy()

    def draft(
        self, known: Floats, token_ids: Int64Array, places: Places, at: Int64Array, *, chained: bool
    ) -> tuple[Tensor, Floats]:
        """See `Draft`. Arrays of numpy: each operation of torch lets go of the interpreter, and the engine's
        thread takes it."""
        drafter, rotary = self._drafter, places.rotary
        assert drafter is not None, "the model has a head that drafts"
        tables: Sequence[Tensor | None] = ()
        if rotary is not None and rotary.ndim > 1:
            tables = drafter.tables_by_axes(torch.from_numpy(rotary))
            rotary = np.arange(rotary.shape[1])
        embedded = None if self._tied else self._embed(torch.from_numpy(token_ids)).numpy()
        shape = len(at), self._stack.model.head.n
        self._drafted = memory = at_least(self._drafted, shape[0] * shape[1])
        made = self._stack.draft(
            known, token_ids, places.positions, places.rows, at, memory,
            embedded=embedded, chained=chained, rotary=rotary, tables=tables,
        )  # fmt: skip
        return memory[: shape[0] * shape[1]].view(shape), made

    def _embed(self, token_ids: Tensor) -> Tensor:
        """float32 [T, hidden]. The weights of a tied head are packed, and C code reads them."""
        if not self._tied:
            return self._decoder.embed(token_ids).float()
        head, factor = self._stack.model.head, self._stack.model.embedding_factor
        hidden = torch.empty(len(token_ids), self._stack.model.hidden)
        ids, into = ctypes.c_void_p(token_ids.data_ptr()), ctypes.c_void_p(hidden.data_ptr())
        n = ctypes.c_int64(len(token_ids))
        self._library.petiole_embed(ctypes.byref(head), n, ids, ctypes.c_float(factor), into)
        return hidden

    def _extra(self, positions: Tensor, types: Tensor | None) -> Tensor | None:
        """float32 [T, hidden]: what is added to the embeddings at these positions, of tokens of these types."""
        decoder = self._decoder
        if self._first_type is not None and types is None:
            return torch.nn.functional.embedding(positions, self._first_type)
        extra = None if decoder.positions is None else decoder.positions[positions].float()
        if decoder.token_types is not None:
            kinds = torch.zeros_like(positions) if types is None else types
            added = decoder.token_types[kinds].float()
            extra = added if extra is None else extra + added
        return extra


def native_decoder(
    decoder: object,
    cache: KVCache,
    bank: AdapterBank | None = None,
    progress: Progress = nothing,
    states: Sequence[LayerState | None] = (),
) -> NativeDecoder | None:
    """The fast CPU path for this model. None if some of it is not known (`models.fast_paths`), if its sizes or
    type are unusual, if nothing can be compiled, or if PETIOLE_NATIVE is off. progress: called every second of a
    step that takes longer. states: of each layer; empty: none keeps any.

    The weights of the layers and of the head are rearranged in place: afterwards only the fast path can use them.
    """
    if (reason := support(decoder).reason) is not None:
        log.warning("torch alone computes on this CPU, which is slower: compiled code does not know %s", reason)
        return None
    assert isinstance(decoder, Decoder)
    library = library_for(decoder.dtype)
    if library is None:
        return None
    library.petiole_instructions.restype = ctypes.c_char_p
    library.petiole_instructions.argtypes = [ctypes.c_int32]
    log.info(
        "compiled code computes all %d layers on this CPU: %s, %d threads, linear maps of %s",
        decoder.plan.n_layers,
        library.petiole_instructions(int(decoder.dtype == torch.bfloat16)).decode(),
        torch.get_num_threads(),
        ", ".join(described(decoder.layers, decoder.head)),
    )
    return NativeDecoder(library, decoder, cache, bank, progress, states)


def _layers(decoder: Decoder) -> list[tuple[Layer, LayerWeights]]:
    """The layers, and behind them the one that drafts."""
    layers = list(zip(decoder.plan.layers, decoder.layers, strict=True))
    if decoder.drafting is not None and decoder.plan.drafting is not None:
        layers.append((decoder.plan.drafting, decoder.drafting.layer))
    return layers


def _ends_of_rows(positions: Tensor, rows: Tensor) -> Tensor:
    """int64 [T]: for each input the end of the positions that its row has in this step."""
    last = torch.ones(len(rows), dtype=torch.bool)
    last[:-1] = rows[1:] != rows[:-1]
    ends = positions[last] + 1
    return ends[torch.cumsum(last, 0) - last.long()]
