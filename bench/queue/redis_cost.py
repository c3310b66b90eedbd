"""The cost of a task and of a delta for Redis: commands, bytes in and out, processor time.

Redis itself counts (`INFO`). The same number of tasks runs with one token and with many, with readers and without.
The difference between one token and many is the cost of deltas; the rest is the cost of a task of any length. The
cost of an idle fleet (leases, reports, heartbeats) is measured first and subtracted."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from bench.harness.checkpoints.decoders import TINY, checkpoint
from bench.harness.load import Case
from bench.harness.report import Report, arguments
from bench.queue.serving import PATIENCE_S, Seen, fleet, read_all, requests

FIGURES = ("commands", "bytes in", "bytes out", "processor us")
UNITS = {"commands": "", "bytes in": "bytes", "bytes out": "bytes", "processor us": "us"}


@dataclass
class Cost:
    """The counts of Redis, and their time."""

    at: float
    figures: dict[str, float]
    calls: Counter[str] = field(default_factory=Counter)

    def since(self, before: Cost) -> Cost:
        figures = {name: value - before.figures[name] for name, value in self.figures.items()}
        return Cost(self.at - before.at, figures, self.calls - before.calls)

    def without_idle(self, idle: Cost) -> Cost:
        figures = {name: v - idle.figures[name] * self.at / idle.at for name, v in self.figures.items()}
        return Cost(self.at, figures, self.calls)


def now(client: Any) -> Cost:
    info = client.info("all")
    figures = {
        "commands": float(info["total_commands_processed"]),
        "bytes in": float(info["total_net_input_bytes"]),
        "bytes out": float(info["total_net_output_bytes"]),
        "processor us": 1e6 * (info["used_cpu_user"] + info["used_cpu_sys"]),
    }
    calls = Counter({name[8:]: int(stat["calls"]) for name, stat in info.items() if name.startswith("cmdstat_")})
    return Cost(time.perf_counter(), figures, calls)


def streamed(case: Case) -> int:
    """Run tasks with a reader each. Returns the number of deltas."""
    seen: Seen = asyncio.run(read_all(case, 0))
    return seen.deltas


def unread(case: Case) -> int:
    """Run tasks whose results are fetched, and whose streams nobody reads."""
    from petiole.tasks import generate

    results = [generate.delay(**request) for request in requests(case)]
    for result in results:
        result.get(timeout=PATIENCE_S)
    return 0


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__).parse_args(argv)
    report = Report("What a task and a delta cost Redis")
    n, output, idle_s = (4, 8, 0.5) if options.quick else (256, 96, 5.0)
    short = Case(TINY, n, 16, 1, min(n, 32), 1)
    long = Case(TINY, n, 16, output, min(n, 32), 1)
    with checkpoint(TINY) as model, fleet(model, TINY, 32, 0):
        from petiole.tasks.servers import connections

        client = connections.streams()
        streamed(Case(TINY, 4, 16, 4, 4, 1))
        unread(Case(TINY, 4, 16, 4, 4, 1))
        before = now(client)
        time.sleep(idle_s)
        idle = now(client).since(before)
        costs, deltas = {}, {}
        for name, work, case in (("short", streamed, short), ("long", streamed, long), ("unread", unread, long)):
            before = now(client)
            deltas[name] = work(case)
            costs[name] = now(client).since(before).without_idle(idle)
    more = max(1, deltas["long"] - deltas["short"])
    for figure in FIGURES:
        short_cost, long_cost = costs["short"].figures[figure], costs["long"].figures[figure]
        delta = max(0.0, (long_cost - short_cost) / more)
        task = max(0.0, (short_cost - delta * deltas["short"]) / n)
        unit = UNITS[figure]
        report.add(f"{figure}: an idle worker, a second", idle.figures[figure] / idle.at, unit, better="lower")
        report.add(f"{figure}: a task with one reader, without its deltas", task, unit, better="lower")
        report.add(f"{figure}: a delta with one reader", delta, unit, better="lower")
        whole = max(0.0, costs["unread"].figures[figure] / n)
        report.add(f"{figure}: a task of {output} tokens that nobody reads", whole, unit, better="lower")
    report.add("tokens in a delta", n * (output - 1) / more, "")
    report.extra["calls_a_task"] = {
        name: {command: round(count / n, 2) for command, count in cost.calls.most_common()}
        for name, cost in costs.items()
    }
    report.finish(options.json)


if __name__ == "__main__":
    main()
