"""Keys of `config.json` that families share, in all their spellings.

Old and new spellings of a parameter are read alike: `rope_theta` and `rope_scaling`, or both in `rope_parameters`,
for all layers or by kind of layer; `layer_types`, or the rules that stand for it. The configuration of the text
part may be nested in `text_config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import (
    MAX_LAYERS as MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH as MAX_WIDTH,
    JsonObject,
    architecture_of,
    objects as objects,
    shown,
    whole as whole,
)
from petiole.gpu_worker.models.plan import (
    MAX_POSITION,
    Activation,
    Attention,
    Dense,
    FeedForward,
    Layer,
    ModelPlan,
    Norm,
    Pooling,
    Rotary,
    Router,
    Scale,
)
from petiole.gpu_worker.models.weights.formats.quantization_config import declared_by
from petiole.gpu_worker.models.weights.names import Names

MAX_EXPERTS = 2**16
MAX_LABELS = 100_000
"""Limits far above every model. A folder that exceeds them is a mistake or an attack, and is refused unread."""

WRAPPED = Names(
    prefixes=("model.language_model.", "language_model.model.", "model.", ""),
    heads=("lm_head", "language_model.lm_head"),
)
"""The names of a model of text inside one of text and images."""

SEEING = replace(WRAPPED, tower=("model.visual.", "visual."))
"""With the names of its tower."""

FULL, SLIDING = "full_attention", "sliding_attention"

_KINDS = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def text_part(raw: JsonObject) -> JsonObject:
    """The configuration of the text part, with what the outer one says of the whole model."""
    inner = raw.get("text_config")
    if not isinstance(inner, Mapping):
        return raw
    both = {**raw, **inner}
    whole = ("architectures", "tie_word_embeddings", "quantization_config")
    kept = {key: both[key] for key in ("dtype", "torch_dtype") if both.get(key) is not None}
    return {**inner, **kept, **{key: raw[key] for key in whole if key in raw}}


def or_default(raw: JsonObject, key: str, default: int, high: int = MAX_POSITION) -> int:
    """A whole number from 1 to `high`; the default if the key is missing, null or 0."""
    return whole(raw, key, high) if raw.get(key) else default


def number(given: JsonObject, key: str, default: float, low: float = 0.0) -> float:
    """A finite number of at least `low`; the default if the key is missing or null."""
    value = given.get(key)
    value = default if value is None else value
    known = isinstance(value, int | float) and not isinstance(value, bool)
    if not known or not low <= value <= 1e30:
        raise ModelError(f"config.json: {key} must be a number from {low:g} to 1e+30, got {shown(value)}")
    return float(value)


def activation(raw: JsonObject, known: Sequence[Activation], key: str = "hidden_act") -> Activation:
    """One of `known`, whose first is the default."""
    given = raw.get(key)
    found = _ACTIVATIONS.get(str(given)) if given else known[0]
    if found not in known:
        names = " or ".join(known)
        raise ModelError(f"config.json: {key} must be {names} for {architecture_of(raw)}, got {shown(given)}")
    assert found is not None
    return found


def heads(raw: JsonObject) -> tuple[int, int]:
    """The numbers of heads of queries, and of keys."""
    n_heads = whole(raw, "num_attention_heads", MAX_WIDTH)
    n_kv_heads = whole(raw, "num_key_value_heads", MAX_WIDTH) if raw.get("num_key_value_heads") else n_heads
    if n_heads % n_kv_heads:
        raise ModelError(f"config.json: num_key_value_heads must divide {n_heads} heads, got {n_kv_heads}")
    return n_heads, n_kv_heads


def head_dim(raw: JsonObject, default: int | None = None) -> int:
    """default None: the hidden size divided by the heads."""
    if raw.get("head_dim"):
        found = whole(raw, "head_dim", MAX_WIDTH)
    else:
        found = default or whole(raw, "hidden_size", MAX_WIDTH) // heads(raw)[0]
    if found < 2 or found % 2:
        raise ModelError(f"config.json: head_dim must be even, for the rotation of pairs, got {found}")
    return found


def rotary(raw: JsonObject, width: int, kind_of_layer: str = "", *, partial: bool = False) -> Rotary:
    """The rotation of heads of this width. kind_of_layer: whose parameters to read, where each kind has its own.
    partial: whether the family rotates a part of a head."""
    given = {**objects(raw, "rope_parameters"), **objects(raw, "rope_scaling")}
    if kind_of_layer in given:
        given = dict(objects(given, kind_of_layer))
    nested = [key for key, value in given.items() if isinstance(value, Mapping)]
    if nested:
        raise ModelError(f"config.json: rope parameters must be the same for all layers, got {shown(nested)}")
    kind: Any = str(given.get("rope_type") or given.get("type") or "default")
    kind = {"su": "longrope", "mrope": "default"}.get(kind, kind)  # all axes of a text are one
    if kind not in _KINDS:
        raise ModelError(f"config.json: rope type must be {', '.join(_KINDS)}, got {shown(kind)}")
    asked = number(given if given.get("partial_rotary_factor") else raw, "partial_rotary_factor", 1.0) or 1.0
    turning, part = (asked, 1.0) if kind == "proportional" else (1.0, asked)
    if (part != 1.0 and not (partial and 0 < part <= 1)) or turning > 1:
        limit = "from 0 to 1" if partial or turning > 1 else "1"
        raise ModelError(f"config.json: partial_rotary_factor must be {limit}, got {asked:g}")
    longest = whole(raw, "max_position_embeddings", MAX_POSITION, 2048)
    trained = "original_max_position_embeddings"
    original = or_default(given, trained, or_default(raw, trained, longest))
    found = Rotary(
        dims=int(width * part),
        theta=number(given if given.get("rope_theta") else raw, "rope_theta", 10_000.0, low=1.0),
        kind=kind,
        original_max_position=original,
        low_freq_factor=number(given, "low_freq_factor", 1.0),
        high_freq_factor=number(given, "high_freq_factor", 4.0),
        beta_fast=number(given, "beta_fast", 32.0) or 32.0,
        beta_slow=number(given, "beta_slow", 1.0) or 1.0,
        attention_factor=None if given.get("attention_factor") is None else number(given, "attention_factor", 1.0),
        mscale=number(given, "mscale", 0.0),
        mscale_all_dim=number(given, "mscale_all_dim", 0.0),
        truncate=bool(given.get("truncate", True)),
        fraction=turning,
    )
    if kind == "yarn" and found.theta == 1.0:
        raise ModelError("config.json: rope_theta must be above 1 for yarn, got 1")
    if kind == "longrope":
        short, long = (_factors(given, key, found.dims // 2) for key in ("short_factor", "long_factor"))
        factor = number(given, "factor", longest / original, low=1e-3)
        return replace(found, factor=factor, short_factors=short, long_factors=long)
    if kind == "default" or (kind == "proportional" and "factor" not in given):
        return found
    if given["factor"] is None:
        raise KeyError("factor")
    return replace(found, factor=number(given, "factor", 1.0, low=1e-3))


def pooled(raw: JsonObject) -> Pooling:
    """How a GGUF file says that texts are pooled, and the products behind that: the mean, and none, for others."""
    kind, denses = raw.get("pooling", "mean"), raw.get("denses", [])
    if kind not in ("first", "last", "mean"):
        raise ModelError(f"config.json: pooling must be first, last or mean, got {shown(kind)}")
    sizes = [size for _, inputs, outputs in denses for size in (inputs, outputs)]
    if not all(type(size) is int and 0 < size <= MAX_WIDTH for size in sizes):
        raise ModelError(f"config.json: denses must have from 1 to {MAX_WIDTH} numbers, got {shown(sizes)}")
    return Pooling(
        (kind,), tuple(Dense(str(name), inputs, outputs, bias=False) for name, inputs, outputs in denses)
    )


def with_axes(plan: ModelPlan, of: Callable[[Rotary], Rotary]) -> ModelPlan:
    """The plan of a model whose pictures have positions of several axes."""

    def layer(one: Layer) -> Layer:
        mixer = one.attention
        return one if mixer.rotary is None else replace(one, mixer=replace(mixer, rotary=of(mixer.rotary)))

    return replace(plan, layers=tuple(map(layer, plan.layers)))


def in_sections(raw: JsonObject, rotary: Rotary, default: Sequence[int]) -> Rotary:
    """With the axis of each frequency: those of the first come first."""
    sections = _sections(raw, default)
    if sum(sections) != rotary.dims // 2:
        limit = f"must be {rotary.dims // 2} frequencies in all"
        raise ModelError(f"config.json: mrope_section {limit}, got {shown(sections)}")
    return replace(rotary, axes=tuple(axis for axis, n in enumerate(sections) for _ in range(n)))


def _sections(raw: JsonObject, default: Sequence[int]) -> Sequence[int]:
    """How many frequencies turn with each of three axes."""
    given = {**objects(raw, "rope_parameters"), **objects(raw, "rope_scaling")}
    found = given.get("mrope_section", default)
    known = isinstance(found, list | tuple) and len(found) == 3
    if not known or not all(type(one) is int and 0 <= one <= MAX_WIDTH for one in found):
        raise ModelError(f"config.json: mrope_section must be three whole numbers, got {shown(found)}")
    return list(found)


def interleaved(raw: JsonObject, rotary: Rotary, default: Sequence[int]) -> Rotary:
    """With the axis of each frequency: the second one's, the third one's and the first one's take turns, as far as
    the sections of the second and the third go."""
    sections = _sections(raw, default)
    axes = (j % 3 if j < 3 * sections[j % 3] else 0 for j in range(rotary.dims // 2))
    return replace(rotary, axes=tuple(axes))


def _factors(given: JsonObject, key: str, n: int) -> tuple[float, ...]:
    found = given[key]
    known = isinstance(found, list) and len(found) == n and all(isinstance(one, int | float) for one in found)
    if not known or not all(1e-6 <= one <= 1e6 for one in found):
        raise ModelError(f"config.json: {key} must be {n} numbers from 1e-06 to 1e+06, got {shown(found)}")
    return tuple(map(float, found))


def router(raw: JsonObject, *keys: str, chosen: str = "num_experts_per_tok", **more: Any) -> Router:
    """keys: spellings of the number of experts. more: fields of the router."""
    key = next((key for key in keys if raw.get(key) is not None), keys[0])
    n = whole(raw, key, MAX_EXPERTS)
    k = whole(raw, chosen, MAX_EXPERTS)
    groups, best = more.get("groups", 1), more.get("best_groups", 1)
    if n % groups or best > groups:
        raise ModelError(f"config.json: {groups} groups, of which {best} count, must divide {n} experts")
    if k > n // groups * best:
        raise ModelError(f"config.json: {chosen} must be at most {n // groups * best} ({key}), got {k}")
    return Router(n, k, **more)


def max_position(raw: JsonObject, *rotaries: Rotary) -> int:
    longest = whole(raw, "max_position_embeddings", MAX_POSITION, 2048)
    longest = max([longest, *(one.max_position for one in rotaries)])
    if longest > MAX_POSITION:
        raise ModelError(
            f"config.json: the scaled context must be at most {MAX_POSITION} positions, got {longest}"
        )
    return longest


def inner(raw: JsonObject) -> int:
    """The width inside a feed-forward."""
    return whole(raw, "intermediate_size", 2 * MAX_WIDTH)


def dtype(raw: JsonObject) -> str:
    return str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")


def scale(raw: JsonObject) -> Scale:
    """What makes scores of a classifier's numbers: as sentence-transformers does for a pair, as the pipeline of
    transformers for classes."""
    told = raw.get("sentence_transformers")
    named = (
        told.get("activation_fn") if isinstance(told, Mapping) else raw.get("sbert_ce_default_activation_function")
    )
    if named is not None:
        known: dict[str, Scale] = {"Identity": "none", "Sigmoid": "sigmoid"}
        if (last := str(named).rpartition(".")[2]) not in known:
            raise ModelError(f"config.json: activation_fn must be Identity or Sigmoid, got {shown(named)}")
        return known[last]
    several = raw.get("problem_type") == "multi_label_classification"
    return "sigmoid" if several or len(labels(raw)) == 1 else "softmax"


def labels(raw: JsonObject) -> tuple[str, ...]:
    """What the scores of a classifier are called, in order. Files with the usual two name none."""
    given = raw.get("id2label")
    if given is None:
        return ("LABEL_0", "LABEL_1")
    names = {str(key): name for key, name in given.items()} if isinstance(given, Mapping) else {}
    found = tuple(str(names.get(str(k), "")) for k in range(len(names)))
    if not 1 <= len(found) <= MAX_LABELS or "" in found:
        limit = f"must name 1 to {MAX_LABELS} labels by the numbers from 0"
        raise ModelError(f"config.json: id2label {limit}, got {shown(given)}")
    return found


def n_layers(raw: JsonObject) -> int:
    return whole(raw, "num_hidden_layers", MAX_LAYERS)


def layer_types(
    raw: JsonObject, default: Sequence[str] | None = None, known: Sequence[str] = (FULL, SLIDING)
) -> tuple[str, ...]:
    """The kind of mixer of each layer. default: if config.json names none; None: full attention."""
    n = n_layers(raw)
    kinds, names = raw.get("layer_types") or default or [FULL] * n, " or ".join(known)
    if not isinstance(kinds, list | tuple) or not all(isinstance(kind, str) for kind in kinds):
        raise ModelError(f"config.json: layer_types must be a list of {names}, got {shown(kinds)}")
    unknown = sorted(set(kinds) - set(known))
    if unknown or len(kinds) != n:
        found = shown(", ".join(unknown))[1:-1] or len(kinds)
        raise ModelError(f"config.json: layer_types must be {names} for {n} layers, got {found}")
    return tuple(kinds)


def indices(raw: JsonObject, key: str) -> frozenset[int]:
    """Numbers of layers; none if the key is missing or null."""
    given = raw.get(key)
    if given is not None and not (isinstance(given, list) and all(type(one) is int for one in given)):
        raise ModelError(f"config.json: {key} must be a list of numbers of layers, got {shown(given)}")
    return frozenset(given or ())


def windows(raw: JsonObject, *, windowed: bool, default: Sequence[str] | None = None) -> tuple[int, ...]:
    """The window of each layer. windowed: whether `sliding_window` counts at all. default: see `layer_types`;
    None: all layers have it, from `max_window_layers` on where the class has that key."""
    counts = windowed and raw.get("sliding_window", 4096)
    window = whole(raw, "sliding_window", 2**31 - 1, 4096) if counts else 0
    if raw.get("layer_types") or default:
        return tuple(window if kind == SLIDING else 0 for kind in layer_types(raw, default))
    first = or_default(raw, "max_window_layers", 0)
    return tuple(window if layer >= first else 0 for layer in range(n_layers(raw)))


def usual_attention(raw: JsonObject, width: int, **more: Any) -> Attention:
    """As Llama has it. more: fields that differ."""
    n_heads, n_kv_heads = heads(raw)
    rope = more.pop("rotary") if "rotary" in more else rotary(raw, width)
    scale = more.pop("scale", width**-0.5)
    return Attention(n_heads, n_kv_heads, width, scale, rope, **more)


def usual_layers(raw: JsonObject, mixer: Attention, sizes: Sequence[int], **more: Any) -> tuple[Layer, ...]:
    """Pre-norm layers as Llama has them, with a window each. more: fields of the layers that differ. Keys of what
    differs are not read."""
    norm = Norm(eps=number(raw, "rms_norm_eps", 1e-6))
    if "feed_forward" not in more:
        more["feed_forward"] = FeedForward(
            inner(raw), activation(raw, ("silu",)), bias=bool(raw.get("mlp_bias", False))
        )
    parts: dict[str, Any] = {"mixer_norm": norm, "feed_forward_norm": norm} | more
    return tuple(Layer(mixer=replace(mixer, window=window), **parts) for window in sizes)


def with_head(raw: JsonObject, plan: ModelPlan, layer: Layer) -> ModelPlan:
    """The plan with a head that drafts, if config.json says that its files have one of one layer. layer: its."""
    n_layers = whole(raw, "mtp_num_hidden_layers", MAX_LAYERS, 0, low=0)
    return replace(plan, drafting=layer) if n_layers == 1 else plan


def usual_plan(raw: JsonObject, layers: tuple[Layer, ...], **more: Any) -> ModelPlan:
    """A decoder of text with these layers. more: fields that differ. Refuses formats of weights that are not
    read."""
    declared_by(raw)
    mixers = (layer.mixer for layer in layers if isinstance(layer.mixer, Attention))
    rotaries = dict.fromkeys(mixer.rotary for mixer in mixers if mixer.rotary is not None)
    parts: dict[str, Any] = {
        "architecture": architecture_of(raw),
        "vocab_size": whole(raw, "vocab_size", MAX_VOCAB),
        "hidden_size": whole(raw, "hidden_size", MAX_WIDTH),
        "layers": layers,
        "norm": Norm(eps=number(raw, "rms_norm_eps", 1e-6)),
        "max_position": max_position(raw, *rotaries),
        "tied_head": bool(raw.get("tie_word_embeddings", False)),
        "dtype": dtype(raw),
    }
    return ModelPlan(**parts | more)
