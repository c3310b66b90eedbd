"""A platform: everything that differs between a CPU and a CUDA device when a model is loaded and served.

`building` asks the platform how much runs at once, what fits, and for the executor. Steps know only the executor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.models.adapters.lora import AdapterBank
from petiole.gpu_worker.models.decoder import Decoder, ImageDecoder
from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.copying import Quantization
from petiole.gpu_worker.models.weights.formats.layer_tensors import BlockReader
from petiole.gpu_worker.request.prepared_images import PreparedImage
from petiole.gpu_worker.runtime.device.device import Device, DeviceStream
from petiole.gpu_worker.runtime.interface import Progress
from petiole.gpu_worker.runtime.memory.kv import KVCache
from petiole.gpu_worker.runtime.memory.states import StatePool
from petiole.gpu_worker.runtime.step.inputs import StepInputs, StepStates
from petiole.gpu_worker.runtime.step.rows import RowStates
from petiole.gpu_worker.runtime.step.sampling import Choose
from petiole.gpu_worker.runtime.step.verify import Accept


class Executor(Protocol):
    """Runs the model on one kind of device. Called in stream order. kernels, instructions: see `Computing`."""

    @property
    def kernels(self) -> str: ...

    @property
    def instructions(self) -> str: ...

    def forward(self, slot_id: int, inputs: StepInputs) -> StepStates:
        """Compute all positions and write their KV to the pool."""
        ...

    def encode(self, slot_id: int, images: Sequence[PreparedImage]) -> Sequence[Tensor]:
        """The features of each image (see `ImageDecoder`)."""
        ...

    def catch_up(self) -> None:
        """Write the KV that is still owed for steps before: before positions are copied."""
        ...


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The device memory that steps read and write, beside the weights. bank: None without adapter slots.
    recurrent: None for a model without layers that keep a state."""

    cache: KVCache
    bank: AdapterBank | None
    states: RowStates
    recurrent: StatePool | None = None


class Platform(Protocol):
    """place: where the tensors are. kernels: those of a decoder's layers. choose, accept: see `OutputSampler`.
    dtypes: the types that weights may have, by name; the first stands in for all others. quantizations: the values
    of `weight_quantization` that this platform computes. pinned: whether copies to the device are quicker from
    pinned memory. drafts: whether its executor runs a head that drafts. block_reader: see `LayerTensors`."""

    @property
    def device(self) -> Device: ...

    @property
    def place(self) -> torch.device: ...

    @property
    def kernels(self) -> Kernels: ...

    @property
    def choose(self) -> Choose: ...

    @property
    def accept(self) -> Accept: ...

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]: ...

    @property
    def quantizations(self) -> Sequence[Quantization]: ...

    @property
    def pinned(self) -> bool: ...

    @property
    def drafts(self) -> bool: ...

    @property
    def block_reader(self) -> BlockReader | None: ...

    def require(self, model: ModelPlan) -> None:
        """Raises ModelError if this platform would not compute the model."""
        ...

    def decided(self, config: EngineConfig, decoder: Decoder) -> EngineConfig:
        """The configuration with numbers for this device and its free memory in place of 0."""
        ...

    def copy_stream(self, compute: DeviceStream, name: str = "copy") -> DeviceStream:
        """A stream for copies to the host."""
        ...

    def room(self, config: EngineConfig) -> int:
        """Bytes that rows and adapters may take."""
        ...

    def n_pages(self, config: EngineConfig, decoder: Decoder, kv_dtype: torch.dtype) -> int:
        """The number of pages of the KV pool, with everything else allocated but the executor."""
        ...

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
        """stepping: called by long steps. building: called while the executor is made."""
        ...

    def release_memory(self) -> None:
        """Return unused device memory to the driver."""
        ...


def largest_region(decoder: Decoder) -> int:
    """The most positions that a step computes together: see `ImageLimits`."""
    return decoder.images.max_region if decoder.images else 0


def encode_bytes(decoder: Decoder, config: EngineConfig) -> int:
    """Bytes that the largest encode takes beside the weights."""
    images = decoder.images
    if images is None:
        return 0
    largest = images.patches * min(config.image_tokens, images.max_positions)
    return cast(ImageDecoder, decoder).encode_bytes(max(images.max_crops, largest))


def feature_bytes(decoder: Decoder, config: EngineConfig) -> int:
    """Bytes that the kept features of images take at most."""
    return 0 if decoder.images is None else config.image_cache_bytes
