"""What is published of each family, and who computes it: the table of docs/models.md. Tests hold it to what paths
say of the plans of families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Published:
    """architectures: as config.json names them. cpu: which path computes. cuda: whether it does."""

    models: str
    architectures: tuple[str, ...]
    cpu: Literal["compiled", "torch"] = "compiled"
    cuda: bool = True


def _causal(models: str, *names: str, cuda: bool = True) -> Published:
    full = (name if "For" in name or "LMHead" in name else f"{name}ForCausalLM" for name in names)
    return Published(models, tuple(full), cuda=cuda)


_VISION, _SCORES = "ForConditionalGeneration", "ForSequenceClassification"


def _heads(name: str) -> tuple[str, ...]:
    return tuple(f"{name}{part}" for part in ("Model", "ForMaskedLM", _SCORES))


PUBLISHED = (
    _causal("Llama 2, 3, 3.1, 3.2; Seed-OSS; ERNIE 4.5, dense", "Llama", "SeedOss", "Ernie4_5"),
    _causal("Llama 3.2 with images, without layers of cross attention", f"Mllama{_VISION}", "Mllama"),
    _causal("Mistral 7B", "Mistral"),
    _causal("Mixtral 8x7B, 8x22B", "Mixtral"),
    _causal("Ministral 3; Mistral Small 3.1, 3.2", "Ministral3", f"Mistral3{_VISION}"),
    _causal("Qwen2, Qwen2.5; Qwen2-VL, Qwen2.5-VL", "Qwen2", f"Qwen2VL{_VISION}", f"Qwen2_5_VL{_VISION}"),
    _causal("Qwen1.5 and 2 with experts", "Qwen2Moe"),
    _causal("Qwen3; Qwen3-VL", "Qwen3", f"Qwen3VL{_VISION}"),
    _causal("Qwen3 and Qwen3-VL with experts", "Qwen3Moe", f"Qwen3VLMoe{_VISION}"),
    _causal(
        "Qwen3.5 and its successors, also with experts",
        "Qwen3_5",
        f"Qwen3_5{_VISION}",
        "Qwen3_5Moe",
        f"Qwen3_5Moe{_VISION}",
    ),
    _causal("Qwen3-Next", "Qwen3Next"),
    _causal("Gemma 1, 2", "Gemma", "Gemma2"),
    _causal("Gemma 3", "Gemma3", f"Gemma3{_VISION}"),
    _causal("Gemma 4, with 26B-A4B, E2B, E4B", "Gemma4", f"Gemma4{_VISION}"),
    _causal("Gemma 4 12B", "Gemma4Unified", f"Gemma4Unified{_VISION}"),
    _causal("gpt-oss 20b, 120b, with MXFP4 experts or plain ones", "GptOss"),
    _causal("GLM-4 9B, 32B", "Glm", "Glm4"),
    _causal("GLM-4.5, 4.6, Air", "Glm4Moe"),
    _causal("DeepSeek-V2, V3; GLM-4.7-Flash", "DeepseekV2", "DeepseekV3", "Glm4MoeLite"),
    _causal("LFM2, LFM2.5, also with experts", "Lfm2", "Lfm2Moe"),
    _causal("Phi-1.5, 2, 3, 3.5, 4-mini", "Phi", "Phi3"),
    _causal("Granite 3, 4; not on CUDA with Mamba-2", "Granite", "GraniteMoeHybrid"),
    _causal("Nemotron-H (not 47B), Nemotron Nano 2, 3", "NemotronH", cuda=False),
    _causal("SmolLM3; SmolVLM2", "SmolLM3", f"SmolVLM{_VISION}"),
    _causal("OLMo 2, 3; OLMoE; EXAONE 4", "Olmo2", "Olmo3", "Olmoe", "Exaone4"),
    _causal("StarCoder2", "Starcoder2"),
    _causal("GPT-2", "GPT2LMHeadModel"),
    _causal("OPT without projections (not 350m)", "OPT"),
    _causal("Command R, R7B", "Cohere", "Cohere2"),
    Published("Moondream 2 of June 2025: see below", ("HfMoondream", "Moondream")),
    Published("EmbeddingGemma", ("Gemma3TextModel",)),
    Published("BERT: MiniLM, bge, e5", _heads("Bert")),
    Published(
        "RoBERTa, XLM-RoBERTa (BGE-M3), CamemBERT",
        (*_heads("Roberta"), *_heads("XLMRoberta"), *_heads("Camembert")),
    ),
    Published("MPNet: all-mpnet-base-v2", _heads("MPNet")),
    Published("DistilBERT", _heads("DistilBert")),
    Published("ModernBERT", ("ModernBertModel", f"ModernBert{_SCORES}")),
    Published("ELECTRA; where embeddings are narrow in torch", ("ElectraModel", f"Electra{_SCORES}")),
    Published("ALBERT", _heads("Albert"), cpu="torch"),
    Published("DeBERTa 2, 3", _heads("DebertaV2"), cpu="torch"),
    Published("NomicBERT: nomic-embed-text", ("NomicBertModel",)),
)
