"""`petiole usage`: what each tenant has used."""

from __future__ import annotations

import argparse
import json
import sys

from petiole.tasks.commands.terminal import print_table
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet import usage

MOST_DAYS = 400


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--days", type=int, default=1, help="how many, today's with them (default: %(default)s)")
    command.add_argument("--tenant", help="of this one alone; '' for tasks without a tenant")
    command.add_argument("--json", action="store_true", help="print the sums as JSON")
    command.add_argument(
        "--tasks", action="store_true", help="print each task's entry, as JSON on a line of its own"
    )


def show(options: argparse.Namespace) -> int:
    if not 1 <= options.days <= MOST_DAYS:
        raise InvalidRequest("days", f"must be from 1 to {MOST_DAYS}", options.days)
    if options.tasks:
        for entry in usage.entries(options.days, options.tenant):
            sys.stdout.write(entry.decode() + "\n")
        return 0
    found = usage.usage(options.days, options.tenant)
    if options.json:
        print(json.dumps([one._asdict() for one in found]))
        return 0
    head = ("day", "tenant", "model", "requests", "prompt", "cached", "output", "reasoning", "ended as")
    rows = [
        (
            one.day,
            one.tenant or "-",
            one.model,
            *(str(number) for number in one.sums.values()),
            ", ".join(f"{end} {number}" for end, number in sorted(one.ends.items())),
        )
        for one in found
    ]
    print_table(head, rows)
    return 0
