"""What code that computes layers itself is asked: which layers of a model it computes, and why not the others.

Compiled code reads a decoder's weights and never calls the decoder; a captured graph records one call and replays
it. Such code cannot see that a decoder computes something else. So it lists the values of plans, the kernels and
the linear layers that it computes, and everything that is not listed is refused: a new field of a plan, a value of
a field, another decoder, other kernels, another linear layer. Which other weights there are, and their sizes,
follow from the plan: loading a checkpoint checks that.

The answer names layers, and the log says once which ones stand in the way. A step is computed by one path all the
same: if one layer is refused, torch computes all of them, by calling the decoder. Two paths in one step would keep
the promises of neither. (Compiled code gives a position the same bits in every batch, and keeps its activations in
float32.) Each change of path would cost a copy of the activations, and would end a region of the threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import pairwise
from typing import Final

from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.moondream.decoder import MoondreamDecoder
from petiole.gpu_worker.models.moondream.vision_encoder import VisionEncoder
from petiole.gpu_worker.models.plan import (
    Attention,
    FeedForward,
    Growth,
    Layer,
    ModelPlan,
    Norm,
    PerLayerInput,
    Rotary,
)
from petiole.gpu_worker.models.vision.seeing import SeeingDecoder
from petiole.gpu_worker.models.vision.tower import Tower

ANY: Final = object()
"""Every value of a field is known."""

Values = Mapping[type, Mapping[str, object]]
"""What a path knows of plans: for each class of `plan`, for each of its fields the set of known values, or `ANY`.
In place of values that are plans themselves their class stands, which is looked up in turn."""


def _fields(any_value: str = "", both: str = "", norms: str = "", **listed: object) -> dict[str, object]:
    """any_value: the names of fields of which every value is known. both: of those that are true or false. norms:
    of those that are a norm or None."""
    known: dict[str, object] = dict.fromkeys(any_value.split(), ANY)
    known |= {name: {True, False} for name in both.split()}
    return known | {name: {None, Norm} for name in norms.split()} | listed


_ACTIVATIONS = {"silu", "gelu", "gelu_tanh", "relu", "relu2"}
_TABLE = "dims theta kind factor original_max_position low_freq_factor high_freq_factor beta_fast beta_slow"
_TABLE += " attention_factor mscale mscale_all_dim truncate fraction short_factors long_factors"
_ENDS = "architecture vocab_size hidden_size max_position embedding_factor learned_positions token_types"
_ENDS += " first_position"
_ENDS += " logits_factor logits_softcap dtype eos_token_ids"

COMMON: Final[Values] = {
    ModelPlan: _fields(
        _ENDS,
        "tied_head head_bias",
        "norm embedding_norm",
        per_layer={None, PerLayerInput},
        pooling={None},
        embedding_size={0},
        stored_layers={()},
        drafting={None, Layer},
    ),
    Layer: _fields(
        "residual",
        "parallel post_norm scalar",
        "mixer_norm mixer_out_norm feed_forward_norm feed_forward_out_norm",
        mixer={Attention},
        feed_forward={None, FeedForward},
        experts={None},
    ),
    Attention: _fields(
        "heads kv_heads head_dim scale window softcap keys_of",
        "norm_whole qkv_bias out_bias output_gate values_are_keys sinks",
        "q_norm k_norm v_norm",
        rotary={None, Rotary},
        mask={"causal", "prefix"},
        query_growth={None, Growth},
        distances={None},
        latent={None},
    ),
    Rotary: _fields(_TABLE + " axes", "neighbours"),  # all paths read its table, which `parts.rotary` computes
    Growth: _fields("beta length"),
    FeedForward: _fields("inner clamp slope up_offset", "gated bias", activation=_ACTIVATIONS),
    PerLayerInput: _fields(
        "width vocab_size embedding_factor projection_factor factor",
        norm={Norm},
        layer_norm={Norm},
        activation=_ACTIVATIONS,
    ),
    Norm: _fields("eps offset", "weight bias", kind={"rms", "layer"}),
}
"""What compiled code and captured steps both compute. A field or a value that only one of them computes stands in
the list of that one, which says how it differs (`changed`)."""


def changed(values: Values, changes: Values) -> Values:
    """With other values for some fields of some classes."""
    return {**values, **{kind: {**values.get(kind, {}), **some} for kind, some in changes.items()}}


Parts = frozenset[type]
"""The kernels and the linear layers in whose place the asking code computes, or which it calls."""


@dataclass(frozen=True, slots=True)
class Support:
    """The answer. model: why nothing of the model can be computed; layers: for each layer why it cannot; None: it
    can."""

    model: str | None
    layers: tuple[str | None, ...] = ()

    @property
    def reason(self) -> str | None:
        """Why the model as a whole cannot be computed, with the layers that stand in the way."""
        at: dict[str, list[int]] = {}
        for i, reason in enumerate(self.layers):
            if reason is not None:
                at.setdefault(reason, []).append(i)
        of_layers = [f"{reason} ({_layers(found, len(self.layers))})" for reason, found in at.items()]
        return ", ".join([*([self.model] if self.model else []), *of_layers]) or None


def _layers(found: Sequence[int], n: int) -> str:
    """Ascending numbers of layers as ranges: `layers 0-2, 5 of 24`."""
    if len(found) == n:
        return f"all {n} layers" if n > 1 else "its layer"
    starts = [b for a, b in pairwise([-2, *found]) if b != a + 1]
    ends = [a for a, b in pairwise([*found, n + 1]) if b != a + 1]
    ranges = (f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
    return f"layer{'s' if len(found) > 1 else ''} {', '.join(ranges)} of {n}"


def supports(decoder: object, values: Values, parts: Parts) -> Support:
    """Whether a path with these values and parts computes this decoder."""
    if type(decoder) not in _DECODERS or not isinstance(decoder, Decoder):
        return Support(f"the class {type(decoder).__name__}")
    plan = decoder.plan
    of_layers = tuple(
        unknown_value(layer, values) or _unknown_part(weights.linears, parts)
        for layer, weights in zip(plan.layers, decoder.layers, strict=False)
    )
    return Support(unknown_value(plan, values, without=("layers",)) or _unknown_ends(decoder, parts), of_layers)


def supports_encoder(encoder: object, values: Values, parts: Parts) -> Support:
    """Whether a path computes the layers of an encoder of crops, or of a tower."""
    if type(encoder) not in (VisionEncoder, Tower) or not isinstance(encoder, VisionEncoder | Tower):
        return Support(f"the class {type(encoder).__name__}")
    layers = tuple(
        unknown_value(layer, values) or _unknown_part(weights.linears, parts)
        for layer, weights in zip(encoder.plan, encoder.layers, strict=False)
    )
    return Support(None, layers)


def with_known_crops(decoder: object) -> MoondreamDecoder | None:
    """The decoder, if its `encode` is known to encode each crop alone and to join the features; else None."""
    return decoder if isinstance(decoder, MoondreamDecoder) and type(decoder) is MoondreamDecoder else None


def tower_of(decoder: object) -> Tower | None:
    """What encodes, if the decoder's `encode` is known to be that of a tower; else None."""
    if not isinstance(decoder, SeeingDecoder) or type(decoder) is not SeeingDecoder:
        return None
    return decoder.vision if isinstance(decoder.vision, Tower) else None


