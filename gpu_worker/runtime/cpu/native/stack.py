"""`Stack`: a plan's layers over a memory of keys and values, as `layers/` computes them."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_int64, c_void_p

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from petiole.contract.settings.engine import switch
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.parts.layer import DraftingWeights, LayerWeights
from petiole.gpu_worker.models.plan import Attention, Experts, Layer, Mixer
from petiole.gpu_worker.models.weights.host_memory import new_tensor
from petiole.gpu_worker.runtime.cpu.head import Floats
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.drafting import Drafting
from petiole.gpu_worker.runtime.cpu.native.layers.model import (
    LayerStruct,
    ModelStruct,
    StepStruct,
)
from petiole.gpu_worker.runtime.cpu.native.layers.structures import (
    EmbeddingAndHead,
    KVPointers,
    PerLayer,
    Structures,
)
from petiole.gpu_worker.runtime.cpu.native.products.adapters import BYTES_OF_LAYER
from petiole.gpu_worker.runtime.cpu.native.products.weights import EMPTY
from petiole.gpu_worker.runtime.interface import Int64Array, Progress, nothing

log = logging.getLogger(__name__)

SMALL = 192 * 2**20
"""Multiply-adds of a step of a small model which one thread computes, in about three milliseconds."""


class Stack:
    """The layers of a model. It takes over their weights, and rearranges them in place. hidden, dtype: the width
    and the type of the model. tables: the rotary table of each layer, None for one that rotates nothing. ends:
    None: there are no logits. reduced: the most outputs of an A of an adapter. progress: called every second of a
    step that takes longer. drafting: of the last layer, if that one drafts: `run` leaves it out."""

    def __init__(
        self,
        library: ctypes.CDLL,
        layers: Sequence[tuple[Layer, LayerWeights]],
        memory: KVPointers,
        hidden: int,
        dtype: torch.dtype,
        *,
        tables: Sequence[Tensor | None] = (),
        ends: EmbeddingAndHead | None = None,
        per_layer: PerLayer | None = None,
        reduced: int = 0,
        progress: Progress = nothing,
        drafting: DraftingWeights | None = None,
    ) -> None:
        self._library, self._reduced = library, reduced
        self._progress = ctypes.CFUNCTYPE(None)(progress)
        library.petiole_scratch.restype = c_int64
        self._structures = Structures(library, memory, dtype)
        plans = [plan for plan, _ in layers]
        self._layers = (LayerStruct * len(layers))(
            *(
                self._structures.layer(i, plan, weights, per_layer, table)
                for i, ((plan, weights), table) in enumerate(
                    zip(layers, tables or [None] * len(layers), strict=True)
                )
            )
        )
        firsts: dict[tuple[int, int, int], int] = {}  # of each shape of heads, the first layer
        for i, plan in enumerate(plans):
            if isinstance(plan.mixer, Attention):
                shape = plan.mixer.heads, plan.mixer.kv_heads, plan.mixer.head_dim
                firsts.setdefault(shape, i)
                self._layers[i].shape = list(firsts).index(shape)
        self._shapes = (c_void_p * len(firsts))(
            *(
                ctypes.addressof(self._layers) + i * ctypes.sizeof(LayerStruct) + LayerStruct.heads.offset
                for i in firsts.values()
            )
        )
        width = 0 if per_layer is None else per_layer.plan.width
        of_latents = latent_widths([plan.mixer for plan in plans])
        most = {
            "qkv": max(layer.qkv.n for layer in self._layers),
            "mixed": max(of_latents["queries"], *(max(layer.out.k, layer.net_gates.k) for layer in self._layers)),
            "gates": max(width, *(max(layer.gate_up.n, layer.net_gates.n) for layer in self._layers)),
            "acted": max(width, *(0 if plan.feed_forward is None else plan.feed_forward.inner for plan in plans)),
        }
        experts = [plan.experts for plan in plans if plan.experts is not None]
        n_layers = len(layers) - (drafting is not None)
        self.model = ModelStruct(
            n_layers=n_layers,
            hidden=hidden,
            n_shapes=len(firsts),
            last_kept=max(i for i, plan in enumerate(plans[:n_layers]) if _keeps(plan.mixer)),
            layers=ctypes.addressof(self._layers),
            shapes=ctypes.addressof(self._shapes),
            terms=max(
                *(hidden, most["acted"], *(one.each.inner for one in experts)),
                *(max(layer.out.k, layer.net_gates.k, layer.heads.head_dim) for layer in self._layers),
                *(
                    mixer.latent.own
                    for plan in plans
                    if isinstance(mixer := plan.mixer, Attention) and mixer.latent
                ),
            ),
            experts=max((one.router.experts for one in experts), default=0),
            room=max((self._room(layer) for layer in self._layers if layer.recurrent), default=0),
            head=EMPTY,
            per_layer_projection=EMPTY,
            embedding_factor=1.0,
            logits_factor=1.0,
            small=SMALL,
            **most,
        )
        if ends is not None:
            self._structures.add_ends(self.model, ends)
        self._drafting = None
        if drafting is not None and ends is not None:
            self._drafting = Drafting.of(library, self._structures, ends, drafting)
        if per_layer is not None:
            self._structures.add_per_layer(self.model, per_layer)
        self._widths = {  # floats for each position
            "normed": hidden,
            **most,
            **of_latents,
            "added": hidden,
            **pair_widths(experts, hidden),
            "projected": self.model.per_layer_projection.n,
            "reduced": reduced,
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
        copies: Tensor | None = None,
        rotary: Tensor | None = None,
        limits: Tensor | None = None,
        extra: Tensor | None = None,
        per_layer: Tensor | None = None,
        logits: Tensor | None = None,
        adapters: npt.NDArray[np.int64] | None = None,
        tables: Sequence[Tensor | None] = (),
        behind: Callable[[int, Tensor], None] | None = None,
        stops: Sequence[int] = (),
        keep: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Compute all layers.

        hidden: float32 [T, hidden], the inputs. outputs: int64 [O], strictly ascending: the inputs whose results
        are wanted; what the layers make of them overwrites the first O rows of `hidden`, and their logits are
        written to `logits`, [O, vocab]. token_ids: int64 [T]; if given, the inputs are the embeddings of these
        tokens, whose table is the head, times the embedding factor. extra: float32 [T, hidden], which is added to
        the inputs. positions, rows, rotary, limits: int64 [T]. copies: int64 [T], the place to which the states
        after each position are copied, or -1. per_layer: float32 [T, layers * width], the rows of
        the table of per-layer inputs; overwritten. adapters: [T], see `NativeAdapters`. tables: float32, the
        rotary table of each layer in this step; empty: those of all steps. behind: called after each layer among
        `stops`, ascending, with its number and the residual stream, which it may change. It may also write other
        positions, rows and limits into these tensors, for the layers that follow. keep: called with
        what the layers make of all positions, float32 [T, hidden]; `hidden` is overwritten with that."""
        t = len(hidden)
        self._make_room(t)
        step = self._step
        step.t = t
        step.token_ids = _address(token_ids)
        step.positions = positions.data_ptr()
        step.rotary = (positions if rotary is None else rotary).data_ptr()
        step.limits = _address(limits)
        step.rows = rows.data_ptr()
        step.copies = _address(copies)
        step.extra = _address(extra)
        step.per_layer = _address(per_layer)
        step.hidden = hidden.data_ptr()
        step.adapters = None if adapters is None else adapters.ctypes.data
        step.o = len(outputs)
        step.outputs = outputs.data_ptr()
        step.logits = _address(logits)
        apart = keep is not None and len(outputs) < t
        if apart:
            every = torch.arange(t)
            step.o, step.outputs, step.logits = t, every.data_ptr(), None
        with self._turned(tables):
            if behind is None or not stops:
                self._compute(step)
            else:
                self._compute_in_parts(step, hidden, every if apart else outputs, adapters, behind, stops)
        if keep is not None:
            keep(hidden)
            if apart and logits is not None and len(outputs):
                self._compute_head(hidden[outputs], logits)

    def draft(
        self,
        known: Floats,
        token_ids: Int64Array,
        positions: Int64Array,
        rows: Int64Array,
        outputs: Int64Array,
        logits: Tensor,
        *,
        embedded: Floats | None = None,
        chained: bool = False,
        rotary: Int64Array | None = None,
        tables: Sequence[Tensor | None] = (),
    ) -> Floats:
        """Compute the layer that drafts, and the logits of the outputs behind its norm. known: [T, hidden], what
        the other layers have made of the inputs; chained: what this one has. token_ids: [T], the token behind each
        input. embedded: [T, hidden], their embeddings, overwritten; None: they are the head's rows. tables: of
        this layer. Others as in `run`. Returns what the layer makes of the outputs, [O, hidden]."""
        drafting = self._drafting
        assert drafting is not None, "no layer drafts"
        model, first = self.model, self.model.n_layers
        hidden = np.empty((len(known), model.hidden), np.float32) if embedded is None else embedded
        self._make_room(len(known))
        whole = (model.layers, model.n_layers, model.last_kept)
        model.layers, model.n_layers, model.last_kept = whole[0] + first * ctypes.sizeof(LayerStruct), 1, 0
        model.norm = drafting.norm
        turned: Sequence[Tensor | None] = [*[None] * first, *tables] if tables else ()
        step = self._alone(len(known))
        step.positions, step.rows = positions.ctypes.data, rows.ctypes.data
        step.rotary = step.positions if rotary is None else rotary.ctypes.data
        step.o, step.outputs = len(outputs), outputs.ctypes.data
        step.hidden, step.logits = hidden.ctypes.data, logits.data_ptr() if len(outputs) else None
        try:
            library = drafting.joined(
                model, step, known, None if embedded is not None else token_ids, chained=chained
            )
            with self._turned(turned):
                self._compute(step, library)
            return hidden[: len(outputs)]
        finally:
            model.layers, model.n_layers, model.last_kept = whole
            model.norm = drafting.last_norm

    def _compute_head(self, hidden: Tensor, logits: Tensor) -> None:
        """The logits of these hidden states, float32 [O, hidden], which are overwritten."""
        model, every = self.model, torch.arange(len(hidden))
        whole = (model.n_layers, model.last_kept)
        model.n_layers, model.last_kept = 0, -1
        step = self._alone(len(hidden))
        step.positions = step.rows = step.outputs = step.rotary = every.data_ptr()
        step.o, step.hidden, step.logits = len(hidden), hidden.data_ptr(), logits.data_ptr()
        try:
            self._compute(step)
        finally:
            model.n_layers, model.last_kept = whole

    def _alone(self, t: int) -> StepStruct:
        """A step of t hidden states that nothing stands before."""
        step = self._step
        step.t = t
        step.token_ids = step.limits = step.copies = step.extra = step.per_layer = step.adapters = None
        return step

    def _compute_in_parts(
        self,
        step: StepStruct,
        hidden: Tensor,
        outputs: Tensor,
        adapters: npt.NDArray[np.int64] | None,
        behind: Callable[[int, Tensor], None],
        stops: Sequence[int],
    ) -> None:
        """All positions are computed up to the last stop: each may be changed there."""
        model, n, every = self.model, self.model.n_layers, torch.arange(len(hidden))
        whole = (model.layers, model.n_layers, model.last_kept, step.logits)
        logits, first = step.logits, 0
        try:
            for end in sorted({*(stop + 1 for stop in stops), n}):
                model.layers = whole[0] + first * ctypes.sizeof(LayerStruct)
                model.n_layers = end - first
                model.last_kept = whole[2] - first if end == n else end - first - 1
                ended = end == n and n - 1 not in stops
                step.o, step.outputs = (len(outputs), outputs.data_ptr()) if ended else (step.t, every.data_ptr())
                step.logits = logits if ended else None
                if adapters is not None:
                    own = np.where(adapters, adapters + first * BYTES_OF_LAYER, 0)
                    step.adapters = own.ctypes.data
                self._compute(step)
                if end - 1 in stops:
                    behind(end - 1, hidden)
                step.token_ids = step.extra = None
                first = end
        finally:
            model.layers, model.n_layers, model.last_kept, step.logits = whole

    def keep_in(
        self,
        keys: Sequence[Tensor],
        values: Sequence[Tensor],
        tables: Sequence[Tensor],
        page_sizes: Sequence[int],
    ) -> None:
        """Other memory for keys and values, by layer: see `KVPointers`."""
        for layer, own, other, table, page_size in zip(
            self._layers, keys, values, tables, page_sizes, strict=True
        ):
            heads = layer.heads
            heads.keys, heads.values, heads.table = own.data_ptr(), other.data_ptr(), table.data_ptr()
            heads.columns, heads.page_size = table.shape[1], page_size

    @contextmanager
    def _turned(self, tables: Sequence[Tensor | None]) -> Iterator[None]:
        if not tables:
            yield
            return
        before = [layer.rotary for layer in self._layers]
        for layer, table in zip(self._layers, tables, strict=False):
            layer.rotary = _address(table)
        try:
            yield
        finally:
            for layer, table in zip(self._layers, before, strict=True):
                layer.rotary = table

    def _compute(self, step: StepStruct, library: ctypes.CDLL | ctypes.PyDLL | None = None) -> None:
        if (library or self._library).petiole_forward(ctypes.byref(self.model), ctypes.byref(step)):
            raise ModelError("adapters: must have the sizes of the model's linear layers")

    def _room(self, layer: LayerStruct) -> int:
        self._library.petiole_recurrent_room.restype = c_int64
        return int(self._library.petiole_recurrent_room(c_void_p(layer.recurrent)))

    def _make_room(self, t: int) -> None:
        """Memory for a step of `t` positions. Later steps use it again."""
        n_threads = torch.get_num_threads()
        if t > self._most or n_threads != self._step.n_threads:
            self._take_memory(max(t, self._most), n_threads)

    def _take_memory(self, t: int, n_threads: int) -> None:
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


def latent_widths(mixers: Sequence[Mixer]) -> dict[str, int]:
    """Floats that attention over latents needs for each position."""
    found = [
        (mixer, mixer.latent) for mixer in mixers if isinstance(mixer, Attention) and mixer.latent is not None
    ]
    return {
        "queries": max((mixer.q_size for mixer, _ in found), default=0),
        "head_in": max((mixer.heads * max(one.own, one.rank) for mixer, one in found), default=0),
        "head_out": max((mixer.heads * max(one.rank, one.value) for mixer, one in found), default=0),
    }


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


def _keeps(mixer: Mixer) -> bool:
    """Whether a layer stores keys and values, or a state."""
    return not isinstance(mixer, Attention) or mixer.keys_of is None


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
