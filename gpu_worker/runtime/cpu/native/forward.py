"""`NativeDecoder`: a decoder over one KV pool, computed by `layers/`.

Activations are float32 whatever the weights are. A product that the processor or torch's library computes in
bfloat16 rounds its inputs to bfloat16.
"""

from __future__ import annotations

import ctypes
import logging

import torch
from torch import Tensor

from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.fast_paths import supports
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.runtime.cpu.native.products.adapters import NativeAdapters
from petiole.gpu_worker.runtime.cpu.native.products.choice import choose_products
from petiole.gpu_worker.runtime.cpu.native.products.weights import KINDS
from petiole.gpu_worker.runtime.cpu.native.stack import (
    PARTS,
    VALUES,
    CacheStruct,
    Shape,
    Stack,
    at_least,
    library_for,
    unlike,
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
        decoder: Decoder,
        cache: KVCache,
        bank: AdapterBank | None,
        progress: Progress = nothing,
    ) -> None:
        self._decoder, self._cache = decoder, cache
        self._adapters = NativeAdapters(library, bank) if bank is not None else None
        head, plan = decoder.head, decoder.plan
        first = plan.layers[0]
        mixer = first.mixer
        assert first.mixer_norm is not None
        self._tied = isinstance(head, DenseLinear) and head.weight.is_set_to(decoder.embedding)
        self._products = choose_products(library, decoder.layers, decoder.head, decoder.dtype)
        self._stack = Stack(
            library,
            self._products,
            plan.layers,
            decoder.layers,
            Shape(
                plan.hidden_size,
                first.feed_forward.inner,
                (mixer.q_size, mixer.kv_size),
                first.mixer_norm.eps,
                NativeAdapters.reduced_width(bank) if bank is not None else 0,
            ),
            CacheStruct(
                heads=mixer.heads,
                kv_heads=mixer.kv_heads,
                head_dim=mixer.head_dim,
                kv_kind=KINDS[cache.dtype],
                page_size=cache.page_size,
                scale=mixer.scale,
                keys=cache.keys[0].data_ptr(),
                values=cache.values[0].data_ptr(),
                n_slots=cache.n_slots,
                columns=cache.table.shape[1],
                table=cache.table.data_ptr(),
            ),
            norm=decoder.norm,
            head=head,
            rotary=_whole_table(decoder),
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
    """The fast CPU path for this model. None if some of it is not known (`models.fast_paths`), if its sizes or
    type are unusual, if nothing can be compiled, or if PETIOLE_NATIVE is off. progress: called every second of a
    step that takes longer.

    The weights of the layers and of the head are rearranged in place: afterwards only the fast path can use them.
    """
    unknown = supports(decoder, VALUES, PARTS).reason or _unlike(decoder, bank)
    if unknown is not None:
        log.warning("torch alone computes on this CPU, which is slower: compiled code does not know %s", unknown)
        return None
    assert isinstance(decoder, Decoder)
    first = decoder.plan.layers[0]
    sizes = decoder.plan.hidden_size, first.feed_forward.inner, first.mixer.head_dim
    library = library_for(*sizes, decoder.dtype, _LANES)
    if library is None:
        return None
    return NativeDecoder(library, _unpartial(decoder), cache, bank, progress)


def _unlike(decoder: object, bank: AdapterBank | None) -> str | None:
    assert isinstance(decoder, Decoder)
    plan = decoder.plan
    found = unlike(plan.layers, plan.norm)
    rotary = plan.layers[0].mixer.rotary if found is None else None
    if found is None and rotary is None:
        return "layers without rotation"
    mixer = plan.layers[0].mixer
    if rotary is not None and rotary.dims != mixer.head_dim and (bank is not None or mixer.q_norm is not None):
        return "adapters or norms of heads where a part of a head is rotated"
    if plan.norm is None or plan.layers[0].mixer.mask == "bidirectional":
        return "an encoder of text"
    return found


def _unpartial(decoder: Decoder) -> Decoder:
    """A decoder for code that rotates whole heads, by the table of `_whole_table`. Where a part of a head is
    rotated, rows of queries and keys change their places: the halves of that part then lie in the halves of the
    head."""
    mixer = decoder.plan.layers[0].mixer
    assert mixer.rotary is not None
    if mixer.rotary.dims == mixer.head_dim:
        return decoder
    half, rest = mixer.rotary.dims // 2, (mixer.head_dim - mixer.rotary.dims) // 2
    rotated = mixer.q_size + mixer.kv_size
    for layer in decoder.layers:
        linear = layer.mixer.qkv
        assert isinstance(linear, DenseLinear)
        for tensor in (linear.weight, linear.bias):
            if tensor is not None:
                heads = tensor[:rotated].view(-1, mixer.head_dim, *tensor.shape[1:])
                low, high, left, right = torch.split(heads, [half, half, rest, rest], dim=1)
                tensor[:rotated] = torch.cat([low, left, high, right], dim=1).flatten(0, 1)
    return decoder


def _whole_table(decoder: Decoder) -> Tensor:
    mixer, table = decoder.plan.layers[0].mixer, decoder.tables[0]
    assert table is not None
    cos, sin = table.chunk(2, dim=-1)
    rest = mixer.head_dim // 2 - cos.shape[1]
    if not rest:
        return table
    ones, zeros = torch.ones(len(table), rest), torch.zeros(len(table), rest)
    return torch.cat([cos, ones, sin, zeros], dim=-1)
