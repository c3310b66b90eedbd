"""The decoder of Llama, Mistral, Qwen2 and Qwen3: pre-norm attention and gated MLP, T positions at a time.

The T positions of a step belong to several sequences and may be prompts, single tokens or drafts; only the
attention, which the caller passes in, distinguishes them. Queries, keys and values come from one product, gate and
up from another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from petiole.gpu_worker.models.config import ModelConfig
from petiole.gpu_worker.models.layers import Kernels, Linear, Rotation
from petiole.gpu_worker.request.images import ImageLimits
from petiole.gpu_worker.request.skills import Processor
from petiole.gpu_worker.request.values import ValueTokens

LinearName = Literal["qkv", "out", "gate_up", "down"]


class ValueDecoder(Protocol):
    """A decoder with `value_tokens`: it embeds values from their bins, and decodes bins from hidden states. No
    method may wait for the device. `runtime.step.values` knows which bins a token has."""

    def embed_coordinates(self, bins: Tensor) -> Tensor:
        """int [n] -> [n, hidden]."""
        ...

    def embed_sizes(self, bins: Tensor) -> Tensor:
        """int [n, 2], widths and heights -> [n, hidden]."""
        ...

    def coordinate_bins(self, hidden: Tensor) -> Tensor:
        """Hidden states whose logits give a coordinate token: [n, hidden] -> int [n]."""
        ...

    def size_bins(self, hidden: Tensor) -> Tensor:
        """Hidden states whose logits give a size token: [n, hidden] -> int [n, 2]."""
        ...


class ImageDecoder(Protocol):
    """A decoder with `images`: its encoder turns crops into inputs. It may not wait for the device."""

    def encode(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> Sequence[Tensor]:
        """Crops uint8 [crops, height, width, 3] with their tiling -> the features of each image, [1 + extra,
        positions, hidden]: the input embeddings, then the tensors that the decoder adds after early layers, if
        any."""
        ...


class CropDecoder(ImageDecoder, Protocol):
    """An `ImageDecoder` whose crops all have one shape. Each crop is encoded alone, and then the crops of an image
    are joined. So encoding a number of crops, of any images, is always the same computation."""

    @property
    def crop_shape(self) -> tuple[int, ...]:
        """(height, width, 3)"""
        ...

    def encode_bytes(self, n_crops: int) -> int:
        """Bytes of device memory that encoding this many crops takes beside the weights."""
        ...

    def crop_features(self, crops: Tensor) -> Tensor:
        """uint8 [n, *crop_shape], of any images -> [n, ...]."""
        ...

    def image_features(self, features: Tensor, tiling: tuple[int, int]) -> Tensor:
        """The features of one image's crops -> the features of the image, as in `encode`, in memory of their
        own."""
        ...


class Attention(Protocol):
    """One step's attention over the paged KV cache."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation) -> Tensor:
        """Rotate q [T, Hq, D] and k [T, Hkv, D], store k and v [T, Hkv, D] of the step's positions, and return the
        attention output [T, Hq * D]. q may be overwritten."""
        ...


class LinearDeltas(Protocol):
    """The LoRA deltas of a step, added to the output of a linear layer in place."""

    def add(self, layer: int, name: LinearName, x: Tensor, y: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Linear
    post_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Forward:
    """The arguments of a forward besides its hidden states. positions: rotary positions, int64 [T], or [axes, T]
    in a step with images that have several axes."""

    positions: Tensor
    attention: Attention
    deltas: LinearDeltas | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model's weights and its forward pass. rotary: see `rotary_table`.

    embedding: [vocab, hidden]; `value_tokens`, `images` and `processor`: None for a text model.
    """

    config: ModelConfig
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    norm: Tensor
    head: Linear
    rotary: Tensor
    kernels: Kernels
    value_tokens: ValueTokens | None = None
    images: ImageLimits | None = None
    processor: Processor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        return torch.nn.functional.embedding(token_ids, self.embedding)

    def forward(self, hidden: Tensor, step: Forward) -> Tensor:
        """[T, hidden] -> [T, hidden], without the final norm; `hidden` is overwritten."""
        eps = self.config.rms_norm_eps
        residual = hidden
        x = self.kernels.rms_norm(residual, self.layers[0].input_norm, eps)
        for i, layer in enumerate(self.layers):
            if i:
                x = self.kernels.add_rms_norm(x, residual, layer.input_norm, eps)
            x = self.attend(i, self._apply(i, "qkv", layer.qkv, x, step), step)
            x = self._apply(i, "out", layer.out, x, step)
            x = self.kernels.add_rms_norm(x, residual, layer.post_norm, eps)
            x = self._apply(i, "gate_up", layer.gate_up, x, step)
            x = self._apply(i, "down", layer.down, self.kernels.silu_mul(x), step)
        residual += x
        return residual

    def head_output(self, hidden: Tensor) -> Tensor:
        """Final norm and logits: [O, hidden] -> [O, vocab] in the model's dtype."""
        return self.head(self.kernels.rms_norm(hidden, self.norm, self.config.rms_norm_eps))

    def attend(self, i: int, qkv: Tensor, step: Forward) -> Tensor:
        """Layer i's attention: [T, queries, keys and values] -> [T, q_size]. `qkv` may be overwritten."""
        config, layer, n = self.config, self.layers[i], qkv.shape[0]
        q, k, v = torch.split(qkv, [config.q_size, config.kv_size, config.kv_size], dim=-1)
        q = q.view(n, config.n_heads, config.head_dim)
        k = k.view(n, config.n_kv_heads, config.head_dim)
        v = v.view(n, config.n_kv_heads, config.head_dim)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        return step.attention.attend(i, q, k, v, Rotation(norms, config.rms_norm_eps, step.positions, self.rotary))

    def _apply(self, i: int, name: LinearName, linear: Linear, x: Tensor, step: Forward) -> Tensor:
        y = linear(x)
        if step.deltas is not None:
            step.deltas.add(i, name, x, y)
        return y
