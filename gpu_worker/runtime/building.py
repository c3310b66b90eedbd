"""Building a runtime: reads the model, decides the sizes once, and allocates everything that steps use.

What is decided here (how much runs at once, the longest sequence, the number of pages) follows from the
configuration, the model, the platform and its free memory, and holds as long as the runtime. The order matters on
CUDA, where the KV pool takes what everything else has left.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from petiole.cache import WindowPages
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.models.adapters.lora import AdaptedModel, AdapterBank
from petiole.gpu_worker.models.adapters.store import AdapterStore
from petiole.gpu_worker.models.checkpoint.sentence_transformers import TextModel
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.weights.copying import TensorSource
from petiole.gpu_worker.request.pooling import TextLimits
from petiole.gpu_worker.runtime.derived_settings import log_drafts, n_threads, require_head, require_states_alone
from petiole.gpu_worker.runtime.device.device import Device, DeviceStream, upload_together
from petiole.gpu_worker.runtime.device.opening import open_device
from petiole.gpu_worker.runtime.device.transfer import DecodeSlot, HostArray, RenderBuffer, check_shared_stream
from petiole.gpu_worker.runtime.interface import (
    FEATURES,
    OF_TOKENS,
    TYPES,
    VALUES,
    VECTORS,
    Computing,
    ModelLimits,
    Progress,
    StepBatch,
    nothing,
)
from petiole.gpu_worker.runtime.memory.kv import KVCache, new_kv_cache
from petiole.gpu_worker.runtime.memory.room import require_rows_and_adapters, snapshots_of, window_pools
from petiole.gpu_worker.runtime.memory.states import StatePool, new_state_pool
from petiole.gpu_worker.runtime.model_files import ModelInfo, ModelReader
from petiole.gpu_worker.runtime.platforms import Platform, StepMemory
from petiole.gpu_worker.runtime.step.in_doubt import RowsInDoubt
from petiole.gpu_worker.runtime.step.inputs import StepStates
from petiole.gpu_worker.runtime.step.rows import OutputPlan, RowStates
from petiole.gpu_worker.runtime.step.sampler import OutputSampler

logger = logging.getLogger(__name__)

N_SLOTS = 2


@dataclass(slots=True)
class Staging:
    """The data of the step that uses a slot. All kinds of steps share it, because a slot belongs to one step at a
    time.

    `sources`: outputs of sampling on the device. Kept until the slot is reused, because the copy stream reads
    them. `batch`: settled as soon as the forward runs, and so is `plan`.
    """

    sources: dict[str, Tensor] = field(default_factory=dict)
    states: StepStates | None = None
    plan: OutputPlan | None = None
    batch: StepBatch | None = None


@dataclass(frozen=True, slots=True)
class SideOutput:
    """What a decoder makes beside each sampled token: `width` numbers. dtype None: objects, on a CPU."""

    width: int
    dtype: torch.dtype | None

    def host_buffer(self, device: Device, n: int) -> HostArray:
        return np.empty(n, object) if self.dtype is None else device.host_buffer((n, self.width), self.dtype)


@dataclass(frozen=True, slots=True)
class Built:
    """A model on its device, with all that its steps use but the executor. config: decided, with nothing left to
    a default."""

    config: EngineConfig
    platform: Platform
    reader: ModelReader
    info: ModelInfo
    decoder: Decoder
    stream: DeviceStream
    copy_stream: DeviceStream
    memory: StepMemory
    adapters: AdapterStore
    sampler: OutputSampler
    sides: Mapping[str, SideOutput]
    slots: Sequence[DecodeSlot[Staging]]
    in_doubt: RowsInDoubt | None


def build(
    config: EngineConfig,
    device: Device | None = None,
    source: TensorSource | None = None,
    progress: Progress = nothing,
) -> Built:
    """Read the configured model and allocate its memory. `source`: see `ModelReader`. progress: called before each
    tensor. Raises ModelError, what `progress` raises, and InvalidRequest for settings that do not fit."""
    platform = platform_of(device or open_device(config.device))
    if (threads := n_threads(config)) != torch.get_num_threads():
        torch.set_num_threads(threads)
    with torch.no_grad():  # not inference mode: buffers are also written by copies outside it
        reader = ModelReader(config, source, platform)
        info = reader.find(config.model)
        require_states_alone(config, info.plan)
        decoder = reader.read(info, progress)
        require_head(config, decoder.plan)
        log_drafts(config, decoder.plan)
        config = decided(config, info, decoder, platform)
        stream = platform.device.new_stream("compute")
        copy_stream = platform.copy_stream(stream)
        require_rows(config, decoder, platform)
        adapted = AdaptedModel(info.plan, info.model.names)
        bank = _new_bank(config, adapted, decoder.dtype, platform) if config.lora_slots else None
        adapters = _new_adapters(config, adapted, decoder.dtype, platform)
        n_rows, place, kinds = rows_of(config), platform.place, decoder.value_tokens
        n_drafts = drafts_of(config, decoder)
        states = RowStates(
            n_rows,
            info.plan.vocab_size,
            place,
            0 if kinds is None else kinds.width,
            n_drafts=n_drafts,
        )
        in_doubt = None
        if platform.device.tasks_wait:
            in_doubt = RowsInDoubt(n_rows, n_drafts, repeats=info.plan.keeps_states)
        sampler = OutputSampler(
            states, lambda arrays: upload_together(arrays, place), platform.choose, platform.accept, in_doubt
        )
        sides = side_outputs(decoder)
        slots = tuple(_new_slot(k, config, sides, platform.device, stream, copy_stream) for k in range(N_SLOTS))
        check_shared_stream(slots)
        pools = pools_of(config, decoder, platform)
        cache = _new_cache(config, decoder, platform, pools)
        memory = StepMemory(cache, bank, states, _new_states(config, decoder, platform, pools))
        platform.device.synchronize()  # tensors created on other streams are complete
    return Built(
        config,
        platform,
        reader,
        info,
        decoder,
        stream,
        copy_stream,
        memory,
        adapters,
        sampler,
        sides,
        slots,
        in_doubt,
    )


def decided(config: EngineConfig, info: ModelInfo, decoder: Decoder, platform: Platform) -> EngineConfig:
    """The settings with nothing left to a default but the number of pages."""
    config = replace(config, max_model_len=info.max_model_len).drafting_by(decoder.plan.drafts)
    return platform.decided(_for_texts(config, info), decoder)


def _for_texts(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """A model whose texts are computed whole needs steps that hold the longest, and its keys are of no use to
    other texts."""
    if not info.plan.whole_texts:
        return config
    if config.num_pages:
        logger.info(
            "num_pages=%d is ignored: this model computes each text in one step, without pages", config.num_pages
        )
    return config.whole_texts(info.max_model_len - 1)


def platform_of(device: Device) -> Platform:
    """The platform of a device. A CPU imports nothing of CUDA's."""
    if device.kind == "cpu":
        from petiole.gpu_worker.runtime.cpu.platform import CpuPlatform

        return CpuPlatform(device)
    from petiole.gpu_worker.runtime.cuda.platform import CudaPlatform
    from petiole.gpu_worker.runtime.device.cuda import CudaDevice

    assert isinstance(device, CudaDevice), f"a device of kind {device.kind}: {device}"
    return CudaPlatform(device)


