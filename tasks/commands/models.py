"""`petiole models`: the models of the last days, and the names by which producers ask for them."""

from __future__ import annotations

import argparse
import json
import time

from petiole.tasks.commands.terminal import print_table
from petiole.tasks.fleet import models
from petiole.tasks.fleet.models import ModelFacts

COLUMNS = ("names", "adapters", "queues", "context", "takes", "fingerprint", "since", "seen")


def show(options: argparse.Namespace) -> int:
    known = models.models()
    if options.json:
        print(json.dumps([model.model_dump() | {"live": model.live} for model in known], indent=2))
    elif known:
        print_table(COLUMNS, [_row(model) for model in known])
    else:
        print(f"No worker has served a model within {models.KEPT_S // 86_400} days.")
    return 0 if known else 1


def _row(model: ModelFacts) -> tuple[str, ...]:
    takes = ("chat", "images", "tools", "reasoning", "embeddings")
    return (
        ", ".join(model.names),
        ", ".join(model.adapters),
        ", ".join(model.queues),
        f"{model.max_model_len:,}",
        ", ".join(name for name in takes if getattr(model, name)),
        model.fingerprint[:12],
        time.strftime("%Y-%m-%d %H:%M", time.localtime(model.since)),
        "now" if model.live else _ago(model.age_s),
    )


def _ago(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
