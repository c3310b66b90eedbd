"""The metadata of a GGUF file as the config.json of the same model."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_LAYERS, shown
from petiole.gpu_worker.models.checkpoint.gguf.block_types import TYPES
from petiole.gpu_worker.models.checkpoint.gguf.header import GgufHeader, read_whole
from petiole.gpu_worker.models.checkpoint.gguf.metadata import Metadata
from petiole.gpu_worker.models.checkpoint.gguf.specifics.mixtures import scored_by_sigmoid
from petiole.gpu_worker.models.checkpoint.gguf.specifics.table import (
    BY_LAYER,
    NOT_TURNED,
    OF_LATENTS,
    PARTLY_TURNED,
    SPECIFICS,
)
from petiole.gpu_worker.models.checkpoint.gguf.tensor_mapping import (
    ARCHITECTURES,
    DEEPSEEK3,
    FREQUENCIES,
    LONG,
    MIXTRAL,
    OLMO3,
    SHORT,
    Architecture,
)

_TOWER = "clip"
"""The architecture of what encodes pictures."""
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_END_TEXTS = frozenset(
    {
        *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
        *("<|return|>", "<|call|>", "<turn|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
        *("<｜end▁of▁sentence｜>", "<|fim_pad|>", "<|fim_repo|>", "<|repo_name|>", "<|file_sep|>"),  # noqa: RUF001
    }
)
"""The texts of tokens that end an output, whatever else the metadata name."""
_END_OF_MESSAGE, _HARMONY = "<|end|>", "<|return|>"
"""The first one ends an output, too, but for a model that has the second one."""


def config_of(path: Path) -> dict[str, Any]:
    """Raises ModelError for an architecture that is not read, and for metadata that make no sense."""
    return _Config(read_whole(path)).config()


def architecture_of(header: GgufHeader) -> Architecture:
    """Raises ModelError for one that is not read."""
    name, kind = (header.metadata.get(f"general.{key}") for key in ("architecture", "type"))
    if name == _TOWER or kind not in (None, "model"):
        got = shown(_TOWER if name == _TOWER else kind)
        raise ModelError(f"{header.path} must be the file of a model, got {got}: take the one that it belongs to")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known, near = ", ".join(ARCHITECTURES), get_close_matches(str(name), ARCHITECTURES, 1, 0.5)
        hint = f" (the nearest is {near[0]})" if near else ""
        raise ModelError(
            f"{header.path}: the architecture of a GGUF file must be {known}, got {shown(name)}{hint};"
            f" of others `petiole models --can` says whether the checkpoint in safetensors is served"
        )
    if name == "llama" and header.metadata.get("llama.expert_count"):
        return MIXTRAL
    if name == "olmo2" and "olmo2.attention.sliding_window" in header.metadata:
        return OLMO3
    if name == "deepseek2" and scored_by_sigmoid(Metadata(header, name)):
        return DEEPSEEK3
    return ARCHITECTURES[name]


class _Config:
    def __init__(self, header: GgufHeader) -> None:
        self._header, self._hub = header, architecture_of(header)
        self._name = str(header.metadata["general.architecture"])
        self._metadata = Metadata(header, self._name)

    def config(self) -> dict[str, Any]:
        metadata, tensors = self._metadata, self._header.tensors
        if "ffn_gate_inp" not in self._hub.layer and metadata.get("expert_count"):
            raise metadata.wrong("expert_count", "be 0", metadata.get("expert_count"))
        n_heads = metadata.whole("attention.head_count")
        hidden, longest = metadata.whole("embedding_length"), metadata.whole("context_length")
        width = metadata.whole("attention.key_length", hidden // max(1, n_heads))
        found = metadata.whole("attention.value_length", width)
        if found != width and self._name not in OF_LATENTS:
            raise metadata.wrong("attention.value_length", f"be {width}, the width of a head", found)
        turned = width if self._name in NOT_TURNED else metadata.whole("rope.dimension_count", width)
        if turned != width and (self._name not in PARTLY_TURNED or turned > width):
            raise metadata.wrong("rope.dimension_count", f"be {width}, the width of a head", turned)
        blocks = metadata.whole("block_count", high=MAX_LAYERS)
        n_layers = blocks - metadata.whole("nextn_predict_layers", 0, low=0, high=blocks - 1)
        kv_heads = set(metadata.of_layers("attention.head_count_kv", n_layers, n_heads)) - {0}
        inner = set(metadata.of_layers("feed_forward_length", n_layers, hidden)) - {0}
        for key, several in (("attention.head_count_kv", kv_heads), ("feed_forward_length", inner)):
            if not several or (len(several) != 1 and self._name not in BY_LAYER):
                raise metadata.wrong(key, "be the same in all layers, and no 0", shown(sorted(several)))
        config: dict[str, Any] = {
            "architectures": [self._hub.hub],
            "model_type": self._name,
            "vocab_size": self._vocab_size(),
            "hidden_size": hidden,
            "num_hidden_layers": n_layers,
            "intermediate_size": min(inner),
            "num_attention_heads": n_heads,
            "num_key_value_heads": max(kv_heads),
            "head_dim": width,
            "partial_rotary_factor": turned / width,
            "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon", 1e-6),
            "max_position_embeddings": longest,
            "rope_theta": metadata.number("rope.freq_base", 10_000.0),
            "tie_word_embeddings": _HEAD not in tensors,
            "dtype": self._dtype(),
            "eos_token_id": self._ends(),
            "attention_bias": "blk.0.attn_q.bias" in tensors,
            "mlp_bias": "blk.0.ffn_up.bias" in tensors,
        }
        if self._name in SPECIFICS:
            config |= SPECIFICS[self._name](metadata, config)
        if (scaling := self._scaling(longest, turned)) is not None:
            config["rope_scaling"] = scaling
        if any(TYPES[kind].quantised for kind in self._kinds()):
            config["quantization_config"] = {"quant_method": "gguf"}
        return config

    def _scaling(self, longest: int, width: int) -> dict[str, Any] | None:
        """width: of the part of a head that is rotated."""
        metadata, tensors = self._metadata, self._header.tensors
        original = metadata.whole("rope.scaling.original_context_length", longest)
        amplitude = {}
        if metadata.has("rope.scaling.attn_factor"):
            amplitude["attention_factor"] = metadata.number("rope.scaling.attn_factor", 1.0)
        if FREQUENCIES in tensors and self._name not in BY_LAYER:  # whose layers differ in these, too
            factors = metadata.floats(FREQUENCIES, width // 2)
            return {
                "rope_type": "longrope",
                "short_factor": factors,
                "long_factor": factors,
                "attention_factor": 1.0,
                "original_max_position_embeddings": longest,
            }
        if LONG in tensors and SHORT in tensors:
            return amplitude | {
                "rope_type": "longrope",
                "short_factor": metadata.floats(SHORT, width // 2),
                "long_factor": metadata.floats(LONG, width // 2),
                "original_max_position_embeddings": original,
            }
        kind = metadata.get("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise metadata.wrong("rope.scaling.type", "be none, linear or yarn", shown(kind))
        scaling = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor", 1.0)}
        if kind == "yarn":
            scaling |= amplitude | {
                "original_max_position_embeddings": original,
                "beta_fast": metadata.number("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": metadata.number("rope.scaling.yarn_beta_slow", 1.0),
                "truncate": self._name != "gpt-oss",
            }
            strength = metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
            if self._name in OF_LATENTS:  # the key is a tenth of its name's; cosine and sine are not strengthened
                scaling |= {"attention_factor": 1.0, "mscale_all_dim": 10 * strength}
            if metadata.has("attention.temperature_scale"):
                beta = metadata.number("attention.temperature_scale", 0.0)
                scaling |= {"mscale": 1.0, "mscale_all_dim": strength, "llama_4_scaling_beta": beta}
        return scaling

    def _vocab_size(self) -> int:
        stored = self._header.tensors.get(_EMBEDDING)
        if stored is None or len(stored.shape) != 2:
            got = "none" if stored is None else list(stored.shape)
            raise ModelError(f"{self._header.path}: tensor {_EMBEDDING} must have two dimensions, got {got}")
        tokens = self._header.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) != stored.shape[0]:  # as llama.cpp
            limit = f"must have a row for each of {len(tokens)} tokens of tokenizer.ggml.tokens"
            raise ModelError(f"{self._header.path}: tensor {_EMBEDDING} {limit}, got {stored.shape[0]}")
        return stored.shape[0]

    def _kinds(self) -> set[str]:
        """Types of the matrices of layers and of the head."""
        stored = self._header.tensors.items()
        return {one.kind for name, one in stored if len(one.shape) > 1 and name != _EMBEDDING}

    def _dtype(self) -> str:
        """For the weights that are not quantised, and for keys and values."""
        plain = {"F32": "float32", "F16": "float16"}
        kinds = self._kinds()
        kinds = kinds - {"F32"} or kinds  # convolutions and routers are always F32
        return plain.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"

    def _ends(self) -> list[int]:
        metadata, ids = self._header.metadata, self._header.token_ids
        texts = _END_TEXTS if _HARMONY in ids else _END_TEXTS | {_END_OF_MESSAGE}
        ends = {ids[text] for text in texts if text in ids}
        for key in (f"tokenizer.ggml.{name}_token_id" for name in _ENDS):
            if (end := metadata.get(key)) is not None and type(end) is not int:
                raise ModelError(f"{self._header.path}: {key} must be a whole number, got {shown(end)}")
            ends |= set() if end is None else {end}
        return sorted(ends)
