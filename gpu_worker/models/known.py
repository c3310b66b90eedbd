"""What code that computes layers itself may take for known: exactly the decoders and encoders listed here.

Compiled code reads a decoder's weights and never calls the decoder; a captured graph records one call and replays
it. Such code cannot see that a decoder computes something else. So it asks here first, and everything that is not
listed is refused: a subclass, another class with the same attributes, a part with a new field, other kernels, a
tensor of another size. Torch then computes the model, by calling it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from petiole.gpu_worker.models.config import ModelConfig
from petiole.gpu_worker.models.decoder import Decoder, DecoderLayer
from petiole.gpu_worker.models.layers import DenseLinear, Fp8Linear, Int8Linear
from petiole.gpu_worker.models.moondream.config import EPS, HEAD_DIM, MoondreamConfig, VisionConfig
from petiole.gpu_worker.models.moondream.crops import CropGeometry
from petiole.gpu_worker.models.moondream.decoder import MoondreamDecoder, TextBlock
from petiole.gpu_worker.models.moondream.encoder import EncoderBlock, Mlp, VisionEncoder

Parts = frozenset[type]
"""The kernels and the linear layers in whose place the asking code computes, or which it calls."""

_CONFIG = (
    "architecture vocab_size hidden_size intermediate_size n_layers n_heads n_kv_heads head_dim rms_norm_eps "
    "max_position rope tied_head qkv_bias out_bias mlp_bias qk_norm windows dtype eos_token_ids"
)
_FIELDS: dict[type, str] = {
    ModelConfig: _CONFIG,
    Decoder: "config embedding layers norm head rotary kernels value_tokens images processor",
    DecoderLayer: "input_norm qkv q_norm k_norm out post_norm gate_up down",
    DenseLinear: "weight bias",
    Int8Linear: "weight scale bias",
    Fp8Linear: "weight scale quantize_rows bias",
    MoondreamConfig: f"{_CONFIG} vision region tokens",
    MoondreamDecoder: ("config embedding blocks norm head rotary vision region value_tokens images processor"),
    TextBlock: "norm qkv proj mlp",
    Mlp: "fc1 fc2",
    VisionConfig: "dim heads layers ff projection geometry",
    CropGeometry: "patch grid margin max_crops",
    VisionEncoder: "config patches positions blocks norm projection",
    EncoderBlock: "ln1 qkv proj ln2 mlp",
}
"""Every field of the known classes. A new field changes what is computed, until somebody has listed it here."""


def unknown_in_decoder(decoder: object, parts: Parts) -> str | None:
    """What is not known of a decoder; None if all of it is."""
    return _first_unknown(lambda: _check_decoder(decoder, parts))


def unknown_in_encoder(encoder: object, parts: Parts) -> str | None:
    """What is not known of the layers of an encoder; None if all of them are."""
    return _first_unknown(lambda: _check_encoder(encoder, parts))


def with_known_crops(decoder: object) -> MoondreamDecoder | None:
    """The decoder, if its `encode` is known to encode each crop alone and to join the features; else None."""
    return decoder if isinstance(decoder, MoondreamDecoder) and type(decoder) is MoondreamDecoder else None


class _UnknownError(Exception):
    """Names what is not known."""


def _first_unknown(check: Callable[[], None]) -> str | None:
    try:
        check()
    except _UnknownError as unknown:
        return str(unknown)
    return None


def _check_decoder(decoder: object, parts: Parts) -> None:
    if isinstance(decoder, MoondreamDecoder):
        _check_moondream(decoder, parts)
        return
    _exactly(decoder, Decoder)
    assert isinstance(decoder, Decoder)
    config = decoder.config
    _exactly(config, ModelConfig)
    _one_of(decoder.kernels, parts)
    for name in ("value_tokens", "images", "processor"):
        _require(getattr(decoder, name) is None, f"a {type(decoder).__name__} with {name}")
    _check_ends(decoder, parts)
    _sized("norm", decoder.norm, config.hidden_size)
    _require(len(decoder.layers) == len(config.windows), f"{len(decoder.layers)} layers of {len(config.windows)}")
    for i, layer in enumerate(decoder.layers):
        _check_layer(f"layer {i}", layer, config, parts)


def _check_layer(at: str, layer: DecoderLayer, config: ModelConfig, parts: Parts) -> None:
    _exactly(layer, DecoderLayer)
    hidden, inner, q_size, head = config.hidden_size, config.intermediate_size, config.q_size, config.head_dim
    _require((layer.q_norm is None) == (layer.k_norm is None), f"{at} with a norm of queries or of keys alone")
    _sized(f"input_norm of {at}", layer.input_norm, hidden)
    _sized(f"post_norm of {at}", layer.post_norm, hidden)
    if layer.q_norm is not None:
        _sized(f"q_norm of {at}", layer.q_norm, head)
        _sized(f"k_norm of {at}", layer.k_norm, head)
    _linear(f"qkv of {at}", layer.qkv, q_size + 2 * config.kv_size, hidden, parts)
    _linear(f"out of {at}", layer.out, hidden, q_size, parts)
    _linear(f"gate_up of {at}", layer.gate_up, 2 * inner, hidden, parts)
    _linear(f"down of {at}", layer.down, hidden, inner, parts)


def _check_moondream(decoder: MoondreamDecoder, parts: Parts) -> None:
    _exactly(decoder, MoondreamDecoder)
    config = decoder.config
    _exactly(config, MoondreamConfig)
    _require(config.head_dim == HEAD_DIM, f"heads of {config.head_dim}")
    _require(config.rms_norm_eps == EPS, f"norms with an eps of {config.rms_norm_eps:g}")
    _check_ends(decoder, parts)
    hidden, inner = config.hidden_size, config.intermediate_size
    _layer_norm("norm", decoder.norm, hidden)
    _require(len(decoder.blocks) == len(config.windows), f"{len(decoder.blocks)} layers of {len(config.windows)}")
    for i, block in enumerate(decoder.blocks):
        at = f"layer {i}"
        _exactly(block, TextBlock)
        _layer_norm(f"norm of {at}", block.norm, hidden)
        _linear(f"qkv of {at}", block.qkv, config.q_size + 2 * config.kv_size, hidden, parts)
        _linear(f"proj of {at}", block.proj, hidden, config.q_size, parts)
        _mlp(at, block.mlp, hidden, inner, parts)


def _check_ends(decoder: Decoder | MoondreamDecoder, parts: Parts) -> None:
    """Embedding, head and rotary table."""
    config, table = decoder.config, decoder.rotary
    _require(config.n_layers == len(config.windows), f"windows of {len(config.windows)} layers")
    _require(config.n_heads % config.n_kv_heads == 0, f"{config.n_heads} heads over {config.n_kv_heads} of keys")
    _sized("embedding", decoder.embedding, config.vocab_size, config.hidden_size)
    _linear("head", decoder.head, config.vocab_size, config.hidden_size, parts)
    known = table.dtype == torch.float32 and table.ndim == 2 and table.shape[1] == config.head_dim
    _require(known, f"a rotary table of {table.dtype} {list(table.shape)}")


def _check_encoder(encoder: object, parts: Parts) -> None:
    _exactly(encoder, VisionEncoder)
    assert isinstance(encoder, VisionEncoder)
    config = encoder.config
    _exactly(config, VisionConfig)
    _exactly(config.geometry, CropGeometry)
    dim = config.dim
    _require(dim % config.heads == 0, f"{config.heads} heads over {dim}")
    _sized("positions", encoder.positions, 1, config.geometry.grid**2, dim)
    for i, block in enumerate(encoder.blocks):
        at = f"layer {i}"
        _exactly(block, EncoderBlock)
        _layer_norm(f"ln1 of {at}", block.ln1, dim)
        _layer_norm(f"ln2 of {at}", block.ln2, dim)
        _linear(f"qkv of {at}", block.qkv, 3 * dim, dim, parts)
        _linear(f"proj of {at}", block.proj, dim, dim, parts)
        _mlp(at, block.mlp, dim, config.ff, parts)


def _mlp(at: str, mlp: Mlp, width: int, inner: int, parts: Parts) -> None:
    _exactly(mlp, Mlp)
    _linear(f"fc1 of {at}", mlp.fc1, inner, width, parts)
    _linear(f"fc2 of {at}", mlp.fc2, width, inner, parts)


def _linear(what: str, linear: object, outputs: int, inputs: int, parts: Parts) -> None:
    _one_of(linear, parts)
    assert isinstance(linear, DenseLinear | Int8Linear | Fp8Linear)
    _sized(what, linear.weight, outputs, inputs)
    if linear.bias is not None:
        _sized(f"bias of {what}", linear.bias, outputs)
    if not isinstance(linear, DenseLinear):
        _require(linear.scale.numel() == outputs, f"scale of {what} of size {list(linear.scale.shape)}")


def _layer_norm(what: str, norm: object, width: int) -> None:
    _require(type(norm) is tuple and len(norm) == 2, f"{what}, a {type(norm).__name__}")
    assert isinstance(norm, tuple)
    for tensor in norm:
        _sized(what, tensor, width)


def _sized(what: str, tensor: object, *shape: int) -> None:
    found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
    _require(found == list(shape), f"{what} of size {found}, where {list(shape)} are known")


def _one_of(part: object, parts: Parts) -> None:
    """It is of exactly one of these types, and has no attributes of its own."""
    _require(type(part) in parts, f"the class {type(part).__name__}")
    _require(not getattr(part, "__dict__", None), f"attributes of one {type(part).__name__}")
    if type(part) in _FIELDS:
        _exactly(part, type(part))


def _exactly(part: object, known: type) -> None:
    """It is of this type, and of no subclass, and the type has only known fields."""
    _require(type(part) is known, f"the class {type(part).__name__}")
    new = [field.name for field in fields(known) if field.name not in _FIELDS[known].split()]
    _require(not new, f"{', '.join(new)} of the class {known.__name__}")


def _require(known: bool, what: str) -> None:
    if not known:
        raise _UnknownError(what)
