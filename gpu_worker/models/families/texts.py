"""Models of texts: what pools the hidden states of a family's model, and how it is asked.

A decoder becomes a model of texts through the files of sentence-transformers beside it. An encoder is one
anyway."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.checkpoint.of_tokens import read_token_heads
from petiole.gpu_worker.models.checkpoint.sentence_transformers import (
    read_judge,
    read_modules,
    read_text_model,
)
from petiole.gpu_worker.models.loading import Model
from petiole.gpu_worker.models.plan import ModelPlan
from petiole.gpu_worker.request.texts import Judge
from petiole.vectors import COLBERT, SPARSE


def of_texts(model: Model, folder: Path, raw: JsonObject) -> Model:
    """The model with the pooling that its folder describes, if it describes any. raw: its config.json. Raises
    ModelError."""
    modules, plan = read_modules(folder), model.plan
    if modules is not None and not (plan.pooling and plan.pooling.labels):
        plan = replace(plan, pooling=modules.pooling)
        model = replace(model, plan=plan, modules=modules.folders)
    if plan.pooling is None:
        return replace(model, judge=_judge(folder, plan))
    if raw.get("is_causal") is False and any(mixer.mask == "causal" for mixer in plan.attentions):
        raise ModelError("config.json: is_causal must be true, got false: this family's attention is causal here")
    width = plan.hidden_size
    for dense in plan.pooling.denses:
        if dense.inputs != width:
            raise ModelError(f"{dense.name}: in_features must be {width}, got {dense.inputs}")
        width = dense.outputs
    texts = read_text_model(folder)
    if not plan.whole_texts or plan.pooling.labels:
        return replace(model, texts=texts)
    heads = read_token_heads(folder, plan.hidden_size)
    pooling = replace(plan.pooling, sparse=heads.products.get(SPARSE), colbert=heads.products.get(COLBERT))
    return replace(
        model,
        plan=replace(plan, pooling=pooling),
        texts=replace(texts, lacking=heads.lacking),
        modules=(*model.modules, *heads.files),
    )


def _judge(folder: Path, plan: ModelPlan) -> Judge | None:
    judge = read_judge(folder)
    if judge is not None and max(judge.yes, judge.no) >= plan.vocab_size:
        limit = f"true_token_id and false_token_id must be below {plan.vocab_size}"
        raise ModelError(f"LogitScore: {limit}, got {judge.yes} and {judge.no}")
    return judge
