"""What config.json has of each architecture beside what all have, by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from petiole.gpu_worker.models.checkpoint.gguf.metadata import Metadata
from petiole.gpu_worker.models.checkpoint.gguf.specifics.decoders import (
    chatglm,
    cohere,
    cohere2,
    ernie,
    exaone4,
    glm4,
    gpt2,
    granite,
    mistral3,
    olmo2,
    phi2,
    phi3,
    seed_oss,
    starcoder2,
)
from petiole.gpu_worker.models.checkpoint.gguf.specifics.encoders import bert, modern_bert
from petiole.gpu_worker.models.checkpoint.gguf.specifics.gemma import gemma2, gemma3, gemma4, gemma_embedding
from petiole.gpu_worker.models.checkpoint.gguf.specifics.hybrids import (
    granitehybrid,
    lfm2,
    lfm2moe,
    nemotron_h,
    qwen3next,
    qwen35,
    qwen35moe,
)
from petiole.gpu_worker.models.checkpoint.gguf.specifics.mixtures import (
    deepseek2,
    glm4moe,
    gpt_oss,
    mixtral,
    olmoe,
    qwen2moe,
    qwen3moe,
)
from petiole.gpu_worker.models.checkpoint.gguf.specifics.shared import Config

SPECIFICS: Mapping[str, Callable[[Metadata, Config], Config]] = {
    "llama": mixtral,
    "qwen2moe": qwen2moe,
    "qwen3moe": qwen3moe,
    "qwen3vlmoe": qwen3moe,
    "qwen3next": qwen3next,
    "qwen35": qwen35,
    "qwen35moe": qwen35moe,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gemma-embedding": gemma_embedding,
    "phi2": phi2,
    "phi3": phi3,
    "gpt2": gpt2,
    "mistral3": mistral3,
    "seed_oss": seed_oss,
    "ernie4_5": ernie,
    "exaone4": exaone4,
    "granite": granite,
    "granitehybrid": granitehybrid,
    "nemotron_h": nemotron_h,
    "nemotron_h_moe": nemotron_h,
    "olmo2": olmo2,
    "starcoder2": starcoder2,
    "chatglm": chatglm,
    "glm4": glm4,
    "glm4moe": glm4moe,
    "deepseek2": deepseek2,
    "gpt-oss": gpt_oss,
    "lfm2": lfm2,
    "lfm2moe": lfm2moe,
    "olmoe": olmoe,
    "command-r": cohere,
    "cohere2": cohere2,
    "bert": bert,
    "modern-bert": modern_bert,
    "nomic-bert": bert,
}
"""By `general.architecture`."""
BY_LAYER = frozenset({"gemma4"})
"""Architectures whose layers differ in heads, feed-forwards and rotation."""
PARTLY_TURNED = frozenset(
    {"phi2", "phi3", "deepseek2", "chatglm", "glm4", "glm4moe", "qwen3next", "qwen35", "qwen35moe"}
)
"""Architectures that rotate a part of each head."""
NOT_TURNED = frozenset({"nemotron_h", "nemotron_h_moe"})
"""Architectures that rotate no head, whatever their files say of that."""
OF_LATENTS = frozenset({"deepseek2"})
"""Architectures whose attention reads latents."""
