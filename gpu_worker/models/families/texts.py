"""Models of texts: what pools the hidden states of a family's model, and how it is asked.

A decoder becomes a model of texts through the files of sentence-transformers beside it. An encoder is one
anyway."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from petiole.contract.results.vectors import COLBERT, SPARSE
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.bge_m3 import read_token_heads
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject
from petiole.gpu_worker.models.checkpoint.sentence_transformers import (
    read_judge,
    read_modules,
    read_text_model,
)
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.loading import Model
from petiole.gpu_worker.models.plan import Dense, ModelPlan, Pooling
from petiole.gpu_worker.request.pooling import Judge


def pooled(plan: Callable[[JsonObject], ModelPlan]) -> Callable[[JsonObject], ModelPlan]:
    """A decoder without its head. Unless its files say otherwise, all positions are pooled, as
    sentence-transformers does."""
    return lambda raw: replace(plan(raw), pooling=Pooling(("mean",)))


def scoring(plan: Callable[[JsonObject], ModelPlan]) -> Callable[[JsonObject], ModelPlan]:
    """A decoder with a head for scores on the last token."""

    def scored(raw: JsonObject) -> ModelPlan:
        made, labels = plan(raw), config_keys.labels(raw)
        head = Dense("score", made.hidden_size, len(labels), bias=False)
        return replace(made, pooling=Pooling(("last",), (head,), labels=labels, scale=config_keys.scale(raw)))

    return scored


def of_texts(model: Model, folder: Path, raw: JsonObject) -> Model:
    """The model with the pooling that its folder describes, if it describes any. raw: its config.json. Raises
    ModelError."""
    modules, plan = read_modules(folder), model.plan
    if modules is not None and not (plan.pooling and plan.pooling.labels):
        plan = replace(plan, pooling=modules.pooling)
        model = replace(model, plan=plan, modules=modules.folders)
    if plan.pooling is None:
        if raw.get("is_causal") is False:
            needed = "a model of vectors, whose modules.json says how they are pooled"
            raise ModelError(f"config.json: is_causal must be true but for {needed}, got false")
        return replace(model, judge=_judge(folder, plan))
    pooling = plan.pooling
    if raw.get("is_causal") is False:
        plan = seeing_all(plan)
        model = replace(model, plan=plan)
    width = plan.hidden_size * len(pooling.kinds)
    for dense in pooling.denses:
        if dense.inputs != width:
            raise ModelError(f"{dense.name}: in_features must be {width}, got {dense.inputs}")
        width = dense.outputs
    texts = read_text_model(folder)
    if not plan.whole_texts or pooling.labels:
        return replace(model, texts=texts)
    heads = read_token_heads(folder, plan.hidden_size)
    made = replace(pooling, sparse=heads.products.get(SPARSE), colbert=heads.products.get(COLBERT))
    return replace(
        model,
        plan=replace(plan, pooling=made),
        texts=replace(texts, lacking=heads.lacking),
        modules=(*model.modules, *heads.files),
    )


def seeing_all(plan: ModelPlan) -> ModelPlan:
    """A decoder of which each position sees all others. Raises ModelError if that is not known of its layers."""
    if plan.keeps_states or any(plan.windows):
        raise ModelError("config.json: is_causal must be true for layers with a window or a state, got false")
    layers = (replace(layer, mixer=replace(layer.attention, mask="bidirectional")) for layer in plan.layers)
    return replace(plan, layers=tuple(layers))


def _judge(folder: Path, plan: ModelPlan) -> Judge | None:
    judge = read_judge(folder)
    if judge is not None and max(judge.yes, judge.no) >= plan.vocab_size:
        limit = f"true_token_id and false_token_id must be below {plan.vocab_size}"
        raise ModelError(f"LogitScore: {limit}, got {judge.yes} and {judge.no}")
    return judge
