"""The dimensions of a tower, from `vision_config`, and its layers as a plan."""

from __future__ import annotations

from dataclasses import dataclass
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

NORM = Norm(kind="layer", eps=1e-6, bias=True)
_MAX_SIDE = 4096
"""Pixels of a patch's side, and patches of a block's: a limit far above every tower."""


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """plan: the layers. patch: pixels of a patch's side. merge: patches of the side of a block, which becomes one
    position. frames: pictures in a patch. table: rows and columns of the table of learned positions. taps: behind
    which layers the features are taken that the decoder of text adds behind its first ones. outputs: the width of
    features. placeholder: the token that stands for a picture in text."""

    plan: ModelPlan
    patch: int
    merge: int
    frames: int
    table: int
    taps: tuple[int, ...]
    outputs: int
    placeholder: int

    @property
    def hidden(self) -> int:
        return self.plan.hidden_size

    @property
    def block(self) -> int:
        """Pixels of the side of a block."""
        return self.patch * self.merge


def qwen3_vl(raw: JsonObject, text: ModelPlan) -> TowerConfig:
    """The tower of Qwen3-VL and of its successors. Missing values are those of its class in transformers. Raises
    ModelError."""
    given = objects(raw, "vision_config")
    hidden, heads = whole(given, "hidden_size", MAX_WIDTH, 1152), whole(given, "num_heads", MAX_WIDTH, 16)
    depth, channels = whole(given, "depth", MAX_LAYERS, 27), whole(given, "in_channels", 3, 3, low=3)
    assert channels == 3
    if hidden % heads or hidden // heads % 4:
        limit = f"must divide {hidden}, hidden_size, into heads of a multiple of 4"
        raise ModelError(f"config.json: vision_config.num_heads {limit}, got {heads}")
    width = hidden // heads
    rotary = Rotary(width, kind="axial", axes=(0,) * (width // 4) + (1,) * (width // 4))
    mixer = Attention(heads, heads, width, width**-0.5, rotary, mask="bidirectional", qkv_bias=True, out_bias=True)
    act = config_keys.activation(
        {"architectures": raw.get("architectures"), **given}, ("gelu_tanh", "gelu", "silu")
    )
    fed = FeedForward(whole(given, "intermediate_size", 2 * MAX_WIDTH, 4304), act, gated=False, bias=True)
    layer = Layer(mixer, fed, mixer_norm=NORM, feed_forward_norm=NORM)
    outputs = whole(given, "out_hidden_size", MAX_WIDTH, 3584)
    if outputs != text.hidden_size:
        raise ModelError(f"config.json: vision_config.out_hidden_size must be {text.hidden_size}, got {outputs}")
    entries = whole(given, "num_position_embeddings", MAX_VOCAB, 2304)
    if isqrt(entries) ** 2 != entries:
        raise ModelError(f"config.json: vision_config.num_position_embeddings must be a square, got {entries}")
    return TowerConfig(
        plan=ModelPlan("tower", 0, hidden, (layer,) * depth, None, max_position=0),
        patch=whole(given, "patch_size", _MAX_SIDE, 16),
        merge=whole(given, "spatial_merge_size", _MAX_SIDE, 2),
        frames=whole(given, "temporal_patch_size", 8, 2),
        table=isqrt(entries),
        taps=_taps(given, depth, text.n_layers),
        outputs=outputs,
        placeholder=whole(raw, "image_token_id", text.vocab_size - 1, 151655, low=0),
    )


def _taps(given: JsonObject, depth: int, most: int) -> tuple[int, ...]:
    found = given.get("deepstack_visual_indexes", [8, 16, 24])
    known = isinstance(found, list | tuple) and all(type(one) is int and 0 <= one < depth for one in found)
    if not known or sorted(set(found)) != list(found) or len(found) >= most:
        limit = f"must be fewer than {most} numbers of layers, 0 to {depth - 1}, in order"
        raise ModelError(f"config.json: vision_config.deepstack_visual_indexes {limit}, got {shown(found)}")
    return tuple(found)
