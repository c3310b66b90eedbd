"""A card that is not here, as a platform: it decides like one that is, and computes nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.exceptions import require
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.runtime.cuda.executor import require_supported
from petiole.gpu_worker.runtime.cuda.platform import CudaPlatform
from petiole.gpu_worker.runtime.device.cuda import CudaDevice


class _NoDevice(CudaDevice):
    """Tensors on it have shapes alone."""

    def __init__(self) -> None:
        self.index, self.torch_device, self.on_span = 0, torch.device("meta"), None


class SimulatedCard(CudaPlatform):
    """memory: of the card. left: what nothing has taken of it. capability: its compute capability; None: one that
    multiplies all types."""

    def __init__(self, memory: int, left: Callable[[], int], capability: tuple[int, int] | None = None) -> None:
        super().__init__(_NoDevice(), capability)
        self._memory, self._left = memory, left

    def require(self, model: ModelPlan) -> None:
        require_supported(model)

    def room(self, config: EngineConfig) -> int:
        return int(self._left() - self._memory * (1 - config.gpu_memory_utilization))

    def n_pages(self, config: EngineConfig, decoder: Decoder, kv_dtype: torch.dtype) -> int:
        """A card that is here fails where `num_pages` do not fit."""
        most = super().n_pages(replace(config, num_pages=0), decoder, kv_dtype)
        require(config.num_pages <= most, "num_pages", f"must be at most {most} on this card", config.num_pages)
        return config.num_pages or most

    def release_memory(self) -> None:
        """None is held."""
