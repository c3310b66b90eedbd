"""What a worker would allocate for a model on a machine of some size, by the decisions of `building`.

The decoder is laid out with shapes in place of weights. From a folder with weights, their headers are read, and
some bytes of each for the model's fingerprint; a config.json alone stands for plain weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from petiole.cache import WindowPages, most_pages
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.exceptions import MachineError, ModelError, require
from petiole.gpu_worker.models.adapters.lora import AdaptedModel
from petiole.gpu_worker.models.checkpoint.finding import CONFIGURATION, resolve_model
from petiole.gpu_worker.models.checkpoint.opening import config_of, is_gguf
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.families.registry import find_model
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.models.weights.copying import TensorSource
from petiole.gpu_worker.models.weights.description import formats_of
from petiole.gpu_worker.models.weights.formats.quantization_config import declared_by
from petiole.gpu_worker.models.weights.source import QuantisedLayer
from petiole.gpu_worker.runtime.building import PoolSizes, decided, pools_of, require_rows
from petiole.gpu_worker.runtime.cpu.platform import CpuPlatform
from petiole.gpu_worker.runtime.derived_settings import require_head, require_states_alone
from petiole.gpu_worker.runtime.device.cpu import CpuDevice
from petiole.gpu_worker.runtime.memory.container import host_memory_left
from petiole.gpu_worker.runtime.memory.room import page_bytes, pool_bytes, snapshot_bytes, states_of_row
from petiole.gpu_worker.runtime.memory.states import state_bytes
from petiole.gpu_worker.runtime.model_files import ModelReader
from petiole.gpu_worker.runtime.platforms import Platform


@dataclass(frozen=True, slots=True)
class Window:
    """A group of layers that keep a window: the bytes of a token in them, and their pages with the reserved one.
    pages 0: these layers have no pool of their own, and keep everything."""

    window: int
    bytes_per_token: int
    pages: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model needs, and what a machine serves of it.

    weights: bytes by type in memory. weight_format: as in `Computing`. kv_bytes_per_token: in all layers; those of
    `windows` hold it as long as a window reaches. state_bytes: of a sequence; snapshot_bytes: of a snapshot.
    pages, snapshots: with the reserved one. pool_bytes: of keys, values and snapshots. tokens: that the pages
    hold, cached prefixes included. sequences: of `length` tokens, which run at once. bounded_by: the setting that
    allows no more."""

    model: str
    architecture: str
    device: Literal["cpu", "cuda"]
    memory_bytes: int
    weight_bytes: int
    weights: dict[str, int]
    weight_format: str
    kv_type: str
    kv_bytes_per_token: int
    windows: tuple[Window, ...]
    state_bytes: int
    snapshot_bytes: int
    rows: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    pages: int
    snapshots: int
    pool_bytes: int
    tokens: int
    length: int
    sequences: int
    bounded_by: Literal["max_num_seqs", "num_pages", "max_num_batched_tokens"]


def sizes_of(
    config: EngineConfig,
    memory: int | None = None,
    length: int | None = None,
    capability: tuple[int, int] | None = None,
) -> Sizes:
    """What a worker with these settings does. memory: bytes of a card, or bytes that are free on the host; None:
    this machine's. length: of a sequence; None: the longest. capability: the card's compute capability; None: one
    that multiplies all types. Nothing is downloaded.

    Raises ModelError for what cannot be served, and InvalidRequest for settings that do not fit."""
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    whole = _memory_here(device) if memory is None else memory
    folder, source = _found(config)
    used = 0
    platform = _platform(device, whole, lambda: whole - used, capability)
    with torch.no_grad():
        reader = ModelReader(config, source, platform)
        info = reader.find(str(folder))
        require_states_alone(config, info.plan)
        decoder = reader.foresee(info)
        require_head(config, decoder.plan)
        used = reader.weight_bytes
        if used >= whole:
            raise MachineError(f"memory: must be more than {used} bytes, which the weights take, got {whole}")
        config = decided(config, info, decoder, platform)
        require_rows(config, decoder, platform)
        if device == "cuda" and config.lora_slots:  # the host's memory is taken when it is written
            each = AdaptedModel(info.plan, info.model.names).rank_bytes(decoder.dtype.itemsize)
            used += (config.lora_slots + 1) * config.lora_max_rank * each
        pools = pools_of(config, decoder, platform)
    return _sizes(config, decoder, pools, reader.layout, device=device, memory=whole, length=length)