def limits_of(
    info: ModelInfo,
    decoder: Decoder,
    memory: StepMemory,
    config: EngineConfig,
    device: Device,
    computing: Computing,
    *,
    goes_ahead: bool,
) -> ModelLimits:
    """What the scheduler must know of a model and its memory."""
    cache, recurrent = memory.cache, memory.recurrent
    return ModelLimits(
        model=info.name,
        fingerprint=info.fingerprint,
        files=info.files,
        vocab_size=info.plan.vocab_size,
        max_model_len=config.max_model_len,
        n_pages=cache.n_pages,
        page_size=cache.page_size,
        max_batch_size=rows_of(config),
        windows=cache.windows,
        snapshots=0 if recurrent is None else recurrent.snapshots,
        eos_token_ids=info.eos_token_ids,
        values=decoder.value_tokens,
        images=decoder.images,
        pictures=decoder.pictures,
        videos=decoder.videos,
        processor=decoder.processor,
        texts=_text_limits(info, config),
        judge=info.model.judge,
        device=device.kind,
        batching=config.batching,
        computing=computing,
        drafts=drafts_of(config, decoder),
        goes_ahead=goes_ahead,
    )


def rows_of(config: EngineConfig) -> int:
    """Rows of the page table. Row 0 is reserved."""
    return config.max_num_seqs + 1


def drafts_of(config: EngineConfig, decoder: Decoder) -> int:
    """How many tokens a head drafts at most behind each step. config: decided."""
    return 0 if decoder.drafting is None else config.speculative_tokens


def side_inputs(decoder: Decoder) -> frozenset[str]:
    """The names of the side inputs that steps of a decoder may have."""
    declared = {VALUES: decoder.value_tokens, FEATURES: decoder.images, TYPES: decoder.token_types}
    return frozenset(name for name, kinds in declared.items() if kinds is not None)


