"""A model's configuration, whether it is a folder in Hugging Face format or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from petiole.gpu_worker.models.checkpoint import configuration
from petiole.gpu_worker.models.checkpoint.class_defaults import class_end_tokens
from petiole.gpu_worker.models.checkpoint.gguf import config


def is_gguf(model: Path) -> bool:
    """model: as `finding.resolve_model` returns it."""
    return model.suffix == ".gguf" and not model.is_dir()


def config_of(model: Path) -> dict[str, Any]:
    """config.json, or what stands for it. Raises ModelError."""
    return config.config_of(model) if is_gguf(model) else configuration.read_json(model / "config.json")


def end_token_ids(model: Path) -> frozenset[int]:
    """The EOS token ids; if no file names any, those of its class. Raises ModelError."""
    if is_gguf(model):
        return frozenset(configuration.token_ids(model, config.config_of(model)["eos_token_id"]))
    if found := configuration.end_token_ids(model):
        return found
    path = model / "config.json"
    raw = configuration.read_json(path) if path.exists() else {}
    return frozenset(configuration.token_ids(path, class_end_tokens(raw)))
