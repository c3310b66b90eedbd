"""Loads model weights onto the device, given the model's name.

A name is a folder, a model that ships with the project ("petiole-tiny", "petiole-tiny-vision") or a Hugging Face
hub id. Tensors are copied one by one from the memory-mapped file to their place on the device. On the way they are
converted, joined with others if one product computes them together, and quantized if the settings say so. The host
never holds more than the weights and one tensor.
"""

from __future__ import annotations

import atexit
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from petiole.gpu_worker.config import switch
from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint import formats
from petiole.gpu_worker.models.checkpoint.safetensors import DTYPES, Checkpoint
from petiole.gpu_worker.models.config import ModelConfig, read_json
from petiole.gpu_worker.models.decoder import Decoder, DecoderLayer
from petiole.gpu_worker.models.host_memory import new_tensor
from petiole.gpu_worker.models.layers import (
    DenseLinear,
    Fp8Linear,
    Int8Linear,
    Kernels,
    Linear,
    TorchKernels,
    quantize_fp8,
    quantize_int8,
)
from petiole.gpu_worker.models.rotary import rotary_table

SHIPPED = ("petiole-tiny", "petiole-tiny-vision")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
PREFIX = "model."
"""Of all tensors but the head. A checkpoint that was saved without a head may lack the prefix."""
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_HUB_COPIES = ["consolidated*.safetensors", "original/*", "onnx/*"]
"""Files on the hub that are not downloaded: copies of the weights in other formats."""
_PROGRESS_FROM_BYTES = 256 * 2**20
_HEAD_ROWS = 8192  # of a head in 8 bits, as many at a time are floats
_VOLATILE_KEYS = frozenset({"transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache"})

Quantization = Literal["none", "int8", "fp8"]


def resolve_model(model: str, revision: str | None = None) -> Path:
    """The local folder of a model. Downloads it from the hub if needed.

    Respects HF_TOKEN, HF_HOME and HF_HUB_OFFLINE, like huggingface_hub.
    """
    if model in SHIPPED:
        return Path(__file__).parent.parent / model.replace("-", "_")
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            formats.refuse(path)
            return path
        if path.is_file():
            formats.refuse_file(path)
    except (
        OSError,
        RuntimeError,
    ) as error:  # an unreadable folder, a name that is too long, the "~" of an unknown user
        raise ModelError(f"model folder {model}: {error}") from error
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise ModelError(f"model folder {model} does not exist")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    atexit.register(_remove_unfinished_downloads)
    try:
        found = snapshot_download(model, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_COPIES)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        where = f"{model}@{revision}" if revision else model
        raise ModelError(
            f"model {where} is not a local folder, and the hub does not provide it: {reason}"
        ) from error
    formats.refuse(Path(found))
    return Path(found)


def _remove_unfinished_downloads() -> None:
    """When this process ends, remove its unfinished downloads. They take gigabytes, and the hub's client
    would never continue them.

    The client's threads still run: a file that one of them opens or renames at this moment may be left behind.
    """
    for descriptor in Path("/proc/self/fd").glob("*"):
        with suppress(OSError):
            file = descriptor.readlink()
            if file.suffix == ".incomplete":
                file.unlink()


def fingerprint(folder: Path) -> str:
    """A hash of a model's content: its configuration, and each tensor's name, dtype, shape and first bytes.

    A checkpoint has the same hash on any machine and with any sharding. Reads a few hundred bytes per tensor.
    """
    raw = {k: v for k, v in read_json(folder / "config.json").items() if k not in _VOLATILE_KEYS}
    digest = hashlib.sha256(json.dumps(raw, sort_keys=True).encode())
    with Checkpoint(folder) as checkpoint:
        for name in checkpoint.names():
            entry = checkpoint.entry(name)
            digest.update(f"{name} {entry.dtype} {entry.shape}".encode())
            digest.update(checkpoint.sample(name))
    return digest.hexdigest()[:16]


def stored_dtype(folder: Path) -> str:
    """The type of a checkpoint's weights, such as "bfloat16". As in transformers, it is the type of the first
    floating-point tensor; "" if there is none."""
    with Checkpoint(folder) as checkpoint:
        stored = (entry.dtype for file in checkpoint.files for entry in file.entries.values())
        return next((str(DTYPES[name]).removeprefix("torch.") for name in stored if name in DTYPES), "")


