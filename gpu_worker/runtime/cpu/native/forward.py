"""`NativeDecoder`: a decoder's weights and KV pool as `decoder.c` sees them.

Activations are float32 whatever the weights are. They are rounded to bfloat16 for products with bfloat16. The
structures mirror those in the C files, field by field.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from petiole.gpu_worker.models.decoder import DecoderLayer, LayeredDecoder, LayerNorm
from petiole.gpu_worker.models.layers import DenseLinear
from petiole.gpu_worker.models.lora import AdapterBank
from petiole.gpu_worker.runtime.cpu.native.adapters import NativeAdapters
from petiole.gpu_worker.runtime.cpu.native.build import load_library, wanted
from petiole.gpu_worker.runtime.cpu.native.products import choose_products
from petiole.gpu_worker.runtime.cpu.native.weights import KINDS, LinearStruct, Weights
from petiole.gpu_worker.runtime.interface import Int32Array
from petiole.gpu_worker.runtime.memory.kv import KVCache

_LANES = 16
_MAX_HEAD = 256


class _Norm(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", _Norm),
        ("post_norm", _Norm),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("window", c_int64),
    ]


class _Cache(ctypes.Structure):
    _fields_ = [
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("kv_kind", c_int32),
        ("page_size", c_int32),
        ("scale", c_float),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("n_slots", c_int64),
        ("columns", c_int64),
        ("table", c_void_p),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("n_layers", c_int32),
        ("hidden", c_int32),
        ("inner", c_int32),
        ("eps", c_float),
        ("rotary", c_void_p),
        ("norm", _Norm),
        ("layers", c_void_p),
        ("head", LinearStruct),
        ("cache", _Cache),
        ("library", c_void_p),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("t", c_int64),
        ("from", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("rotary", c_void_p),
        ("limits", c_void_p),
        ("rows", c_void_p),
        ("hidden", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("mixed", c_void_p),
        ("gates", c_void_p),
        ("acted", c_void_p),
        ("adapters", c_void_p),
        ("reduced", c_void_p),
        ("reduced_stride", c_int64),
        ("halves", c_void_p),
        ("o", c_int64),
        ("outputs", c_void_p),
        ("logits", c_void_p),
        ("n_threads", c_int32),
        ("scratch", c_void_p),
        ("scratch_stride", c_int64),
    ]


class NativeDecoder:
    """One decoder over one KV pool. It takes over the decoder's weights. Make it with `native_decoder`."""

    def __init__(
        self, library: ctypes.CDLL, decoder: LayeredDecoder, cache: KVCache, bank: AdapterBank | None
    ) -> None:
        self._library = library
        library.petiole_scratch.restype = c_int64
        self._decoder, self._cache = decoder, cache
        self._products = choose_products(library, decoder)
        self._weights = Weights(library, self._products.library)
        self._adapters = NativeAdapters(library, bank) if bank is not None else None
        head = decoder.head
        self._tied = isinstance(head, DenseLinear) and head.weight.data_ptr() == decoder.embedding.data_ptr()
        config = decoder.config
        self._layers = (_Layer * config.n_layers)(*(self._layer(i) for i in range(config.n_layers)))
        self._model = _Model(
            n_layers=config.n_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            eps=config.rms_norm_eps,
            rotary=self._weights.floats(decoder.rotary),
            norm=self._norm(decoder.norm),
            layers=ctypes.addressof(self._layers),
            head=self._weights.linear(decoder.head, self._products.library_from("head")),
            cache=_Cache(
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
            library=None if self._products.library is None else self._products.library.address,
        )
        self._widths = (
            config.hidden_size,
            config.q_size + 2 * config.kv_size,
            config.q_size,
            self._layers[0].gate_up.n,
            config.intermediate_size,
            NativeAdapters.reduced_width(bank) if bank is not None else 0,
            0
            if self._products.library is None
            else max(config.intermediate_size, config.q_size, config.hidden_size),
        )
        self._activations, self._scratch = torch.empty(0), torch.empty(0)
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
        """Logits, float32 [O, vocab], in memory that the slot's next step overwrites: to allocate that much in
        each step would cost more than the arithmetic of a small batch.

        token_ids, positions, rows: int64 [T]; a row's positions ascend, and its inputs are neighbours; outputs:
        int64 [O], ascending, the inputs whose logits are wanted; adapter_slots: [T]. Writes the KV of every
        position, and reads the KV of the row's earlier positions.

        hidden: float32 [T, hidden], the inputs' embeddings, overwritten by the hidden states before the final
        norm; None: the embeddings of the token ids. rotary: int64 [T], rotary positions; None: the positions.
        limits: int64 [T], for each input the end of the positions that it sees; None: all up to its own."""
        t, width, hidden_size, vocab = len(token_ids), sum(self._widths), self._model.hidden, self._model.head.n
        by_ids = self._tied and hidden is None
        if hidden is None:
            hidden = torch.empty(t, hidden_size) if by_ids else self._decoder.embed(token_ids).float()
        self._activations = _at_least(self._activations, t * width)
        self._logits[slot_id] = memory = _at_least(self._logits.get(slot_id), len(outputs) * vocab)
        at, parts = self._activations.data_ptr(), []
        for part in self._widths:
            parts.append(at)
            at += 4 * t * part
        adapters = None
        if self._adapters is not None and adapter_slots is not None and adapter_slots.any():
            adapters = self._adapters.addresses(adapter_slots)
        n_threads = torch.get_num_threads()
        step = _Step(
            t,
            0,
            token_ids.data_ptr() if by_ids else None,
            positions.data_ptr(),
            (positions if rotary is None else rotary).data_ptr(),
            None if limits is None else limits.data_ptr(),
            rows.data_ptr(),
            hidden.data_ptr(),
            *parts[:-2],
            None if adapters is None else adapters.ctypes.data,
            parts[-2],
            self._widths[-2],
            parts[-1],
            len(outputs),
            outputs.data_ptr(),
            memory.data_ptr(),
            n_threads,
        )
        arguments = ctypes.byref(self._model), ctypes.byref(step)
        step.scratch_stride = self._library.petiole_scratch(*arguments)
        self._scratch = _at_least(self._scratch, n_threads * step.scratch_stride // 4)
        step.scratch = self._scratch.data_ptr()
        if self._library.petiole_forward(*arguments):
            self._products.give_up_library()
            self._model.library = None
        return memory[: len(outputs) * vocab].view(len(outputs), vocab)

    def _layer(self, i: int) -> _Layer:
        layer = self._decoder.layers[i]
        norms = (
            {
                "input_norm": self._norm(layer.input_norm),
                "post_norm": self._norm(layer.post_norm),
                "q_norm": self._weights.floats(layer.q_norm),
                "k_norm": self._weights.floats(layer.k_norm),
            }
            if isinstance(layer, DecoderLayer)
            else {"input_norm": self._norm(layer.norm)}
        )
        return _Layer(
            **norms,
            qkv=self._weights.linear(layer.qkv, self._products.library_from("qkv")),
            out=self._weights.linear(layer.out, self._products.library_from("out")),
            gate_up=self._weights.linear(layer.gate_up, self._products.library_from("gate_up")),
            down=self._weights.linear(layer.down, self._products.library_from("down")),
            window=self._decoder.config.windows[i],
        )

    def _norm(self, norm: Tensor | LayerNorm) -> _Norm:
        weight, bias = norm if isinstance(norm, tuple) else (norm, None)
        return _Norm(self._weights.floats(weight), self._weights.floats(bias))


def _at_least(memory: Tensor | None, n: int) -> Tensor:
    return memory if memory is not None and memory.numel() >= n else torch.empty(n)


def native_decoder(decoder: object, cache: KVCache, bank: AdapterBank | None = None) -> NativeDecoder | None:
    """The fast CPU path for this model; None if there is no compiler, or the model or its type is unusual.

    The decoder's weights are rearranged in place, so only the fast path can use them afterwards.
    """
    if not isinstance(decoder, LayeredDecoder):
        return None
    width, even = (
        decoder.config.head_dim,
        decoder.config.intermediate_size % 2 == decoder.config.hidden_size % 2 == 0,
    )
    usual = (
        decoder.dtype in (torch.float32, torch.bfloat16) and width % _LANES == 0 and width <= _MAX_HEAD and even
    )
    library = load_library() if usual and wanted() else None
    return None if library is None else NativeDecoder(library, decoder, cache, bank)