def unknown_value(plan: object, values: Values, without: Sequence[str] = ()) -> str | None:
    """The first field of a plan that is at no known value; None if all are. without: fields that are not looked
    at."""
    known = values.get(type(plan))
    if known is None or not is_dataclass(plan):
        return f"the class {type(plan).__name__}"
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.name in without:
            continue
        if field.name not in known:
            return f"{field.name} of {type(plan).__name__}"
        listed = known[field.name]
        if listed is ANY:
            continue
        assert isinstance(listed, set | frozenset)
        inner = is_dataclass(value)
        if (type(value) if inner else value) not in listed:
            return f"{field.name} {type(value).__name__ if inner else repr(value)} of {type(plan).__name__}"
        if inner and (unknown := unknown_value(value, values)) is not None:
            return f"{unknown} ({field.name})"
    return None


_DECODERS = (Decoder, SeeingDecoder, MoondreamDecoder)


def _unknown_ends(decoder: Decoder, parts: Parts) -> str | None:
    """What is not known of kernels and head."""
    if type(decoder) is Decoder:
        for name in ("value_tokens", "images", "pictures", "processor"):
            if getattr(decoder, name) is not None:
                return f"a Decoder with {name}"
    return _unknown_part((decoder.kernels, decoder.head), parts)


def _unknown_part(found: Iterable[object], parts: Parts) -> str | None:
    """The first that is not of exactly one of these types, or that has attributes of its own."""
    for part in found:
        if type(part) not in parts:
            return f"the class {type(part).__name__}"
        if getattr(part, "__dict__", None):
            return f"attributes of one {type(part).__name__}"
    return None
