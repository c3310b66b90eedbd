"""The CUDA executor: captured graphs for encode steps and for other steps up to some size, one eager pass for the
rest.

In an eager pass the queries of bidirectional regions come first. They attend without a mask; all other queries
attend causally (`step.segments`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import cast

import numpy as np
import torch
from torch import Tensor

from petiole.contract.settings.engine import Batching, EngineConfig, switch
from petiole.gpu_worker.exceptions import MachineError
from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.decoder import Decoder, Forward, ImageDecoder
from petiole.gpu_worker.models.fast_paths import (
    Parts,
    Support,
    supports,
    supports_encoder,
    unknown_value,
    with_known_crops,
)
from petiole.gpu_worker.models.plan import Attention, DeltaNet, Layer, ModelPlan
from petiole.gpu_worker.models.weights.linear import DenseLinear, Fp8Linear
from petiole.gpu_worker.models.weights.quantized import KernelLinear
from petiole.gpu_worker.request.prepared_images import PreparedImage
from petiole.gpu_worker.request.values import NO_NUMBER
from petiole.gpu_worker.runtime.cuda import whole_texts
from petiole.gpu_worker.runtime.cuda.attention import latents, split
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import (
    HEAD_SIZES,
    PLAN_BYTES,
    WORKSPACE_BYTES,
    AppendWrappers,
    AttentionKind,
    FlashInferAttention,
    FlashInferKernels,
    Geometry,
    PageList,
    host_page_counts,
    new_workspace,
)
from petiole.gpu_worker.runtime.cuda.attention.installed import require_version
from petiole.gpu_worker.runtime.cuda.attention.latents import LatentWrappers, append_wrappers
from petiole.gpu_worker.runtime.cuda.capture import Capture, eager
from petiole.gpu_worker.runtime.cuda.encoder import EncoderGraphs
from petiole.gpu_worker.runtime.cuda.graphs import Graphs, listed_columns, new_step_buffers, states_of
from petiole.gpu_worker.runtime.cuda.recurrent import StatesOnCuda
from petiole.gpu_worker.runtime.cuda.shapes import Shape, append_shapes, uniform_shapes
from petiole.gpu_worker.runtime.cuda.supported import ATTENTION, CAPTURED, ENCODED
from petiole.gpu_worker.runtime.device.cuda import architecture
from petiole.gpu_worker.runtime.device.device import Device, DeviceStream, staged, upload, upload_together
from petiole.gpu_worker.runtime.interface import FEATURES, NO_UPDATES, Int64Array, StepBatch, StepKind
from petiole.gpu_worker.runtime.memory.kv import KVCache
from petiole.gpu_worker.runtime.memory.room import sampling_bytes
from petiole.gpu_worker.runtime.memory.states import StatePool
from petiole.gpu_worker.runtime.step.inputs import StepInputs, StepStates, adding_behind, lay_out
from petiole.gpu_worker.runtime.step.pending import PendingInputs
from petiole.gpu_worker.runtime.step.sampling import SamplingMetadata, likeliest
from petiole.gpu_worker.runtime.step.segments import Run, Segmented, segmented
from petiole.gpu_worker.runtime.step.terms import GroupedTerms
from petiole.gpu_worker.runtime.step.token_values import ValuedDecoder, embed_all

logger = logging.getLogger(__name__)

CAPTURED_PARTS: Parts = frozenset({FlashInferKernels, DenseLinear, Fp8Linear, KernelLinear})
"""The parts that may be captured. See `models.fast_paths`."""

_WRAPPER_BYTES = 8 * 2**20
_LENGTHS_BYTES = 2**18  # buffers of a wrapper beside its plan
_SLACK_BYTES = 512 * 2**20
"""Memory for all that is not counted, such as the weights that `linear.grouped` widens, up to twice 64 MiB."""

WORKING_PART = 0.25
"""The part of the memory left by the weights that the default numbers of sequences and of tokens may take."""


def require_flashinfer(model: ModelPlan) -> None:
    """Raises MachineError if FlashInfer is missing or of another version than needed, or if its kernels would
    silently compute this model wrongly."""
    require_version()
    require_supported(model)


def require_supported(model: ModelPlan) -> None:
    """Raises MachineError if FlashInfer's kernels would silently compute this model wrongly."""
    if model.whole_texts:
        whole_texts.require_supported(model)
        return
    for _, mixer in model.attending:
        if mixer.latent is not None:
            latents.require_supported(mixer)
        elif mixer.head_dim not in HEAD_SIZES:
            known = ", ".join(map(str, HEAD_SIZES))
            raise MachineError(
                f"head_dim: must be {known} on CUDA, got {mixer.head_dim}; device=cpu serves this model"
            )
    unknown = (
        unknown_value(mixer, ATTENTION if isinstance(mixer, Attention) else CAPTURED) for mixer in model.mixers
    )
    found = Support(None, tuple(unknown))
    if found.reason is not None:
        raise MachineError(f"CUDA does not compute {found.reason} yet; device=cpu serves this model")


