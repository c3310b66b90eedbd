"""The supported architectures: those of every module beside this one that has `FAMILIES`."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models import families
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, architecture_of
from petiole.gpu_worker.models.checkpoint.opening import config_of
from petiole.gpu_worker.models.families.family import Family
from petiole.gpu_worker.models.families.texts import of_texts
from petiole.gpu_worker.models.loading import Model

ARCHITECTURES: dict[str, Family] = {
    name: family
    for module in pkgutil.iter_modules(families.__path__)
    if module.name != "registry"
    for family in getattr(importlib.import_module(f"{families.__name__}.{module.name}"), "FAMILIES", ())
    for name in family.architectures
}


def find_model(folder: Path) -> Model:
    """The model of a folder, with the files of sentence-transformers beside it, or of a GGUF file. Raises
    ModelError if its architecture is unknown."""
    raw = config_of(folder)
    return of_texts(model_of(raw, f"{folder}: "), folder, raw)


def model_of(raw: JsonObject, where: str = "") -> Model:
    """The model of a config.json. where: before the message of an error."""
    name = architecture_of(raw)
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"{where}architecture {name} is not supported: take a checkpoint of one of these: {known}"
        )
    return ARCHITECTURES[name].model(raw)
