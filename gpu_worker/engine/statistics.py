"""What an engine says of itself: the facts of its model, and its counters and gauges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from petiole.cache import GroupUsage
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.gpu_worker.scheduling.scheduler import Scheduler
from petiole.gpu_worker.text import Tokenizer

_POSITIONS = 16
"""Places among the drafts of a verification that are counted apart."""


def facts_of(limits: ModelLimits, tokenizer: Tokenizer | None, config: EngineConfig) -> dict[str, Any]:
    """What the model is and takes, as far as its checkpoint says so."""
    known: dict[str, Any] = {} if tokenizer is None else dict(tokenizer.facts)
    if limits.processor is not None:  # it answers conversations by its skills, without a chat template
        known |= {"chat": True, "tools": False}
    if (texts := limits.texts) is not None:
        known |= {
            "dimensions": 0 if texts.labels else texts.dimensions,
            "labels": list(texts.labels),
            "prompts": sorted(texts.prompts),
            "chat": False,
            "tools": False,
        }
    return {
        "max_model_len": limits.max_model_len if texts is None else texts.max_tokens,
        "vocab_size": limits.vocab_size,
        "images": limits.images is not None,
        "embeddings": texts is not None and not texts.labels,
        "takes_adapters": config.lora_slots > 0,
        **known,
    }


def scheduler_stats(scheduler: Scheduler) -> dict[str, float | int]:
    """The scheduler's counters and gauges. Read without a lock, so the values may come from different instants."""
    state = scheduler.state
    counters, usage = state.counters, state.manager.usage()
    return {
        "running": len(state.running) + len(state.prefilling),
        "waiting": len(state.waiting),
        "held_back": scheduler.planner.budget.held_back,
        "rows_held": usage.rows_held,
        "pages_total": usage.pages_total,
        "pages_free": usage.pages_free,
        "pages_cached": usage.pages_cached,
        "pages_private": usage.pages_private,
        "prefix_hit_tokens": usage.cache.hit_tokens,
        "prefix_hit_rate": round(usage.cache.hit_rate, 4),
        "evicted_pages": usage.cache.evicted_pages,
        **{name: number for group in usage.groups for name, number in _window_gauges(group)},
        **({} if state.tier is None else state.tier.stats()),
        **({} if usage.states is None else asdict(usage.states, dict_factory=_state_gauges)),
        **{name: number for name, number in asdict(counters).items() if name != "speculation"},
        "verifications": counters.speculation.verifications,
        "draft_tokens": counters.speculation.drafted,
        "accepted_draft_tokens": counters.speculation.accepted,
        "tokens_per_verification": round(counters.speculation.mean_length, 4),
        **{f"accepted_drafts_{i}": n for i, n in enumerate(counters.speculation.accepted_at[:_POSITIONS])},
    }


def _window_gauges(group: GroupUsage) -> Iterator[tuple[str, int]]:
    """The gauges of a group of layers with a window."""
    pages = ("pages_total", "pages_free", "pages_cached", "pages_held", "pages_evicted")
    for name in (*pages, "hit_tokens", "missed_tokens"):
        yield f"window_{group.window}_{name}", getattr(group, name)


def _state_gauges(facts: list[tuple[str, int]]) -> dict[str, int]:
    """The gauges of layers that keep a state."""
    return {f"state_{name}" if name.endswith("_tokens") else name: number for name, number in facts}


def imbalance(expert_tokens: Sequence[Sequence[int]]) -> float:
    """How many times as many positions the busiest expert of a layer computes as the mean one, on the average of
    layers. 1: all compute equally many; 0: no expert has computed any."""
    busy = [max(layer) * len(layer) / sum(layer) for layer in expert_tokens if sum(layer)]
    return sum(busy) / len(busy) if busy else 0.0
