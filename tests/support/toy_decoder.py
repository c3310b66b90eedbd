"""A decoder that makes values beside its tokens, served by the real `ModelRuntime`.

Its arithmetic is exact: keys and queries are zero, so attention is the mean over the history, and the mean of
small integers times their number, rounded, is their sum. What it samples, and the numbers beside it, are hashes of
that sum, which depends on every token, every number and every position before. Most of what it samples are
coordinates and sizes.

`SeeingToyDecoder` takes images, too: several, wherever they stand, each as long as its crops are high.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.gpu_worker import EngineConfig
from petiole.gpu_worker.models.decoder import Forward
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.families.registry import ARCHITECTURES
from petiole.gpu_worker.models.moondream.values import value_kinds
from petiole.gpu_worker.models.parts.rotary import Rotation
from petiole.gpu_worker.models.plan import Attention, FeedForward, Layer, ModelPlan, Norm, Rotary
from petiole.gpu_worker.request.prepared_images import ImageLimits
from petiole.gpu_worker.request.values import NO_NUMBER, Numbers
from petiole.gpu_worker.runtime.device.cpu import CpuDevice
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from petiole.gpu_worker.runtime.step.token_values import embed_found, made_found

VOCAB, WIDTH, MAX_POSITIONS = 48, 16, 96
COORDINATE_ID, SIZE_ID = 5, 6
COORDINATES = tuple(k / 1024 for k in range(1024))
SIZES = tuple(2 ** (k / 512 - 2) for k in range(1024))
VALUES = value_kinds(COORDINATE_ID, SIZE_ID, COORDINATES, SIZES)
_TOKENS = {kind.name: kind for kind in VALUES.kinds}
_NAME = "ToyDecoderWithValues"


def _hash(x: Tensor) -> Tensor:
    """int64, wrapping."""
    x = (x ^ (x >> 15)) * 0x2C1B3C6D1F35A7B9
    x = (x ^ (x >> 29)) * 0x297A2D3953B1A6E5
    return x ^ (x >> 32)


def _columns(token_ids: Tensor, rest: Tensor) -> Tensor:
    return torch.cat((token_ids[:, None], rest), dim=1).float()


class ToyDecoder:
    """Implements what `ModelRuntime` uses of a decoder, and `ValueDecoder`."""

    value_tokens = VALUES
    token_types: Tensor | None = None
    images: ImageLimits | None = None
    pictures: Any = None
    videos: Any = None
    processor: Any = None
    drafting: Any = None
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, plan: ModelPlan) -> None:
        self.plan = plan

    def embed(self, token_ids: Tensor) -> Tensor:
        return _columns(token_ids, torch.zeros(len(token_ids), 2))

    def embed_value(self, kind: str, numbers: Tensor) -> Tensor:
        """As text, with the numbers, from 1 on, beside it."""
        token_ids = torch.full_like(numbers[:, 0], _TOKENS[kind].token_id)
        return _columns(token_ids, F.pad(numbers + 1, (0, 2 - numbers.shape[1])))

    def forward(self, hidden: Tensor, step: Forward) -> Tensor:
        inputs = hidden.round().long()
        positions = step.positions if step.positions.ndim == 2 else step.positions.expand(2, -1)
        mixed = positions[0] + 97 * (positions[1] - positions[0])
        for column in inputs.unbind(1):
            mixed = _hash(mixed * 31 + column)
        own = _hash(mixed[:, None] + torch.arange(WIDTH)) & 255
        own[:, -1] = 256 * (positions[0] == 0)  # of the mean, this tells how many keys are seen
        nothing = torch.zeros(len(hidden), 1, WIDTH)
        rotation = Rotation(None, 0.0, positions[0], torch.zeros(MAX_POSITIONS + 1, WIDTH))
        mean = step.attention.attend(0, nothing, nothing, own[:, None].float(), rotation)
        return (mean * (256 / mean[:, -1:]).round()).round()

    def head_output(self, hidden: Tensor) -> Tensor:
        logits = (_hash(self._state(hidden)[:, None] + torch.arange(VOCAB)) & 0xFFFF).float()
        logits[:, [COORDINATE_ID, SIZE_ID]] += 0x6000
        return logits

    def made_value(self, kind: str, hidden: Tensor) -> Tensor:
        mixed = _hash(self._state(hidden) + 1000 * (1 + _TOKENS[kind].token_id))
        return (_hash(mixed[:, None] + torch.arange(_TOKENS[kind].n)) & 1023).int()

    def _state(self, hidden: Tensor) -> Tensor:
        state = torch.zeros(len(hidden), dtype=torch.int64)
        for column in hidden.round().long().unbind(1):
            state = _hash(state * 31 + column)
        return state


class SeeingToyDecoder(ToyDecoder):
    """Every position of an image is embedded as numbers that follow from all of its pixels, and from its index."""

    images = ImageLimits(max_images=3, max_positions=20, max_crops=4, bidirectional=False)

    def __init__(self, plan: ModelPlan) -> None:
        super().__init__(plan)
        self.encoded: list[int] = []

    def encode(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> list[Tensor]:
        self.encoded.append(len(images))
        return [embedded_image(pixels)[None] for pixels, _ in images]


class LeadingToyDecoder(SeeingToyDecoder):
    """One image, which begins behind BOS and sees it."""

    images = ImageLimits(max_images=1, max_positions=20, max_crops=4, bidirectional=True, lead=1)


def embedded_image(pixels: Tensor) -> Tensor:
    """float32 [height, 3]"""
    state = torch.zeros(1, dtype=torch.int64)
    for number in pixels.flatten().long():
        state = _hash(state * 31 + number)
    return (_hash(state + torch.arange(3 * pixels.shape[1]).view(-1, 3)) & 1023).float() + VOCAB


class _History:
    """Attention over everything that it was ever given: no pages, no rows."""

    def __init__(self) -> None:
        self._all = torch.zeros(0, WIDTH)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation) -> Tensor:
        self._all = torch.cat((self._all, v[:, 0]))
        return self._all.mean(0, keepdim=True)


def continuation(prompt: Sequence[int | Tensor], rotary: Any = ()) -> Iterator[tuple[int, Numbers]]:
    """The oracle: greedy tokens and their numbers, one by one, without an engine. `prompt`: tokens, and images as
    `embedded_image` makes them. `rotary`: [2, n], the rotary positions of the first n positions."""
    decoder, history = ToyDecoder(_plan()), _History()
    parts = [part if isinstance(part, Tensor) else [part] for part in prompt]
    inputs: list[Any] = [(token, (NO_NUMBER,) * VALUES.width) for part in parts for token in part]
    position = 0
    where = torch.as_tensor(rotary).view(2, -1)
    behind = torch.arange(MAX_POSITIONS) + (where.max() + 1 if len(rotary) else 0)
    where = torch.cat([where, behind.expand(2, -1)], dim=1).long()
    while True:
        for token, line in inputs:
            if isinstance(token, Tensor):
                embedded = token[None]
            else:
                embedded = embed_found(decoder, torch.tensor([token]), torch.tensor([line]))
            hidden = decoder.forward(embedded, Forward(where[:, position : position + 1], history))
            position += 1
        best = decoder.head_output(hidden).argmax(-1)
        inputs = [(int(best), tuple(made_found(decoder, hidden, best)[0].tolist()))]
        yield int(best), VALUES.numbers(*inputs[0])


def value_runtime(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    jitter: Callable[[], None] | None = None,
    kind: type[ToyDecoder] = ToyDecoder,
    **config: Any,
) -> ModelRuntime:
    """The real runtime with the toy decoder in it. `config` is for `EngineConfig`."""
    read: Any = lambda source, model, options: kind(model.plan)  # noqa: E731
    monkeypatch.setitem(ARCHITECTURES, _NAME, Family((_NAME,), lambda raw: _plan(), read=read))
    (folder / "config.json").write_text(json.dumps({"architectures": [_NAME], "eos_token_id": 0}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensors
    return ModelRuntime(EngineConfig(model=str(folder), device="cpu", **config), device=CpuDevice(jitter=jitter))


def _plan() -> ModelPlan:
    mixer = Attention(heads=1, kv_heads=1, head_dim=WIDTH, scale=WIDTH**-0.5, rotary=Rotary(WIDTH))
    layer = Layer(mixer, FeedForward(WIDTH), mixer_norm=Norm(), feed_forward_norm=Norm())
    return ModelPlan(_NAME, VOCAB, WIDTH, (layer,), Norm(), max_position=MAX_POSITIONS)
