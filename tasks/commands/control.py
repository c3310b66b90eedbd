"""`petiole pause`, `resume`, `reload` and `drain`: commands for running workers, and the workers' answers."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from petiole.tasks.fleet import control, reports

POLL_S = 0.5


def pause(options: argparse.Namespace) -> int:
    return _steered(options.worker, control.pause(options.worker))


def resume(options: argparse.Namespace) -> int:
    return _steered(options.worker, control.resume(options.worker))


def reload(options: argparse.Namespace) -> int:
    """Ask workers to reload, and wait until each of them has loaded the model, refused it or gone."""
    asked = control.reload(options.model, options.worker)
    status = _steered(options.worker, asked)
    left = {name for name, answer in asked.items() if "error" not in answer}
    while left:
        time.sleep(POLL_S)
        answers = control.engines(sorted(left))
        for name in sorted(left):
            answer = answers.get(name, {"error": "gone", "state": "gone"})
            if answer["state"] == "reloading":
                continue
            left.remove(name)
            status |= bool(answer["error"])
            print(f"{name}: {answer['error'] or 'serves ' + answer['model']}")
    return status


def _steered(names: Sequence[str], answers: dict[str, control.Answer]) -> int:
    """Print the workers' answers to a command. Returns 1 if one refused or did not answer."""
    for name, answer in sorted(answers.items()):
        print(f"{name}: {answer.get('error') or answer['ok']}")
    silent = sorted({*names} - answers.keys())
    if silent or not answers:
        who = ", ".join(silent) or "any worker; a worker takes commands once its model is loaded"
        print(f"petiole: no answer from {who}", file=sys.stderr)
    return int(bool(silent) or not answers or any("error" in answer for answer in answers.values()))


def drain(options: argparse.Namespace) -> int:
    known = {worker.worker for worker in reports.workers() if not worker.lost}
    if unknown := [name for name in options.worker if name not in known]:
        print(f"petiole: no such worker: {', '.join(unknown)}", file=sys.stderr)
        return 1
    for name in options.worker:
        control.drain(name)
        print(f"{name}: drains", flush=True)
    began, waiting = time.monotonic(), list(options.worker)
    while options.wait and waiting:
        left = _still_there(waiting)
        for name in waiting:
            if name not in left:
                print(f"{name}: gone after {time.monotonic() - began:.0f} s", flush=True)
        waiting = left
        if left and time.monotonic() > began + options.wait:
            print(f"petiole: still there: {', '.join(left)}", file=sys.stderr)
            return 1
        if left:
            time.sleep(POLL_S)
    return 0


def _still_there(names: Sequence[str]) -> list[str]:
    return [worker.worker for worker in reports.workers() if worker.worker in names and not worker.lost]
