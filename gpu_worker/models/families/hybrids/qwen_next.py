"""Qwen3-Next, and Qwen3.5 and its successors: most layers are gated delta nets, every fourth attends, with an
output gate and a rotation of a quarter of its heads. All norms of the stream and of heads are of 1 + w. Layers are
dense, or have experts beside one that every position takes, behind a gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.families import config_keys, towers
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.plan import DeltaNet, Experts, FeedForward, Layer, Mixer, ModelPlan, Norm
from petiole.gpu_worker.models.vision.reading import with_eyes
from petiole.gpu_worker.models.weights.names import DELTA_NET, Names

LINEAR = "linear_attention"

NAMES = replace(
    config_keys.SEEING,
    beside_gate_up=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    beside_down=("mlp.shared_expert.down_proj",),
)
NEXT: Names = replace(
    NAMES,
    recurrent=replace(DELTA_NET, inputs=("linear_attn.in_proj_qkvz",), gates=("linear_attn.in_proj_ba",)),
)


def qwen3_next(raw: JsonObject) -> ModelPlan:
    """The layers with experts are as in Qwen3."""
    every = config_keys.whole(raw, "decoder_sparse_step", config_keys.MAX_LAYERS, 1)
    alone = config_keys.indices(raw, "mlp_only_layers")
    normalised = bool(raw.get("norm_topk_prob", True))
    return _plan(
        raw,
        grouped=True,
        mixed=lambda i: i not in alone and (i + 1) % every == 0,
        normalised=normalised,
    )


def qwen3_5(outer: JsonObject) -> ModelPlan:
    return _plan(config_keys.text_part(outer), grouped=False, mixed=lambda i: False, axes=True, drafts=True)


def qwen3_5_moe(outer: JsonObject) -> ModelPlan:
    return _plan(config_keys.text_part(outer), grouped=False, mixed=lambda i: True, axes=True, drafts=True)


def _plan(
    raw: JsonObject,
    *,
    grouped: bool,
    mixed: Callable[[int], bool],
    normalised: bool = True,
    axes: bool = False,
    drafts: bool = False,
) -> ModelPlan:
    """axes: whether pictures have positions of three axes. drafts: whether there may be a head that drafts."""
    norm = Norm(eps=config_keys.number(raw, "rms_norm_eps", 1e-6), offset=1.0)
    kinds, net = _kinds(raw), _delta_net(raw, grouped=grouped)
    width, biases = config_keys.head_dim(raw), bool(raw.get("attention_bias", False))
    rotary = config_keys.rotary(raw, width, partial=True)
    attention = config_keys.usual_attention(
        raw,
        width,
        rotary=config_keys.interleaved(raw, rotary, (11, 11, 10)) if axes else rotary,
        q_norm=norm,
        k_norm=norm,
        qkv_bias=biases,
        out_bias=biases,
        output_gate=bool(raw.get("attn_output_gate", True)),
    )
    mixers: list[Mixer] = [net if kind == LINEAR else attention for kind in kinds]
    layers = []
    for i, mixer in enumerate(mixers):
        fed, experts = _mixture(raw, normalised=normalised) if mixed(i) else (_dense(raw), None)
        layers.append(Layer(mixer, fed, norm, feed_forward_norm=norm, experts=experts))
    plan = config_keys.usual_plan(raw, tuple(layers), norm=norm)
    if not drafts:
        return plan
    fed, experts = _mixture(raw, normalised=normalised) if mixed(0) else (_dense(raw), None)
    return config_keys.with_head(raw, plan, Layer(attention, fed, norm, feed_forward_norm=norm, experts=experts))


def _kinds(raw: JsonObject) -> tuple[str, ...]:
    every = config_keys.whole(raw, "full_attention_interval", config_keys.MAX_LAYERS, 4)
    pattern = [LINEAR if (i + 1) % every else config_keys.FULL for i in range(config_keys.n_layers(raw))]
    return config_keys.layer_types(raw, pattern, (LINEAR, config_keys.FULL))


def _delta_net(raw: JsonObject, *, grouped: bool) -> DeltaNet:
    def size(key: str, default: int) -> int:
        return config_keys.whole(raw, f"linear_{key}", config_keys.MAX_WIDTH, default)

    heads, key_heads = size("num_value_heads", 32), size("num_key_heads", 16)
    if heads % key_heads:
        raise ModelError(f"config.json: linear_num_key_heads must divide {heads} heads of values, got {key_heads}")
    config_keys.activation(raw, ("silu",), key="output_gate_type")
    return DeltaNet(
        key_heads=key_heads,
        value_heads=heads,
        key_dim=size("key_head_dim", 128),
        value_dim=size("value_head_dim", 128),
        kernel=size("conv_kernel_dim", 4),
        norm=Norm(eps=config_keys.number(raw, "rms_norm_eps", 1e-6)),
        grouped=grouped,
        tiled=bool(raw.get("linear_value_heads_tiled", False)),  # only in GGUF files
    )


def _dense(raw: JsonObject) -> FeedForward:
    return FeedForward(config_keys.inner(raw), config_keys.activation(raw, ("silu",)))


def _mixture(raw: JsonObject, *, normalised: bool) -> tuple[FeedForward, Experts]:
    """The expert that every position takes, and the others."""
    router = config_keys.router(raw, "num_experts", "num_local_experts", normalised=normalised)
    act = config_keys.activation(raw, ("silu",))
    inner = config_keys.whole(raw, "moe_intermediate_size", 2 * config_keys.MAX_WIDTH)
    beside = config_keys.whole(raw, "shared_expert_intermediate_size", 2 * config_keys.MAX_WIDTH)
    return FeedForward(beside, act), Experts(router, FeedForward(inner, act), dense_gate=True)


FAMILIES = (
    Family(("Qwen3NextForCausalLM",), qwen3_next, NEXT),
    Family(("Qwen3_5ForCausalLM",), qwen3_5, NAMES),
    Family(("Qwen3_5MoeForCausalLM",), qwen3_5_moe, NAMES),
    Family(("Qwen3_5ForConditionalGeneration",), qwen3_5, NAMES, with_eyes(towers.qwen3_5), sees=True),
    Family(("Qwen3_5MoeForConditionalGeneration",), qwen3_5_moe, NAMES, with_eyes(towers.qwen3_5), sees=True),
)
