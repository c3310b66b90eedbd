"""`NativeDecoder`: a decoder over one KV pool, computed by `layers/`.

Activations are float32 whatever the weights are. A product that the processor or torch's library computes in
bfloat16 rounds its inputs to bfloat16.
"""

from __future__ import annotations

import ctypes
import logging
from typing import cast

import torch
from torch import Tensor

from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.known import unknown_in_decoder
from petiole.gpu_worker.models.layered import LayeredDecoder
from petiole.gpu_worker.models.layers import DenseLinear
from petiole.gpu_worker.runtime.cpu.native.products.adapters import NativeAdapters
from petiole.gpu_worker.runtime.cpu.native.products.choice import choose_products
from petiole.gpu_worker.runtime.cpu.native.products.weights import KINDS
from petiole.gpu_worker.runtime.cpu.native.stack import (
    PARTS,
    CacheStruct,
    Shape,
    Stack,
    at_least,
    library_for,
)
from petiole.gpu_worker.runtime.interface import Int32Array, Progress, nothing
from petiole.gpu_worker.runtime.memory.kv import KVCache

log = logging.getLogger(__name__)

_LANES = 16


class NativeDecoder:
    """One decoder over one KV pool. It takes over the decoder's weights. Make it with `native_decoder`."""

    def __init__(
        self,
        library: ctypes.CDLL,
        decoder: LayeredDecoder,
        cache: KVCache,
        bank: AdapterBank | None,
        progress: Progress = nothing,
    ) -> None:
        self._decoder, self._cache = decoder, cache
        self._adapters = NativeAdapters(library, bank) if bank is not None else None
        head, config = decoder.head, decoder.config
        self._tied = isinstance(head, DenseLinear) and head.weight.is_set_to(decoder.embedding)
        self._products = choose_products(library, decoder.layers, decoder.head, decoder.dtype)
        self._stack = Stack(
            library,
            self._products,
            decoder.layers,
            Shape(
                config.hidden_size,
                config.intermediate_size,
                (config.q_size, config.kv_size),
                config.rms_norm_eps,
                NativeAdapters.reduced_width(bank) if bank is not None else 0,
            ),
            CacheStruct(
                heads=config.n_heads,
                kv_heads=config.n_kv_heads,
                head_dim=config.head_dim,
                kv_kind=KINDS[cache.keys.dtype],
                page_size=cache.page_size,
                scale=config.head_dim**-0.5,
                keys=cache.keys.data_ptr(),
                values=cache.values.data_ptr(),
                n_slots=cache.keys.shape[1],
                columns=cache.table.shape[1],
                table=cache.table.data_ptr(),
            ),
            windows=config.windows,
            norm=decoder.norm,
            head=head,
            rotary=decoder.rotary,
            progress=progress,
        )
        self._logits: dict[int, Tensor] = {}

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
        rotary: Tensor | None = None,
        limits: Tensor | None = None,
    ) -> Tensor:
        """Logits, float32 [O, vocab], for O outputs of T inputs. The slot's next step overwrites this memory: a
        new allocation in each step would cost more than the arithmetic of a small batch.

        token_ids, positions, rows: int64 [T]. The inputs of a row are neighbours, and their positions ascend.
        outputs: int64 [O], strictly ascending: the inputs whose logits are wanted. adapter_slots: [T]. The forward
        writes the KV of every input, and reads the KV of the positions that the input sees.

        hidden: float32 [T, hidden], the inputs' embeddings; None: the embeddings of the token ids. The forward
        overwrites its first O rows with the outputs' hidden states before the final norm. rotary: int64 [T],
        rotary positions; None: the positions. limits: int64 [T]: an input sees the positions before its limit;
        None: all up to its own."""
        if rotary is not None and rotary.ndim != 1:
            raise ValueError(f"rotary positions: must be of one axis, got {list(rotary.shape)}")
        model = self._stack.model
        by_ids = self._tied and hidden is None
        if hidden is None:
            hidden = (
                torch.empty(len(token_ids), model.hidden) if by_ids else self._decoder.embed(token_ids).float()
            )
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
            token_ids=token_ids if by_ids else None,
            rotary=rotary,
            limits=limits,
            logits=memory,
            adapters=adapters,
        )
        return memory[: shape[0] * shape[1]].view(shape)


def native_decoder(
    decoder: object, cache: KVCache, bank: AdapterBank | None = None, progress: Progress = nothing
) -> NativeDecoder | None:
    """The fast CPU path for this model. None if some of it is not known (`models.known`), if its sizes or type are
    unusual, if nothing can be compiled, or if PETIOLE_NATIVE is off. progress: called every second of a step that
    takes longer.

    The weights of the layers and of the head are rearranged in place: afterwards only the fast path can use them.
    """
    unknown = unknown_in_decoder(decoder, PARTS)
    if unknown is not None:
        log.warning("torch alone computes on this CPU, which is slower: compiled code does not know %s", unknown)
        return None
    known = cast(LayeredDecoder, decoder)
    config = known.config
    sizes = config.hidden_size, config.intermediate_size, config.head_dim
    library = library_for(*sizes, known.dtype, _LANES)
    return None if library is None else NativeDecoder(library, known, cache, bank, progress)
