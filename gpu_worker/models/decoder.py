"""The decoder: runs a plan, T positions at a time, in torch and in the kernels that its device brings.

The T positions of a step belong to several sequences and may be prompts, single tokens or drafts; only the
attention and the states, which the caller passes in, distinguish them. Queries, keys and values come from one
product, gate and up from another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from petiole.contract.results.vectors import COLBERT, SPARSE
from petiole.gpu_worker.models.parts.attention import AttentionWeights, StepAttention, attended
from petiole.gpu_worker.models.parts.experts import mixed_experts, routed
from petiole.gpu_worker.models.parts.feed_forward import activated
from petiole.gpu_worker.models.parts.kernels import Kernels
from petiole.gpu_worker.models.parts.layer import DraftingWeights, LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights, is_plain, normed, weight_of
from petiole.gpu_worker.models.parts.per_layer import PerLayerTables, per_layer_inputs, per_layer_output
from petiole.gpu_worker.models.parts.pooling import Pooler
from petiole.gpu_worker.models.parts.recurrent.mixing import recurrent
from petiole.gpu_worker.models.parts.recurrent.states import RecurrentStep
from petiole.gpu_worker.models.parts.rotary import table_by_axes
from petiole.gpu_worker.models.plan import Attention, ModelPlan, Norm, Rotary
from petiole.gpu_worker.models.weights.linear import Linear
from petiole.gpu_worker.models.weights.names import LinearName
from petiole.gpu_worker.models.weights.quantized import CodedTable
from petiole.gpu_worker.request.prepared_images import ImageLimits
from petiole.gpu_worker.request.skills import Pictures, Processor
from petiole.gpu_worker.request.values import ValueKinds
from petiole.gpu_worker.request.videos import Videos


class ValueDecoder(Protocol):
    """A decoder with `value_tokens`. No method may wait for the device. `runtime.step.values` knows which tokens
    carry a value; kinds are known by their names."""

    def embed_value(self, kind: str, numbers: Tensor) -> Tensor:
        """int [n, numbers of the kind] -> [n, hidden]: what a token of this kind is embedded as."""
        ...

    def made_value(self, kind: str, hidden: Tensor) -> Tensor:
        """Hidden states whose logits give a token of this kind: [n, hidden] -> int [n, numbers of the kind]."""
        ...


class ImageDecoder(Protocol):
    """A decoder with `images`: its encoder turns pixels into inputs. It may not wait for the device."""

    def encode(self, images: Sequence[tuple[Tensor, tuple[int, int]]]) -> Sequence[Tensor]:
        """Crops or frames uint8 [n, height, width, 3] with their tiling -> the features of each image, [1 + extra,
        positions, hidden]: the input embeddings, then what is added after each of the first layers, if anything
        is."""
        ...

    def encode_bytes(self, n_encoded: int) -> int:
        """Bytes of device memory that an encode step takes beside the weights: of this many crops or patches."""
        ...


class CropDecoder(ImageDecoder, Protocol):
    """An `ImageDecoder` whose crops all have one shape. Each crop is encoded alone, and then the crops of an image
    are joined. So encoding a number of crops, of any images, is always the same computation."""

    @property
    def crop_shape(self) -> tuple[int, ...]:
        """(height, width, 3)"""
        ...

    def crop_features(self, crops: Tensor) -> Tensor:
        """uint8 [n, *crop_shape], of any images -> [n, ...]."""
        ...

    def image_features(self, features: Tensor, tiling: tuple[int, int]) -> Tensor:
        """The features of one image's crops -> the features of the image, as in `encode`, in memory of their
        own."""
        ...


class AdapterTerms(Protocol):
    """The LoRA terms of a step, added to the output of a linear layer in place."""

    def add(self, layer: int, name: LinearName, x: Tensor, y: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class Forward:
    """The arguments of a forward besides its hidden states. positions: rotary positions, int64 [T], or [axes, T]
    in a step with images that have several axes. token_ids: int64 [T], for a plan with per-layer inputs. types:
    int64 [T], the row of each token's type; None: the first. states: for a plan with mixers that keep some. real:
    bool [T], which positions are not padding; None: all. behind: called after each layer with its number and the
    residual stream [T, hidden], which it may change in place. tables: see `Decoder.tables`; None: the decoder's
    own."""

    positions: Tensor
    attention: StepAttention
    terms: AdapterTerms | None = None
    token_ids: Tensor | None = None
    types: Tensor | None = None
    states: RecurrentStep | None = None
    real: Tensor | None = None
    behind: Callable[[int, Tensor], None] | None = None
    tables: Sequence[Tensor | None] | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A plan's weights and its forward pass. tables: the rotary table of each layer, None for one that rotates
    nothing; layers of one `plan.Rotary` share theirs.

    embedding: [vocab, hidden]; norm: after the last layer. pooler: of a model of texts. `value_tokens`, `images`
    and `pictures`: None for a text model; `videos`: alike; `processor`: of a model with skills of its
    own. drafting: of the plan's layer that drafts."""

    plan: ModelPlan
    embedding: Tensor | CodedTable
    layers: tuple[LayerWeights, ...]
    norm: NormWeights | None
    head: Linear
    tables: tuple[Tensor | None, ...]
    kernels: Kernels
    embedding_norm: NormWeights | None = None
    positions: Tensor | None = None
    token_types: Tensor | None = None
    embedding_projection: Linear | None = None
    per_layer: PerLayerTables | None = None
    pooler: Pooler | None = None
    value_tokens: ValueKinds | None = None
    images: ImageLimits | None = None
    pictures: Pictures | None = None
    videos: Videos | None = None
    processor: Processor | None = None
    drafting: DraftingWeights | None = None

    @property
    def drafter(self) -> Decoder:
        """The layer that drafts, its norm and the model's head, as a decoder of their own."""
        assert self.plan.drafting is not None, "a head that drafts"
        assert self.drafting is not None, "a head that drafts"
        return Decoder(
            plan=replace(self.plan, layers=(self.plan.drafting,), drafting=None),
            embedding=self.embedding,
            layers=(self.drafting.layer,),
            norm=self.drafting.norm,
            head=self.head,
            tables=(self.drafting.table,),
            kernels=self.kernels,
        )

    def drafting_inputs(self, embedded: Tensor, known: Tensor) -> Tensor:
        """See `DraftingWeights.joined`."""
        assert self.drafting is not None, "a head that drafts"
        assert self.plan.norm is not None, "which is that of a model with a last norm"
        return self.drafting.joined(self.plan.norm, embedded, known, self.kernels)

    def normed(self, hidden: Tensor) -> Tensor:
        """The final norm: [T, hidden] -> [T, hidden]."""
        return self._behind(hidden, self.plan.norm, self.norm)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def embedding_factor(self) -> float:
        """The factor of the embeddings, rounded to the type of the weights."""
        factor = self.plan.embedding_factor
        return factor if factor == 1.0 else rounded(factor, self.dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        table = self.embedding
        embedded = table[token_ids] if isinstance(table, CodedTable) else F.embedding(token_ids, table)
        return embedded if self.embedding_factor == 1.0 else embedded * self.embedding_factor

    def forward(self, hidden: Tensor, step: Forward) -> Tensor:
        """[T, hidden] -> [T, hidden], without the final norm; `hidden` is overwritten."""
        plan, kernels = self.plan, self.kernels
        step = self._by_axes(step)
        hidden = self.first_inputs(hidden, step)
        inputs = None
        if plan.per_layer is not None and self.per_layer is not None:
            assert step.token_ids is not None, "the caller passes the tokens of a plan with per-layer inputs"
            inputs = per_layer_inputs(plan.per_layer, self.per_layer, hidden, step.token_ids, kernels)
        stream = Residual(hidden, kernels)
        for i, (layer, weights) in enumerate(zip(plan.layers, self.layers, strict=True)):
            x = stream.value if layer.post_norm else stream.normed(layer.mixer_norm, weights.mixer_norm)
            apart = layer.parallel and layer.feed_forward_norm is not None
            y = stream.normed(layer.feed_forward_norm, weights.feed_forward_norm) if apart else x
            mixed = self._mixed(i, x, step)
            stream.add(self._behind(mixed, layer.mixer_out_norm, weights.mixer_out_norm), layer.residual)
            if layer.post_norm:
                stream.norm(layer.mixer_norm, weights.mixer_norm)
                y = stream.value
            elif not layer.parallel:
                y = stream.normed(layer.feed_forward_norm, weights.feed_forward_norm)
            if layer.feeds:
                fed = self._fed_forward(i, y, stream.value, step)
                fed = self._behind(fed, layer.feed_forward_out_norm, weights.feed_forward_out_norm)
                stream.add(fed, layer.residual)
            if layer.post_norm:
                stream.norm(layer.feed_forward_norm, weights.feed_forward_norm)
            if inputs is not None and plan.per_layer is not None and weights.per_layer is not None:
                given = inputs[:, i]
                stream.add(per_layer_output(plan.per_layer, weights.per_layer, stream.value, given, kernels))
            if weights.scalar is not None:
                stream.scale(weights.scalar)
            if step.behind is not None:
                step.behind(i, stream.value)
        return stream.value

    def head_output(self, hidden: Tensor) -> Tensor:
        """Final norm and logits: [O, hidden] -> [O, vocab] in the model's dtype."""
        plan = self.plan
        logits = self.head(self._behind(hidden, plan.norm, self.norm))
        if plan.logits_factor != 1.0:
            logits = logits * plan.logits_factor
        cap = plan.logits_softcap
        return (logits / cap).tanh() * cap if cap else logits

    def vectors(
        self, hidden: Tensor, lengths: Sequence[int] | None = None, prompts: Sequence[int] | None = None
    ) -> Tensor:
        """The vectors that a model of texts makes: float32 [texts, vector_size]. hidden: [T, hidden], all
        positions of texts of these lengths; without lengths, the position of each text that is pooled. prompts: of
        each text, how many of its first positions are not pooled."""
        assert self.pooler is not None, "a model of texts has a pooler"
        hidden = self._behind(hidden, self.plan.norm, self.norm)
        pooled = hidden if lengths is None else self.pooler.pooled(hidden, lengths, prompts)
        return self.pooler.vectors(pooled, self.kernels)

    def of_tokens(self, hidden: Tensor, wanted: Sequence[str]) -> tuple[Tensor | None, Tensor | None]:
        """The weights and the vectors of one text's tokens, as far as they are wanted: see `parts.pooling`.
        hidden: [tokens, hidden]."""
        assert self.pooler is not None, "a model of texts has a pooler"
        hidden = self._behind(hidden, self.plan.norm, self.norm)
        weights = self.pooler.token_weights(hidden) if SPARSE in wanted else None
        return weights, self.pooler.token_vectors(hidden) if COLBERT in wanted else None

    def attend(self, i: int, qkv: Tensor, step: Forward) -> Tensor:
        """Layer i's attention: [T, queries, keys and values] -> [T, out_size]. `qkv` may be overwritten."""
        mixer, weights = self.plan.layers[i].attention, self.layers[i].attention
        table = (self.tables if step.tables is None else step.tables)[i]
        return attended(mixer, weights, i, qkv, step.positions, table, step.attention, self.kernels)

    def _by_axes(self, step: Forward) -> Forward:
        """Positions of several axes become rows of tables that are this step's own."""
        if step.positions.ndim == 1:
            return step
        rows = torch.arange(step.positions.shape[1], dtype=step.positions.dtype, device=step.positions.device)
        return replace(step, positions=rows, tables=self.tables_by_axes(step.positions))

    def tables_by_axes(self, positions: Tensor) -> Sequence[Tensor | None]:
        """positions: integers [axes, T] -> of each layer that rotates, [T, dims], a row for each position."""
        mixers = self.plan.mixers
        rotaries = [mixer.rotary if isinstance(mixer, Attention) else None for mixer in mixers]
        made: dict[Rotary, Tensor] = {}
        for rotary, table in zip(rotaries, self.tables, strict=True):
            if rotary is not None and table is not None and rotary not in made:
                made[rotary] = table_by_axes(rotary, table, positions)
        return [None if rotary is None else made[rotary] for rotary in rotaries]

    def first_inputs(self, hidden: Tensor, step: Forward) -> Tensor:
        """Embeddings with what stands after them: the first layer's inputs."""
        if self.positions is not None:
            hidden = hidden + self.positions[step.positions]
        if self.token_types is not None:
            hidden = hidden + self.token_types[0 if step.types is None else step.types]
        hidden = self._behind(hidden, self.plan.embedding_norm, self.embedding_norm)
        return hidden if self.embedding_projection is None else self.embedding_projection(hidden)

    def _mixed(self, i: int, x: Tensor, step: Forward) -> Tensor:
        mixer, weights = self.plan.layers[i].mixer, self.layers[i].mixer
        if not isinstance(mixer, Attention):
            assert step.states is not None, "the caller passes the states of a plan that has some"
            assert not isinstance(weights, AttentionWeights)
            return recurrent(mixer, weights, i, x, step.states, self.kernels)
        weights = self.layers[i].attention
        x = self.attend(i, self._apply(i, "qkv", weights.qkv, x, step), step)
        return self._apply(i, "out", weights.out, x, step)

    def _fed_forward(self, i: int, x: Tensor, stream: Tensor, step: Forward) -> Tensor:
        """x: the inputs of the layer's feed-forward; stream: the residual stream."""
        layer, weights = self.plan.layers[i], self.layers[i]
        if layer.experts is None or weights.experts is None:
            return self._dense(i, x, step)
        plan, experts = layer.experts, weights.experts
        inputs = self._behind(stream, plan.norm, experts.norm) if plan.norm is not None else x
        read = stream if plan.router.of_stream else inputs
        chosen, shares = routed(plan.router, experts.router, read, step.real, self.kernels)
        mixed = mixed_experts(plan, experts, inputs, chosen, shares, self.kernels)
        mixed = self._behind(mixed, plan.out_norm, experts.out_norm)
        if layer.feed_forward is None:
            return mixed
        dense = self._behind(self._dense(i, x, step), plan.dense_out_norm, experts.dense_out_norm)
        if experts.dense_gate is not None:
            dense = dense * torch.sigmoid(experts.dense_gate(x))
        return dense + mixed

    def _dense(self, i: int, x: Tensor, step: Forward) -> Tensor:
        plan, weights = self.plan.layers[i].dense, self.layers[i].dense
        x = self._apply(i, "gate_up", weights.gate_up, x, step)
        return self._apply(i, "down", weights.down, activated(plan, x, self.kernels), step)

    def _behind(self, x: Tensor, norm: Norm | None, weights: NormWeights | None) -> Tensor:
        return x if norm is None or weights is None else normed(norm, weights, x, self.kernels)

    def _apply(self, i: int, name: LinearName, linear: Linear, x: Tensor, step: Forward) -> Tensor:
        y = linear(x)
        if step.terms is not None:
            step.terms.add(i, name, x, y)
        return y


def rounded(factor: float, dtype: torch.dtype) -> float:
    """A factor in the type of what it multiplies, as in transformers."""
    return torch.tensor(factor, dtype=dtype).item()


class Residual:
    """The residual stream, to which layers add. hidden [T, hidden], changed in place. An addition waits until the
    stream is read: kernels compute an addition and the norm after it in one pass."""

    def __init__(self, hidden: Tensor, kernels: Kernels) -> None:
        self._hidden, self._kernels = hidden, kernels
        self._waiting: Tensor | None = None

    @property
    def value(self) -> Tensor:
        if self._waiting is not None:
            self._hidden += self._waiting
            self._waiting = None
        return self._hidden

    def add(self, x: Tensor, factor: float = 1.0) -> None:
        """x may be overwritten later."""
        _ = self.value
        self._waiting = x if factor == 1.0 else x * factor

    def normed(self, norm: Norm | None, weights: NormWeights | None) -> Tensor:
        """The norm of the stream; without one the stream itself, which must not be changed."""
        if norm is None or weights is None:
            return self.value
        if self._waiting is not None and is_plain(norm, weights):
            x, self._waiting = self._waiting, None
            return self._kernels.add_rms_norm(x, self._hidden, weight_of(weights), norm.eps)
        return normed(norm, weights, self.value, self._kernels)

    def norm(self, norm: Norm | None, weights: NormWeights | None) -> None:
        """The stream becomes its norm."""
        self._hidden = self.normed(norm, weights)

    def scale(self, factor: Tensor) -> None:
        self._hidden = self.value.mul_(factor)
