"""`Stack`: a plan's layers over a memory of keys and values, as `layers/` computes them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.gpu_worker.config import switch
from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.host_memory import new_tensor
from petiole.gpu_worker.models.parts.experts import ExpertWeights
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.parts.per_layer import PerLayerTables
from petiole.gpu_worker.models.plan import Experts, FeedForward, Growth, Layer, Norm, PerLayerInput
from petiole.gpu_worker.models.weights.linear import DenseLinear, Linear
from petiole.gpu_worker.models.weights.stacked import StackedLinear
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.layers.model import (
    ACTIVATIONS,
    MAPS,
    MASKS,
    NORMS,
    SCORES,
    BendStruct,
    ExpertsStruct,
    HeadsStruct,
    LayerStruct,
    ModelStruct,
    NormStruct,
    StepStruct,
)
from petiole.gpu_worker.runtime.cpu.native.products.choice import Kind, Products
from petiole.gpu_worker.runtime.cpu.native.products.weights import EMPTY, KINDS, LinearStruct, Weights
from petiole.gpu_worker.runtime.interface import Progress, nothing

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """keys, values: of each layer, [slots, kv_heads, head_dim]; tables: of each layer, int32 [rows, columns]."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    tables: Sequence[Tensor]
    page_size: int


@dataclass(frozen=True)
class Ends:
    """What turns token ids into the first layer's inputs, and hidden states into logits. embedding_factor: of the
    embeddings of token ids; factor, softcap: of logits."""

    embedding_factor: float
    embedding_norm: Norm | None
    embedding_norm_weights: NormWeights | None
    norm: Norm | None
    norm_weights: NormWeights | None
    head: Linear
    factor: float
    softcap: float


@dataclass(frozen=True)
class PerLayer:
    """The per-layer inputs of all layers."""

    plan: PerLayerInput
    tables: PerLayerTables


