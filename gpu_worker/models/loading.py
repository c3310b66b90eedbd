"""Reads a model's weights into a decoder: walks its plan and its family's names, part by part.

Sizes in a configuration may be wrong. So before any memory is allocated, all tensors are looked up, with their
shapes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petiole.contract.settings.engine import switch
from petiole.gpu_worker.exceptions import MachineError
from petiole.gpu_worker.models.checkpoint.identity import open_checkpoint
from petiole.gpu_worker.models.checkpoint.named_tokens import NamedTokens
from petiole.gpu_worker.models.checkpoint.safetensors import Checkpoint
from petiole.gpu_worker.models.checkpoint.sentence_transformers import TextModel
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.parts.attention import (
    AttentionWeights,
    BiasTable,
    Distances,
    DistanceVectors,
    LatentWeights,
    bias_table,
    vector_places,
)
from petiole.gpu_worker.models.parts.experts import ExpertWeights, RouterWeights
from petiole.gpu_worker.models.parts.feed_forward import FeedForwardWeights
from petiole.gpu_worker.models.parts.kernels import Kernels, TorchKernels
from petiole.gpu_worker.models.parts.layer import DraftingWeights, LayerWeights
from petiole.gpu_worker.models.parts.norms import NormWeights, normed
from petiole.gpu_worker.models.parts.per_layer import PerLayerTables, PerLayerWeights
from petiole.gpu_worker.models.parts.pooling import DenseWeights, Pooler
from petiole.gpu_worker.models.parts.recurrent.delta_inputs import DeltaNetWeights
from petiole.gpu_worker.models.parts.recurrent.mamba2 import Mamba2Weights
from petiole.gpu_worker.models.parts.recurrent.mixing import RecurrentWeights
from petiole.gpu_worker.models.parts.recurrent.short import ShortConvolutionWeights
from petiole.gpu_worker.models.parts.rotary import rotary_table
from petiole.gpu_worker.models.plan import (
    Attention,
    DeltaNet,
    Dense,
    Disentangled,
    DistanceBias,
    Experts,
    Latent,
    Layer,
    Mamba2,
    ModelPlan,
    Norm,
    Recurrent,
    Rotary,
    Router,
)
from petiole.gpu_worker.models.weights.copying import (
    HeadQuantization,
    Quantization,
    Storage,
    TensorSource,
    coded_layers,
    read_head,
    read_linear,
    read_tensor,
)
from petiole.gpu_worker.models.weights.formats.layer_tensors import BlockReader
from petiole.gpu_worker.models.weights.formats.quantization_config import declared_by
from petiole.gpu_worker.models.weights.formats.unread import check_embedding
from petiole.gpu_worker.models.weights.fused import ExpertTensors
from petiole.gpu_worker.models.weights.linear import DenseLinear, Linear
from petiole.gpu_worker.models.weights.names import WEIGHTS, LinearName, Names
from petiole.gpu_worker.models.weights.quantized import (
    Coded,
    CodedLinear,
    CodedTable,
    CodeLayout,
    KernelLinear,
    takes_int8,
    takes_int8_inputs,
)
from petiole.gpu_worker.models.weights.source import CheckpointWeights
from petiole.gpu_worker.models.weights.stacked import StackedLinear
from petiole.gpu_worker.request.pooling import Judge

log = logging.getLogger(__name__)

_PROGRESS_FROM_BYTES = 256 * 2**20


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The target device and format of weights. `max_positions`: length of the rotary tables. `on_read`: told how
    many bytes have been read. `int8_inputs`: where four-bit integers allow it, inputs meet them in eight bits.
    `room`: bytes that new weights may take; None: the device refuses what it cannot hold. `block_reader`,
    `scanned`: see `LayerTensors`. `sizes`: settings that must hold a picture, else the tower is left out: see
    `ImageLimits.too_small`.

    On the "meta" device, loading only checks that all tensors exist and have the right shape; it reads none.
    """

    device: torch.device
    dtype: torch.dtype
    max_positions: int
    quantization: Quantization = "none"
    head_quantization: HeadQuantization = "none"
    int8_inputs: bool = False
    kernels: Kernels = field(default_factory=TorchKernels)
    storage: Storage = field(default_factory=Storage)
    on_read: Callable[[int], object] = lambda n_bytes: None
    room: int | None = None
    block_reader: BlockReader | None = None
    scanned: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)

    def empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return self.storage.empty(shape, dtype or self.dtype, self.device)

    def advance(self, n_bytes: int) -> object:
        return self.on_read(n_bytes)

    def held(self, form: CodeLayout) -> CodeLayout:
        """The form in which the device keeps weights of a form."""
        return self.kernels.held(form)

    def coded(self, weight: Coded, bias: Tensor | None) -> CodedLinear:
        taken = self.kernels.take(weight)
        if taken is not None:
            return KernelLinear(taken[0], bias, product=taken[1])
        return CodedLinear(weight, bias, self.int8_inputs and takes_int8(weight.form))

    def quantize_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.quantize_rows(x)


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its configuration describes it. raw: its config.json. read: makes the decoder of such a model
    from any source of tensors. texts: how a model of texts is asked. modules: the folders and files, inside the
    model's, of modules with weights of their own. judge: how a model that generates is asked for scores, if its
    files say that. pictures: how the files say that pictures are made
    ready; None: the family does not read it. tokens: of the files, by their texts."""

    raw: Mapping[str, Any]
    plan: ModelPlan
    names: Names
    read: Reader
    texts: TextModel | None = None
    modules: tuple[str, ...] = ()
    judge: Judge | None = None
    pictures: Mapping[str, Any] | None = None
    tokens: NamedTokens | None = None


Reader = Callable[[TensorSource, Model, LoadOptions], Decoder]


def load_model(folder: Path, model: Model, options: LoadOptions) -> Decoder:
    """Read a checkpoint's weights into a decoder. Raises ModelError for missing tensors and wrong shapes.

    As in transformers, a head that differs from the embedding is used even if the configuration ties them.
    """
    with open_checkpoint(folder, model.modules) as checkpoint, torch.no_grad():
        names = model.names.stored_in(checkpoint.names())
        model = replace(model, names=names)
        if model.plan.pooling is None and model.plan.tied_head and _has_head(checkpoint, names):
            model = replace(model, plan=replace(model.plan, tied_head=False))
        if model.plan.drafting is not None and not _drafts(checkpoint, names):
            model = replace(model, plan=replace(model.plan, drafting=None))
        source = CheckpointWeights(
            ExpertTensors(checkpoint, names.fused, names.turned),
            declared_by(model.raw),
            options.block_reader,
            scanned=options.scanned,
        )
        only_check = options.device.type == "meta"
        meta = options if only_check else replace(options, device=torch.device("meta"), storage=Storage())
        checked = model.read(source, model, meta)
        source.check()
        if only_check:
            return checked
        needed = meta.storage.n_bytes
        if options.room is not None and needed > options.room:
            raise MachineError(f"{folder}: its weights must fit into {options.room} bytes of memory, got {needed}")
        source.log(needed, checkpoint.n_bytes())
        sees = bool(names.tower) and checked.images is not None
        text_alone = model.read is read_decoder or bool(names.tower)
        if text_alone and (left_out := parts_left_out(checkpoint, model, names.tower if sees else ())):
            what = "this checkpoint" if sees else "the text part of this checkpoint"
            log.info("%s is served, without %s", what, ", ".join(left_out))
        if model.raw.get("denses") == []:  # so said by a GGUF file alone
            log.warning("%s lacks dense_2 and dense_3: its vectors are not the published model's", folder.name)
        if options.int8_inputs and not takes_int8_inputs((checked.layers, checked.head)):
            log.warning(
                "activation_quantization=int8 changes nothing for %s, which has no integers of four bits",
                folder.name,
            )
        with _progress(checkpoint.n_bytes(), folder.name) as advance:
            return model.read(source, model, replace(options, on_read=advance))


def parts_left_out(checkpoint: Checkpoint, model: Model, seen: tuple[str, ...] = ()) -> list[str]:
    """What a checkpoint has beside its model of text, such as an encoder of images, with numbers of tensors. seen:
    prefixes of what is read all the same."""
    names, pooling = model.names, model.plan.pooling
    own: tuple[str, ...] = (names.prefix_in(checkpoint), names.head_in(checkpoint) + ".", *seen)
    if model.plan.drafting is not None:
        own += (names.drafting.prefix,)
    if not own[0]:
        return []
    if pooling is not None:
        denses = (one for one in (*pooling.denses, pooling.sparse, pooling.colbert) if one is not None)
        own += tuple(f"{name}." for one in denses for name in (one.name, one.norm_name) if name)
    parts = Counter(
        ".".join(name.split(".")[: 2 if name.startswith("model.") else 1])
        for name in checkpoint.names()
        if not name.startswith(own) and "/" not in name
    )
    return [f"{part}.* ({n} tensor{'s' * (n > 1)})" for part, n in sorted(parts.items())]


def _has_head(checkpoint: Checkpoint, names: Names) -> bool:
    """Whether the checkpoint has a head of its own."""
    embedding, head = names.prefix_in(checkpoint) + names.embedding, names.head_in(checkpoint)
    if head + ".weight" in checkpoint:
        return not checkpoint.same(embedding, head + ".weight")
    return any(head + weight in checkpoint for weight in WEIGHTS)


def _drafts(checkpoint: Checkpoint, names: Names) -> bool:
    """Whether the checkpoint has a head that drafts."""
    return any(names.drafting.prefix + names.drafting.join + weight in checkpoint for weight in WEIGHTS)


def read_decoder(source: TensorSource, model: Model, options: LoadOptions) -> Decoder:
    """The decoder alone: a `Reader` for families of text."""
    with torch.no_grad():
        return _Walk(source, model.plan, model.names, options, model.names.prefix_in(source)).decoder()


def read_layers(source: TensorSource, plan: ModelPlan, names: Names, options: LoadOptions, prefix: str) -> Decoder:
    """The layers of a plan alone, for what is no decoder of text."""
    walk = _Walk(source, plan, names, options, prefix)
    nothing = options.empty((0, plan.hidden_size))
    return Decoder(
        plan,
        nothing,
        walk._layers(),
        norm=None,
        head=DenseLinear(nothing),
        tables=walk._tables(),
        kernels=options.kernels,
    )


@dataclass(frozen=True, slots=True)
class _Walk:
    source: TensorSource
    plan: ModelPlan
    names: Names
    options: LoadOptions
    prefix: str

    def decoder(self) -> Decoder:
        plan, names = self.plan, self.names
        hidden, width = plan.hidden_size, plan.embedding_width
        embedding = self._embedding()
        layers = self._layers()
        return Decoder(
            plan=plan,
            embedding=embedding,
            layers=layers,
            head=self._head(embedding),
            norm=self._norm(plan.norm, names.norm, hidden),
            tables=self._tables(),
            kernels=self.options.kernels,
            embedding_norm=self._norm(plan.embedding_norm, names.embedding_norm, width),
            positions=self._rows(names.learned_positions, plan.learned_positions, plan.first_position),
            token_types=self._rows(names.token_types, plan.token_types),
            embedding_projection=self._linear((names.embedding_projection,), (hidden,), width, bias=True)
            if plan.embedding_size
            else None,
            per_layer=self._per_layer(),
            pooler=self._pooler(),
            drafting=self._drafting(),
        )

    def _drafting(self) -> DraftingWeights | None:
        if self.plan.drafting is None:
            return None
        names, hidden = self.names.drafting, self.plan.hidden_size
        plan = replace(self.plan, layers=(self.plan.drafting,), drafting=None, stored_layers=())
        walk = replace(self, plan=plan, prefix=names.prefix)
        (layer,), (table,) = walk._layers(), walk._tables()
        norms = [walk._norm(plan.norm, name, hidden) for name in (names.token_norm, names.hidden_norm, names.norm)]
        token, before, behind = norms
        assert token is not None
        assert before is not None
        assert behind is not None
        return DraftingWeights(
            layer, walk._linear((names.join,), (hidden,), 2 * hidden), token, before, behind, table
        )

    def _embedding(self) -> Tensor | CodedTable:
        """Codes, where the file has blocks of codes and the device looks them up."""
        plan, names, options = self.plan, self.names, self.options
        size, name = (plan.vocab_size, plan.embedding_width), self.prefix + names.embedding
        stem = name.removesuffix(".weight")
        check_embedding(stem, lambda suffix: stem + suffix in self.source)
        floats = plan.tied_head and options.head_quantization != "none"  # of which the head is made
        if options.kernels.codes_of_tokens and not floats and plan.pooling is None and name in self.source:
            stored = self.source.quantised(stem, *size)
            if stored is not None and stored.form.codes != torch.float8_e4m3fn:
                coded = coded_layers([stored], options.held(stored.form), options)
                return CodedTable(coded, options.dtype)
        return self._tensor(names.embedding, *size)

    def _head(self, embedding: Tensor | CodedTable) -> Linear:
        plan, options = self.plan, self.options
        if plan.pooling is not None:
            head = options.empty((plan.head_size, plan.hidden_size))
            return DenseLinear(head if options.device.type == "meta" else head.zero_())
        name = self.names.head_in(self.source)
        return read_head(self.source, name, embedding, options, tied=plan.tied_head, bias=plan.head_bias)

    def _rows(self, name: str, n: int, first: int = 0) -> Tensor | None:
        return self._tensor(name, n, self.plan.embedding_width)[first:] if n else None

    def _pooler(self) -> Pooler | None:
        pooling = self.plan.pooling
        if pooling is None:
            return None
        of_tokens = [None if one is None else self._dense(one) for one in (pooling.sparse, pooling.colbert)]
        return Pooler(pooling, tuple(map(self._dense, pooling.denses)), *of_tokens)

    def _dense(self, dense: Dense) -> DenseWeights:
        def read(name: str, *shape: int) -> Tensor:
            return read_tensor(self.source, name, shape, self.options, torch.float32)

        norm = None
        if dense.norm is not None:
            bias = read(f"{dense.norm_name}.bias", dense.outputs) if dense.norm.bias else None
            norm = NormWeights(read(f"{dense.norm_name}.weight", dense.outputs), bias)
        weight = read(f"{dense.name}.weight", dense.outputs, dense.inputs)
        return DenseWeights(weight, read(f"{dense.name}.bias", dense.outputs) if dense.bias else None, norm)

    def _per_layer(self) -> PerLayerTables | None:
        plan, names = self.plan, self.names
        if (per_layer := plan.per_layer) is None:
            return None
        width = plan.n_layers * per_layer.width
        norm = self._norm(per_layer.norm, names.per_layer_norm, per_layer.width)
        assert norm is not None
        return PerLayerTables(
            table=self._tensor(names.per_layer_table, per_layer.vocab_size, width),
            projection=self._linear((names.per_layer_projection,), (width,), plan.hidden_size),
            norm=norm,
        )

    def _tables(self) -> tuple[Tensor | None, ...]:
        tables = {rotary: self._table(rotary) for rotary in self.plan.rotaries}
        rotaries = (mixer.rotary if isinstance(mixer, Attention) else None for mixer in self.plan.mixers)
        return tuple(None if rotary is None else tables[rotary] for rotary in rotaries)

    def _table(self, rotary: Rotary) -> Tensor:
        options = self.options
        if options.device.type == "meta":
            return options.empty((options.max_positions, rotary.dims), torch.float32)
        table = rotary_table(rotary, options.max_positions, options.device)
        return options.empty(table.shape, table.dtype).copy_(table)

    def _layers(self) -> tuple[LayerWeights, ...]:
        """Layers that are stored once share their weights."""
        plan, made = self.plan, dict[tuple[str, str], LayerWeights]()
        places, shared = list(self.names.places(plan)), self._shared_distances()
        for place, layer in zip(places, plan.layers, strict=True):
            if place not in made:
                made[place] = self._layer(*place, layer, shared)
        return tuple(made[place] for place in places)

    def _shared_distances(self) -> Distances | Tensor | None:
        """What all layers read: a table of biases, or the vectors of distances after their norm, float32."""
        found = {mixer.distances for _, mixer in self.plan.attending if mixer.distances is not None}
        if not found:
            return None
        (plan,) = found
        mixer, name = next(iter(self.plan.attending))[1], self.names.distances
        if isinstance(plan, DistanceBias):
            stored = self._tensor(name, plan.buckets, mixer.heads, dtype=torch.float32)
            if self.options.device.type == "meta":
                return BiasTable(self.options.empty((mixer.heads, 2 * self.positions - 1), torch.float32))
            return BiasTable(self._kept(bias_table(plan, stored, self.positions).table))
        vectors = self._tensor(name, plan.vectors, self.plan.hidden_size)
        if (norm := self._norm(plan.norm, self.names.distances_norm, self.plan.hidden_size)) is None:
            return vectors
        assert plan.norm is not None
        return normed(plan.norm, norm, vectors, self.options.kernels)

    @property
    def positions(self) -> int:
        """The positions of the longest text."""
        return min(self.options.max_positions, self.plan.max_position)

    def _kept(self, tensor: Tensor) -> Tensor:
        """The same numbers, in the memory of the model."""
        return self.options.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def _distances(
        self, at: str, mixer: Attention, qkv: Linear, shared: Distances | Tensor | None
    ) -> Distances | None:
        """The distances of a layer."""
        plan, hidden = mixer.distances, self.plan.hidden_size
        if not isinstance(plan, Disentangled):
            assert not isinstance(shared, Tensor)
            return shared
        assert isinstance(shared, Tensor)

        def heads(product: Linear | None, part: slice) -> Tensor | None:
            if product is None:
                return None
            shape = (mixer.heads, plan.vectors, mixer.head_dim)
            if self.options.device.type == "meta":
                return self.options.empty(shape)
            return self._kept(product(shared)[:, part].reshape(plan.vectors, mixer.heads, -1).transpose(0, 1))

        def product(name: str, wanted: bool) -> Linear | None:
            if not wanted or plan.shared:
                return qkv if wanted else None
            return plain._linear((at + name,), (mixer.q_size,), hidden, bias=True)

        plain = replace(self, options=replace(self.options, quantization="none"))
        first, second = slice(mixer.q_size), slice(mixer.q_size, 2 * mixer.q_size)
        keys = heads(product(self.names.distance_keys, plan.keys), second if plan.shared else first)
        queries = heads(product(self.names.distance_queries, plan.queries), first)
        if self.options.device.type == "meta":
            return DistanceVectors(keys, queries, self.options.empty((2 * self.positions - 1,), torch.int64))
        places = vector_places(plan, self.positions, self.options.device)
        return DistanceVectors(keys, queries, self._kept(places))

    def _layer(self, at: str, beside: str, layer: Layer, shared: Distances | Tensor | None) -> LayerWeights:
        """at, beside: see `Names.places`."""
        names, hidden, feed_forward = self.names, self.plan.hidden_size, layer.feed_forward

        def norm(plan: Norm | None, name: str, width: int = hidden, at: str = at) -> NormWeights | None:
            return self._norm(plan, at + name, width)

        def linear(name: LinearName, bias: bool, at: str = at) -> Linear:
            stored = names.stored(name, layer, hidden)
            assert stored is not None
            return self._linear([at + one for one in stored.names], stored.sizes, stored.inputs, bias)

        def attention(mixer: Attention) -> AttentionWeights:
            q_width, k_width = (mixer.q_size, mixer.kv_size) if mixer.norm_whole else (mixer.head_dim,) * 2
            qkv = linear("qkv", mixer.qkv_bias)
            return AttentionWeights(
                qkv=qkv,
                distances=None if mixer.distances is None else self._distances(at, mixer, qkv, shared),
                q_norm=norm(mixer.q_norm, names.q_norm, q_width),
                k_norm=None if mixer.keys_of is not None else norm(mixer.k_norm, names.k_norm, k_width),
                v_norm=None if mixer.keys_of is not None else norm(mixer.v_norm, names.v_norm, mixer.head_dim),
                sinks=self._tensor(at + names.sinks, mixer.heads) if mixer.sinks else None,
                latent=None if mixer.latent is None else self._latent(at, mixer, mixer.latent),
                out=linear("out", mixer.out_bias),
            )

        return LayerWeights(
            mixer_norm=norm(layer.mixer_norm, names.mixer_norm),
            mixer=attention(layer.mixer)
            if isinstance(layer.mixer, Attention)
            else self._recurrent(at, layer.mixer),
            mixer_out_norm=norm(layer.mixer_out_norm, names.mixer_out_norm),
            feed_forward_norm=norm(layer.feed_forward_norm, names.feed_forward_norm, at=beside),
            feed_forward=None
            if feed_forward is None
            else FeedForwardWeights(
                gate_up=linear("gate_up", feed_forward.bias, beside),
                down=linear("down", feed_forward.bias, beside),
            ),
            feed_forward_out_norm=norm(layer.feed_forward_out_norm, names.feed_forward_out_norm, at=beside),
            scalar=self._tensor(at + names.scalar, 1) if layer.scalar else None,
            per_layer=self._per_layer_of(at),
            experts=None if layer.experts is None else self._experts(beside, layer.experts),
        )

    def _latent(self, at: str, mixer: Attention, plan: Latent) -> LatentWeights:
        names, heads, each = self.names.latent, mixer.heads, plan.own + plan.value
        norm, query_norm, queries = self._norm(plan.norm, at + names.norm, plan.rank), None, None
        assert norm is not None
        if plan.query_rank:
            query_norm = self._norm(plan.norm, at + names.query_norm, plan.query_rank)
            queries = self._linear((at + names.query_up,), (mixer.latent_query_size,), plan.query_rank)
        if self.prefix + at + names.keys + ".weight" in self.source:
            keys = self._widened(at + names.keys, heads * plan.rank, plan.own)
            values = self._widened(at + names.values, heads * plan.value, plan.rank)
        else:
            whole = self._widened(at + names.up, heads * each, plan.rank).view(heads, each, plan.rank)
            keys, values = whole[:, : plan.own].transpose(1, 2), whole[:, plan.own :]
        return LatentWeights(
            keys=DenseLinear(self._kept(keys).view(-1, plan.own)),
            values=DenseLinear(self._kept(values).view(-1, plan.rank)),
            norm=norm,
            queries=queries,
            query_norm=query_norm,
        )

    def _widened(self, name: str, outputs: int, inputs: int) -> Tensor:
        """The weights of a stored layer in the model's type, whatever they are stored in, outside the model's
        memory: [outputs, inputs]."""
        options = replace(self.options, quantization="none", storage=Storage(), kernels=TorchKernels())
        linear = replace(self, options=options)._linear((name,), (outputs,), inputs)
        if isinstance(linear, DenseLinear) or options.device.type == "meta":
            return linear.weight if isinstance(linear, DenseLinear) else options.empty((outputs, inputs))
        return linear(torch.eye(inputs, device=options.device)).t().to(options.dtype)

    def _recurrent(self, at: str, plan: Recurrent) -> RecurrentWeights:
        names, hidden = self.names.recurrent, self.plan.hidden_size
        stored = [at + name for name in names.inputs]
        kernel = self._tensor(f"{at}{names.convolution}.weight", plan.channels, 1, plan.kernel).squeeze(1)
        if isinstance(plan, Mamba2):
            return self._mamba2(at, plan, kernel)
        if not isinstance(plan, DeltaNet):
            bias = self._tensor(f"{at}{names.convolution}.bias", plan.channels) if plan.bias else None
            inputs = self._linear(stored, (3 * hidden,), hidden, plan.bias)
            return ShortConvolutionWeights(
                inputs, kernel, bias, self._linear((at + names.out,), (hidden,), hidden, plan.bias)
            )
        plain = replace(self, options=replace(self.options, quantization="none"))
        norm = self._norm(plan.norm, at + names.norm, plan.value_dim)
        assert norm is not None
        return DeltaNetWeights(
            inputs=self._linear(stored, plan.input_sizes, hidden),
            gates=plain._linear([at + name for name in names.gates], plan.gate_sizes, hidden),
            convolution=kernel,
            fading=self._tensor(at + names.decay, plan.value_heads, dtype=torch.float32).exp_().neg_(),
            bias=self._tensor(at + names.bias, plan.value_heads, dtype=torch.float32),
            norm=norm,
            out=self._linear((at + names.out,), (hidden,), plan.value_size),
        )

    def _mamba2(self, at: str, plan: Mamba2, kernel: Tensor) -> Mamba2Weights:
        names, hidden, wide = self.names.recurrent, self.plan.hidden_size, torch.float32
        norm = self._norm(plan.norm, at + names.norm, plan.inner)
        assert norm is not None
        bias = f"{at}{names.convolution}.bias"
        return Mamba2Weights(
            inputs=self._linear(
                [at + name for name in names.inputs],
                (plan.inner + plan.channels + plan.heads,),
                hidden,
                plan.bias,
            ),
            convolution=kernel,
            convolution_bias=self._tensor(bias, plan.channels) if plan.convolution_bias else None,
            fading=self._tensor(at + names.decay, plan.heads, dtype=wide).exp_().neg_(),
            bias=self._tensor(at + names.bias, plan.heads, dtype=wide),
            skip=self._tensor(at + names.skip, plan.heads, dtype=wide),
            norm=norm,
            out=self._linear((at + names.out,), (hidden,), plan.inner, plan.bias),
        )

    def _experts(self, at: str, plan: Experts) -> ExpertWeights:
        names, hidden, each, n = self.names, self.plan.hidden_size, plan.each, plan.router.experts
        experts = [at + names.expert.format(i) for i in range(n)]
        gate_up = names.expert_gate_up if each.gated else names.expert_gate_up[-1:]
        up = [expert + name for expert in experts for name in gate_up]
        down = [expert + names.expert_down for expert in experts]
        return ExpertWeights(
            router=self._router(at, plan.router),
            gate_up=StackedLinear(self._linear(up, each.up_sizes * n, hidden, each.bias), n, sum(each.up_sizes)),
            down=StackedLinear(self._linear(down, (hidden,) * n, each.inner, each.bias), n, hidden),
            taken=self.options.empty((n,), torch.int64).zero_(),
            norm=self._norm(plan.norm, at + names.experts_norm, hidden),
            out_norm=self._norm(plan.out_norm, at + names.experts_out_norm, hidden),
            dense_out_norm=self._norm(plan.dense_out_norm, at + names.dense_out_norm, hidden),
            dense_gate=DenseLinear(self._tensor(at + names.dense_gate + ".weight", 1, hidden))
            if plan.dense_gate
            else None,
        )

    def _router(self, at: str, plan: Router) -> RouterWeights:
        """In float32 what is added to scores or multiplied with them."""
        names, n, hidden, wide = self.names, plan.experts, self.plan.hidden_size, torch.float32
        return RouterWeights(
            logits=DenseLinear(
                self._tensor(at + names.router + ".weight", n, hidden),
                self._tensor(at + names.router + ".bias", n) if plan.bias else None,
            ),
            correction=self._tensor(at + names.router_correction, n, dtype=wide) if plan.correction else None,
            scale=self._tensor(at + names.router_scale, hidden, dtype=wide) if plan.of_stream else None,
            expert_scales=self._tensor(at + names.expert_scales, n, dtype=wide) if plan.expert_scales else None,
        )

    def _per_layer_of(self, at: str) -> PerLayerWeights | None:
        names, hidden = self.names, self.plan.hidden_size
        if (per_layer := self.plan.per_layer) is None:
            return None
        norm = self._norm(per_layer.layer_norm, at + names.per_layer_out_norm, hidden)
        assert norm is not None
        return PerLayerWeights(
            gate=self._linear((at + names.per_layer_gate,), (per_layer.width,), hidden),
            out=self._linear((at + names.per_layer_out,), (hidden,), per_layer.width),
            norm=norm,
        )

    def _norm(self, norm: Norm | None, name: str, width: int) -> NormWeights | None:
        if norm is None:
            return None
        whole = self.prefix + name
        old = whole + ".gamma" in self.source and whole + ".weight" not in self.source
        weight, (of_weight, of_bias) = None, _NORM_TENSORS[old]
        if norm.weight:
            weight = self._tensor(name + of_weight, width, dtype=torch.float32 if norm.offset else None)
            if norm.offset:
                weight += norm.offset
        return NormWeights(weight, self._tensor(name + of_bias, width) if norm.bias else None)

    def _linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        whole = [self.prefix + name for name in names]
        return read_linear(self.source, whole, sizes, inputs, self.options, bias=bias)

    def _tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return read_tensor(self.source, self.prefix + name, shape, self.options, dtype)


_NORM_TENSORS = ((".weight", ".bias"), (".gamma", ".beta"))
"""The tensors of a norm, and what they are called in checkpoints that were TensorFlow's."""


@contextmanager
def _progress(n_bytes: int, what: str) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes, for large loads on an interactive terminal."""
    from tqdm import tqdm

    quiet = n_bytes < _PROGRESS_FROM_BYTES or switch("progress") == "off"
    settings: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with tqdm(total=n_bytes, desc=f"loading {what}", disable=True if quiet else None, **settings) as bar:
        yield bar.update
