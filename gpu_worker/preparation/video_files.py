"""The frames of a video's file: `pip install 'petiole[video]'`.

A child reads it, within limits of time and memory. Its packets are counted and one frame is decoded when the
request is prepared. So most damage is known then."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from queue import LifoQueue
from typing import Any

import numpy as np

from petiole.gpu_worker.children import Child, ChildEnded, _video
from petiole.gpu_worker.children._video import CPU_S, MEMORY_BYTES, READABLE
from petiole.gpu_worker.exceptions import InvalidRequest, require
from petiole.gpu_worker.request.prepared_images import UInt8Array

CHILDREN = 2
_children: LifoQueue[Child] = LifoQueue()
for _ in range(CHILDREN):
    _children.put(Child(_video.__file__))


@dataclass(frozen=True, slots=True)
class Film:
    """n: frames; rate: how many there are to a second; coded, size: (width, height), before they are turned and
    after."""

    data: bytes
    field: str
    n: int
    rate: float
    coded: tuple[int, int]
    size: tuple[int, int]

    def pixels(self, numbers: Sequence[int], size: tuple[int, int], resample: int) -> UInt8Array:
        """uint8 [frames, height, width, 3] of the frames of these ascending numbers. size: (width, height) to
        which they are resized; resample: of Pillow. Raises InvalidRequest."""
        wanted = {"numbers": list(numbers), "coded": self.coded, "size": self.size}
        found = _asked(self.data, self.field, {**wanted, "to": size, "resample": resample})
        return np.frombuffer(found, np.uint8).reshape(len(numbers), size[1], size[0], 3)


def opened(data: bytes, field: str, most_pixels: int) -> Film:
    """A file whose packets are counted, and whose first frame is decoded. Raises InvalidRequest."""
    lacking = "must be a list of frames: this worker lacks petiole[video]"
    require(find_spec("av") is not None, field, lacking, "a file")
    found = _asked(data, field, {"most_pixels": most_pixels})
    return Film(data, field, found["n"], found["rate"], tuple(found["coded"]), tuple(found["size"]))


def _asked(data: bytes, field: str, question: dict[str, Any]) -> Any:
    child = _children.get()
    try:
        found = child.ask(json.dumps(question).encode() + b"\n" + data)
    except ChildEnded:
        limit = f"{READABLE} within {CPU_S:g} s of processor time and {MEMORY_BYTES} bytes of memory"
        raise InvalidRequest(field, limit, f"{len(data)} bytes that take more") from None
    finally:
        _children.put(child)
    if isinstance(found, dict) and "refused" in found:
        raise InvalidRequest(field, *found["refused"])
    return found
