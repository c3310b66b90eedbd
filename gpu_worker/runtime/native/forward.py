"""`NativeDecoder`: a decoder's weights and KV pool as `decoder.c` sees them.

Activations are float32 whatever the weights are. The structures mirror those in the C file, field by field.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.decoder import Decoder
from gpu_worker.models.layers import DenseLinear, Int8Linear, Linear
from gpu_worker.runtime.kv import KVCache
from gpu_worker.runtime.native.build import load_library, wanted

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_LANES = 16


class _Linear(ctypes.Structure):
    _fields_ = [
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("kind", c_int32),
        ("pad", c_int32),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("post_norm", c_void_p),
        ("qkv", _Linear),
        ("out", _Linear),
        ("gate_up", _Linear),
        ("down", _Linear),
        ("window", c_int64),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("n_layers", c_int32),
        ("hidden", c_int32),
        ("inner", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("kv_kind", c_int32),
        ("page_size", c_int32),
        ("eps", c_float),
        ("scale", c_float),
        ("rotary", c_void_p),
        ("norm", c_void_p),
        ("layers", c_void_p),
        ("head", _Linear),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("n_slots", c_int64),
        ("columns", c_int64),
        ("table", c_void_p),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("t", c_int64),
        ("positions", c_void_p),
        ("rows", c_void_p),
        ("hidden", c_void_p),
        ("normed", c_void_p),
        ("qkv", c_void_p),
        ("mixed", c_void_p),
        ("gates", c_void_p),
        ("acted", c_void_p),
        ("n_threads", c_int32),
    ]


class NativeDecoder:
    """One decoder over one KV pool. Make it with `native_decoder`."""

    def __init__(self, library: ctypes.CDLL, decoder: Decoder, cache: KVCache) -> None:
        self._library = library
        self._decoder = decoder
        self._kept: list[Any] = [decoder, cache]  # what the structures point into
        self._embedding = decoder.embedding
        config = decoder.config
        layers = (_Layer * config.n_layers)(*(self._layer(i) for i in range(config.n_layers)))
        self._kept.append(layers)
        self._model = _Model(
            n_layers=config.n_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.n_heads,
            kv_heads=config.n_kv_heads,
            head_dim=config.head_dim,
            kv_kind=_KINDS[cache.keys.dtype],
            page_size=cache.page_size,
            eps=config.rms_norm_eps,
            scale=config.head_dim**-0.5,
            rotary=self._float(decoder.rotary),
            norm=self._float(decoder.norm),
            layers=ctypes.addressof(layers),
            head=self._linear(decoder.head),
            keys=cache.keys.data_ptr(),
            values=cache.values.data_ptr(),
            n_slots=cache.keys.shape[1],
            columns=cache.table.shape[1],
            table=cache.table.data_ptr(),
        )
        self._widths = (
            config.hidden_size,
            config.q_size + 2 * config.kv_size,
            config.q_size,
            2 * config.intermediate_size,
            config.intermediate_size,
        )
        self._scratch = torch.empty(0)

    def embed(self, token_ids: Tensor) -> Tensor:
        """float32 [T, hidden]"""
        return self._embedding[token_ids].float()

    def forward(self, hidden: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        """All layers over `hidden`, float32 [T, hidden], in place. positions, rows: int64 [T]; a row's positions
        ascend. Writes the KV of every position, and reads that of the row's earlier ones."""
        t = hidden.shape[0]
        if self._scratch.numel() < t * sum(self._widths):
            self._scratch = torch.empty(t * sum(self._widths))
        at, parts = self._scratch.data_ptr(), []
        for width in self._widths:
            parts.append(at)
            at += 4 * t * width
        step = _Step(t, positions.data_ptr(), rows.data_ptr(), hidden.data_ptr(), *parts, torch.get_num_threads())
        self._library.petiole_forward(ctypes.byref(self._model), ctypes.byref(step))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [O, hidden] -> float32 [O, vocab]"""
        hidden = hidden.contiguous()
        normed = torch.empty_like(hidden)
        logits = torch.empty(hidden.shape[0], self._model.head.n)
        self._library.petiole_logits(
            ctypes.byref(self._model),
            c_int64(hidden.shape[0]),
            c_void_p(hidden.data_ptr()),
            c_void_p(normed.data_ptr()),
            c_void_p(logits.data_ptr()),
            c_int32(torch.get_num_threads()),
        )
        return logits

    def _layer(self, i: int) -> _Layer:
        layer = self._decoder.layers[i]
        return _Layer(
            input_norm=self._float(layer.input_norm),
            q_norm=self._float(layer.q_norm),
            k_norm=self._float(layer.k_norm),
            post_norm=self._float(layer.post_norm),
            qkv=self._linear(layer.qkv),
            out=self._linear(layer.out),
            gate_up=self._linear(layer.gate_up),
            down=self._linear(layer.down),
            window=self._decoder.config.windows[i],
        )

    def _linear(self, linear: Linear) -> _Linear:
        assert isinstance(linear, (DenseLinear, Int8Linear))
        n, k = linear.weight.shape
        scale = linear.scale if isinstance(linear, Int8Linear) else None
        return _Linear(
            weight=self._pointer(linear.weight),
            scale=self._float(scale),
            bias=self._float(linear.bias),
            n=n,
            k=k,
            kind=_KINDS[linear.weight.dtype],
        )

    def _float(self, tensor: Tensor | None) -> int | None:
        return None if tensor is None else self._pointer(tensor.float())

    def _pointer(self, tensor: Tensor) -> int:
        tensor = tensor.contiguous()
        self._kept.append(tensor)
        return tensor.data_ptr()


def native_decoder(decoder: Decoder, cache: KVCache) -> NativeDecoder | None:
    """The fast CPU path for this model, or None where torch must do: no compiler, or an unusual type or shape."""
    usual = decoder.dtype in (torch.float32, torch.bfloat16) and decoder.config.head_dim % _LANES == 0
    library = load_library() if usual and wanted() else None
    return None if library is None else NativeDecoder(library, decoder, cache)
