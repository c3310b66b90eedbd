"""Models of texts: what pools the hidden states of a family's model, and how it is asked.

A decoder becomes a model of texts through the files of sentence-transformers beside it. An encoder is one
anyway."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.checkpoint.sentence_transformers import read_modules, read_text_model
from petiole.gpu_worker.models.loading import Model


def of_texts(model: Model, folder: Path, raw: JsonObject) -> Model:
    """The model with the pooling that its folder describes, if it describes any. raw: its config.json. Raises
    ModelError."""
    modules, plan = read_modules(folder), model.plan
    if modules is not None and not (plan.pooling and plan.pooling.labels):
        plan = replace(plan, pooling=modules.pooling)
        model = replace(model, plan=plan, modules=modules.folders)
    if plan.pooling is None:
        return model
    if raw.get("is_causal") is False and any(mixer.mask == "causal" for mixer in plan.attentions):
        raise ModelError("config.json: is_causal must be true, got false: this family's attention is causal here")
    width = plan.hidden_size
    for dense in plan.pooling.denses:
        if dense.inputs != width:
            raise ModelError(f"{dense.name}: in_features must be {width}, got {dense.inputs}")
        width = dense.outputs
    return replace(model, texts=read_text_model(folder))