def side_outputs(decoder: Decoder) -> dict[str, SideOutput]:
    """The side outputs of a decoder, by name. An executor makes them (`StepStates.sides`); sampling and the copy
    to the host need no more than their sizes."""
    kinds, sides = decoder.value_tokens, dict[str, SideOutput]()
    if kinds is not None:
        sides[VALUES] = SideOutput(kinds.width, torch.int32)
    if decoder.plan.pooling is not None:
        sides[VECTORS] = SideOutput(decoder.plan.vector_size, torch.float32)
        if decoder.plan.pooling.of_tokens:
            sides[OF_TOKENS] = SideOutput(0, None)
    return sides


def _text_limits(info: ModelInfo, config: EngineConfig) -> TextLimits | None:
    pooling, texts = info.plan.pooling, info.model.texts or TextModel()
    if pooling is None:
        return None
    return TextLimits(
        dimensions=info.plan.vector_size,
        max_tokens=min(config.max_model_len - 1, texts.max_tokens or config.max_model_len),
        prompts=texts.prompts,
        default_prompt=texts.default_prompt,
        normalize=pooling.normalize,
        whole=info.plan.whole_texts,
        lower_case=texts.lower_case,
        labels=pooling.labels,
        scale=pooling.scale,
        types=info.plan.token_types > 1,
        of_tokens=pooling.of_tokens,
        lacking=texts.lacking,
        pools_prompts=pooling.prompts,
    )


def require_rows(config: EngineConfig, decoder: Decoder, platform: Platform) -> None:
    """Raises InvalidRequest for rows or adapters that do not fit. config: decided."""
    require_rows_and_adapters(
        config,
        decoder.plan,
        max_model_len=config.max_model_len,
        bytes_per_element=decoder.dtype.itemsize,
        room=platform.room(config),
    )


def _new_bank(config: EngineConfig, model: AdaptedModel, dtype: torch.dtype, platform: Platform) -> AdapterBank:
    return AdapterBank(model, config.lora_slots, config.lora_max_rank, dtype, platform.place)


def _new_adapters(
    config: EngineConfig, model: AdaptedModel, dtype: torch.dtype, platform: Platform
) -> AdapterStore:
    kept = 2 * config.lora_slots
    return AdapterStore(model, config.lora_max_rank, kept=kept, dtype=dtype, pinned=platform.pinned)


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """How large the pools of keys, values and states are, and the type of keys and values. See `KVCache` and
    `StatePool`."""

    dtype: torch.dtype
    n_pages: int
    windows: Sequence[WindowPages]
    snapshots: int


def pools_of(config: EngineConfig, decoder: Decoder, platform: Platform) -> PoolSizes:
    """config: decided. Raises InvalidRequest, and MachineError if no sequence fits."""
    plan, dtype = decoder.plan.with_drafting, torch.float8_e4m3fn if config.kv_dtype == "fp8" else decoder.dtype
    n_pages = platform.n_pages(config, decoder, dtype)
    windows = window_pools(config, plan, n_pages)
    snapshots = snapshots_of(config, plan, dtype.itemsize, n_pages, of_states=decoder.dtype.itemsize)
    return PoolSizes(dtype, n_pages, windows, snapshots)


def _new_cache(config: EngineConfig, decoder: Decoder, platform: Platform, pools: PoolSizes) -> KVCache:
    return new_kv_cache(
        decoder.plan.with_drafting,
        n_pages=pools.n_pages,
        windows=pools.windows,
        page_size=config.page_size,
        rows=rows_of(config),
        max_model_len=config.max_model_len,
        dtype=pools.dtype,
        device=platform.place,
    )


def _new_states(config: EngineConfig, decoder: Decoder, platform: Platform, pools: PoolSizes) -> StatePool | None:
    return new_state_pool(
        decoder.plan,
        rows=rows_of(config),
        snapshots=pools.snapshots,
        dtype=decoder.dtype,
        device=platform.place,
        rounded=config.snapshot_quantization == "int8",
        drafts=config.speculative_tokens > 0,
    )


def _new_slot(
    slot_id: int,
    config: EngineConfig,
    sides: Mapping[str, SideOutput],
    device: Device,
    stream: DeviceStream,
    copying: DeviceStream,
) -> DecodeSlot[Staging]:
    n_rows = rows_of(config)
    n_outputs = n_rows * (1 + config.speculative_tokens)
    host: dict[str, HostArray] = {
        "token_ids": device.host_buffer((n_outputs,), torch.int32),
        "accepted": device.host_buffer((n_rows,), torch.int32),
        "drafts": device.host_buffer((n_rows, config.speculative_tokens), torch.int32),
    }
    host |= {name: side.host_buffer(device, n_outputs) for name, side in sides.items()}
    return DecodeSlot(slot_id, stream, RenderBuffer(host, copying), Staging())
