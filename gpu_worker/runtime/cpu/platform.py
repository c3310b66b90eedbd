"""The CPU as a platform: see `runtime.platform`. Its memory is shared with other programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from petiole.contract.settings.engine import BATCHING, EngineConfig
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.parts.kernels import TorchKernels
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.copying import Quantization
from petiole.gpu_worker.runtime.cpu.executor import CpuExecutor, choose
from petiole.gpu_worker.runtime.cpu.native.products.gguf_blocks import NativeBlocks
from petiole.gpu_worker.runtime.device.device import Device, DeviceStream
from petiole.gpu_worker.runtime.interface import Progress
from petiole.gpu_worker.runtime.memory.container import host_memory_left
from petiole.gpu_worker.runtime.memory.kv import new_step_cache
from petiole.gpu_worker.runtime.memory.room import page_bytes, pages_in, require_pages, require_room
from petiole.gpu_worker.runtime.platforms import StepMemory, feature_bytes, largest_region
from petiole.gpu_worker.runtime.step.verify import accept

_KV_BYTES = 2**30
_LENGTH_EACH = 2048


class CpuPlatform:
    """Implements `Platform`. free: the bytes that this process may still take; None: asks the machine."""

    def __init__(self, device: Device, free: Callable[[], int] | None = None) -> None:
        self.device = device
        self.place = torch.device("cpu")
        self.kernels = TorchKernels()
        self.choose, self.accept = choose, accept
        self.dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        self.quantizations: tuple[Quantization, ...] = ("none", "int8", "int4")
        self.pinned = False
        self.drafts = True
        self.block_reader = NativeBlocks()
        self._free = host_memory_left if free is None else free

    def require(self, model: ModelPlan) -> None:
        """Torch computes all models."""

    def decided(self, config: EngineConfig, decoder: Decoder) -> EngineConfig:
        return config.decided(BATCHING["cpu"], largest_region(decoder))

    def copy_stream(self, compute: DeviceStream, name: str = "copy") -> DeviceStream:
        return compute  # a copy within memory needs no thread of its own

    def room(self, config: EngineConfig) -> int:
        return self._free() // 2

    def n_pages(self, config: EngineConfig, decoder: Decoder, kv_dtype: torch.dtype) -> int:
        plan, size, features = decoder.plan.with_drafting, kv_dtype.itemsize, feature_bytes(decoder, config)
        free = self._free() - features
        each = page_bytes(config, plan, size)
        if plan.whole_texts:  # their keys lie in the executor's memory, for a step
            require_room("max_num_batched_tokens", config.max_num_batched_tokens, each // config.page_size, free)
            return 1
        fitting = partial(pages_in, config, plan, size, of_states=decoder.dtype.itemsize)
        if config.num_pages:
            if config.num_pages > fitting(free):
                require_room("num_pages", config.num_pages, each, free)
            return config.num_pages
        return require_pages(config, default_pages(config, fitting, free), each, free, features)

    def new_executor(
        self,
        decoder: Decoder,
        memory: StepMemory,
        stream: DeviceStream,
        config: EngineConfig,
        *,
        stepping: Progress,
        building: Progress,
    ) -> CpuExecutor:
        cache = memory.cache
        if decoder.plan.whole_texts:
            cache = new_step_cache(decoder.plan, cache, config.max_num_batched_tokens)
        return CpuExecutor(
            decoder, cache, memory.bank, memory.states.pending, stepping, recurrent=memory.recurrent
        )

    def release_memory(self) -> None:
        """Nothing is held."""


def default_pages(config: EngineConfig, fitting: Callable[[int], int], free_bytes: int) -> int:
    """2,048 tokens for every row, within 1 GiB or a quarter of the free memory, whichever is less; but at least
    one sequence of full length if that fits into half of the free memory. fitting: how many pages fit into
    bytes."""
    size, longest = config.page_size, config.max_model_len
    wanted = config.max_num_seqs * -(-min(longest, _LENGTH_EACH) // size) + 1
    budget = fitting(min(_KV_BYTES, free_bytes // 4))
    return max(min(wanted, budget), min(-(-longest // size) + 1, fitting(free_bytes // 2)))
