"""A model as data: what each layer computes, without its weights.

A family's file turns `config.json` into a `ModelPlan`, and computes nothing. `decoder.Decoder` runs plans. A fast
path is asked which layers of a plan it computes (`fast_paths`), and refuses the rest.

    one layer        x = mixer_norm(h);  h += residual * mixer_out_norm(mixer(x))
                     x = feed_forward_norm(h);  h += residual * feed_forward_out_norm(feed_forward(x))
    parallel         both read mixer_norm(h); without `feed_forward_norm` they share it, else each has its own
    post_norm        h = mixer_norm(h + mixer(h));  h = feed_forward_norm(h + feed_forward(h))
    experts          the feed-forward's output is dense(x) + experts(x); either may be missing
    per_layer        then h += layer_norm(out(act(gate(h)) * per-layer input)): see `PerLayerInput`
    scalar           then h *= scalar

A mixer is what relates a position to those before it: attention, which keeps keys and values of them, or a mixer
that keeps a state. Numbers that follow from others are properties. All plans are values: equal plans compute the
same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple

from petiole.contract.results.vectors import COLBERT, SPARSE

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""gelu: with the error function; gelu_tanh: its approximation. relu2: the square of relu."""

RotaryKind = Literal["default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional", "axial"]

MAX_POSITION = 2**24
"""A limit far above every model."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension. offset: stored weights w stand for offset + w; loading adds it, in float32,
    so nothing that computes sees it. weight False: nothing multiplies the normalised vector."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    weight: bool = True
    bias: bool = False
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Rotary:
    """Which elements of a head are rotated, and how fast. A model has one table for each distinct `Rotary`.

    dims: the first `dims` elements of a head are rotated, element i with i + dims / 2; neighbours: element 2 i
    with 2 i + 1 instead. kind "proportional": only the first `fraction` of the pairs turn. short_factors,
    long_factors (longrope): divisors of the frequencies, up to and beyond `original_max_position`. A kind whose
    frequencies depend on the length of a sequence is settled once, for the served length (`at_length`): cached
    keys must not depend on what comes later. kind "axial": the frequencies of half as many dimensions, twice.
    axes: of positions with several axes, the one by which each frequency turns."""

    dims: int
    theta: float = 10_000.0
    kind: RotaryKind = "default"
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
    fraction: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    neighbours: bool = False
    axes: tuple[int, ...] = ()

    @property
    def max_position(self) -> int:
        """The scaled context length for YaRN, else 0."""
        return int(self.original_max_position * self.factor) if self.kind == "yarn" else 0

    @property
    def amplitude(self) -> float:
        """The factor of cosine and sine (1 except for YaRN and longrope)."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "longrope":
            grows = self.factor > 1 and self.original_max_position > 1
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position)) if grows else 1.0
        if self.mscale and self.mscale_all_dim:
            return self.grown(self.mscale) / self.grown(self.mscale_all_dim)
        return self.grown(1.0)

    def grown(self, mscale: float) -> float:
        """How much YaRN strengthens what it stretches."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    def at_length(self, longest: int) -> Rotary:
        """The rotation of a server whose sequences have up to `longest` positions."""
        if self.kind == "longrope":
            chosen = self.short_factors if longest <= self.original_max_position else self.long_factors
            return replace(self, short_factors=chosen, long_factors=chosen)
        if self.kind == "dynamic":
            original = self.original_max_position
            stretch = self.factor * max(longest, original) / original - (self.factor - 1)
            theta = self.theta * stretch ** (self.dims / (self.dims - 2))
            return replace(self, kind="default", theta=theta, factor=1.0)
        return self


@dataclass(frozen=True, slots=True)
class Growth:
    """Queries are multiplied by 1 + beta * ln(1 + floor(position / length))."""

    beta: float
    length: int


@dataclass(frozen=True, slots=True)
class DistanceBias:
    """A stored number of each head is added to a score, by the distance of its positions. Distances share numbers:
    those of each sign have half of the buckets, one each for the shortest, then longer and longer ranges up to
    `farthest` (T5's buckets)."""

    buckets: int = 32
    farthest: int = 128


@dataclass(frozen=True, slots=True)
class Disentangled:
    """Scores of distances as in DeBERTa: (q.k + q.key(distance) + k.query(distance)) * scale. key(distance): the
    product of keys, or one of its own unless `shared`, of a stored vector; query(distance) alike. keys, queries:
    which of the two are added. span: distances up to it, to each side, have a vector. buckets: if above 0, they
    share `buckets` vectors to each side instead, in longer and longer ranges. norm: of the stored vectors."""

    span: int
    buckets: int = 0
    keys: bool = True
    queries: bool = True
    shared: bool = False
    norm: Norm | None = None

    @property
    def vectors(self) -> int:
        """Stored vectors."""
        return 2 * (self.buckets or self.span)


@dataclass(frozen=True, slots=True)
class Latent:
    """What all heads read of a position in place of keys and values (multi-head latent attention): one vector
    [rotated key | norm(latent)], whose first numbers turn with the position. A head's query is a product with the
    whole vector, and a head's output a product of the latent's weighted sum:

        [own | turning] = query of a head;  query = [turning | own @ keys];  output = (sum of latents) @ values

    rank: numbers of the latent. own: those of a head's query that do not turn. value: those of a head's output.
    query_rank: if above 0, queries are a product of so many numbers, behind a norm. norm: of both."""

    rank: int
    own: int
    value: int
    query_rank: int
    norm: Norm


@dataclass(frozen=True, slots=True)
class Attention:
    """A mixer. rotary None: nothing is rotated. window: positions that a query sees, its own included; 0: all.
    With the mask "bidirectional" a window reaches as far to the other side. The mask "prefix" is causal, except
    inside the regions that a step names.

    norm_whole: the norms of queries and keys stand over all heads at once. softcap: a score s becomes cap * tanh(s
    / cap); 0: none. sinks: one more logit for each head in the softmax, whose weight is dropped. output_gate: the
    projection of queries has for each head [query | gate]; outputs are multiplied by sigmoid(gate). keys_of: the
    layer whose keys and values are read; a layer that names one has none of its own. values_are_keys: values are
    the projection of keys, before their norm and rotation. distances: what a score has beside the product
    of its query and key, only where texts are computed whole. latent: there is one head of keys, which are their
    own values, see `Latent`."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rotary: Rotary | None = None
    window: int = 0
    mask: Literal["causal", "bidirectional", "prefix"] = "causal"
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    norm_whole: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    softcap: float = 0.0
    sinks: bool = False
    output_gate: bool = False
    keys_of: int | None = None
    values_are_keys: bool = False
    query_growth: Growth | None = None
    distances: DistanceBias | Disentangled | None = None
    latent: Latent | None = None

    @property
    def q_size(self) -> int:
        """The outputs of attention."""
        return self.heads * self.head_dim

    @property
    def out_size(self) -> int:
        """The inputs of the output projection."""
        return self.q_size if self.latent is None else self.heads * self.latent.value

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def kept_size(self) -> int:
        """The numbers that a position has in memory."""
        return self.kv_size if self.latent is not None else 2 * self.kv_size

    @property
    def latent_query_size(self) -> int:
        """The width of all heads' queries before they meet the latents' space, in a plan with latents."""
        assert self.latent is not None
        return self.heads * (self.latent.own + self.head_dim - self.latent.rank)

    @property
    def qkv_sizes(self) -> tuple[int, ...]:
        """The outputs of the projections that are stored: of queries (with their gates), keys and values. With
        latents: of queries or what they are made of, and of [latent | key]."""
        if self.latent is not None:
            return self.latent.query_rank or self.latent_query_size, self.kv_size
        queries = self.q_size * (2 if self.output_gate else 1)
        if self.keys_of is not None:
            return (queries,)
        return (queries, self.kv_size) if self.values_are_keys else (queries, self.kv_size, self.kv_size)


class HeadPart(NamedTuple):
    """The numbers of each head of keys among the outputs of a projection: those of the first head begin at
    `first`, those of the next one `apart` later."""

    first: int
    size: int
    apart: int


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """A mixer that keeps a state: a gated delta rule after a causal convolution.

        queries, keys, values = silu(convolution(projection(x)));  queries, keys: of length 1 in each head
        S *= exp(-exp(decay) * softplus(a + bias))
        S += key (x) sigmoid(b) * (value - S key);  output = norm(S query / sqrt(key_dim)) * silu(z)

    Each head of keys serves value_heads / key_heads heads of values. These follow one another or, if `tiled`, the
    heads of values take turns over those of keys. a, b, z: projections of x, a and b with one number a head of
    values. kernel: positions that the convolution reads, its own included. norm: of each head of the output, an
    RMS norm without a bias. grouped: the projections are stored by heads of keys, [query | key | values | z] and
    [b | a] of each; else [queries | keys | values], z, b and a of all heads.

    The state: S, float32, and the last kernel - 1 inputs of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    norm: Norm
    grouped: bool = False
    tiled: bool = False

    @property
    def each(self) -> int:
        """Heads of values that a head of keys serves."""
        return self.value_heads // self.key_heads

    @property
    def run(self) -> int:
        """Heads of values in a row that have the same keys: head i has those of i // run % key_heads."""
        return 1 if self.tiled else self.each

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The channels of the convolution."""
        return 2 * self.key_size + self.value_size

    @property
    def input_sizes(self) -> tuple[int, ...]:
        """The outputs of the projections that are stored: of the convolution's inputs, and of z."""
        return (self.channels + self.value_size,) if self.grouped else (self.channels, self.value_size)

    @property
    def gate_sizes(self) -> tuple[int, ...]:
        """The outputs of the projections that are stored of b and a."""
        return (2 * self.value_heads,) if self.grouped else (self.value_heads, self.value_heads)

    @property
    def convolved(self) -> tuple[str, ...]:
        """The parts that are the channels of the convolution, in their order."""
        return "queries", "keys", "values"

    @property
    def parts(self) -> dict[str, HeadPart]:
        """The parts of the projections: of the inputs' queries, keys, values and z, of the gates' b and a."""
        key, values, each = self.key_dim, self.each * self.value_dim, self.each
        sizes = {"queries": key, "keys": key, "values": values, "z": values, "b": each, "a": each}
        if self.grouped:
            first = {"queries": 0, "keys": key, "values": 2 * key, "z": 2 * key + values, "b": 0, "a": each}
            inputs, gates = 2 * (key + values), 2 * each
            apart = {name: gates if name in ("b", "a") else inputs for name in sizes}
        else:
            of_keys = {"queries": 0, "keys": self.key_size, "values": 2 * self.key_size}
            first, apart = {**of_keys, "z": self.channels, "b": 0, "a": self.value_heads}, sizes
        return {name: HeadPart(first[name], size, apart[name]) for name, size in sizes.items()}

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The shape of S."""
        return self.value_heads, self.key_dim, self.value_dim


@dataclass(frozen=True, slots=True)
class ShortConvolution:
    """A mixer that keeps a state: b, c, x = projection(x);  output = c * convolution(b * x), all of the model's
    width. The state: the last kernel - 1 inputs of the convolution."""

    channels: int
    kernel: int
    bias: bool = False

    @property
    def matrices(self) -> None:
        """There are none."""
        return None


@dataclass(frozen=True, slots=True)
class Mamba2:
    """A mixer that keeps a state: the scan of Mamba-2 after a causal convolution.

        values, keys, queries = silu(convolution(projection(x)));  t = softplus(steps + a stored number)
        S = exp(-exp(decay) * t) * S + key (x) t * value;  output = norm((S query + skip * value) * silu(z))

    Each group of heads shares keys and queries of `state` numbers. z, steps: projections of x, steps with one
    number a head; decay, skip: stored numbers of each head. kernel: positions that the convolution reads, its own
    included. norm: over each group of the output, an RMS norm. convolution_bias, bias: of the convolution, of
    both projections.

    The state: S, float32, and the last kernel - 1 inputs of the convolution."""

    heads: int
    head_dim: int
    state: int
    groups: int
    kernel: int
    norm: Norm
    convolution_bias: bool = True
    bias: bool = False

    @property
    def inner(self) -> int:
        """The numbers of the output."""
        return self.heads * self.head_dim

    @property
    def group_size(self) -> int:
        """The numbers of the keys, and of the queries."""
        return self.groups * self.state

    @property
    def channels(self) -> int:
        """The channels of the convolution."""
        return self.inner + 2 * self.group_size

    @property
    def each(self) -> int:
        """The heads of a group."""
        return self.heads // self.groups

    @property
    def convolved(self) -> tuple[str, ...]:
        """The parts that are the channels of the convolution, in their order."""
        return "values", "keys", "queries"

    @property
    def parts(self) -> dict[str, HeadPart]:
        """The parts of the projection of the inputs: a are the steps; what is called a head of keys is a group."""
        values = self.each * self.head_dim
        sizes = {"z": values, "values": values, "keys": self.state, "queries": self.state, "a": self.each}
        firsts = accumulate((self.groups * size for size in sizes.values()), initial=0)
        return {
            name: HeadPart(first, size, size) for (name, size), first in zip(sizes.items(), firsts, strict=False)
        }

    @property
    def matrices(self) -> tuple[int, int, int]:
        """The shape of S."""
        return self.heads, self.state, self.head_dim


Recurrent = DeltaNet | Mamba2 | ShortConvolution
"""A mixer that keeps a state."""

Mixer = Attention | DeltaNet | Mamba2 | ShortConvolution


@dataclass(frozen=True, slots=True)
class FeedForward:
    """gated: down(act(gate) * (up + up_offset)); else down(act(up)). clamp: gate is at most this, and up between
    minus and plus this; 0: none. slope: silu(x) is x * sigmoid(slope * x)."""

    inner: int
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    clamp: float = 0.0
    slope: float = 1.0
    up_offset: float = 0.0

    @property
    def up_sizes(self) -> tuple[int, ...]:
        """The outputs of the projections that are stored: of gate and up."""
        return (self.inner, self.inner) if self.gated else (self.inner,)


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses `chosen` of `experts` for each position, and how much each counts. What it scores are logits, a
    product of its inputs.

    score: "softmax": a softmax over all experts; "chosen": over the chosen ones alone; "sigmoid": each by itself.
    normalised: weights are divided by their sum. factor: of weights. correction: a stored number of each expert
    is added to its score for the choice alone. groups: experts lie in this many groups, of which the `best_groups`
    with the largest sum of their best `of_group` scores count. bias: of the logits.

    of_stream: the inputs are the residual stream, divided by its root mean square with `eps`, times a stored
    vector and hidden^-0.5; else they are those of the experts. expert_scales: a stored factor of each weight."""

    experts: int
    chosen: int
    score: Literal["softmax", "chosen", "sigmoid"] = "softmax"
    normalised: bool = False
    factor: float = 1.0
    correction: bool = False
    groups: int = 1
    best_groups: int = 1
    of_group: int = 2
    bias: bool = False
    of_stream: bool = False
    eps: float = 1e-6
    expert_scales: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """Feed-forwards of one size, of which a router chooses some for each position. norm: of their inputs; None:
    they read what the dense feed-forward reads. out_norm: of their weighted sum. dense_out_norm: of the output of
    the dense feed-forward beside them. dense_gate: that output is multiplied by sigmoid of a product."""

    router: Router
    each: FeedForward
    norm: Norm | None = None
    out_norm: Norm | None = None
    dense_out_norm: Norm | None = None
    dense_gate: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """See the module. feed_forward: the dense one, which every position takes; None: there are experts alone, or
    the layer is a mixer and nothing else.
    residual: a factor of what is added. scalar: a stored factor of the layer's whole output."""

    mixer: Mixer
    feed_forward: FeedForward | None
    mixer_norm: Norm | None
    mixer_out_norm: Norm | None = None
    feed_forward_norm: Norm | None = None
    feed_forward_out_norm: Norm | None = None
    parallel: bool = False
    post_norm: bool = False
    residual: float = 1.0
    scalar: bool = False
    experts: Experts | None = None

    @property
    def attention(self) -> Attention:
        """The mixer, for code that computes no other."""
        assert isinstance(self.mixer, Attention)
        return self.mixer

    @property
    def feeds(self) -> bool:
        """Whether it has a feed-forward, dense or of experts."""
        return self.feed_forward is not None or self.experts is not None

    @property
    def dense(self) -> FeedForward:
        """For code that computes no layer without one."""
        assert self.feed_forward is not None
        return self.feed_forward


@dataclass(frozen=True, slots=True)
class PerLayerInput:
    """A second embedding, of which every layer has a slice of `width`, added at the layer's end (Gemma 4's
    per-layer input):

        input = factor * (embedding_factor * table[token] + norm(projection_factor * projection(h0)))
        h += layer_norm(out(act(gate(h)) * input[layer]))

    h0: the inputs of the first layer."""

    width: int
    vocab_size: int
    norm: Norm
    layer_norm: Norm
    activation: Activation = "gelu_tanh"
    embedding_factor: float = 1.0
    projection_factor: float = 1.0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Dense:
    """One more product after the pooling, and what follows it. name: of its stored layer. norm_name: of its
    norm's."""

    name: str
    inputs: int
    outputs: int
    bias: bool = True
    activation: Literal["none", "tanh", "gelu", "relu"] = "none"
    norm: Norm | None = None
    norm_name: str = ""


Scale = Literal["none", "sigmoid", "softmax"]

PoolingKind = Literal["first", "max", "mean", "sqrt_mean", "weighted_mean", "last"]


@dataclass(frozen=True, slots=True)
class Pooling:
    """What a model of texts makes of the hidden states of a text, after the last norm, in float32:

        v = of each kind one vector, joined;  for each dense: v = norm(act(dense(v)))

    kinds: the first position, the last, or of all the largest numbers, the mean, the sum over the root of their
    count, or the mean in which the n-th position counts n times. prompts: whether the positions of a prompt are
    among these "all".
    normalize: vectors have the length 1 unless a request says otherwise. labels: what each of the numbers is
    called, of a classifier; empty: they are a vector. scale: what makes scores of a classifier's numbers. sparse,
    colbert: what BGE-M3 makes of each token beside that, see `parts.pooling`."""

    kinds: tuple[PoolingKind, ...]
    denses: tuple[Dense, ...] = ()
    normalize: bool = False
    labels: tuple[str, ...] = ()
    scale: Scale = "none"
    sparse: Dense | None = None
    colbert: Dense | None = None
    prompts: bool = True

    @property
    def of_tokens(self) -> dict[str, int]:
        """What is made of each token, by the names of outputs, with their numbers."""
        found = {SPARSE: self.sparse, COLBERT: self.colbert}
        return {name: dense.outputs for name, dense in found.items() if dense is not None}


LONGEST_CHAIN = 4
"""Drafts that a head makes one after the other, each of the one before. Few hold behind these."""


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A decoder, or with `pooling` a model of texts, which has no head and generates nothing. norm: after the
    last layer. dtype: the type of the weights, empty if config.json does not name it. eos_token_ids: the family's,
    used if the model's files name none. learned_positions, token_types: rows of tables that are added to the
    embeddings (token types: row 0, and row 1 for the second text of a pair). first_position: the row of the first
    position; the rows before it are not positions. embedding_norm: after these. embedding_size: if above 0, the
    width of these tables, which a product with a bias brings to the model's after that norm. stored_layers: which
    stored layer each layer is, where some are the same; empty: each is its own. drafting: the layer of a head that
    drafts, see `parts.layer`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[Layer, ...]
    norm: Norm | None
    max_position: int
    tied_head: bool = False
    head_bias: bool = False
    embedding_factor: float = 1.0
    embedding_norm: Norm | None = None
    learned_positions: int = 0
    first_position: int = 0
    token_types: int = 0
    embedding_size: int = 0
    stored_layers: tuple[int, ...] = ()
    logits_factor: float = 1.0
    logits_softcap: float = 0.0
    per_layer: PerLayerInput | None = None
    pooling: Pooling | None = None
    dtype: str = ""
    eos_token_ids: tuple[int, ...] = ()
    drafting: Layer | None = None

    @property
    def drafts(self) -> int:
        """The most tokens that a head drafts in a step."""
        return 0 if self.drafting is None else LONGEST_CHAIN

    @property
    def with_drafting(self) -> ModelPlan:
        """The plan with the layer that drafts, if there is one, as its last. Memory has keys and values of it."""
        if self.drafting is None:
            return self
        return replace(self, layers=(*self.layers, self.drafting), drafting=None)

    @property
    def head_size(self) -> int:
        """The outputs of the head. Of a model of texts it has one, which nobody reads, so that a step of it ends
        like every step."""
        return self.vocab_size if self.pooling is None else 1

    @property
    def vector_size(self) -> int:
        """The numbers that a model of texts makes of a text; 0 for a model that generates."""
        if self.pooling is None:
            return 0
        if self.pooling.denses:
            return self.pooling.denses[-1].outputs
        return self.hidden_size * len(self.pooling.kinds)

    @property
    def embedding_width(self) -> int:
        return self.embedding_size or self.hidden_size

    @property
    def whole_texts(self) -> bool:
        """Whether a step computes each text from its first position to its last, because earlier positions see
        later ones, or because all of them are pooled."""
        if self.pooling is None:
            return False
        return self.pooling.kinds != ("last",) or any(mixer.mask == "bidirectional" for _, mixer in self.attending)

    @property
    def n_layers(self) -> int:
        return len(self.layers)

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return tuple(layer.mixer for layer in self.layers)

    @property
    def attentions(self) -> tuple[Attention, ...]:
        """The mixers, for code that computes no others."""
        return tuple(layer.attention for layer in self.layers)

    @property
    def attending(self) -> Iterator[tuple[int, Attention]]:
        """The layers that attend, and their mixers."""
        return ((i, mixer) for i, mixer in enumerate(self.mixers) if isinstance(mixer, Attention))

    @property
    def recurrent(self) -> Iterator[tuple[int, Recurrent]]:
        """The layers that keep a state, and their mixers."""
        return ((i, mixer) for i, mixer in enumerate(self.mixers) if not isinstance(mixer, Attention))

    @property
    def keeps_states(self) -> bool:
        return any(True for _ in self.recurrent)

    @property
    def reads_latents(self) -> bool:
        return any(mixer.latent is not None for _, mixer in self.attending)

    @property
    def experts(self) -> tuple[Experts | None, ...]:
        """The experts of each layer."""
        return tuple(layer.experts for layer in self.layers)

    @property
    def rotaries(self) -> tuple[Rotary, ...]:
        """The distinct rotations, in the order of the layers that use them first."""
        return tuple(dict.fromkeys(mixer.rotary for _, mixer in self.attending if mixer.rotary is not None))

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer; 0: the layer sees everything, or keeps a state."""
        return tuple(mixer.window if isinstance(mixer, Attention) else 0 for mixer in self.mixers)

    @property
    def kept_windows(self) -> tuple[int, ...]:
        """For each layer the window in which any layer sees the keys that this one reads; 0: some see all, there
        are no keys, or texts are computed whole, and keys are kept for a step alone."""
        if self.whole_texts:
            return (0,) * self.n_layers
        seen, read = dict[int, list[int]](), dict[int, int]()
        for i, mixer in self.attending:
            window = 0 if mixer.mask == "bidirectional" else mixer.window
            read[i] = i if mixer.keys_of is None else mixer.keys_of
            seen.setdefault(read[i], []).append(window)
        kept = {i: max(windows) if all(windows) else 0 for i, windows in seen.items()}
        return tuple(kept[read[i]] if i in read else 0 for i in range(self.n_layers))

    @property
    def most_positions(self) -> int:
        """The largest `max_model_len`. Linear and dynamic scaling stretch the context by their factor. Some
        checkpoints name the context before it, and some the one after it, so only `max_position` is a safe
        default."""
        scaled = (r.original_max_position * r.factor for r in self.rotaries if r.kind in ("linear", "dynamic"))
        return max(self.max_position, *(int(min(one, MAX_POSITION)) for one in scaled), 0)

    @property
    def caches(self) -> Iterator[tuple[int, Attention]]:
        """The layers that store keys and values of their own, and their mixers."""
        return ((i, mixer) for i, mixer in self.attending if mixer.keys_of is None)

    @property
    def kv_homes(self) -> dict[int, int]:
        """By layer that stores keys and values: the layer in whose memory they lie.

        Where texts are computed whole, nobody reads the keys of a layer after that layer, so layers share memory.
        Two kinds do not: a layer whose keys others read, and layers of different sizes. The threads of a step
        compute different texts, each at its own layer, so a position must have the same bytes in all of these."""
        caches = dict(self.caches)
        if not self.whole_texts:
            return {i: i for i in caches}
        read, homes = {mixer.keys_of for _, mixer in self.attending}, dict[tuple[int, int], int]()
        return {
            i: i if i in read else homes.setdefault((mixer.kv_size, mixer.kept_size), i)
            for i, mixer in caches.items()
        }

    @property
    def kv_elements_per_token(self) -> int:
        """In memory."""
        homes = set(self.kv_homes.values())
        return sum(mixer.kept_size for i, mixer in self.caches if i in homes)

    def at_length(self, longest: int) -> ModelPlan:
        """The plan of a server whose sequences have up to `longest` positions: see `Rotary.at_length`."""
        if all(rotary.at_length(longest) == rotary for rotary in self.rotaries):
            return self
        return replace(self, layers=tuple(_at_length(layer, longest) for layer in self.layers))


def _at_length(layer: Layer, longest: int) -> Layer:
    mixer = layer.mixer
    if not isinstance(mixer, Attention) or mixer.rotary is None:
        return layer
    return replace(layer, mixer=replace(mixer, rotary=mixer.rotary.at_length(longest)))
