"""The image encoder as CUDA graphs: one for each number of crops, captured once.

An encode is a step of its own. Its crops travel from the pinned memory of its slot to one buffer on the device,
which all graphs read. A number between two sizes of the ladder is padded with crops of earlier steps. Each crop is
encoded alone, so the content of the padding does not matter. Joining the features of an image depends on how it is
tiled, so that runs behind the graph.

    slot's pinned crops --copy--> crops on the device --graph--> features of crops --tiling--> features of images

Copies, graphs and the readers of their output run in stream order, so only the pinned memory belongs to a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from petiole.gpu_worker.models.decoder import CropDecoder
from petiole.gpu_worker.request.prepared_images import PreparedImage
from petiole.gpu_worker.runtime.cuda.capture import Capture
from petiole.gpu_worker.runtime.device.device import Device, DeviceStream

ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Torch's attention backends, in this order; the last one is for types that the others refuse. By default torch
would prefer cuDNN's, which plans again for each shape."""


def crop_ladder(most: int) -> list[int]:
    """Numbers of crops to capture graphs for: 2, each up to 16, then every 4th. Each further crop takes as long as
    the previous one."""
    return [*range(2, min(most, 16)), *range(16, most, 4), most]


class EncoderGraphs:
    """The encoder of one decoder. `most`: maximum number of crops in a step."""

    def __init__(self, decoder: CropDecoder, most: int, torch_device: torch.device, device: Device) -> None:
        self._decoder, self._sizes = decoder, crop_ladder(most)
        shape = (most, *decoder.crop_shape)
        self._pinned = [device.host_buffer(shape, torch.uint8) for _ in range(2)]
        self._crops = torch.zeros(shape, dtype=torch.uint8, device=torch_device)
        self._features = torch.empty(0)
        self._replays: dict[int, Callable[[], object]] = {}

    def capture(self, stream: DeviceStream, capture: Capture) -> None:
        """Warm up and capture every size, the largest first, so that the memory pool grows only once."""
        stream.enqueue(self._warm_up)
        for size in reversed(self._sizes):
            work = partial(self._encode, size)
            stream.enqueue(partial(_without_gradients, work))
            stream.synchronize()
            self._replays[size] = capture(work)

    @torch.inference_mode()
    def _warm_up(self) -> None:
        self._features = torch.empty_like(self._of_crops(len(self._crops)))

    def _encode(self, size: int) -> None:
        self._features[:size].copy_(self._of_crops(size))

    def _of_crops(self, n: int) -> Tensor:
        with sdpa_kernel(ATTENTION, set_priority=True):
            return self._decoder.crop_features(self._crops[:n])

    def encode(self, slot_id: int, images: Sequence[PreparedImage]) -> list[Tensor]:
        """The features of each image. Called in stream order."""
        pinned, each = self._pinned[slot_id], [len(image.pixels) for image in images]
        n = sum(each)
        np.concatenate([image.pixels for image in images], out=pinned.numpy()[:n])
        self._crops[:n].copy_(pinned[:n], non_blocking=True)
        self._replays[next(size for size in self._sizes if size >= n)]()
        parts = torch.split(self._features[:n], each)
        return [
            self._decoder.image_features(part, image.tiling) for part, image in zip(parts, images, strict=True)
        ]


def _without_gradients(work: Callable[[], None]) -> None:
    with torch.inference_mode():
        work()
