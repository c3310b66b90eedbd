"""Parses a checkpoint's `config.json` into the parameters that the decoder needs.

Llama, Qwen2, Qwen3 and Mistral share one decoder. Their differences (biases, norms of queries and keys, layers
with sliding windows) are data here, so the decoder has no family-specific code. Old and new spellings of a
parameter (`rope_theta` and `rope_scaling`, or both in `rope_parameters`) are unified here too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petiole.gpu_worker.errors import ModelError

JsonObject = Mapping[str, Any]

MAX_VOCAB = MAX_POSITION = 2**24
MAX_LAYERS = 10_000
MAX_WIDTH = 2**20
"""Limits far above every model. A folder that exceeds them is a mistake or an attack, and is refused unread."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding parameters: the base and, for long contexts, the scaling of its frequencies."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    @property
    def max_position(self) -> int:
        """The scaled context length for YaRN, else 0."""
        return int(self.original_max_position * self.factor) if self.kind == "yarn" else 0

    @property
    def amplitude(self) -> float:
        """The factor of cosine and sine (1 except for YaRN)."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._grown(self.mscale) / self._grown(self.mscale_all_dim)
        return self._grown(1.0)

    def _grown(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The parameters of a decoder. `windows[i]`: how many positions layer i attends to, including its own; 0: all.
    `dtype`: the type of the weights, empty if config.json does not name it. `eos_token_ids`: the family's, used if
    the model's files name none."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig
    tied_head: bool
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]
    dtype: str = ""
    eos_token_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.n_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.n_kv_heads * self.head_dim

    @property
    def most_positions(self) -> int:
        """The largest `max_model_len`. Linear scaling stretches the context by its factor. Some checkpoints name
        the context before it, and some the one behind it, so only `max_position` is a safe default."""
        scaled = self.rope.original_max_position * self.rope.factor if self.rope.kind == "linear" else 0.0
        return max(self.max_position, int(min(scaled, MAX_POSITION)))

    @property
    def kv_elements_per_token(self) -> int:
        return 2 * self.n_layers * self.kv_size


@dataclass(frozen=True, slots=True)
class Family:
    """Properties of a family that its `config.json` omits. `head_dim` None: hidden size divided by heads."""

    qkv_bias: Callable[[JsonObject], bool]
    out_bias: Callable[[JsonObject], bool]
    qk_norm: bool
    windowed: Callable[[JsonObject], bool]
    head_dim: int | None = None


def _flag(key: str, default: bool = False) -> Callable[[JsonObject], bool]:
    return lambda raw: bool(raw.get(key, default))


def _always(value: bool) -> Callable[[JsonObject], bool]:
    return lambda raw: value


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(_flag("attention_bias"), _flag("attention_bias"), False, _always(False)),
    "MistralForCausalLM": Family(_always(False), _always(False), False, _always(True)),
    "Qwen2ForCausalLM": Family(_always(True), _always(False), False, _flag("use_sliding_window")),
    "Qwen3ForCausalLM": Family(
        _flag("attention_bias"), _flag("attention_bias"), True, _flag("use_sliding_window"), head_dim=128
    ),
}


def parse_decoder_config(raw: JsonObject) -> ModelConfig:
    """Parse the configuration of one of `FAMILIES`. Raises ModelError for unsupported features."""
    architecture = architecture_of(raw)
    family = FAMILIES[architecture]
    try:
        return _parse(architecture, family, raw)
    except KeyError as error:
        raise ModelError(f"config.json of a {architecture} lacks {error.args[0]!r}") from None
    except ModelError:
        raise
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ModelError(f"config.json of a {architecture} makes no sense: {error}") from error


def architecture_of(raw: JsonObject) -> str:
    names = raw.get("architectures") or ["(none named)"]
    return str(names[0] if isinstance(names, list) else names)


def _whole(raw: JsonObject, key: str, high: int, default: int | None = None) -> int:
    """A whole number from 1 to `high`. Raises KeyError if the key is missing and there is no default."""
    value = raw[key] if default is None else raw.get(key, default)
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if not isinstance(number, int) or isinstance(number, bool) or not 1 <= number <= high:
        raise ModelError(f"config.json: {key} must be a whole number from 1 to {high}, got {_shown(value)}")
    return number


def _number(given: JsonObject, key: str, default: float, low: float = 0.0) -> float:
    """A finite number of at least `low`; the default if the key is missing or null."""
    value = given.get(key)
    value = default if value is None else value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= 1e30:
        raise ModelError(f"config.json: {key} must be a number from {low:g} to 1e+30, got {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 100 else f"{shown[:100]}…"


def _parse(architecture: str, family: Family, raw: JsonObject) -> ModelConfig:
    _check_computable(architecture, raw)
    n_heads = _whole(raw, "num_attention_heads", MAX_WIDTH)
    n_kv_heads = _whole(raw, "num_key_value_heads", MAX_WIDTH) if raw.get("num_key_value_heads") else n_heads
    if n_heads % n_kv_heads:
        raise ModelError(f"config.json: num_key_value_heads must divide {n_heads} heads, got {n_kv_heads}")
    rope = _parse_rope(raw)
    return ModelConfig(
        architecture=architecture,
        vocab_size=_whole(raw, "vocab_size", MAX_VOCAB),
        hidden_size=_whole(raw, "hidden_size", MAX_WIDTH),
        intermediate_size=_whole(raw, "intermediate_size", 2 * MAX_WIDTH),
        n_layers=_whole(raw, "num_hidden_layers", MAX_LAYERS),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=_head_dim(family, raw, n_heads),
        rms_norm_eps=_number(raw, "rms_norm_eps", 1e-6),
        max_position=_max_position(raw, rope),
        rope=rope,
        tied_head=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias(raw),
        out_bias=family.out_bias(raw),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        qk_norm=family.qk_norm,
        windows=_parse_windows(family, raw),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch."),
    )


def _head_dim(family: Family, raw: JsonObject, n_heads: int) -> int:
    if raw.get("head_dim"):
        head_dim = _whole(raw, "head_dim", MAX_WIDTH)
    else:
        head_dim = family.head_dim or _whole(raw, "hidden_size", MAX_WIDTH) // n_heads
    if head_dim < 2 or head_dim % 2:
        raise ModelError(f"config.json: head_dim must be even, for the rotation of pairs, got {head_dim}")
    return head_dim


def _max_position(raw: JsonObject, rope: RopeConfig) -> int:
    longest = max(_whole(raw, "max_position_embeddings", MAX_POSITION, 2048), rope.max_position)
    if longest > MAX_POSITION:
        raise ModelError(
            f"config.json: the scaled context must be at most {MAX_POSITION} positions, got {longest}"
        )
    return longest


def _check_computable(architecture: str, raw: JsonObject) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act must be silu for {architecture}, got {activation!r}")
    if quantised := raw.get("quantization_config"):
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else quantised
        raise ModelError(
            f"config.json: weights that are quantised already ({method}) are not read; "
            "take the plain checkpoint, and weight_quantization for eight bits"
        )


def _parse_rope(raw: JsonObject) -> RopeConfig:
    given = dict(raw.get("rope_parameters") or {}) | dict(raw.get("rope_scaling") or {})
    nested = [key for key, value in given.items() if isinstance(value, dict)]
    if nested:
        raise ModelError(f"config.json: rope parameters must be the same for all layers, got {', '.join(nested)}")
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in ("default", "linear", "llama3", "yarn"):
        raise ModelError(f"config.json: rope type must be default, linear, llama3 or yarn, got {kind!r}")
    if float(given.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor must be 1")
    attention_factor = given.get("attention_factor")
    return RopeConfig(
        theta=_number(given if given.get("rope_theta") else raw, "rope_theta", 10_000.0, low=1.0),
        kind=kind,
        factor=1.0 if kind == "default" else _number({"factor": float(given["factor"])}, "factor", 1.0, low=1e-3),
        original_max_position=int(
            given.get("original_max_position_embeddings") or raw.get("max_position_embeddings", 2048)
        ),
        low_freq_factor=float(given.get("low_freq_factor", 1.0)),
        high_freq_factor=float(given.get("high_freq_factor", 4.0)),
        beta_fast=float(given.get("beta_fast") or 32.0),
        beta_slow=float(given.get("beta_slow") or 1.0),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(given.get("mscale") or 0.0),
        mscale_all_dim=float(given.get("mscale_all_dim") or 0.0),
        truncate=bool(given.get("truncate", True)),
    )


def _parse_windows(family: Family, raw: JsonObject) -> tuple[int, ...]:
    n_layers = _whole(raw, "num_hidden_layers", MAX_LAYERS)
    windowed = family.windowed(raw) and raw.get("sliding_window", 4096)
    window = _whole(raw, "sliding_window", 2**31 - 1, 4096) if windowed else 0
    kinds = raw.get("layer_types")
    if kinds:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown or len(kinds) != n_layers:
            found = ", ".join(map(str, sorted(unknown))) or f"{len(kinds)}"
            raise ModelError(
                f"config.json: layer_types must be full or sliding attention for {n_layers} layers, got {found}"
            )
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = int(raw.get("max_window_layers", 28)) if "use_sliding_window" in raw else 0
    return tuple(window if layer >= first else 0 for layer in range(n_layers))


def read_json(path: Path) -> dict[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    except RecursionError:
        raise ModelError(f"{path} cannot be read: it is nested too deep") from None
    if not isinstance(loaded, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return loaded


def end_token_ids(folder: Path) -> frozenset[int]:
    """The EOS token ids. Merges the ids in both files, because each file may have ids that the other lacks."""
    token_ids: set[int] = set()
    for path in (folder / "config.json", folder / "generation_config.json"):
        ids = read_json(path).get("eos_token_id") if path.exists() else None
        ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
        for token_id in ids:
            known = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not known or not 0 <= token_id < MAX_VOCAB:
                limit = f"must be token ids from 0 to {MAX_VOCAB - 1}"
                raise ModelError(f"{path}: eos_token_id {limit}, got {_shown(token_id)}")
        token_ids.update(ids)
    return frozenset(token_ids)