class Stack:
    """The layers of a model. It takes over their weights, and rearranges them in place. hidden: the width of the
    model. tables: the rotary table of each layer, None for one that rotates nothing. ends: None: there are no
    logits. reduced: the most outputs of an A of an adapter. progress: called every second of a step that takes
    longer."""

    def __init__(
        self,
        library: ctypes.CDLL,
        products: Products,
        layers: Sequence[tuple[Layer, LayerWeights]],
        memory: Memory,
        hidden: int,
        *,
        tables: Sequence[Tensor | None] = (),
        ends: Ends | None = None,
        per_layer: PerLayer | None = None,
        reduced: int = 0,
        progress: Progress = nothing,
    ) -> None:
        self._library, self._products, self._reduced = library, products, reduced
        self._progress = ctypes.CFUNCTYPE(None)(progress)
        library.petiole_scratch.restype = c_int64
        self._weights = Weights(library, products.library)
        self._tables: dict[object, int | None] = {}
        self._structures: list[object] = []
        self._kept = memory
        plans = [plan for plan, _ in layers]
        shapes = list(dict.fromkeys(_shape(plan) for plan in plans))
        self._layers = (LayerStruct * len(layers))(
            *(
                self._layer(plan, weights, shapes.index(_shape(plan)), per_layer, table)
                for (plan, weights), table in zip(layers, tables or [None] * len(layers), strict=True)
            )
        )
        for i, layer in enumerate(self._layers):
            layer.heads = self._heads(layer.heads, memory, i)
        self._shapes = (c_void_p * len(shapes))(
            *(
                ctypes.addressof(self._layers) + i * ctypes.sizeof(LayerStruct) + LayerStruct.heads.offset
                for i in (next(i for i, plan in enumerate(plans) if _shape(plan) == shape) for shape in shapes)
            )
        )
        width = 0 if per_layer is None else per_layer.plan.width
        most = {
            "qkv": max(layer.qkv.n for layer in self._layers),
            "mixed": max(plan.attention.q_size for plan in plans),
            "gates": max(width, *(layer.gate_up.n for layer in self._layers)),
            "acted": max(width, *(0 if plan.feed_forward is None else plan.feed_forward.inner for plan in plans)),
        }
        experts = [plan.experts for plan in plans if plan.experts is not None]
        self.model = ModelStruct(
            n_layers=len(layers),
            hidden=hidden,
            n_shapes=len(shapes),
            last_kept=max(i for i, plan in enumerate(plans) if plan.attention.keys_of is None),
            layers=ctypes.addressof(self._layers),
            shapes=ctypes.addressof(self._shapes),
            terms=max(hidden, most["mixed"], most["acted"], *(one.each.inner for one in experts)),
            experts=max((one.router.experts for one in experts), default=0),
            head=EMPTY,
            per_layer_projection=EMPTY,
            embedding_factor=1.0,
            logits_factor=1.0,
            library=None if products.library is None else products.library.address,
            **most,
        )
        if ends is not None:
            self._add_ends(ends)
        if per_layer is not None:
            self._add_per_layer(per_layer)
        self._widths = {  # floats for each position
            "normed": hidden,
            **most,
            "added": hidden,
            **pair_widths(experts, hidden),
            "projected": self.model.per_layer_projection.n,
            "reduced": reduced,
            "halves": 0 if products.library is None else self.model.terms,
        }
        self._most = 0
        self._step = StepStruct()
        self._memory: tuple[Tensor, ...] | None = None

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
        extra: Tensor | None = None,
        per_layer: Tensor | None = None,
        logits: Tensor | None = None,
        adapters: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Compute all layers.

        hidden: float32 [T, hidden], the inputs. outputs: int64 [O], strictly ascending: the inputs whose results
        are wanted; what the layers make of them overwrites the first O rows of `hidden`, and their logits are
        written to `logits`, [O, vocab]. token_ids: int64 [T]; if given, the inputs are the embeddings of these
        tokens, whose table is the head, times the embedding factor. extra: float32 [T, hidden], which is added to
        the inputs. positions, rows, rotary, limits: int64 [T]. per_layer: float32 [T, layers * width], the rows of
        the table of per-layer inputs; overwritten. adapters: [T], see `NativeAdapters`."""
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
        step.extra = _address(extra)
        step.per_layer = _address(per_layer)
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
        step = StepStruct(
            t=t,
            n_threads=n_threads,
            reduced_stride=self._reduced,
            per_layer_stride=self.model.per_layer_projection.n,
            progress=self._progress,
        )
        activations = new_tensor((t * sum(self._widths.values()),), torch.float32, torch.device("cpu"))
        at = activations.data_ptr()
        for name, width in self._widths.items():
            setattr(step, name, at)
            at += 4 * t * width
        step.scratch_stride = self._library.petiole_scratch(ctypes.byref(self.model), ctypes.byref(step))
        scratch = new_tensor((n_threads * step.scratch_stride // 4,), torch.float32, torch.device("cpu"))
        step.scratch = scratch.data_ptr()
        routes = torch.empty(3 * (self.model.experts + 1), dtype=torch.int64)
        step.routes = routes.data_ptr()
        self._most, self._step, self._memory = t, step, (activations, scratch, routes)

    # -- structures

    def _layer(
        self, plan: Layer, weights: LayerWeights, shape: int, per_layer: PerLayer | None, table: Tensor | None
    ) -> LayerStruct:
        mixer, fed, own = plan.attention, plan.feed_forward, weights.attention
        layer = LayerStruct(
            mixer_norm=self._norm(plan.mixer_norm, weights.mixer_norm),
            mixer_out_norm=self._norm(plan.mixer_out_norm, weights.mixer_out_norm),
            feed_forward_norm=self._norm(plan.feed_forward_norm, weights.feed_forward_norm),
            feed_forward_out_norm=self._norm(plan.feed_forward_out_norm, weights.feed_forward_out_norm),
            **dict.fromkeys(MAPS, EMPTY)
            | {
                "qkv": self._linear("qkv", own.qkv),
                "out": self._linear("out", own.out),
            },
            q_norm=self._norm(mixer.q_norm, own.q_norm),
            k_norm=self._norm(mixer.k_norm, own.k_norm),
            v_norm=self._norm(mixer.v_norm, own.v_norm),
            heads=HeadsStruct(
                heads=mixer.heads,
                kv_heads=mixer.kv_heads,
                head_dim=mixer.head_dim,
                mask=MASKS[mixer.mask],
                window=mixer.window,
                scale=mixer.scale,
                cap=mixer.softcap,
                sinks=self._weights.floats(own.sinks),
            ),
            rotary=self._table(table),
            rotary_dims=0 if table is None else table.shape[1],
            growth=self._growth(mixer.query_growth),
            shape=shape,
            borrowed=mixer.keys_of is not None,
            values_are_keys=mixer.values_are_keys,
            output_gate=mixer.output_gate,
            norm_whole=mixer.norm_whole,
            bend=BendStruct(0.0, 1.0, 0.0),
            parallel=plan.parallel,
            post_norm=plan.post_norm,
            residual=plan.residual,
            scalar=1.0 if weights.scalar is None else float(weights.scalar),
        )
        if fed is not None and weights.feed_forward is not None:
            layer.gate_up = self._linear("gate_up", weights.feed_forward.gate_up)
            layer.down = self._linear("down", weights.feed_forward.down)
            layer.inner, layer.gated = fed.inner, fed.gated
            layer.activation = layer.gate_up.activation = ACTIVATIONS[fed.activation]
            layer.bend = bend_of(fed)
        if plan.experts is not None and weights.experts is not None:
            experts, router = self._experts(plan.experts, weights.experts)
            layer.experts, layer.router = ctypes.addressof(experts), router
        if per_layer is not None and weights.per_layer is not None:
            layer.per_layer = per_layer.plan.width
            layer.per_layer_activation = ACTIVATIONS[per_layer.plan.activation]
            layer.per_layer_gate = self._weights.linear(weights.per_layer.gate)
            layer.per_layer_out = self._weights.linear(weights.per_layer.out)
            layer.per_layer_norm = self._norm(per_layer.plan.layer_norm, weights.per_layer.norm)
        return layer

    def _experts(self, plan: Experts, weights: ExpertWeights) -> tuple[ExpertsStruct, LinearStruct]:
        """And the router's map, in float32 whatever the model's type."""
        router, of_router, own = plan.router, weights.router, self._weights
        up, down = (self._each(stack) for stack in (weights.gate_up, weights.down))
        taken = own.pointer(weights.taken)
        assert taken == weights.taken.data_ptr()
        experts = ExpertsStruct(
            n=router.experts,
            chosen=router.chosen,
            score=SCORES[router.score],
            normalised=router.normalised,
            groups=router.groups,
            best_groups=router.best_groups,
            of_stream=router.of_stream,
            inner=plan.each.inner,
            activation=ACTIVATIONS[plan.each.activation],
            gated=plan.each.gated,
            factor=router.factor,
            eps=router.eps,
            bend=bend_of(plan.each),
            correction=own.floats(of_router.correction),
            scale=own.floats(of_router.scale),
            shares=own.floats(of_router.expert_scales),
            gate_up=ctypes.addressof(up),
            down=ctypes.addressof(down),
            dense_gate=None if weights.dense_gate is None else own.floats(weights.dense_gate.weight),
            taken=taken,
            norm=self._norm(plan.norm, weights.norm),
            out_norm=self._norm(plan.out_norm, weights.out_norm),
            dense_out_norm=self._norm(plan.dense_out_norm, weights.dense_out_norm),
        )
        self._structures += [experts, up, down]
        logits = of_router.logits
        return experts, own.linear(DenseLinear(logits.weight.float(), logits.bias))

    def _each(self, stack: StackedLinear) -> ctypes.Array[LinearStruct]:
        return (LinearStruct * stack.n)(*(self._weights.linear(stack[i]) for i in range(stack.n)))

    def _heads(self, heads: HeadsStruct, memory: Memory, i: int) -> HeadsStruct:
        heads.kv_kind = KINDS[memory.keys[i].dtype]
        heads.page_size = memory.page_size
        heads.keys, heads.values = memory.keys[i].data_ptr(), memory.values[i].data_ptr()
        heads.columns, heads.table = memory.tables[i].shape[1], memory.tables[i].data_ptr()
        return heads

    def _add_ends(self, ends: Ends) -> None:
        model = self.model
        model.embedding_norm = self._norm(ends.embedding_norm, ends.embedding_norm_weights)
        model.norm = self._norm(ends.norm, ends.norm_weights)
        model.head = self._linear("head", ends.head)
        model.embedding_factor, model.logits_factor = ends.embedding_factor, ends.factor
        model.logits_cap = ends.softcap

    def _add_per_layer(self, per_layer: PerLayer) -> None:
        model, plan = self.model, per_layer.plan
        model.per_layer_projection = self._weights.linear(per_layer.tables.projection)
        model.per_layer_norm = self._norm(plan.norm, per_layer.tables.norm)
        model.per_layer_width = plan.width
        model.per_layer_embedding_factor = plan.embedding_factor
        model.per_layer_projection_factor, model.per_layer_factor = plan.projection_factor, plan.factor

    def _linear(self, name: Kind, linear: Linear) -> LinearStruct:
        return self._weights.linear(linear, self._products.library_from(name))

    def _norm(self, norm: Norm | None, weights: NormWeights | None) -> NormStruct:
        if norm is None or weights is None:
            return NormStruct()
        floats = self._weights.floats
        return NormStruct(NORMS[norm.kind], norm.eps, floats(weights.weight), floats(weights.bias))

    def _table(self, table: Tensor | None) -> int | None:
        """Layers share tables."""
        if id(table) not in self._tables:
            self._tables[id(table)] = self._weights.floats(table)
        return self._tables[id(table)]

    def _growth(self, growth: Growth | None) -> int | None:
        """The factors of queries at all positions."""
        if growth is None:
            return None
        if growth not in self._tables:
            at = torch.arange(self._kept.tables[0].shape[1] * self._kept.page_size, dtype=torch.float32)
            factors = 1 + growth.beta * torch.log1p(torch.floor(at / growth.length))
            self._tables[growth] = self._weights.floats(factors)
        return self._tables[growth]


def bend_of(fed: FeedForward) -> BendStruct:
    return BendStruct(fed.clamp, fed.slope, fed.up_offset)


def pair_widths(experts: Sequence[Experts], hidden: int) -> dict[str, int]:
    """Numbers of four bytes that mixtures need for each position."""
    chosen = max((one.router.chosen for one in experts), default=0)
    streamed = any(one.router.of_stream for one in experts)
    each = [one.each for one in experts]
    return {
        "streamed": hidden if streamed else 0,
        "scores": max((one.router.experts for one in experts), default=0),
        "chosen": chosen,
        "places": chosen,
        "shares": chosen,
        "openings": 1 if any(one.dense_gate for one in experts) else 0,
        "pairs": chosen * hidden,
        "pair_gates": chosen * max((sum(one.up_sizes) for one in each), default=0),
        "pair_acted": chosen * max((one.inner for one in each), default=0),
    }


def _shape(plan: Layer) -> tuple[int, int, int]:
    mixer = plan.attention
    return mixer.heads, mixer.kv_heads, mixer.head_dim


def library_for(dtype: torch.dtype) -> ctypes.CDLL | None:
    """The compiled code for layers of this type. None if it has none, if nothing can be compiled, or if
    PETIOLE_NATIVE is off."""
    if switch("native") == "off":
        why = "as PETIOLE_NATIVE says"
    elif dtype not in (torch.float32, torch.bfloat16):
        why = f"because the kernels are not made for {str(dtype).removeprefix('torch.')}"
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