def working_bytes(engine: EngineConfig, model: ModelPlan, itemsize: int, encode_bytes: int = 0) -> int:
    """Bytes needed beside weights, adapters and KV: workspaces, graphs, activations of a prefill and of an encode,
    logits and the rows' sampling states."""
    longest = engine.max_model_len
    shapes = captured_shapes(engine, model, longest)
    outputs = engine.max_num_seqs * (1 + engine.speculative_tokens)
    tokens = max(engine.max_num_batched_tokens, outputs)
    if engine.mixes:
        tokens = max(tokens, engine.chunk_size + outputs)
    tokens += max((shape.positions for shape in shapes["append"]), default=0)  # of the graphs' pool
    widest = max(3 * model.hidden_size + _mixed_width(layer) + _fed_width(layer, model) for layer in model.layers)
    if model.per_layer is not None:
        widest += 4 * model.n_layers * model.per_layer.width
    with_logits = max(shape.rows for shape in shapes["decode"]) * (1 + engine.speculative_tokens)
    logits = 4 * model.vocab_size * (6 * outputs + 2 * with_logits)
    plan_bytes = latents.PLAN_BYTES if model.reads_latents else PLAN_BYTES
    plans = sum(
        max(plan_bytes, split.list_bytes(shape.rows, longest)) + _LENGTHS_BYTES
        for shape in chain(*shapes.values())
    )
    plans += 2 * _WRAPPER_BYTES  # causal, bidirectional
    columns = -(-longest // engine.page_size)
    positions = max(shape.positions for shape in chain(*shapes.values()))
    listed = (listed_columns(columns, one, positions, engine.page_size) for one in {0, *model.kept_windows})
    rows = engine.max_num_seqs
    page_lists = 4 * sum(2 * rows * n + (rows + 1) * columns for n in listed)  # each slot's, and the tables
    states = (engine.max_num_seqs + 1) * sampling_bytes(model)
    states += whole_texts.mask_bytes(model, tokens, longest, itemsize)
    activations = tokens * widest * itemsize + 2 * encode_bytes  # an encode is warmed up outside the graphs' pool
    kept = 2 * len(_kinds(model)) * plans + page_lists + logits + states
    return workspace_bytes(model, shapes, longest) + kept + activations + _SLACK_BYTES


def workspace_bytes(model: ModelPlan, shapes: dict[str, list[Shape]], longest: int) -> int:
    """Of the workspace that all wrappers share. longest: maximum positions of a row."""
    return max(WORKSPACE_BYTES, split.workspace_bytes(_kinds(model), [*chain(*shapes.values())], longest))


def _kinds(model: ModelPlan) -> set[AttentionKind]:
    """A group of layers is named by the window that it keeps here: the cache gives it its number later."""
    return {AttentionKind.of(mixer, model.kept_windows[i]) for i, mixer in model.attending}


def _mixed_width(layer: Layer) -> int:
    """Numbers of a position between the products of its mixer; float32 ones count twice."""
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        parts = 2 if mixer.latent is None else 6  # with what its heads are padded to
        return parts * mixer.q_size + 4 * mixer.kv_size
    if isinstance(mixer, DeltaNet):
        chunks = switch("exact") == "off"
        squares = 256 * mixer.value_heads * chunks  # of `states.chunks`, the last ones of rows included
        return sum(mixer.input_sizes) + 2 * mixer.channels + 3 * mixer.value_size + squares
    return 8 * mixer.channels


def _fed_width(layer: Layer, model: ModelPlan) -> int:
    """Numbers of a position between the products of its feed-forward, and of its experts."""
    dense = 0 if layer.feed_forward is None else 3 * layer.feed_forward.inner
    if layer.experts is None:
        return dense
    each = 3 * layer.experts.each.inner + 4 * model.hidden_size  # inputs and outputs of a pair, in float32
    return dense + layer.experts.router.chosen * each + 4 * layer.experts.router.experts


def captured_shapes(engine: EngineConfig, model: ModelPlan, longest: int) -> dict[str, list[Shape]]:
    """The steps that each slot captures, by layout. longest: maximum positions of a row. With latents, a plan's
    launches follow the average length of rows, so rows of any length are not captured. The padding of a
    verification would change states."""
    queries, appends = 1 + engine.speculative_tokens, engine.cuda_graphs == "on" and not model.reads_latents
    verifies = 1 < queries <= longest and not model.keeps_states
    return {
        "decode": uniform_shapes(engine, 1),
        "verify": uniform_shapes(engine, queries) if verifies else [],
        "append": append_shapes(engine, longest) if appends else [],
    }


def batching_that_fits(
    config: EngineConfig,
    defaults: Batching,
    model: ModelPlan,
    itemsize: int,
    free: int,
    encode_bytes: int = 0,
    largest_region: int = 0,
) -> EngineConfig:
    """The configuration with these defaults, half of them, or a quarter of them in place of 0: the first whose
    working memory is at most `WORKING_PART` of the free bytes. The rest is for the KV cache, without which no
    sequence runs. largest_region: see `EngineConfig.decided`."""
    *larger, smallest = (config.decided(defaults.divided(by), largest_region) for by in (1, 2, 4))
    fits = (one for one in larger if working_bytes(one, model, itemsize, encode_bytes) <= free * WORKING_PART)
    return next(fits, smallest)


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot's graphs by layout, and the attention wrappers of its other steps. bidirectional: None if the model
    has no such regions."""

    graphs: dict[str, Graphs]
    append: AppendWrappers | LatentWrappers
    bidirectional: AppendWrappers | None


_LAYOUTS: dict[StepKind, tuple[str, ...]] = {
    "decode": ("decode",),
    "verify": ("verify", "append"),
    "prefill": ("append",),
    "mixed": ("append",),
}
"""The layouts in which a step may be captured, the best first."""


def choose(logits: Tensor, choice: SamplingMetadata | None) -> Tensor:
    """`sampling.choose` in two launches."""
    if choice is None:
        return likeliest(logits)
    from petiole.gpu_worker.runtime.cuda.fused.choose import choose as choose_in_one_launch

    return choose_in_one_launch(logits, choice)


def accept(
    token_ids: Tensor, values: Tensor | None, drafts: Tensor, n_rows: int, pending: PendingInputs
) -> tuple[Tensor, Tensor]:
    """`verify.accept` in one launch."""
    from petiole.gpu_worker.runtime.cuda.fused.accept import accept as accept_in_one_launch

    return accept_in_one_launch(token_ids, values, drafts, n_rows, pending)


class CudaExecutor:
    """Forward and logits on CUDA. See `platform.Executor`."""

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        bank: AdapterBank | None,
        pending: PendingInputs,
        config: EngineConfig,
        device: Device,
        stream: DeviceStream,
        capture: Capture,
        recurrent: StatePool | None = None,
    ) -> None:
        crops = with_known_crops(decoder)
        unknown = supports(decoder, CAPTURED, CAPTURED_PARTS).reason
        if unknown is None and crops is not None:
            unknown = supports_encoder(crops.vision, ENCODED, CAPTURED_PARTS).reason
        if unknown is not None:
            logger.warning(
                "no steps are captured as CUDA graphs, which is slower: captured code does not know %s", unknown
            )
            config, capture = replace(config, cuda_graphs="off"), eager
        self._decoder, self._cache, self._bank = decoder, cache, bank
        self._pending, self._recurrent = pending, recurrent
        self._geometry = Geometry(decoder.plan, cache, decoder.dtype)
        longest = cache.table.shape[1] * cache.page_size
        shapes = captured_shapes(config, decoder.plan, longest)
        workspace = new_workspace(cache.device, workspace_bytes(decoder.plan, shapes, longest))
        self._slots = [self._new_slot(shapes, workspace, device) for _ in range(2)]
        device.synchronize()  # these tensors were created on another stream than the one that will use them
        self.fused: dict[int, bool] = {}
        for slot in self._slots:
            for graphs in slot.graphs.values():
                graphs.capture(stream, capture, self.fused)
        self._encoder: EncoderGraphs | None = None
        if decoder.images is not None and crops is not None:
            self._encoder = EncoderGraphs(crops, decoder.images.max_crops, cache.device, device)
            device.synchronize()
            self._encoder.capture(stream, capture)
        stream.enqueue(self._warm_up)
        stream.synchronize()

    kernels = "flashinfer"

    @property
    def instructions(self) -> str:
        return architecture(self._cache.device)

    def _new_slot(self, shapes: dict[str, list[Shape]], workspace: Tensor, device: Device) -> _Slot:
        states = None if self._recurrent is None else self._recurrent.layers
        model = (self._decoder, self._geometry, self._pending, self._bank, states)
        buffers = new_step_buffers([*chain(*shapes.values())], self._decoder, self._geometry, device)
        graphs = {layout: Graphs(*model, workspace, buffers, some) for layout, some in shapes.items()}
        images, bidirectional = self._decoder.images, None
        if images is not None and images.bidirectional:
            bidirectional = AppendWrappers(self._geometry, workspace, causal=False)
        return _Slot(graphs, append_wrappers(self._geometry, workspace), bidirectional)

    def catch_up(self) -> None:
        """Nothing is owed."""

    def encode(self, slot_id: int, images: Sequence[PreparedImage]) -> Sequence[Tensor]:
        if self._encoder is not None:
            return self._encoder.encode(slot_id, images)
        crops = [(self._up(image.pixels), image.tiling) for image in images]
        return cast(ImageDecoder, self._decoder).encode(crops)

    def forward(self, slot_id: int, inputs: StepInputs) -> StepStates:
        slot, copies = self._slots[slot_id], None
        if self._recurrent is not None and inputs.states is not None:
            copies = self._recurrent.begin(inputs.batch_rows, inputs.starts, inputs.lengths, inputs.states)
        for layout in _LAYOUTS[inputs.kind]:
            graphs = slot.graphs[layout]
            if not inputs.kept and (shape := graphs.shape_for(inputs)) is not None:
                return graphs.run(shape, inputs, copies)
        self._cache.update(inputs.pages)
        return self._append(slot, segmented(inputs), copies)

    def _warm_up(self) -> None:
        """Compile and load the kernels outside the graphs, on row 0: an eager step, sampling with all filters."""
        one = np.ones(1, dtype=np.int32)
        batch = StepBatch("prefill", 0 * one, 0 * one, 2 * one, np.zeros(2, np.int32), one, -one, (), NO_UPDATES)
        if self._slots[0].bidirectional is not None:  # a region, and one position after it
            region, three = np.array([[0, 0, 2]], np.int32), np.zeros(3, np.int32)
            batch = replace(batch, lengths=3 * one, token_ids=three, regions=region)
        with torch.inference_mode():
            for slot in self._slots:
                logits = self._append(slot, segmented(lay_out(batch, 0 * one))).logits()
            keys, half = self._up(np.zeros((1, 2), np.int32)), self._up(np.full(1, 0.5, np.float32))
            for found in dict.fromkeys((logits, logits.float())):  # for example unchanged, and after penalties
                token_ids = choose(found, SamplingMetadata(half, keys, self._up(one.astype(np.int64)), half, half))
            values = None if self._decoder.value_tokens is None else self._pending.values[:1]
            accept(token_ids, values, self._up(np.array([0, 1, 0, -1])), 1, self._pending)

    def _append(self, slot: _Slot, step: Segmented, copies: Int64Array | None = None) -> StepStates:
        inputs = step.inputs
        rows, positions = self._up(inputs.rows), self._up(inputs.positions.astype(np.int32))
        attention = self._attention(slot, step, rows, positions)
        terms = None
        if self._bank is not None and step.adapters.any():
            terms = GroupedTerms(self._bank, step.adapters)
        rotary = positions if inputs.rotary is None else self._up(inputs.rotary.astype(np.int32))
        given = self._up(inputs.token_ids)
        token_ids = torch.where(given < 0, self._pending.token_ids[rows], given)
        embedded = self._embed(inputs, rows, token_ids, given < 0)
        for begin, features in inputs.kept.get(FEATURES, ()):
            embedded[begin : begin + features.shape[1]] = features[0]
        states, behind = self._states(inputs, copies), adding_behind(inputs.kept.get(FEATURES, ()))
        forward = Forward(rotary, attention, terms, token_ids, states=states, behind=behind)
        hidden = self._decoder.forward(embedded, forward)
        outputs = hidden[self._up(inputs.output_inputs)]
        return states_of(self._decoder, outputs)

    def _states(self, inputs: StepInputs, copies: Int64Array | None) -> StatesOnCuda | None:
        if self._recurrent is None:
            return None
        from petiole.gpu_worker.runtime.cuda.fused.states import fla

        bounds = np.concatenate([[0], np.cumsum(inputs.lengths)])
        of = np.arange(len(inputs.batch_rows)).repeat(inputs.lengths)
        copies = np.full(len(of), -1) if copies is None else copies
        arrays = [array.astype(np.int32) for array in (inputs.batch_rows, bounds, of, copies)]
        parts = fla.parts_of(arrays[1], arrays[3], self._cache.device) if fla.chosen() else None
        places, ends, rows, kept = upload_together(arrays, self._cache.device)
        return StatesOnCuda(self._recurrent.layers, places, ends, rows, kept, parts)

    def _embed(self, inputs: StepInputs, rows: Tensor, token_ids: Tensor, pending: Tensor) -> Tensor:
        """pending: bool [T], which tokens come from their rows' pending buffers."""
        if self._decoder.value_tokens is None or (inputs.values is None and not len(inputs.pending_inputs)):
            return self._decoder.embed(token_ids)
        lines = self._pending.values[rows]
        known = torch.full_like(lines, NO_NUMBER) if inputs.values is None else self._up(inputs.values)
        lines = torch.where(pending[:, None], lines, known)
        return embed_all(cast(ValuedDecoder, self._decoder), token_ids, lines)

    def _attention(self, slot: _Slot, step: Segmented, rows: Tensor, positions: Tensor) -> FlashInferAttention:
        from petiole.gpu_worker.runtime.cuda.fused.layers import token_slots

        slots = token_slots(self._cache.tables, rows, positions, self._cache.page_size)
        n, regions = step.bidirectional.n_queries, slot.bidirectional
        if n:
            assert regions is not None, "only images make regions"
            self._plan(regions, step.bidirectional)
        if len(step.causal.rows):
            self._plan(slot.append, step.causal)
        wrappers = {} if regions is None else regions.wrappers
        return FlashInferAttention(self._geometry, slots, slot.append.wrappers, n, wrappers)

    def _plan(self, wrappers: AppendWrappers | LatentWrappers, run: Run) -> None:
        from petiole.gpu_worker.runtime.cuda.fused.layers import gather_pages

        cache, lists = self._cache, []
        found = host_page_counts(cache, run.ends - run.lengths, run.lengths, run.ends)
        lengths = np.zeros(len(run.rows) + 1, dtype=np.int32)
        np.cumsum(run.lengths, out=lengths[1:])
        given = [run.rows.astype(np.int32), found.firsts, found.indptr]
        rows, *up = upload_together(given, cache.device)
        for table, firsts, bounds, indptr in zip(cache.tables, *up, found.indptr, strict=True):
            indices = torch.empty(int(indptr[-1]), dtype=torch.int32, device=cache.device)
            gather_pages(table, rows, firsts, bounds, indices)
            lists.append(PageList(staged(indptr, cache.device), indices))
        wrappers.plan(staged(lengths, cache.device), lists, staged(found.last, cache.device))

    def _up(self, array: np.ndarray) -> Tensor:
        return upload(array, self._cache.device)
