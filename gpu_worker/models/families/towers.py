"""`vision_config` as the dimensions of a tower and a plan of its layers. Missing values are those of the class in
transformers. All of these raise ModelError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isqrt

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import (
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    JsonObject,
    objects,
    shown,
    whole,
)
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.plan import Attention, FeedForward, Layer, ModelPlan, Norm, Rotary
from petiole.gpu_worker.models.vision.dimensions import TowerConfig

NORM = Norm(kind="layer", eps=1e-6, bias=True)
_MAX_SIDE = 4096
"""Pixels of a patch's side, and patches of a block's: a limit far above every tower."""


def qwen3_vl(raw: JsonObject, text: ModelPlan) -> TowerConfig:
    """The tower of Qwen3-VL."""
    tower, given = _plain(raw, text, 151655), objects(raw, "vision_config")
    taps = _layers(given, "deepstack_visual_indexes", [8, 16, 24], tower.plan.n_layers)
    if len(taps) >= text.n_layers:
        limit = f"must be fewer than the {text.n_layers} layers of text"
        raise ModelError(f"config.json: vision_config.deepstack_visual_indexes {limit}, got {len(taps)}")
    return replace(tower, taps=taps)


def qwen3_5(raw: JsonObject, text: ModelPlan) -> TowerConfig:
    """The tower of Qwen3.5: that of Qwen3-VL without features of earlier layers."""
    return _plain(raw, text, 248056)


def _plain(raw: JsonObject, text: ModelPlan, token: int) -> TowerConfig:
    given = objects(raw, "vision_config")
    act = config_keys.activation(_named(raw, given), ("gelu_tanh", "gelu", "silu"))
    fed = FeedForward(whole(given, "intermediate_size", 2 * MAX_WIDTH, 4304), act, gated=False, bias=True)
    entries = whole(given, "num_position_embeddings", MAX_VOCAB, 2304)
    if isqrt(entries) ** 2 != entries:
        raise ModelError(f"config.json: vision_config.num_position_embeddings must be a square, got {entries}")
    tower = _tower(raw, text, NORM, fed, hidden=1152, depth=27, patch=16, token=token)
    return replace(tower, table=isqrt(entries))


def qwen2_5_vl(raw: JsonObject, text: ModelPlan) -> TowerConfig:
    """The tower of Qwen2.5-VL: most layers see windows."""
    given = objects(raw, "vision_config")
    act = config_keys.activation(_named(raw, given), ("silu",))
    fed = FeedForward(whole(given, "intermediate_size", 2 * MAX_WIDTH, 3420), act, bias=True)
    tower = _tower(raw, text, Norm(eps=1e-6), fed, hidden=3584, depth=32, patch=14, token=151655)
    pixels = whole(given, "window_size", _MAX_SIDE**2, 112)
    if pixels < tower.block:
        raise ModelError(f"config.json: vision_config.window_size must be at least {tower.block}, got {pixels}")
    seeing_all = _layers(given, "fullatt_block_indexes", [7, 15, 23, 31], MAX_LAYERS)
    return replace(tower, window=pixels // tower.merge // tower.patch, whole=seeing_all)


def _tower(
    raw: JsonObject,
    text: ModelPlan,
    norm: Norm,
    fed: FeedForward,
    *,
    hidden: int,
    depth: int,
    patch: int,
    token: int,
) -> TowerConfig:
    """hidden, depth, patch, token: the defaults."""
    given = objects(raw, "vision_config")
    hidden, heads = whole(given, "hidden_size", MAX_WIDTH, hidden), whole(given, "num_heads", MAX_WIDTH, 16)
    depth = whole(given, "depth", MAX_LAYERS, depth)
    whole(given, "in_channels", 3, 3, low=3)
    if hidden % heads or hidden // heads % 4:
        limit = f"must divide {hidden}, hidden_size, into heads of a multiple of 4"
        raise ModelError(f"config.json: vision_config.num_heads {limit}, got {heads}")
    width = hidden // heads
    rotary = Rotary(width, _theta(given), "axial", axes=(0,) * (width // 4) + (1,) * (width // 4))
    mixer = Attention(heads, heads, width, width**-0.5, rotary, mask="bidirectional", qkv_bias=True, out_bias=True)
    layer = Layer(mixer, fed, mixer_norm=norm, feed_forward_norm=norm)
    outputs = whole(given, "out_hidden_size", MAX_WIDTH, 3584)
    if outputs != text.hidden_size:
        raise ModelError(f"config.json: vision_config.out_hidden_size must be {text.hidden_size}, got {outputs}")
    return TowerConfig(
        plan=ModelPlan("tower", 0, hidden, (layer,) * depth, None, max_position=0),
        patch=whole(given, "patch_size", _MAX_SIDE, patch),
        merge=whole(given, "spatial_merge_size", _MAX_SIDE, 2),
        frames=whole(given, "temporal_patch_size", 8, 2),
        outputs=outputs,
        placeholder=whole(raw, "image_token_id", text.vocab_size - 1, token, low=0),
        norm=norm,
    )


def _theta(given: JsonObject) -> float:
    """The rotation's theta, in the new spelling or the old one."""
    rope = {**objects(given, "rope_parameters"), **objects(given, "rope_scaling")}
    kind = rope.get("rope_type") or rope.get("type") or "axial"
    if kind not in ("axial", "default"):
        raise ModelError(f"config.json: vision_config.rope_parameters.rope_type must be axial, got {shown(kind)}")
    return config_keys.number(rope if rope.get("rope_theta") else given, "rope_theta", 10_000.0, low=1.0)


def _named(raw: JsonObject, given: JsonObject) -> JsonObject:
    """A part of a configuration that names its model in errors."""
    return {**given, "architectures": raw.get("architectures")}


def _layers(given: JsonObject, key: str, default: Sequence[int], depth: int) -> tuple[int, ...]:
    """Numbers of layers, ascending; without the key, the default."""
    found = given.get(key, default)
    known = isinstance(found, list | tuple) and all(type(one) is int and 0 <= one < depth for one in found)
    if not known or sorted(set(found)) != list(found):
        limit = f"must be numbers of layers, 0 to {depth - 1}, in order"
        raise ModelError(f"config.json: vision_config.{key} {limit}, got {shown(found)}")
    return tuple(found)
