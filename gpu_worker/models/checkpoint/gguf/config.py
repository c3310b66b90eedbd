"""The metadata of a GGUF file as the config.json of the same model."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.models.checkpoint.gguf.header import Header, read_header
from petiole.gpu_worker.models.checkpoint.gguf.names import ARCHITECTURES, FREQUENCIES, Architecture
from petiole.gpu_worker.models.checkpoint.gguf.types import TYPES

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_END_TEXTS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"}
)
"""Of tokens that end an output, whatever else the metadata name."""
_LARGE_GEMMA_LAYERS = 62
"""The Gemma 3 of this many layers scales its attention by the width of the model for each head."""


def config_of(path: Path) -> dict[str, Any]:
    """Raises ModelError for an architecture that is not read, and for metadata that make no sense."""
    return _Config(read_header(path)).config()


def architecture_of(header: Header) -> Architecture:
    """Raises ModelError for one that is not read."""
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{header.path}: the architecture of a GGUF file must be {known}, got {shown(name)}")
    return ARCHITECTURES[str(name)]


class _Config:
    def __init__(self, header: Header) -> None:
        self._header, self._hub = header, architecture_of(header)
        self._name = str(header.metadata["general.architecture"])

    def config(self) -> dict[str, Any]:
        self._refuse_unread()
        n_heads = self._whole("attention.head_count")
        hidden, longest = self._whole("embedding_length"), self._whole("context_length")
        width = self._whole("attention.key_length", hidden // max(1, n_heads))
        for key in ("attention.value_length", "rope.dimension_count"):
            if (found := self._whole(key, width)) != width:
                raise self._wrong(key, f"be {width}, the width of a head", found)
        config: dict[str, Any] = {
            "architectures": [self._hub.hub],
            "model_type": self._name,
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden,
            "num_hidden_layers": self._whole("block_count"),
            "intermediate_size": self._whole("feed_forward_length"),
            "num_attention_heads": n_heads,
            "num_key_value_heads": self._whole("attention.head_count_kv", n_heads),
            "head_dim": width,
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon", 1e-6),
            "max_position_embeddings": longest,
            "rope_theta": self._number("rope.freq_base", 10_000.0),
            "tie_word_embeddings": _HEAD not in self._header.tensors,
            "dtype": self._dtype(),
            "eos_token_id": self._ends(),
        }
        if self._name == "llama":
            config["attention_bias"] = any(name.endswith("attn_q.bias") for name in self._header.tensors)
        if self._name == "gemma3":
            config |= self._gemma3(n_heads, hidden, width)
        if (scaling := self._scaling(longest, width)) is not None:
            config["rope_scaling"] = scaling
        if any(TYPES[kind].quantised for kind in self._kinds()):
            config["quantization_config"] = {"quant_method": "gguf"}
        return config

    def _refuse_unread(self) -> None:
        files = self._header.metadata.get("split.count", 1)
        if files not in (0, 1):
            raise ModelError(
                f"{self._header.path} is one of {shown(files)} files: join them with `llama-gguf-split --merge`"
            )
        if self._header.metadata.get(f"{self._name}.expert_count"):
            raise self._wrong("expert_count", "be 0", self._header.metadata[f"{self._name}.expert_count"])

    def _gemma3(self, n_heads: int, hidden: int, width: int) -> dict[str, Any]:
        large = self._whole("block_count") == _LARGE_GEMMA_LAYERS
        return {
            "sliding_window": self._whole("attention.sliding_window", 4096),
            "query_pre_attn_scalar": hidden // n_heads if large else width,
            "rope_local_base_freq": self._number("rope.freq_base_swa", 10_000.0),
            "rope_theta": self._number("rope.freq_base", 1_000_000.0),
            "final_logit_softcapping": self._number("final_logit_softcapping", 0.0),
        }

    def _scaling(self, longest: int, width: int) -> dict[str, Any] | None:
        if FREQUENCIES in self._header.tensors:
            factors = self._frequencies(width // 2)
            return {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": longest,
            }
        kind = self._header.metadata.get(f"{self._name}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise self._wrong("rope.scaling.type", "be none, linear or yarn", shown(kind))
        scaling = {"rope_type": kind, "factor": self._number("rope.scaling.factor", 1.0)}
        if kind == "yarn":
            original = self._whole("rope.scaling.original_context_length", longest)
            scaling["original_max_position_embeddings"] = original
        return scaling

    def _frequencies(self, n: int) -> list[float]:
        stored = self._header.tensors[FREQUENCIES]
        if (stored.kind, stored.shape) != ("F32", (n,)):
            got = f"{stored.kind} {list(stored.shape)}"
            raise ModelError(f"{self._header.path}: tensor {FREQUENCIES} must be F32 [{n}], got {got}")
        with self._header.path.open("rb") as file:
            file.seek(stored.start)
            return list(struct.unpack(f"<{n}f", file.read(4 * n)))

    def _vocab_size(self) -> int:
        stored = self._header.tensors.get(_EMBEDDING)
        if stored is None or len(stored.shape) != 2:
            got = "none" if stored is None else list(stored.shape)
            raise ModelError(f"{self._header.path}: tensor {_EMBEDDING} must have two dimensions, got {got}")
        return stored.shape[0]

    def _kinds(self) -> set[str]:
        """Types of the matrices of layers and of the head."""
        stored = self._header.tensors.items()
        return {one.kind for name, one in stored if len(one.shape) == 2 and name != _EMBEDDING}

    def _dtype(self) -> str:
        """For the weights that are not quantised, and for keys and values."""
        plain = {"F32": "float32", "F16": "float16"}
        kinds = self._kinds()
        return plain.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"

    def _ends(self) -> list[int]:
        metadata = self._header.metadata
        texts = metadata.get("tokenizer.ggml.tokens")
        ends = {i for i, text in enumerate(texts if isinstance(texts, list) else ()) if text in _END_TEXTS}
        ends |= {metadata[f"tokenizer.ggml.{key}"] for key in _ENDS if f"tokenizer.ggml.{key}" in metadata}
        return sorted(ends, key=str)

    def _whole(self, key: str, default: int | None = None) -> int:
        value = self._header.metadata.get(f"{self._name}.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 2**31:
            raise self._wrong(key, f"be a whole number from 1 to {2**31}", shown(value))
        return value

    def _number(self, key: str, default: float) -> float:
        value = self._header.metadata.get(f"{self._name}.{key}", default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
            raise self._wrong(key, "be a number", shown(value))
        return float(value)

    def _wrong(self, key: str, limit: str, got: object) -> ModelError:
        return ModelError(f"{self._header.path}: {self._name}.{key} must {limit}, got {got}")
