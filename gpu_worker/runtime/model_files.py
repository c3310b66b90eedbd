"""Finding a model, and reading its weights into device memory. A reload reads into the same memory.

Captured graphs hold the addresses of the weights, so a reload must not move them. Nor may memory have room for two
models. So a model is checked before its weights are read: its tensors must have the layout of the first model's.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.finding import files_of_weights, resolve_model
from petiole.gpu_worker.models.checkpoint.identity import fingerprint, stored_dtype
from petiole.gpu_worker.models.checkpoint.named_tokens import NamedTokens
from petiole.gpu_worker.models.checkpoint.opening import end_token_ids, is_gguf
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.families.registry import find_model
from petiole.gpu_worker.models.loading import LoadOptions, Model, load_model
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.copying import Storage, TensorSource
from petiole.gpu_worker.models.weights.quantized import takes_int8_inputs
from petiole.gpu_worker.runtime.derived_settings import (
    drafts_by_head,
    head_quantization,
    int8_inputs,
    max_model_len,
    quantization,
    same_shape,
    weights_dtype,
)
from petiole.gpu_worker.runtime.interface import Progress, nothing
from petiole.gpu_worker.runtime.memory.container import host_memory
from petiole.gpu_worker.runtime.platforms import Platform

_SETTINGS = {field.name for field in dataclasses.fields(EngineConfig)}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The facts of a model, without its weights. name: as it was asked for. max_model_len: the most positions of a
    sequence that are served. files: see `files_of_weights`."""

    name: str
    folder: Path
    model: Model
    fingerprint: str
    files: str
    eos_token_ids: frozenset[int]
    max_model_len: int

    @property
    def plan(self) -> ModelPlan:
        return self.model.plan


class ModelReader:
    """Reads models, one after the other into the same memory. `source` replaces the weight files of the model's
    folder, which then needs only its config.json."""

    def __init__(self, config: EngineConfig, source: TensorSource | None, platform: Platform) -> None:
        self._config, self._source, self._platform = config, source, platform
        self._storage = Storage()
        self._tokens: NamedTokens | None = None  # of the served model

    @property
    def weight_bytes(self) -> int:
        """The bytes of the weights of the served model."""
        return self._storage.n_bytes

    @property
    def layout(self) -> Sequence[tuple[torch.Size, torch.dtype]]:
        """Shapes and types of its tensors."""
        return self._storage.layout

    def find(self, model: str) -> ModelInfo:
        """Read the model's configuration, downloading it if needed. Raises ModelError."""
        folder = resolve_model(model, self._config.revision)
        with _naming(folder):
            return self._found(model, folder)

    def _found(self, model: str, folder: Path) -> ModelInfo:
        found = find_model(folder, self._tokens)
        plan = found.plan
        if plan.pooling is not None or not drafts_by_head(self._config, self._platform):
            plan = replace(plan, drafting=None)
        if self._source is None and not plan.dtype:
            plan = replace(plan, dtype=stored_dtype(folder))
        more = _pooled_as(found)
        digest = fingerprint(folder, found.modules, more) if self._source is None else "unknown"
        longest = max_model_len(self._config, plan)
        settled = plan.at_length(longest - (plan.pooling is not None))  # no position is that of the vector
        if settled is not plan:
            digest = _joined(digest, settled)
        digest = _quantised(digest, self._config, self._platform)
        if found.pictures is not None:  # a task that goes on elsewhere must have the same prompt there
            config = self._config
            seen = f"image tokens {config.image_tokens} video {config.video_frames} {config.video_tokens}"
            digest = _with(digest, seen)
        ends = end_token_ids(folder) or frozenset(plan.eos_token_ids)
        files = files_of_weights(folder) if self._source is None else "unknown"
        info = ModelInfo(model, folder, replace(found, plan=settled), digest, files, ends, longest)
        return replace(info, fingerprint=_with(digest, "inputs int8")) if self._rounds_inputs(info) else info

    def read(self, info: ModelInfo, progress: Progress = nothing) -> Decoder:
        """Read the weights: at first into new memory, later over the previous ones. Raises ModelError."""
        self._platform.require(info.plan)
        self._storage.rewind()
        self._storage.progress, self._tokens = progress, info.model.tokens
        return self._read(info, self._platform.place, self._storage)

    def foresee(self, info: ModelInfo) -> Decoder:
        """The decoder with shapes in place of weights: none are read, and `layout` is that of the weights. Raises
        ModelError."""
        self._platform.require(info.plan)
        return self._read(info, torch.device("meta"), self._storage)

    def check(self, info: ModelInfo, served: ModelInfo) -> None:
        """Raises ModelError if `read` could not put this model in the place of the one that is served."""
        new = Storage()
        if same_shape(info.plan, served.plan):
            self._read(info, torch.device("meta"), new, scanned=True)
        if new.layout != self._storage.layout:
            what = f"{info.name} has another shape or type than {served.name}"
            raise ModelError(f"{what}; start a new engine for it")

    def _rounds_inputs(self, info: ModelInfo) -> bool:
        """Whether some linear layer takes its inputs in eight bits."""
        if not int8_inputs(self._config, self._platform):
            return False
        decoder = self._read(info, torch.device("meta"), Storage())
        return takes_int8_inputs((decoder.layers, decoder.head))

    def _read(self, info: ModelInfo, device: torch.device, storage: Storage, *, scanned: bool = False) -> Decoder:
        steps = {name: getattr(self._config, name) for name in ("chunk_size", "max_num_batched_tokens")}
        given = {name: size for name, size in steps.items() if size}  # others are made large enough
        options = LoadOptions(
            device=device,
            dtype=weights_dtype(self._config, info.plan, self._platform),
            max_positions=info.max_model_len + 1,
            quantization=quantization(self._config, self._platform),
            head_quantization=head_quantization(self._config, self._platform),
            int8_inputs=int8_inputs(self._config, self._platform),
            kernels=self._platform.kernels,
            storage=storage,
            block_reader=self._platform.block_reader,
            scanned=scanned,
            sizes={**given, "max_model_len": info.max_model_len},
            room=host_memory() if device.type == "cpu" and not storage.n_bytes else None,
        )
        if self._source is not None:
            return info.model.read(self._source, info.model, options)
        with _naming(info.folder):
            return load_model(info.folder, info.model, options)


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """Has errors of a model name its folder or file, which those of its configuration and its tensors do not know;
    those of a setting name the setting. Of a GGUF file no config.json was read."""
    try:
        yield
    except ModelError as error:
        said = str(error)
        if type(error) is not ModelError or str(folder) in said or said.partition(":")[0] in _SETTINGS:
            raise
        said = said.removeprefix("config.json: ") if is_gguf(folder) else said
        raise ModelError(f"{folder}: {said}") from error


