"""The supported architectures: those of every module beside and below this one that has `FAMILIES`, and for each
decoder what transformers makes of it without its head, and with one for scores."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models import families
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, architecture_of, read_json, shown
from petiole.gpu_worker.models.checkpoint.named_tokens import NamedTokens
from petiole.gpu_worker.models.checkpoint.opening import config_of
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.families.texts import of_texts, pooled, scoring
from petiole.gpu_worker.models.loading import Model

FOUND: dict[str, Family] = {
    name: family
    for module in pkgutil.walk_packages(families.__path__, f"{families.__name__}.")
    if module.name != __name__
    for family in getattr(importlib.import_module(module.name), "FAMILIES", ())
    for name in family.architectures
}
"""By architecture, as the families name them."""
_DECODERS = {
    name.removesuffix("ForCausalLM"): family for name, family in FOUND.items() if name.endswith("ForCausalLM")
}
ARCHITECTURES: dict[str, Family] = {
    f"{name}{part}": replace(family, architectures=(f"{name}{part}",), plan=made(family.plan))
    for name, family in _DECODERS.items()
    for part, made in (("Model", pooled), ("ForSequenceClassification", scoring))
} | FOUND


def find_model(folder: Path, served: NamedTokens | None = None) -> Model:
    """The model of a folder, with the files of sentence-transformers beside it, or of a GGUF file. served: the
    tokens of a model that is served, for a folder without a tokenizer. Raises ModelError if its architecture is
    unknown."""
    raw = config_of(folder)
    model = model_of(raw, f"{folder}: ")
    if model.pictures is not None:
        own = served is None or (folder / "tokenizer.json").is_file()
        pictures = _described(folder, "image_processor", "preprocessor_config.json") or {}
        if (videos := _described(folder, "video_processor", "video_preprocessor_config.json")) is not None:
            pictures = pictures | {"video_processor": videos}
        model = replace(model, pictures=pictures, tokens=NamedTokens(folder) if own else served)
    return of_texts(model, folder, raw)


def model_of(raw: JsonObject, where: str = "") -> Model:
    """The model of a config.json. where: before the message of an error."""
    name = architecture_of(raw)
    if name not in ARCHITECTURES:
        near = get_close_matches(name, ARCHITECTURES, 1, cutoff=0)
        instead = f"the nearest that is: {near[0]}; docs/models.md has all"
        raise ModelError(f"{where[-120:]}architecture {shown(name)[1:-1]} is not supported, {instead}")
    return ARCHITECTURES[name].model(raw)


def _described(folder: Path, name: str, file: str) -> dict[str, Any] | None:
    """How pictures or videos are made ready. As in transformers, a part of processor_config.json comes before a
    file of its own. None without both."""
    whole, own = folder / "processor_config.json", folder / file
    part = read_json(whole).get(name) if whole.exists() else None
    if part is None:
        return read_json(own) if own.exists() else None
    if not isinstance(part, dict):
        raise ModelError(f"{whole}: {name} must be an object, got {shown(part)}")
    return part
