"""The plans that the C code computes. A value of a plan that is not listed is refused, and so is a new field."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.fast_paths import ANY, COMMON, Parts, Support, changed, supports
from petiole.gpu_worker.models.parts.kernels import TorchKernels
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.plan import (
    Attention,
    DeltaNet,
    DistanceBias,
    Experts,
    FeedForward,
    Latent,
    Layer,
    Mamba2,
    ModelPlan,
    Norm,
    Pooling,
    Recurrent,
    Router,
    ShortConvolution,
)
from petiole.gpu_worker.models.weights.linear import DenseLinear, Int8Linear
from petiole.gpu_worker.models.weights.quantized import CodedLinear
from petiole.gpu_worker.runtime.cpu.native.products.weights import unknown_form

PARTS: Parts = frozenset({TorchKernels, DenseLinear, Int8Linear, CodedLinear})

_BOTH = {True, False}
_NORM = {None, Norm}
_ROUTER = "experts chosen factor groups best_groups eps"
VALUES = changed(
    COMMON,
    {
        Attention: {
            "mask": {"causal", "prefix", "bidirectional"},
            "distances": {None, DistanceBias},
            "latent": {None, Latent},
        },
        Latent: {**dict.fromkeys(("rank", "own", "value", "query_rank"), ANY), "norm": {Norm}},
        DistanceBias: dict.fromkeys(("buckets", "farthest"), ANY),
        Layer: {"experts": {None, Experts}, "mixer": {Attention, DeltaNet, Mamba2, ShortConvolution}},
        DeltaNet: {
            **dict.fromkeys(("key_heads", "value_heads", "key_dim", "value_dim", "kernel"), ANY),
            "norm": {Norm},
            "grouped": _BOTH,
            "tiled": _BOTH,
        },
        Mamba2: {
            **dict.fromkeys(("heads", "head_dim", "state", "groups", "kernel"), ANY),
            **dict.fromkeys(("convolution_bias", "bias"), _BOTH),
            "norm": {Norm},
        },
        ShortConvolution: {"channels": ANY, "kernel": ANY, "bias": _BOTH},
        Experts: {
            "router": {Router},
            "each": {FeedForward},
            "dense_gate": _BOTH,
            **dict.fromkeys(("norm", "out_norm", "dense_out_norm"), _NORM),
        },
        Router: {
            **dict.fromkeys(_ROUTER.split(), ANY),
            **dict.fromkeys(("normalised", "correction", "bias", "of_stream", "expert_scales"), _BOTH),
            "of_group": {1, 2},
            "score": {"softmax", "chosen", "sigmoid"},
        },
        ModelPlan: {"pooling": {None, Pooling}},  # which is not computed here
        Pooling: dict.fromkeys(
            ("kinds", "denses", "normalize", "labels", "scale", "sparse", "colbert", "prompts"), ANY
        ),
    },
)
"""By class and field. What is asked of several fields together, and of sizes: `with_sizes`."""

_MOST_HEAD = 1024
_MOST_EXPERTS = 4096
_MOST_KERNEL = 64


def support(decoder: object) -> Support:
    """What the C code computes of a decoder."""
    known = supports(decoder, VALUES, PARTS)
    if not isinstance(decoder, Decoder) or known.model is not None:
        return known
    layers, weights = decoder.plan.with_drafting.layers, decoder.layers
    if decoder.drafting is not None:
        weights = (*weights, decoder.drafting.layer)
    hidden, ends = decoder.plan.hidden_size, _unknown_ends(decoder)
    return with_sizes(known, layers, weights, hidden, lanes=16, ends=ends)


def _unknown_ends(decoder: Decoder) -> str | None:
    plan = decoder.plan
    if plan.tied_head and decoder.value_tokens is not None:  # torch embeds values, and the head is rearranged
        return "a tied head beside values"
    if plan.per_layer is not None and plan.per_layer.width % 2:
        return f"per-layer inputs of {plan.per_layer.width} numbers"
    projection = None if decoder.per_layer is None else decoder.per_layer.projection
    return _unknown_codes((decoder.head, projection))


def with_sizes(
    known: Support,
    layers: Sequence[Layer],
    weights: Sequence[LayerWeights],
    hidden: int,
    lanes: int,
    ends: str | None = None,
) -> Support:
    """The answer when sizes and forms of codes are looked at, too, and layers together. known: the answer without.
    lanes: the size of heads must be a multiple. ends: what is not computed before and after the layers."""
    if not layers:
        return Support("a model without layers")
    if hidden % 2:
        return Support(f"a model of {hidden} numbers", known.layers)
    masks = {layer.mixer.mask for layer in layers if isinstance(layer.mixer, Attention)}
    if masks >= {"prefix", "bidirectional"}:
        return Support("layers with prefixes beside bidirectional ones", known.layers)
    # a layer that drafts stands behind those of the plan, and what is unknown of it is said of the model
    unknown = (*known.layers, *[None] * (len(layers) - len(known.layers)))
    sized = (
        unknown[i] or _unknown_layer(layers, i, lanes) or _unknown_codes(weights[i].linears)
        for i in range(len(layers))
    )
    return Support(known.model or ends, tuple(sized))


def _unknown_codes(linears: Iterable[object]) -> str | None:
    """What the C code does not multiply of quantised weights."""
    coded = (linear.weight.form for linear in linears if isinstance(linear, CodedLinear))
    return next((found for form in coded if (found := unknown_form(form)) is not None), None)


def _unknown_layer(layers: Sequence[Layer], i: int, lanes: int) -> str | None:
    layer, mixer = layers[i], layers[i].mixer
    if (found := _unknown_fed(layer)) is not None:
        return found
    if layer.parallel and layer.post_norm:
        return "a parallel layer whose norms stand after the addition"
    if not isinstance(mixer, Attention):
        return _unknown_recurrent(mixer)
    if mixer.head_dim % lanes or mixer.head_dim > _MOST_HEAD:
        return f"heads of {mixer.head_dim} numbers"
    if mixer.heads % mixer.kv_heads:
        return f"{mixer.heads} heads over {mixer.kv_heads} of keys"
    if mixer.rotary is not None and (mixer.rotary.dims % 2 or mixer.rotary.dims > mixer.head_dim):
        return f"a rotation of {mixer.rotary.dims} of {mixer.head_dim} numbers"
    if mixer.norm_whole and mixer.output_gate:
        return "a norm over all heads that have gates"
    if mixer.latent is not None:
        return _unknown_latent(mixer, mixer.latent)
    if mixer.keys_of is not None and not _can_read(mixer, layers[:i]):
        return f"the keys of layer {mixer.keys_of}"
    return None


def _unknown_latent(mixer: Attention, latent: Latent) -> str | None:
    sizes = (latent.rank, latent.own, latent.value, latent.query_rank)
    if any(size % 2 for size in sizes):
        return f"latents of {', '.join(map(str, sizes))} numbers"
    more = (mixer.q_norm, mixer.k_norm, mixer.v_norm, mixer.query_growth, mixer.keys_of)
    alone = all(one is None for one in more) and not (mixer.output_gate or mixer.values_are_keys)
    return None if alone else "latents beside norms of heads, gates or other layers' keys"


def _unknown_recurrent(mixer: Recurrent) -> str | None:
    if mixer.kernel > _MOST_KERNEL:
        return f"a convolution of {mixer.kernel} positions"
    if isinstance(mixer, DeltaNet) and mixer.value_heads % mixer.key_heads:
        return f"{mixer.value_heads} heads of values over {mixer.key_heads} of keys"
    if isinstance(mixer, Mamba2) and mixer.heads % mixer.groups:
        return f"{mixer.heads} heads in {mixer.groups} groups"
    inputs = mixer.channels if isinstance(mixer, ShortConvolution) else mixer.matrices[0] * mixer.matrices[2]
    return f"a mixer of {inputs} numbers" if inputs % 2 else None


def _unknown_fed(layer: Layer) -> str | None:
    """The first thing that is not known of a layer's feed-forward and experts."""
    experts = layer.experts
    for fed in (layer.feed_forward, None if experts is None else experts.each):
        if fed is not None and fed.inner % 2:
            return f"a feed-forward of {fed.inner} numbers"
        if fed is not None and fed.slope != 1.0 and fed.activation != "silu":
            return f"a slope of {fed.activation}"
    if not layer.feeds:
        added = layer.mixer_out_norm is None and layer.residual == 1.0  # as it is, by the product
        return None if added and not (layer.parallel or layer.post_norm) else "a mixer alone that is not plain"
    if experts is None:
        return None
    if experts.dense_gate and layer.feed_forward is None:
        return "a gate of no feed-forward"
    if layer.parallel or layer.post_norm:
        return "experts in a layer that is parallel, or whose norms stand after the addition"
    return f"{experts.router.experts} experts" if experts.router.experts > _MOST_EXPERTS else None


def _can_read(mixer: Attention, earlier: Sequence[Layer]) -> bool:
    """Whether a mixer can read the keys and values of the layer that it names."""
    if mixer.keys_of is None or not 0 <= mixer.keys_of < len(earlier):
        return False
    source = earlier[mixer.keys_of].mixer
    if not isinstance(source, Attention):
        return False
    same = (source.kv_heads, source.head_dim) == (mixer.kv_heads, mixer.head_dim)
    return same and source.keys_of is None
