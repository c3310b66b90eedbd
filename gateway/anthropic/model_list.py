"""The models of the fleet as Anthropic lists them: names of models, and of adapters. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from petiole.tasks.fleet.models import ModelFacts


def listed(known: Iterable[ModelFacts]) -> list[dict[str, Any]]:
    """Live models come first in `known`, so a name that several have is the live one's."""
    found: dict[str, dict[str, Any]] = {}
    for model in known:
        for name in (*model.names, *model.adapters):
            found.setdefault(name, _info(model, name))
    return list(found.values())


def _info(model: ModelFacts, name: str) -> dict[str, Any]:
    created = datetime.fromtimestamp(int(model.since), UTC)
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active" if model.live else "deprecated",
        "max_input_tokens": model.max_model_len,
        "max_tokens": model.max_model_len,
    }


def page(models: list[dict[str, Any]]) -> dict[str, Any]:
    """All of them: a fleet has few."""
    return {
        "data": models,
        "has_more": False,
        "first_id": models[0]["id"] if models else None,
        "last_id": models[-1]["id"] if models else None,
    }