class Storage:
    """The memory of a decoder's tensors. After `rewind`, `empty` returns the same tensors in the same order, so
    that another decoder of the same layout can be read into them. `empty` calls `progress` first."""

    def __init__(self) -> None:
        self.progress: Callable[[], None] = lambda: None
        self._tensors: list[Tensor] = []
        self._used = 0

    @property
    def layout(self) -> list[tuple[torch.Size, torch.dtype]]:
        return [(tensor.shape, tensor.dtype) for tensor in self._tensors]

    def rewind(self) -> None:
        self._used = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        self.progress()
        if self._used == len(self._tensors):
            self._tensors.append(new_tensor(shape, dtype, device))
        tensor = self._tensors[self._used]
        self._used += 1
        assert (tensor.shape, tensor.dtype, tensor.device.type) == (tuple(shape), dtype, device.type)
        return tensor


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The target device and format of weights. `max_positions`: length of the rotary table.

    On the "meta" device, loading only checks that all tensors exist and have the right shape; it reads none.
    """

    device: torch.device
    dtype: torch.dtype
    max_positions: int
    quantization: Quantization = "none"
    kernels: Kernels | None = None
    storage: Storage = field(default_factory=Storage)

    def empty(self, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
        return self.storage.empty(shape, dtype or self.dtype, self.device)


class TensorSource(Protocol):
    """The source of a decoder's tensors: a `Checkpoint`, or generated ones in benchmarks."""

    def copy(self, name: str, into: Tensor) -> int:
        """Copy the named tensor to `into`. Returns the number of bytes read."""
        ...


def read_decoder(
    source: TensorSource,
    config: ModelConfig,
    options: LoadOptions,
    advance: Callable[[int], object] = lambda n_bytes: None,
    prefix: str = PREFIX,
) -> Decoder:
    with torch.no_grad():
        return _Loader(source, config, options, advance, prefix).decoder()


def load_decoder(folder: Path, config: ModelConfig, options: LoadOptions) -> Decoder:
    """Read a checkpoint's weights into a decoder. Raises ModelError for missing tensors and wrong shapes.

    As in transformers, a head that differs from the embedding is used even if the configuration ties them.
    """
    with Checkpoint(folder) as checkpoint:
        bare = EMBEDDING in checkpoint and PREFIX + EMBEDDING not in checkpoint
        prefix = "" if bare else PREFIX
        if config.tied_head and HEAD in checkpoint and not checkpoint.same(prefix + EMBEDDING, HEAD):
            config = replace(config, tied_head=False)
        if options.device.type == "meta":
            return read_decoder(checkpoint, config, options, prefix=prefix)
        # Check all names and shapes before allocating memory: the sizes in the configuration may be wrong.
        meta = replace(options, device=torch.device("meta"), storage=Storage())
        read_decoder(checkpoint, config, meta, prefix=prefix)
        n_bytes = checkpoint.n_bytes()
        with _progress(n_bytes, folder.name) as advance:
            return read_decoder(checkpoint, config, options, advance, prefix)


