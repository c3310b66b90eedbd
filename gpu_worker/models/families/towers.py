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
from petiole.gpu_worker.models.vision.dimensions import TowerConfig, VideoMarks
from petiole.gpu_worker.request.prepared_images import Written

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
    return replace(tower, table=isqrt(entries), boxes=1000, video=_timed(raw, text))


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
    mark, per_second = _video(raw, text), config_keys.number(given, "tokens_per_second", 4.0)
    video = None if mark is None else VideoMarks(mark, per_second=per_second)
    return replace(tower, window=pixels // tower.merge // tower.patch, whole=seeing_all, boxes=0, video=video)


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
    hidden, heads = _heads(given, "num_heads", hidden=hidden, heads=16, width=4)
    depth = whole(given, "depth", MAX_LAYERS, depth)
    whole(given, "in_channels", 3, 3, low=3)
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


def gemma3(raw: JsonObject, text: ModelPlan) -> TowerConfig:
    """SigLIP: all pictures have one size."""
    given = objects(raw, "vision_config")
    layer, hidden = _siglip_layer(raw, given, hidden=768, heads=12)
    assert layer.mixer_norm is not None
    patch = whole(given, "patch_size", _MAX_SIDE, 16)
    table = whole(given, "image_size", 2**16, 224) // patch
    tokens = whole(raw, "mm_tokens_per_image", MAX_VOCAB, 256)
    if isqrt(tokens) ** 2 != tokens or not table or table % isqrt(tokens):
        limit = f"must be a square whose root divides {table}, the patches of a side"
        raise ModelError(f"config.json: mm_tokens_per_image {limit}, got {tokens}")
    begin, end = (_token(raw, text, part, default) for part, default in (("boi", 255_999), ("eoi", 256_000)))
    placeholder = _token(raw, text, "image", 262_144)
    return TowerConfig(
        plan=_layers_of(given, hidden, layer, 12),
        patch=patch,
        merge=table // isqrt(tokens),
        frames=1,
        outputs=text.hidden_size,
        placeholder=placeholder,
        norm=Norm(eps=layer.mixer_norm.eps, offset=1.0),
        table=table,
        written=Written(begin, ("\n\n", begin, placeholder, end, "\n\n")),
    )


def gemma4(raw: JsonObject, text: ModelPlan) -> TowerConfig:
    """Heads turn by column and by row. The two halves of a head are in the order of `_turning`."""
    given = objects(raw, "vision_config")
    hidden = whole(given, "hidden_size", MAX_WIDTH, 768)
    heads, width = whole(given, "num_attention_heads", MAX_WIDTH, 12), whole(given, "head_dim", MAX_WIDTH, 64)
    kv_heads = whole(given, "num_key_value_heads", MAX_WIDTH, 12)
    if width % 4 or heads % kv_heads:
        limit = "must be a multiple of 4, of heads that those of keys divide"
        raise ModelError(f"config.json: vision_config.head_dim {limit}, got {width}, {heads} and {kv_heads} heads")
    if given.get("attention_bias"):
        raise ModelError("config.json: vision_config.attention_bias must be false, got true")
    norm = Norm(eps=config_keys.number(given, "rms_norm_eps", 1e-6))
    named = {"hidden_activation": "gelu_pytorch_tanh", **_named(raw, given)}
    act = config_keys.activation(named, ("gelu_tanh", "gelu", "silu"), key="hidden_activation")
    half = width // 4
    mixer = Attention(
        heads,
        kv_heads,
        width,
        scale=1.0,
        rotary=Rotary(width, _theta(given, 100.0), "axial", axes=(1,) * half + (0,) * half),
        mask="bidirectional",
        q_norm=norm,
        k_norm=norm,
        v_norm=replace(norm, weight=False),
    )
    fed = FeedForward(whole(given, "intermediate_size", 2 * MAX_WIDTH, 3072), act)
    if text.per_layer is not None and objects(raw, "text_config").get("pad_token_id", 0) != 0:
        raise ModelError("config.json: pad_token_id must be 0 beside pictures and per-layer inputs")
    placeholder = _token(raw, text, "image", 258_880)
    begin, end = (_token(raw, text, part, default) for part, default in (("boi", 255_999), ("eoi", 258_882)))
    return TowerConfig(
        plan=_layers_of(given, hidden, Layer(mixer, fed, norm, norm, norm, norm), 16),
        patch=whole(given, "patch_size", _MAX_SIDE, 16),
        merge=whole(given, "pooling_kernel_size", _MAX_SIDE, 3),
        frames=1,
        outputs=text.hidden_size,
        placeholder=placeholder,
        norm=replace(norm, weight=False),
        table=whole(given, "position_embedding_size", MAX_VOCAB, 10_240),
        written=Written(placeholder, (begin, placeholder, end)),
        video=None if (mark := _video(raw, text)) is None else VideoMarks(mark, (begin, end)),
        clipped=bool(given.get("use_clipped_linears", False)),
        standard=bool(given.get("standardize", False)),
    )


def pixtral(raw: JsonObject, text: ModelPlan) -> TowerConfig:
    """The tower of Mistral Small 3.1. Frequencies take turns between rows and columns."""
    given = objects(raw, "vision_config")
    hidden, heads = _heads(given, "num_attention_heads", hidden=1024, heads=16, width=4)
    width, norm = hidden // heads, Norm(eps=1e-5)
    act = config_keys.activation(_named(raw, given), ("gelu", "gelu_tanh", "silu"))
    config_keys.activation(_named(raw, raw), ("gelu",), key="projector_hidden_act")
    rotary = Rotary(width, _theta(given), axes=(0, 1) * (width // 4))
    mixer = Attention(heads, heads, width, width**-0.5, rotary, mask="bidirectional")
    fed = FeedForward(whole(given, "intermediate_size", 2 * MAX_WIDTH, 4096), act)
    if raw.get("vision_feature_layer", -1) != -1:
        got = shown(raw["vision_feature_layer"])
        raise ModelError(f"config.json: vision_feature_layer must be -1, the last, got {got}")
    whole(given, "num_channels", 3, 3, low=3)
    return TowerConfig(
        plan=_layers_of(given, hidden, Layer(mixer, fed, mixer_norm=norm, feed_forward_norm=norm), 24),
        patch=whole(given, "patch_size", _MAX_SIDE, 16),
        merge=whole(raw, "spatial_merge_size", _MAX_SIDE, 2),
        frames=1,
        outputs=text.hidden_size,
        placeholder=_token(raw, text, "image", 10),
        norm=Norm(eps=config_keys.number(objects(raw, "text_config"), "rms_norm_eps", 1e-5)),
        biased=bool(raw.get("multimodal_projector_bias", False)),
        edge=whole(given, "image_size", 2**16, 1024),
    )


def smolvlm(raw: JsonObject, text: ModelPlan) -> TowerConfig:
    """SigLIP: each tile of a picture, and the whole picture, has its size."""
    given = objects(raw, "vision_config")
    layer, hidden = _siglip_layer(raw, given, hidden=1152, heads=16)
    patch = whole(given, "patch_size", _MAX_SIDE, 32)
    table, merge = whole(given, "image_size", 2**16, 224) // patch, whole(raw, "scale_factor", _MAX_SIDE, 2)
    if not table or table % merge:
        raise ModelError(f"config.json: scale_factor must divide {table}, the patches of a side, got {merge}")
    assert layer.mixer_norm is not None
    return TowerConfig(
        plan=_layers_of(given, hidden, layer, 12),
        patch=patch,
        merge=merge,
        frames=1,
        outputs=text.hidden_size,
        placeholder=whole(raw, "image_token_id", text.vocab_size - 1, 128_257, low=0),
        norm=layer.mixer_norm,
        table=table,
    )


def _siglip_layer(raw: JsonObject, given: JsonObject, *, hidden: int, heads: int) -> tuple[Layer, int]:
    """A layer of SigLIP, and the hidden size. hidden, heads: the defaults."""
    hidden, heads = _heads(given, "num_attention_heads", hidden=hidden, heads=heads, width=1)
    norm = Norm(kind="layer", eps=config_keys.number(given, "layer_norm_eps", 1e-6), bias=True)
    act = config_keys.activation({"hidden_act": "gelu_pytorch_tanh", **_named(raw, given)}, ("gelu_tanh", "gelu"))
    fed = FeedForward(whole(given, "intermediate_size", 2 * MAX_WIDTH, 3072), act, gated=False, bias=True)
    width = hidden // heads
    mixer = Attention(heads, heads, width, width**-0.5, mask="bidirectional", qkv_bias=True, out_bias=True)
    whole(given, "num_channels", 3, 3, low=3)
    return Layer(mixer, fed, mixer_norm=norm, feed_forward_norm=norm), hidden


def _layers_of(given: JsonObject, hidden: int, layer: Layer, depth: int) -> ModelPlan:
    layers = (layer,) * whole(given, "num_hidden_layers", MAX_LAYERS, depth)
    return ModelPlan("tower", 0, hidden, layers, None, max_position=0)


def _heads(given: JsonObject, key: str, *, hidden: int, heads: int, width: int) -> tuple[int, int]:
    """The hidden size, and how many heads divide it into heads of a multiple of `width`."""
    hidden, heads = whole(given, "hidden_size", MAX_WIDTH, hidden), whole(given, key, MAX_WIDTH, heads)
    if hidden % heads or hidden // heads % width:
        of = f" of a multiple of {width}" if width > 1 else ""
        limit = f"must divide {hidden}, hidden_size, into heads{of}"
        raise ModelError(f"config.json: vision_config.{key} {limit}, got {heads}")
    return hidden, heads


def _token(raw: JsonObject, text: ModelPlan, part: str, default: int) -> int:
    """A token of pictures, in the new spelling or the old one."""
    key = f"{part}_token_index" if f"{part}_token_index" in raw else f"{part}_token_id"
    return whole(raw, key, text.vocab_size - 1, default, low=0)


def _timed(raw: JsonObject, text: ModelPlan) -> VideoMarks | None:
    """The marks of videos whose times are text."""
    mark = _video(raw, text)
    begin, end = (_named_token(raw, text, f"vision_{part}_token_id") for part in ("start", "end"))
    return None if mark is None or begin is None or end is None else VideoMarks(mark, (begin, end))


def _video(raw: JsonObject, text: ModelPlan) -> int | None:
    return _named_token(raw, text, "video_token_id")


def _named_token(raw: JsonObject, text: ModelPlan, key: str) -> int | None:
    """None if the configuration does not name it, or names one without an embedding."""
    token = raw.get(key)
    return token if type(token) is int and 0 <= token < text.vocab_size else None


def _theta(given: JsonObject, default: float = 10_000.0) -> float:
    """The rotation's theta, in the new spelling or the old one."""
    rope = {**objects(given, "rope_parameters"), **objects(given, "rope_scaling")}
    kind = rope.get("rope_type") or rope.get("type") or "axial"
    if kind not in ("axial", "default"):
        raise ModelError(f"config.json: vision_config.rope_parameters.rope_type must be axial, got {shown(kind)}")
    return config_keys.number(rope if rope.get("rope_theta") else given, "rope_theta", default, low=1.0)


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
