"""A CUDA device as a platform: see `runtime.platform`. All memory that nothing else needs becomes KV pages."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from petiole.contract.settings.engine import BATCHING, EngineConfig
from petiole.gpu_worker.exceptions import MachineError, require
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.copying import Quantization
from petiole.gpu_worker.runtime.cuda import whole_texts
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import FlashInferKernels
from petiole.gpu_worker.runtime.cuda.attention.installed import kernels_at_hand
from petiole.gpu_worker.runtime.cuda.attention.latents import most_batched_tokens
from petiole.gpu_worker.runtime.cuda.capture import cuda_capture, eager
from petiole.gpu_worker.runtime.cuda.executor import (
    CudaExecutor,
    accept,
    batching_that_fits,
    choose,
    require_flashinfer,
    working_bytes,
)
from petiole.gpu_worker.runtime.device.cuda import CudaDevice, CudaStream, capability
from petiole.gpu_worker.runtime.device.device import DeviceStream
from petiole.gpu_worker.runtime.interface import Progress
from petiole.gpu_worker.runtime.memory.kv_tier import RING_BYTES
from petiole.gpu_worker.runtime.memory.room import page_bytes, pages_in, require_pages, states_of_row
from petiole.gpu_worker.runtime.memory.states import state_bytes
from petiole.gpu_worker.runtime.platforms import Executor, StepMemory, encode_bytes, feature_bytes, largest_region

OLDEST = (8, 0)
"""The least compute capability for which the kernels are compiled and checked: A100."""

EIGHT_BIT_FLOATS = (8, 9)
"""The least whose tensor cores multiply eight-bit floats: L4, 4090."""


class CudaPlatform:
    """Implements `Platform`."""

    def __init__(self, device: CudaDevice, known: tuple[int, int] | None = None) -> None:
        """known: the compute capability of a card that is not here."""
        self.device = device
        self.place = device.torch_device
        self.kernels = FlashInferKernels()
        self.choose, self.accept = choose, accept
        self.dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        real = device.torch_device.type == "cuda"
        self._capability = capability(device.torch_device) if real else known or EIGHT_BIT_FLOATS
        fp8: tuple[Quantization, ...] = ("fp8",) if self._capability >= EIGHT_BIT_FLOATS else ()
        self.quantizations: tuple[Quantization, ...] = ("none", *fp8, "int4")
        self.pinned = True
        self.drafts = False
        self.block_reader = None

    def require(self, model: ModelPlan) -> None:
        if self._capability < OLDEST:
            oldest, found = (".".join(map(str, one)) for one in (OLDEST, self._capability))
            what = f"the card's compute capability: must be at least {oldest}, got {found}"
            raise MachineError(f"{what}; device=cpu serves this model")
        require_flashinfer(model)

    def decided(self, config: EngineConfig, decoder: Decoder) -> EngineConfig:
        """The numbers are small enough that the working memory takes only a part of the free memory."""
        latents = decoder.plan.reads_latents
        what = "must be auto on CUDA for attention over latents"
        require(not latents or config.kv_dtype == "auto", "kv_dtype", what, config.kv_dtype)
        self.release_memory()
        free = self.room(config)
        itemsize, encode, region = decoder.dtype.itemsize, encode_bytes(decoder, config), largest_region(decoder)
        config = batching_that_fits(config, BATCHING["cuda"], decoder.plan, itemsize, free, encode, region)
        if latents:
            rows, tokens = config.max_num_seqs, config.max_num_batched_tokens
            most = most_batched_tokens(decoder.plan, rows)
            what = f"must be at most {most} on CUDA, for attention over latents with max_num_seqs {rows}"
            require(tokens <= most, "max_num_batched_tokens", what, tokens)
        return config

    def copy_stream(self, compute: DeviceStream, name: str = "copy") -> DeviceStream:
        return self.device.new_stream(name)

    def room(self, config: EngineConfig) -> int:
        free, total = torch.cuda.mem_get_info(self.place)
        return int(free - total * (1 - config.gpu_memory_utilization))

    def n_pages(self, config: EngineConfig, decoder: Decoder, kv_dtype: torch.dtype) -> int:
        """All that is left of the memory fraction beside weights and working memory. Pages that running sequences
        do not need hold cached prefixes."""
        self.release_memory()  # temporary tensors of the weight conversion
        working = working_bytes(config, decoder.plan, decoder.dtype.itemsize, encode_bytes(decoder, config))
        plan, size, of_states = decoder.plan, kv_dtype.itemsize, decoder.dtype.itemsize
        rows = (config.max_num_seqs + 1) * states_of_row(config) * state_bytes(plan, of_states)
        features = feature_bytes(decoder, config)
        ring = RING_BYTES if config.kv_tier else 0
        free = self.room(config) - working - rows - features - ring
        fitting = pages_in(config, plan, size, free, of_states=of_states)
        if features:  # which requests take later: what does not fit beside the pages must not begin to serve
            limit = f"must be at most {max(fitting, 0)} beside image_cache_bytes {features}"
            require(config.num_pages <= max(fitting, 0), "num_pages", limit, config.num_pages)
        each = page_bytes(config, plan, size)
        n_pages = config.num_pages or require_pages(config, fitting, each, free, features)
        return 1 if plan.whole_texts else n_pages

    def new_executor(
        self,
        decoder: Decoder,
        memory: StepMemory,
        stream: DeviceStream,
        config: EngineConfig,
        *,
        stepping: Progress,
        building: Progress,
    ) -> Executor:
        assert isinstance(stream, CudaStream), "the streams are the device's own"
        if decoder.plan.whole_texts:
            return whole_texts.CudaTextExecutor(decoder, memory.bank, self.place)
        capture = cuda_capture(stream) if config.cuda_graphs == "on" else eager

        def capture_one(work: Callable[[], None], *, kept: bool = True) -> Callable[[], object]:
            building()
            return capture(work, kept=kept)

        pending = memory.states.pending
        with torch.inference_mode(), kernels_at_hand():
            return CudaExecutor(
                decoder,
                memory.cache,
                memory.bank,
                pending,
                config,
                self.device,
                stream,
                capture_one,
                memory.recurrent,
            )

    def release_memory(self) -> None:
        gc.collect()  # graphs and their callables form reference cycles
        torch.cuda.empty_cache()
