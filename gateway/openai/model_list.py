"""The models of the fleet as OpenAI lists them: each name of a model, and each adapter that has a name. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from petiole.tasks.fleet.models import ModelFacts


def cards(known: Iterable[ModelFacts]) -> list[dict[str, Any]]:
    """Live models come first in `known`, so a name that several have is the live one's."""
    found: dict[str, dict[str, Any]] = {}
    for model in known:
        for name in model.names:
            found.setdefault(name, _card(model, name, model.model or name, None))
        for name, where in model.adapters.items():
            found.setdefault(name, _card(model, name, where, model.names[0] if model.names else None))
    return list(found.values())


def listed(known: Iterable[ModelFacts]) -> dict[str, Any]:
    """OpenAI's list; `models` is what clients of Ollama and llama.cpp read of it."""
    found = cards(known)
    return {"object": "list", "data": found, "models": [{"name": one["id"], "model": one["id"]} for one in found]}


def _card(model: ModelFacts, name: str, root: str, parent: str | None) -> dict[str, Any]:
    """OpenAI's fields, vLLM's (root, parent, max_model_len), OpenRouter's (context_length), and what it takes."""
    return {
        "id": name,
        "object": "model",
        "created": int(model.since),
        "owned_by": model.owned_by or "petiole",
        "engine": model.engine or "petiole",
        "root": root,
        "parent": parent,
        "max_model_len": model.max_model_len,
        "context_length": model.max_model_len,
        "live": model.live,
        "capabilities": {
            "chat": model.chat,
            "images": model.images,
            "tools": model.tools,
            "reasoning": model.reasoning,
            "embeddings": model.embeddings,
        },
    }
