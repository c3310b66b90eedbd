"""`petiole task`: the story of a task. `petiole replay`: messages that were put aside."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime

from petiole.tasks.commands.terminal import print_table
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet import quarantined, story


def show(options: argparse.Namespace) -> int:
    """Exit status 1 if nothing is known of the task."""
    found = story.of(options.task_id)
    if options.json:
        attempts = [one._asdict() for one in found.attempts]
        print(json.dumps({"task": found.task_id, "state": found.state, **found.facts, "attempts": attempts}))
    elif found.known:
        print(f"{found.task_id}: {found.state}")
        for name, value in found.facts.items():
            print(f"  {name}: {_when(value) if name.endswith('_at') else value}")
        rows = [(str(one.number), one.worker, _when(one.began_at), one.end) for one in found.attempts]
        if rows:
            print_table(("attempt", "worker", "began", "end"), rows)
    else:
        print(f"petiole: {found.task_id} is not known: it waits, is forgotten, or never was", file=sys.stderr)
    return 0 if found.known else 1


def replay(options: argparse.Namespace) -> int:
    """Without tasks, list what was put aside. Exit status 1 if one could not be sent again."""
    found = quarantined.listed()
    if not (options.task_id or options.all):
        rows = [(one.task_id or "-", one.queue, _when(one.at), one.reason[:100]) for one in found]
        print_table(("task", "queue", "put aside", "reason"), rows)
        return 0
    wanted, failed = set(options.task_id), False
    for unknown in sorted(wanted - {one.task_id for one in found}):
        print(f"{unknown}: was not put aside, or is forgotten")
        failed = True
    for one in reversed(found):  # the oldest first
        if not (options.all or one.task_id in wanted):
            continue
        try:
            quarantined.replay(one)
            print(f"{one.task_id or 'a message without an id'}: sent again to {one.queue}")
        except InvalidRequest as error:
            print(f"{one.task_id or 'a message without an id'}: {error}")
            failed = True
    return int(failed)


def _when(at: float) -> str:
    return datetime.fromtimestamp(at).isoformat(" ", "milliseconds")