@dataclass(frozen=True, slots=True)
class _Loader:
    checkpoint: TensorSource
    config: ModelConfig
    options: LoadOptions
    advance: Callable[[int], object]
    prefix: str

    def decoder(self) -> Decoder:
        config, options = self.config, self.options
        embedding = self._tensor(self.prefix + EMBEDDING, config.vocab_size, config.hidden_size)
        layers = tuple(self._layer(i) for i in range(config.n_layers))
        head = self._head(embedding)
        return Decoder(
            config=config,
            embedding=embedding,
            layers=layers,
            norm=self._tensor(self.prefix + "norm.weight", config.hidden_size),
            head=head,
            rotary=self._rotary(),
            kernels=options.kernels or TorchKernels(),
        )

    def _head(self, embedding: Tensor) -> Linear:
        """In 8-bit integers where the layers are: a token reads all of the head, but one row of the embedding."""
        options, weight = self.options, embedding
        int8 = options.quantization == "int8"
        if not self.config.tied_head:
            weight = torch.empty_like(embedding) if int8 else options.empty(embedding.shape)
            self.advance(self.checkpoint.copy(HEAD, weight))
        if not int8:
            return DenseLinear(weight)
        values, scale = options.empty(weight.shape, torch.int8), options.empty(weight.shape[:1])
        parts = zip(*(torch.split(tensor, _HEAD_ROWS) for tensor in (weight, values, scale)), strict=True)
        for part, to_values, to_scale in parts:
            quantized, scales = quantize_int8(part)
            to_values.copy_(quantized)
            to_scale.copy_(scales)
        return Int8Linear(values, scale)

    def _rotary(self) -> Tensor:
        config, options = self.config, self.options
        if options.device.type == "meta":
            return options.empty((options.max_positions, config.head_dim), torch.float32)
        table = rotary_table(config.rope, config.head_dim, options.max_positions, options.device)
        return options.empty(table.shape, table.dtype).copy_(table)

    def _layer(self, i: int) -> DecoderLayer:
        config, at = self.config, f"{self.prefix}layers.{i}."
        attention, mlp = at + "self_attn.", at + "mlp."
        hidden, inner = config.hidden_size, config.intermediate_size
        qkv_sizes = [config.q_size, config.kv_size, config.kv_size]
        return DecoderLayer(
            input_norm=self._tensor(at + "input_layernorm.weight", hidden),
            qkv=self._linear(
                [attention + n for n in ("q_proj", "k_proj", "v_proj")], qkv_sizes, hidden, bias=config.qkv_bias
            ),
            q_norm=self._tensor(attention + "q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=self._tensor(attention + "k_norm.weight", config.head_dim) if config.qk_norm else None,
            out=self._linear([attention + "o_proj"], [hidden], config.q_size, bias=config.out_bias),
            post_norm=self._tensor(at + "post_attention_layernorm.weight", hidden),
            gate_up=self._linear(
                [mlp + "gate_proj", mlp + "up_proj"], [inner, inner], hidden, bias=config.mlp_bias
            ),
            down=self._linear([mlp + "down_proj"], [hidden], inner, bias=config.mlp_bias),
        )

    def _tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self.options.empty(shape)
        self.advance(self.checkpoint.copy(name, tensor))
        return tensor

    def _linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, *, bias: bool) -> Linear:
        """Several linear layers with the same input, fused into one."""
        joint = self._joint([n + ".bias" for n in names], sizes, ()) if bias else None
        if self.options.quantization != "none":
            return self._quantized(names, sizes, inputs, joint)
        return DenseLinear(self._joint([n + ".weight" for n in names], sizes, (inputs,)), joint)

    def _joint(self, names: Sequence[str], sizes: Sequence[int], rest: tuple[int, ...]) -> Tensor:
        joint = self.options.empty((sum(sizes), *rest))
        for name, part in zip(names, torch.split(joint, list(sizes)), strict=True):
            self.advance(self.checkpoint.copy(name, part))
        return joint

    def _quantized(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: Tensor | None) -> Linear:
        """Quantize part by part: memory holds the unquantized weights of one part at a time."""
        int8, device = self.options.quantization == "int8", self.options.device
        dtype = torch.int8 if int8 else torch.float8_e4m3fn
        weight = self.options.empty((sum(sizes), inputs), dtype)
        scale = self.options.empty((sum(sizes),), None if int8 else torch.float32)
        parts = zip(names, torch.split(weight, list(sizes)), torch.split(scale, list(sizes)), strict=True)
        for name, weight_part, scale_part in parts:
            full = torch.empty(weight_part.shape, dtype=torch.float32, device=device)
            self.advance(self.checkpoint.copy(name + ".weight", full))
            quantized, scales = (quantize_int8 if int8 else quantize_fp8)(full)
            weight_part.copy_(quantized)
            scale_part.copy_(scales)
        if int8:
            return Int8Linear(weight, scale, bias)
        kernels = self.options.kernels or TorchKernels()
        return Fp8Linear(weight, scale[None, :], kernels.quantize_rows, bias)


@contextmanager
def _progress(n_bytes: int, what: str) -> Iterator[Callable[[int], None]]:
    """A progress bar in bytes, for large loads on an interactive terminal."""
    from tqdm import tqdm

    quiet = n_bytes < _PROGRESS_FROM_BYTES or switch("progress") == "off"
    settings: dict[str, Any] = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}
    with tqdm(total=n_bytes, desc=f"loading {what}", disable=True if quiet else None, **settings) as bar:
        yield bar.update
