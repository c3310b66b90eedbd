"""The CPU as a platform: see `runtime.platform`. Its memory is shared with other programs."""

from __future__ import annotations

import torch

from petiole.gpu_worker.config import BATCHING, EngineConfig
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.parts.kernels import TorchKernels
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.reading import Quantization
from petiole.gpu_worker.runtime.cpu.executor import CpuExecutor, choose
from petiole.gpu_worker.runtime.device.interface import Device, DeviceStream
from petiole.gpu_worker.runtime.interface import Progress
from petiole.gpu_worker.runtime.memory.kv import decide_n_pages, free_bytes
from petiole.gpu_worker.runtime.platform import StepMemory, largest_region
from petiole.gpu_worker.runtime.step.verify import accept


class CpuPlatform:
    """Implements `Platform`."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.place = torch.device("cpu")
        self.kernels = TorchKernels()
        self.choose, self.accept = choose, accept
        self.dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
        self.quantizations: tuple[Quantization, ...] = ("none", "int8", "int4")
        self.pinned = False

    def require(self, model: ModelPlan) -> None:
        """Torch computes all models."""

    def decided(self, config: EngineConfig, decoder: Decoder) -> EngineConfig:
        return config.decided(BATCHING["cpu"], largest_region(decoder))

    def copy_stream(self, compute: DeviceStream) -> DeviceStream:
        return compute  # a copy within memory needs no thread of its own

    def room(self, config: EngineConfig) -> int:
        return free_bytes(self.place, config.gpu_memory_utilization) // 2

    def n_pages(self, config: EngineConfig, decoder: Decoder, kv_dtype: torch.dtype) -> int:
        return decide_n_pages(
            config,
            decoder.plan,
            max_model_len=config.max_model_len,
            bytes_per_element=kv_dtype.itemsize,
            free_bytes=free_bytes(self.place, config.gpu_memory_utilization),
            on_cuda=False,
        )

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
        return CpuExecutor(decoder, memory.cache, memory.bank, memory.states.pending, stepping)

    def release_memory(self) -> None:
        """Nothing is held."""
