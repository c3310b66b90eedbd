"""Settings derived from configuration, model and device. Unsupported combinations raise ModelError."""

from __future__ import annotations

import logging

import torch

from petiole.contract.settings.engine import EngineConfig, switch
from petiole.gpu_worker.exceptions import InvalidRequest, ModelError
from petiole.gpu_worker.models.parts.recurrent.states import RUN
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.copying import HeadQuantization, Quantization
from petiole.gpu_worker.runtime.memory.container import cpu_quota
from petiole.gpu_worker.runtime.platforms import Platform

logger = logging.getLogger(__name__)


def n_threads(config: EngineConfig) -> int:
    """The configured number of threads, or torch's default limited by the container's CPU quota."""
    if config.num_threads:
        return config.num_threads
    threads, quota = torch.get_num_threads(), cpu_quota()
    return threads if quota is None else max(1, min(threads, int(quota)))


def max_model_len(config: EngineConfig, model: ModelPlan) -> int:
    if config.max_model_len > model.most_positions:
        raise ModelError(
            f"max_model_len: must be at most {model.most_positions}, the model's, got {config.max_model_len}"
        )
    longest = config.max_model_len or model.max_position
    return longest if model.pooling is None else longest + 1  # the vector takes the place of an output token


def weights_dtype(config: EngineConfig, model: ModelPlan, platform: Platform) -> torch.dtype:
    """The configured dtype, else the checkpoint's, else the platform's first."""
    known, kind = platform.dtypes, platform.device.kind
    if config.dtype != "auto" and config.dtype not in known:
        raise ModelError(f"dtype: must be {', '.join(known)} or auto on {kind}, got {config.dtype}")
    return known.get(model.dtype if config.dtype == "auto" else config.dtype, next(iter(known.values())))


def quantization(config: EngineConfig, platform: Platform) -> Quantization:
    """The quantization of the weights."""
    wanted = config.weight_quantization
    if wanted not in platform.quantizations:
        known = ", ".join(platform.quantizations)
        where = "this card" if platform.device.kind == "cuda" else "a CPU"
        raise ModelError(f"weight_quantization: must be {known} on {where}, got {wanted}")
    return wanted


def head_quantization(config: EngineConfig, platform: Platform) -> HeadQuantization:
    """The quantization of the output head."""
    wanted = config.head_quantization
    if wanted == "auto":
        return "int8" if config.weight_quantization == "int8" else "none"
    if wanted != "none" and wanted not in platform.quantizations:
        raise ModelError(f"head_quantization: {wanted} is not for {platform.device.kind} (int8: cpu)")
    return wanted


def drafts_by_head(config: EngineConfig, platform: Platform) -> bool:
    """Whether a model's own head drafts, if it has one."""
    if not config.speculative_tokens or config.drafts == "ngram":
        return False
    if not platform.drafts and config.drafts == "mtp":
        raise InvalidRequest("drafts", f"must be auto, ngram or off on {platform.device.kind}", "mtp")
    return platform.drafts


def require_head(config: EngineConfig, model: ModelPlan) -> None:
    """Raises InvalidRequest if a head is to draft that the model does not have."""
    if config.speculative_tokens and config.drafts == "mtp" and model.drafting is None:
        limit = f"must be auto, ngram or off for {model.architecture}, whose files have no head that drafts"
        raise InvalidRequest("drafts", limit, "mtp")


def log_drafts(config: EngineConfig, model: ModelPlan) -> None:
    """Say what the settings of drafts do not do."""
    if config.drafts == "mtp" and not config.speculative_tokens:
        logger.warning("drafts=mtp changes nothing without speculative_tokens")
    elif 0 < model.drafts < config.speculative_tokens:
        given = config.speculative_tokens
        logger.info("speculative_tokens=%d: the model's head drafts %d tokens a step", given, model.drafts)


def int8_inputs(config: EngineConfig, platform: Platform) -> bool:
    """Whether inputs of layers with four-bit weights are in eight bits."""
    wanted = config.activation_quantization
    if wanted not in {"none", "int8"}.intersection(platform.quantizations):
        raise ModelError(f"activation_quantization: {wanted} is not for {platform.device.kind} (int8: cpu)")
    return wanted == "int8"


def require_states_alone(config: EngineConfig, model: ModelPlan) -> None:
    """Refuse what would spoil states: texts that are computed whole have no row, and rounded snapshots are not
    exact."""
    if not model.keeps_states:
        return
    if config.snapshot_quantization != "none":
        given = config.snapshot_quantization
        if config.speculative_tokens:  # a row's state before its drafts must be exact
            limit = f"must be none with speculative_tokens, which are {config.speculative_tokens}"
            raise InvalidRequest("snapshot_quantization", limit, given)
        if switch("exact") != "off":
            limit = "must be none without PETIOLE_EXACT=off: a rounded state gives other logits"
            raise InvalidRequest("snapshot_quantization", limit, given)
        widths = [mixer.matrices[-1] for _, mixer in model.recurrent if mixer.matrices is not None]
        if odd := [width for width in widths if width % RUN]:
            limit = f"must be none for a state with values of {odd[0]} dimensions, no multiple of {RUN}"
            raise InvalidRequest("snapshot_quantization", limit, given)
    if model.whole_texts:
        raise ModelError(
            f"pooling must be that of the last token for {model.architecture}, whose layers keep a state"
        )


def same_shape(one: ModelPlan, other: ModelPlan) -> bool:
    """Whether the models can share a KV cache, rotary tables and adapters."""

    def shape(plan: ModelPlan) -> tuple[object, ...]:
        heads = tuple((i, m.kv_heads, m.head_dim, m.keys_of, m.latent) for i, m in plan.attending)
        return heads, tuple(plan.recurrent), plan.vocab_size, plan.windows, plan.max_position, plan.pooling

    return shape(one) == shape(other)
