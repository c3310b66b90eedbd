"""A decoder that decodes values beside its tokens, served by the real `ModelRuntime`.

Its arithmetic is exact: keys and queries are zero, so attention is the mean over the history, and the mean of
small integers times their number, rounded, is their sum. What it samples, and the values beside it, are hashes of
that sum, which depends on every token, every value and every position before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpu_worker import EngineConfig
from gpu_worker.models.config import ModelConfig, RopeConfig
from gpu_worker.models.decoder import Forward
from gpu_worker.models.layers import Rotation
from gpu_worker.models.registry import ARCHITECTURES, Architecture
from gpu_worker.runtime.device import CpuDevice
from gpu_worker.runtime.runtime import ModelRuntime

VOCAB, N_VALUES, WIDTH, MAX_POSITIONS = 48, 2, 16, 96
_UNITS = 4096  # values are multiples of one in so many
_NAME = "ToyDecoderWithValues"


def _hash(x: Tensor) -> Tensor:
    """int64, wrapping."""
    x = (x ^ (x >> 15)) * 0x2C1B3C6D1F35A7B9
    x = (x ^ (x >> 29)) * 0x297A2D3953B1A6E5
    return x ^ (x >> 32)


class ToyDecoder:
    """Implements what `ModelRuntime` uses of a decoder, and `ValueDecoder`."""

    n_values = N_VALUES
    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, config: ModelConfig) -> None:
        self.config = config

    def embed_values(self, token_ids: Tensor, values: Tensor) -> Tensor:
        return torch.cat((token_ids[:, None].float(), values * _UNITS), dim=1)

    def forward(self, hidden: Tensor, step: Forward) -> Tensor:
        inputs = hidden.round().long()
        mixed = step.positions
        for column in inputs.unbind(1):
            mixed = _hash(mixed * 31 + column)
        own = _hash(mixed[:, None] + torch.arange(WIDTH)) & 255
        nothing = torch.zeros(len(hidden), 1, WIDTH)
        rotation = Rotation(None, 0.0, step.positions, torch.zeros(MAX_POSITIONS + 1, WIDTH))
        mean = step.attention.attend(0, nothing, nothing, own[:, None].float(), rotation)
        return (mean * (step.positions[:, None] + 1)).round()

    def head_output(self, hidden: Tensor) -> Tensor:
        return (_hash(self._state(hidden)[:, None] + torch.arange(VOCAB)) & 0xFFFF).float()

    def decode_values(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        mixed = _hash(self._state(hidden) + 1000 * (1 + token_ids.long()))
        return (_hash(mixed[:, None] + torch.arange(N_VALUES)) & (_UNITS - 1)).float() / _UNITS

    def _state(self, hidden: Tensor) -> Tensor:
        state = torch.zeros(len(hidden), dtype=torch.int64)
        for column in hidden.round().long().unbind(1):
            state = _hash(state * 31 + column)
        return state


class _History:
    """Attention over everything that it was ever given: no pages, no rows."""

    def __init__(self) -> None:
        self._all = torch.zeros(0, WIDTH)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation) -> Tensor:
        self._all = torch.cat((self._all, v[:, 0]))
        return self._all.mean(0, keepdim=True)


def continuation(prompt: list[int]) -> Iterator[tuple[int, tuple[float, ...]]]:
    """The oracle: greedy tokens and the values beside them, one by one, without an engine."""
    decoder, history = ToyDecoder(_config()), _History()
    inputs = [(token, (0.0,) * N_VALUES) for token in prompt]
    position = 0
    while True:
        for token, values in inputs:
            embedded = decoder.embed_values(torch.tensor([token]), torch.tensor([values]))
            hidden = decoder.forward(embedded, Forward(torch.tensor([position]), history))
            position += 1
        best = decoder.head_output(hidden).argmax(-1)
        inputs = [(int(best), tuple(decoder.decode_values(hidden, best)[0].tolist()))]
        yield inputs[0]


def value_runtime(
    folder: Path, monkeypatch: pytest.MonkeyPatch, jitter: Callable[[], None] | None = None, **config: Any
) -> ModelRuntime:
    """The real runtime with the toy decoder in it. `config` is for `EngineConfig`."""
    load: Any = lambda folder, config, options: ToyDecoder(config)  # noqa: E731
    monkeypatch.setitem(ARCHITECTURES, _NAME, Architecture(lambda raw: _config(), load))
    (folder / "config.json").write_text(json.dumps({"architectures": [_NAME]}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")  # no tensors
    return ModelRuntime(EngineConfig(model=str(folder), device="cpu", **config), device=CpuDevice(jitter=jitter))


def _config() -> ModelConfig:
    return ModelConfig(
        architecture=_NAME,
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        n_layers=1,
        n_heads=1,
        n_kv_heads=1,
        head_dim=WIDTH,
        rms_norm_eps=1e-6,
        max_position=MAX_POSITIONS,
        rope=RopeConfig(theta=10000.0),
        tied_head=True,
        qkv_bias=False,
        out_bias=False,
        mlp_bias=False,
        qk_norm=False,
        windows=(0,),
    )
