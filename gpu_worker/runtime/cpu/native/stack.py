"""`Stack`: the layers of a model over a memory of keys and values, as `layers/` sees them.

The structures mirror those in the C files, field by field.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.gpu_worker.config import switch
from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.fast_paths import ANY, TABLE, Parts, Values
from petiole.gpu_worker.models.host_memory import new_tensor
from petiole.gpu_worker.models.parts.kernels import TorchKernels
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.plan import Attention, FeedForward, Layer, ModelPlan, Norm, Rotary
from petiole.gpu_worker.models.weights.linear import DenseLinear, Int8Linear, Linear
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.products.choice import Products
from petiole.gpu_worker.runtime.cpu.native.products.weights import EMPTY, LinearStruct, Weights
from petiole.gpu_worker.runtime.interface import Progress, nothing

log = logging.getLogger(__name__)


class NormStruct(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("input_norm", NormStruct),
        ("post_norm", NormStruct),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("window", c_int64),
    ]


class CacheStruct(ctypes.Structure):
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
        ("norm", NormStruct),
        ("layers", c_void_p),
        ("head", LinearStruct),
        ("cache", CacheStruct),
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
        ("progress", ctypes.CFUNCTYPE(None)),
    ]


_MAX_HEAD = 256

PARTS: Parts = frozenset({TorchKernels, DenseLinear, Int8Linear})
"""The parts that the C code computes. See `models.fast_paths`."""

VALUES: Values = {
    ModelPlan: {
        "architecture": ANY,
        "vocab_size": ANY,
        "hidden_size": ANY,
        "norm": {Norm},
        "max_position": ANY,
        "tied_head": ANY,
        "head_bias": ANY,
        "embedding_factor": {1.0},
        "embedding_norm": {None},
        "learned_positions": {0},
        "token_types": {0},
        "logits_factor": {1.0},
        "logits_softcap": {0.0},
        "side": {None},
        "dtype": ANY,
        "eos_token_ids": ANY,
    },
    Layer: {
        "mixer": {Attention},
        "feed_forward": {FeedForward},
        "mixer_norm": {Norm},
        "mixer_out_norm": {None},
        "feed_forward_norm": {None, Norm},
        "feed_forward_out_norm": {None},
        "parallel": {True, False},
        "post_norm": {False},
        "residual": {1.0},
        "scalar": {False},
    },
    Attention: {
        "heads": ANY,
        "kv_heads": ANY,
        "head_dim": ANY,
        "scale": ANY,
        "rotary": {None, Rotary},
        "window": ANY,
        "mask": {"causal", "prefix", "bidirectional"},
        "q_norm": {None, Norm},
        "k_norm": {None, Norm},
        "v_norm": {None},
        "norm_whole": {False},
        "qkv_bias": ANY,
        "out_bias": ANY,
        "softcap": {0.0},
        "sinks": {False},
        "output_gate": {False},
        "keys_of": {None},
        "values_are_keys": {False},
        "query_growth": {None},
    },
    Rotary: TABLE,
    FeedForward: {
        "inner": ANY,
        "activation": {"silu", "gelu_tanh"},
        "gated": {True, False},
        "bias": ANY,
        "clamp": {0.0},
    },
    Norm: {"kind": {"rms", "layer"}, "eps": ANY, "weight": {True}, "bias": ANY, "offset": {0.0}},
}
"""The plans that the C code computes, layer by layer. `unlike` has what it needs of layers together."""


def unlike(layers: Sequence[Layer], norm: Norm | None = None) -> str | None:
    """What the C code does not compute of these layers together: their sizes must be the same, and so must their
    norms. norm: behind the last layer."""
    if not layers:
        return "a model without layers"
    first = layers[0]
    for layer in layers:
        mixer, fed = layer.mixer, layer.feed_forward
        if replace(layer, mixer=replace(mixer, window=0)) != replace(first, mixer=replace(first.mixer, window=0)):
            return "layers of different sizes or kinds"
        if fed.gated != (fed.activation == "silu"):
            return f"a {fed.activation} {'with' if fed.gated else 'without'} a gate"
        if (layer.feed_forward_norm is None) != layer.parallel:
            return "a layer with another number of norms"
        if layer.parallel and fed.gated:
            return "attention beside a gated feed-forward"
        norms = [one for one in (layer.mixer_norm, layer.feed_forward_norm, norm) if one is not None]
        if any(one != norms[0] or one.bias != (one.kind == "layer") for one in norms):
            return "norms of different kinds"
        of_heads = mixer.q_norm, mixer.k_norm
        if (of_heads != (None, None) and of_heads != (norms[0], norms[0])) or (mixer.q_norm and norms[0].bias):
            return "norms of heads of another kind"
    return None


@dataclass(frozen=True)
class Shape:
    """Numbers of floats. hidden: of a position; inner: of an MLP; attention: of all queries, and of all keys;
    reduced: of A x, if there are adapters."""

    hidden: int
    inner: int
    attention: tuple[int, int]
    eps: float
    reduced: int = 0


class Stack:
    """The layers of a model. It takes over their weights, and rearranges them in place. norm, head: they turn
    hidden states into logits; None: there are no logits. rotary: see `rotary_table`; None: queries and keys are
    not rotated. progress: called every second of a step that takes longer."""

    def __init__(
        self,
        library: ctypes.CDLL,
        products: Products,
        plan: Sequence[Layer],
        layers: Sequence[LayerWeights],
        shape: Shape,
        cache: CacheStruct,
        *,
        norm: NormWeights | None = None,
        head: Linear | None = None,
        rotary: Tensor | None = None,
        progress: Progress = nothing,
    ) -> None:
        self._library, self._products = library, products
        self._progress = ctypes.CFUNCTYPE(None)(progress)
        library.petiole_scratch.restype = c_int64
        self._weights = Weights(library, products.library)
        self._layers = (_Layer * len(layers))(
            *(self._layer(layer, of.mixer.window) for layer, of in zip(layers, plan, strict=True))
        )
        self.model = _Model(
            n_layers=len(layers),
            hidden=shape.hidden,
            inner=shape.inner,
            eps=shape.eps,
            rotary=self._weights.floats(rotary),
            norm=self._norm(norm),
            layers=ctypes.addressof(self._layers),
            head=EMPTY if head is None else self._weights.linear(head, products.library_from("head")),
            cache=cache,
            library=None if products.library is None else products.library.address,
        )
        queries, keys = shape.attention
        self._reduced = shape.reduced
        self._widths = {  # floats for each position
            "normed": shape.hidden,
            "qkv": queries + 2 * keys,
            "mixed": queries,
            "gates": self._layers[0].gate_up.n,
            "acted": shape.inner,
            "reduced": shape.reduced,
            "halves": 0 if products.library is None else max(shape.inner, queries, shape.hidden),
        }
        self._most = 0
        self._step = _Step()
        self._memory: tuple[Tensor, Tensor] | None = None

    def run(
        self,
        hidden: Tensor,
        positions: Tensor,
        rows: Tensor,
        outputs: Tensor,
        *,
        token_ids: Tensor | None = None,
        rotary: Tensor | None = None,
        limits: Tensor | None = None,
        logits: Tensor | None = None,
        adapters: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Compute all layers.

        hidden: float32 [T, hidden], the layers' inputs. outputs: int64 [O], strictly ascending: the inputs whose
        results are wanted; what the layers make of them overwrites the first O rows of `hidden`, and their logits
        are written to `logits`, [O, vocab]. token_ids: int64 [T]; if given, the inputs are the embeddings of these
        tokens, whose table is the head. positions, rows, rotary, limits: int64 [T]. adapters: [T], see
        `NativeAdapters`."""
        t, n_threads = len(hidden), torch.get_num_threads()
        if t > self._most or n_threads != self._step.n_threads:
            self._take_memory(max(t, self._most), n_threads)
        step = self._step
        step.t = t
        step.token_ids = _address(token_ids)
        step.positions = positions.data_ptr()
        step.rotary = (positions if rotary is None else rotary).data_ptr()
        step.limits = _address(limits)
        step.rows = rows.data_ptr()
        step.hidden = hidden.data_ptr()
        step.adapters = None if adapters is None else adapters.ctypes.data
        step.o = len(outputs)
        step.outputs = outputs.data_ptr()
        step.logits = _address(logits)
        failures = self._library.petiole_forward(ctypes.byref(self.model), ctypes.byref(step))
        if failures < 0:
            raise ModelError("adapters: must have the sizes of the model's linear layers")
        if failures:
            self._products.give_up_library()
            self.model.library = None

    def _take_memory(self, t: int, n_threads: int) -> None:
        """Memory for steps of up to `t` positions. Later steps use it again."""
        self._memory = None
        step = _Step(t=t, n_threads=n_threads, reduced_stride=self._reduced, progress=self._progress)
        activations = new_tensor((t * sum(self._widths.values()),), torch.float32, torch.device("cpu"))
        at = activations.data_ptr()
        for name, width in self._widths.items():
            setattr(step, name, at)
            at += 4 * t * width
        step.scratch_stride = self._library.petiole_scratch(ctypes.byref(self.model), ctypes.byref(step))
        scratch = new_tensor((n_threads * step.scratch_stride // 4,), torch.float32, torch.device("cpu"))
        step.scratch = scratch.data_ptr()
        self._most, self._step, self._memory = t, step, (activations, scratch)

    def _layer(self, layer: LayerWeights, window: int) -> _Layer:
        mixer, fed = layer.mixer, layer.feed_forward
        return _Layer(
            input_norm=self._norm(layer.mixer_norm),
            post_norm=self._norm(layer.feed_forward_norm),
            q_norm=self._norm(mixer.q_norm).weight,
            k_norm=self._norm(mixer.k_norm).weight,
            qkv=self._weights.linear(mixer.qkv, self._products.library_from("qkv")),
            out=self._weights.linear(mixer.out, self._products.library_from("out")),
            gate_up=self._weights.linear(fed.gate_up, self._products.library_from("gate_up")),
            down=self._weights.linear(fed.down, self._products.library_from("down")),
            window=window,
        )

    def _norm(self, norm: NormWeights | None) -> NormStruct:
        norm = norm or NormWeights()
        return NormStruct(self._weights.floats(norm.weight), self._weights.floats(norm.bias))


def library_for(hidden: int, inner: int, head_dim: int, dtype: torch.dtype, lanes: int) -> ctypes.CDLL | None:
    """The compiled code for layers of these sizes and this type. None if it has none for them, if nothing can be
    compiled, or if PETIOLE_NATIVE is off. lanes: heads must be a multiple of them."""
    if switch("native") == "off":
        why = "as PETIOLE_NATIVE says"
    elif dtype not in (torch.float32, torch.bfloat16):
        why = f"because the kernels are not made for {str(dtype).removeprefix('torch.')}"
    elif hidden % 2 or inner % 2 or head_dim % lanes or head_dim > _MAX_HEAD:
        why = f"because the kernels are not made for layers of {hidden}, {inner} and heads of {head_dim}"
    else:
        return load_library()
    log.info("torch alone computes on this CPU, %s", why)
    return None


def at_least(memory: Tensor | None, n: int) -> Tensor:
    if memory is not None and memory.numel() >= n:
        return memory
    return new_tensor((n,), torch.float32, torch.device("cpu"))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
