"""The supported architectures and their loaders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.loading import LoadOptions, TensorSource, load_decoder, read_decoder
from petiole.gpu_worker.models.config import (
    FAMILIES,
    ModelConfig,
    architecture_of,
    parse_decoder_config,
    read_json,
)
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.moondream import config as moondream
from petiole.gpu_worker.models.moondream.config import parse_moondream_config
from petiole.gpu_worker.models.moondream.loading import load_moondream, read_moondream


@dataclass(frozen=True, slots=True)
class Architecture:
    """`load` reads a checkpoint's folder; `read` takes tensors from any source. `adapters`: whether the decoder's
    forward adds LoRA adapters."""

    parse: Callable[[Mapping[str, Any]], ModelConfig]
    load: Callable[[Path, ModelConfig, LoadOptions], Decoder]
    read: Callable[[TensorSource, ModelConfig, LoadOptions], Decoder] = read_decoder
    adapters: bool = False


ARCHITECTURES: dict[str, Architecture] = {
    name: Architecture(parse_decoder_config, load_decoder, adapters=True) for name in FAMILIES
} | {
    name: Architecture(parse_moondream_config, load_moondream, read_moondream) for name in moondream.ARCHITECTURES
}


def architecture(folder: Path) -> tuple[Architecture, ModelConfig]:
    """The architecture and configuration of a model folder, from its config.json. Raises ModelError if unknown."""
    raw = read_json(folder / "config.json")
    name = architecture_of(raw)
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"{folder}: architecture {name} is not supported; supported are {known}")
    found = ARCHITECTURES[name]
    return found, found.parse(raw)
