"""`petiole models`: the models of the last days, and the names by which producers ask for them; or whether another
can be served."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time

from petiole.tasks.app import worker_side
from petiole.tasks.commands.terminal import print_table
from petiole.tasks.fleet import models
from petiole.tasks.fleet.models import ModelFacts

COLUMNS = ("names", "adapters", "queues", "context", "takes", "fingerprint", "since", "seen")


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print all facts as JSON")
    command.add_argument(
        "--can",
        metavar="MODEL",
        help="say whether a hub id, a folder or a config.json is served, without its weights",
    )


def show(options: argparse.Namespace) -> int:
    if options.can:
        return _can(options.can, as_json=options.json)
    known = models.models()
    if options.json:
        print(json.dumps([model.model_dump() | {"live": model.live} for model in known], indent=2))
    elif known:
        print_table(COLUMNS, [_row(model) for model in known])
    else:
        print(f"No worker has served a model within {models.KEPT_S // 86_400} days.")
    return 0 if known else 1


def _can(model: str, *, as_json: bool) -> int:
    try:
        found = worker_side.load(worker_side.SERVED)(model)
    except ImportError as error:
        print(f"petiole: this question needs 'petiole[worker]': {error}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"petiole: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
        return 0
    cuda = "on CPU and CUDA" if found.cuda is None else f"on CPU; not on CUDA: {found.cuda}"
    print(f"yes: {found.architecture} makes {found.makes} of up to {found.max_position:,} tokens, {cuda}")
    return 0


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
