"""Nemotron-H, Nemotron Nano 2 and 3: Mamba-2, attention without rotation, and feed-forwards of squared relu, dense
or of experts as in GLM. What is stored as a layer is one of these; a mixer and the feed-forward behind it are one
layer here.

Steps have no bounds, as in the published code. (transformers bounds those of prompts by `time_step_min`, and those
of single positions not.)"""

from __future__ import annotations

from dataclasses import replace

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, shown
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.families.hybrids.mamba import SCANNING, checked
from petiole.gpu_worker.models.families.mixtures.glm import router
from petiole.gpu_worker.models.plan import Attention, Experts, FeedForward, Layer, Mamba2, ModelPlan, Norm
from petiole.gpu_worker.models.weights.names import Names, RecurrentNames

_SCAN, _ATTEND, _DENSE, _MIXED = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": _SCAN, "*": _ATTEND, "-": _DENSE, "E": _MIXED}
_KINDS = {**{kind: kind for kind in _LETTERS.values()}, **dict.fromkeys(SCANNING, _SCAN), "attention": _ATTEND}

NAMES = Names(
    prefixes=("backbone.", "model.", ""),
    embedding="embeddings.weight",
    norm="norm_f",
    apart=True,
    mixer_norm="norm",
    feed_forward_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    out=("mixer.o_proj",),
    gate_up=("mixer.up_proj",),
    down=("mixer.down_proj",),
    router="mixer.gate",
    router_correction="mixer.gate.e_score_correction_bias",
    expert="mixer.experts.{}.",
    beside_gate_up=("mixer.shared_experts.up_proj",),
    beside_down=("mixer.shared_experts.down_proj",),
    recurrent=RecurrentNames(
        inputs=("mixer.in_proj",),
        convolution="mixer.conv1d",
        out="mixer.out_proj",
        decay="mixer.A_log",
        bias="mixer.dt_bias",
        norm="mixer.norm",
        skip="mixer.D",
    ),
)


def plan(raw: JsonObject) -> ModelPlan:
    norm = Norm(eps=config_keys.number(raw, "layer_norm_epsilon", 1e-5))
    kinds = _kinds(raw)
    mixers = {kind: make(raw) for kind, make in ((_SCAN, _mamba2), (_ATTEND, _attention)) if kind in kinds}
    layers: list[Layer] = []
    for i, kind in enumerate(kinds):
        if kind in mixers:
            layers.append(Layer(mixers[kind], None, norm))
            continue
        if not layers or layers[-1].feeds:
            before = f"a mixer before each {_DENSE} and {_MIXED}"
            raise ModelError(f"config.json: layers_block_type must have {before}, got none before layer {i}")
        fed, experts = _fed(raw, kind)
        layers[-1] = replace(layers[-1], feed_forward=fed, experts=experts, feed_forward_norm=norm)
    return config_keys.usual_plan(raw, tuple(layers), norm=norm)


def _kinds(raw: JsonObject) -> list[str]:
    given = raw.get("layers_block_type")
    if given is None and isinstance(pattern := raw.get("hybrid_override_pattern") or None, str):
        given = [_LETTERS.get(letter, letter) for letter in pattern]
    elif given is None:
        given = [_SCAN, _MIXED, _ATTEND, _DENSE] if pattern is None else pattern
    whole = isinstance(given, list) and 1 <= len(given) <= config_keys.MAX_LAYERS
    if not whole or not all(isinstance(kind, str) and kind in _KINDS for kind in given):
        known = ", ".join(_LETTERS.values())
        raise ModelError(f"config.json: layers_block_type must be a list of {known}, got {shown(given)}")
    return [_KINDS[kind] for kind in given]


def _attention(raw: JsonObject) -> Attention:
    biases = bool(raw.get("attention_bias", False))
    return config_keys.usual_attention(
        raw, config_keys.head_dim(raw), rotary=None, qkv_bias=biases, out_bias=biases
    )


def _mamba2(raw: JsonObject) -> Mamba2:
    def size(key: str, default: int, old: str = "") -> int:
        return config_keys.whole(raw, old if old in raw else key, config_keys.MAX_WIDTH, default)

    config_keys.activation(raw, ("silu",), key="mamba_hidden_act")
    mixer = Mamba2(
        heads=size("mamba_num_heads", 128),
        head_dim=size("mamba_head_dim", 64),
        state=size("ssm_state_size", 128),
        groups=size("n_groups", 8, "mamba_n_groups"),
        kernel=size("conv_kernel", 4, "mamba_d_conv"),
        norm=Norm(eps=config_keys.number(raw, "layer_norm_epsilon", 1e-5)),
        convolution_bias=bool(raw.get("mamba_conv_bias", raw.get("use_conv_bias", True))),
        bias=bool(raw.get("use_bias", False)),
    )
    return checked(
        raw, mixer, groups="n_groups", limits="mamba_dt_limit" if "mamba_dt_limit" in raw else "time_step_limit"
    )


def _fed(raw: JsonObject, kind: str) -> tuple[FeedForward, Experts | None]:
    act = config_keys.activation(raw, ("relu2", "relu", "silu", "gelu", "gelu_tanh"), key="mlp_hidden_act")
    dense = FeedForward(config_keys.inner(raw), act, gated=False, bias=bool(raw.get("mlp_bias", False)))
    if kind == _DENSE:
        return dense, None
    if raw.get("moe_latent_size") is not None:
        raise ModelError(f"config.json: moe_latent_size must be null, got {shown(raw['moe_latent_size'])}")

    def size(key: str) -> int:
        return config_keys.whole(raw, key, 2 * config_keys.MAX_WIDTH, 7688)

    each = replace(dense, inner=size("moe_intermediate_size"), bias=False)
    return replace(dense, inner=size("moe_shared_expert_intermediate_size")), Experts(router(raw), each)


FAMILIES = (Family(("NemotronHForCausalLM",), plan, NAMES),)