def _sizes(
    config: EngineConfig,
    decoder: Decoder,
    pools: PoolSizes,
    layout: Sequence[tuple[torch.Size, torch.dtype]],
    *,
    device: Literal["cpu", "cuda"],
    memory: int,
    length: int | None,
) -> Sizes:
    plan, size, longest = decoder.plan.with_drafting, pools.dtype.itemsize, config.max_model_len
    at = longest if length is None else length
    require(1 <= at <= longest, "length", f"must be 1 to {longest}, the longest sequence", at)
    weights = Counter[str]()
    for shape, dtype in layout:
        weights[_name(dtype)] += shape.numel() * dtype.itemsize
    fitting = config.max_num_batched_tokens // at if plan.whole_texts else _sequences(config, pools, at)
    limit: Literal["num_pages", "max_num_batched_tokens"]
    limit = "max_num_batched_tokens" if plan.whole_texts else "num_pages"
    return Sizes(
        model=config.model,
        architecture=plan.architecture,
        device=device,
        memory_bytes=memory,
        weight_bytes=weights.total(),
        weights=dict(weights.most_common()),
        weight_format=formats_of(decoder),
        kv_type=_name(pools.dtype),
        kv_bytes_per_token=page_bytes(config, plan, size) // config.page_size,
        windows=tuple(_windows(plan, pools)),
        state_bytes=states_of_row(config) * state_bytes(plan, decoder.dtype.itemsize),
        snapshot_bytes=snapshot_bytes(config, plan, decoder.dtype.itemsize),
        rows=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=longest,
        page_size=config.page_size,
        pages=pools.n_pages,
        snapshots=pools.snapshots,
        pool_bytes=_pool_bytes(config, plan, pools, decoder.dtype.itemsize),
        tokens=(pools.n_pages - 1) * config.page_size,
        length=at,
        sequences=min(config.max_num_seqs, fitting),
        bounded_by="max_num_seqs" if config.max_num_seqs <= fitting else limit,
    )


def _sequences(config: EngineConfig, pools: PoolSizes, length: int) -> int:
    """How many sequences of this length the pages of every pool hold, while one of them is in a prompt. Page 0 is
    reserved."""
    each, decode = -(-length // config.page_size), 1 + config.speculative_tokens

    def of_window(pool: WindowPages) -> int:
        steps = (config.longest_step, decode)
        first, later = (min(each, most_pages(pool.window, config.page_size, step)) for step in steps)
        return max(0, 1 + (pool.n_pages - 1 - first) // later)

    return min([(pools.n_pages - 1) // each, *map(of_window, pools.windows)])


def _windows(plan: ModelPlan, pools: PoolSizes) -> list[Window]:
    elements, pages = Counter[int](), dict(pools.windows)
    for i, mixer in plan.caches:
        elements[plan.kept_windows[i]] += mixer.kept_size
    sizes = sorted((window, n * pools.dtype.itemsize) for window, n in elements.items() if window)
    return [Window(window, n_bytes, pages.get(window, 0)) for window, n_bytes in sizes]


def _pool_bytes(config: EngineConfig, plan: ModelPlan, pools: PoolSizes, of_states: int) -> int:
    size = pools.dtype.itemsize
    if pools.windows or pools.snapshots:
        return pool_bytes(config, plan, size, pools.n_pages, of_states=of_states)
    return pools.n_pages * page_bytes(config, plan, size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _memory_here(device: Literal["cpu", "cuda"]) -> int:
    if device == "cpu":
        return host_memory_left()
    if not torch.cuda.is_available():
        raise MachineError("memory: must be given for device cuda, because torch sees no GPU here, got nothing")
    return int(torch.cuda.get_device_properties(0).total_memory)


def _platform(
    device: Literal["cpu", "cuda"], memory: int, left: Callable[[], int], capability: tuple[int, int] | None
) -> Platform:
    """left: bytes of the memory that nothing has taken yet."""
    if device == "cpu":
        return CpuPlatform(CpuDevice(), left)
    from petiole.gpu_worker.runtime.cuda.simulated import SimulatedCard

    return SimulatedCard(memory, left, capability)


# -- the model


@dataclass(frozen=True, slots=True)
class Served:
    """How a model is served. makes: "text", "vectors" or "scores". cuda: why CUDA does not, if so."""

    model: str
    architecture: str
    makes: Literal["text", "vectors", "scores"]
    layers: int
    max_position: int
    cuda: str | None


def served(model: str, revision: str | None = None) -> Served:
    """Whether a model is served, by its configuration alone: a folder, its config.json, or a hub id, of which the
    configuration is downloaded. Raises ModelError for what is not served."""
    from petiole.gpu_worker.runtime.cuda.simulated import SimulatedCard

    given = Path(model)
    where = str(given.parent) if given.name == "config.json" else model
    plan = find_model(resolve_model(where, revision, files=CONFIGURATION)).plan
    makes: Literal["text", "vectors", "scores"] = "text"
    if plan.pooling is not None:
        makes = "scores" if plan.pooling.labels else "vectors"
    refused = None
    try:
        SimulatedCard(0, lambda: 0).require(plan)
    except ValueError as error:
        refused = str(error)
    return Served(model, plan.architecture, makes, plan.n_layers, plan.max_position, refused)


class _PlainWeights:
    """The tensors of a model whose weight files are not here: all plain."""

    def __contains__(self, name: str) -> bool:
        return False

    def copy(self, name: str, into: torch.Tensor) -> int:
        return 0

    def quantised(self, name: str, outputs: int, inputs: int) -> QuantisedLayer | None:
        return None


def _found(config: EngineConfig) -> tuple[Path, TensorSource | None]:
    """The configured model's folder or GGUF file, and what stands for its weights if it has none."""
    given = Path(config.model)
    alone = given.name == "config.json"
    folder = resolve_model(str(given.parent) if alone else config.model, config.revision, download=False)
    if is_gguf(folder) or (not alone and any(folder.glob("*.safetensors"))):
        return folder, None
    if method := declared_by(config_of(folder)).method:
        raise ModelError(
            f"{folder}: quant_method must be absent where there are no weight files, whose headers alone say how "
            f"layers are stored, got {method}"
        )
    return folder, _PlainWeights()
