"""Settings derived from configuration, model and device. Unsupported combinations raise ModelError."""

from __future__ import annotations

import torch

from petiole.gpu_worker.config import EngineConfig
from petiole.gpu_worker.errors import ModelError, require
from petiole.gpu_worker.models.checkpoint.loading import Quantization
from petiole.gpu_worker.models.config import ModelConfig
from petiole.gpu_worker.runtime.memory.container import cpu_quota
from petiole.gpu_worker.runtime.platform import Platform


def n_threads(config: EngineConfig) -> int:
    """The configured number of threads, or torch's default limited by the container's CPU quota."""
    if config.num_threads:
        return config.num_threads
    threads, quota = torch.get_num_threads(), cpu_quota()
    return threads if quota is None else max(1, min(threads, int(quota)))


def max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    if config.max_model_len > model.most_positions:
        raise ModelError(
            f"max_model_len: must be at most {model.most_positions}, the model's, got {config.max_model_len}"
        )
    return config.max_model_len or model.max_position


def require_adapters(config: EngineConfig, taken: bool, model: ModelConfig) -> None:
    """Raises InvalidRequest if there shall be adapter slots for a model that takes no adapters."""
    limit = f"must be 0 for a {model.architecture}, which takes no LoRA adapters"
    require(taken or not config.lora_slots, "lora_slots", limit, config.lora_slots)


def weights_dtype(config: EngineConfig, model: ModelConfig, platform: Platform) -> torch.dtype:
    """The configured dtype, else the checkpoint's, else the platform's first."""
    known, kind = platform.dtypes, platform.device.kind
    if config.dtype != "auto" and config.dtype not in known:
        raise ModelError(f"dtype: must be {', '.join(known)} or auto on {kind}, got {config.dtype}")
    return known.get(model.dtype if config.dtype == "auto" else config.dtype, next(iter(known.values())))


def quantization(config: EngineConfig, platform: Platform) -> Quantization:
    """The quantization of the weights."""
    wanted = config.weight_quantization
    if wanted not in platform.quantizations:
        kind = platform.device.kind
        raise ModelError(f"weight_quantization: {wanted} is not for {kind} (int8: cpu, fp8: cuda)")
    return wanted


def same_shape(one: ModelConfig, other: ModelConfig) -> bool:
    """Whether the models can share a KV cache, rotary table and adapters."""

    def shape(config: ModelConfig) -> tuple[object, ...]:
        heads = (config.n_layers, config.n_kv_heads, config.head_dim)
        return *heads, config.vocab_size, config.windows, config.max_position

    return shape(one) == shape(other)