def _pooled_as(model: Model) -> str:
    """What outputs depend on beside the weights: of a model of texts how they are pooled, of a model that sees how
    pictures are made ready. What is hashed is written down by name, as below."""
    pooling, texts = model.plan.pooling, model.texts
    if pooling is None:
        judged = "" if model.judge is None else str(dataclasses.astuple(model.judge))
        return judged + (str(sorted(model.pictures.items())) if model.pictures else "")
    denses = [(dense.name, dense.activation) for dense in pooling.denses]
    prompts = None if texts is None else sorted(texts.prompts.items()), texts and texts.default_prompt
    taken = texts and (texts.max_tokens, texts.lower_case)
    kinds = "+".join(pooling.kinds) + ("" if pooling.prompts else " without prompts")
    return f"{kinds} {pooling.normalize} {denses} {prompts} {taken}"


def _joined(digest: str, plan: ModelPlan) -> str:
    """The fingerprint of weights whose rotations were settled for the served length: keys and values of two such
    models differ. What is hashed is written down by name, so that a new field of a plan changes no fingerprint."""
    return _with(digest, [(rotary.theta, rotary.short_factors) for rotary in plan.rotaries])


def _quantised(digest: str, config: EngineConfig, platform: Platform) -> str:
    """The fingerprint of weights that are quantised while they are loaded: they are other weights, so a task that
    began with them does not go on with the plain ones. Weights that are loaded as they are keep theirs."""
    layers, head = quantization(config, platform), head_quantization(config, platform)
    if layers != "none" or head != "none":
        return _with(digest, f"layers {layers}, head {head}")
    return digest


def _with(digest: str, more: object) -> str:
    return hashlib.sha256(f"{digest} {more}".encode()).hexdigest()[: len(digest)]
