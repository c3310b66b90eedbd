"""A benchmark in parts, each in a process of its own: a part that fails, hangs or breaks the device ends alone.

Every figure is written into the file as soon as it is measured, under its part. So a run that is cut off is not
lost, and a later call measures the missing parts. A file holds figures of one commit on one card. Figures of
another commit or card are moved to a file beside it, under the card's name."""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import logging
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from bench.harness.load import settle
from bench.harness.report import Measurement, Report, commit, write


@dataclass
class Parts(Report):
    """The figures of all parts. A figure is added to one part, and written to `path` at once. A target may belong
    to a card, by a word of its name: figures of other cards have no verdict then. A `variant` is another way to
    run the same parts: it ends their names and those of their figures, which stand beside the others."""

    path: str = ""
    part: str = ""
    variant: str = ""
    names: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, value: float, unit: str, *, card: str = "", **more: Any) -> Measurement:
        target = more.get("target")
        if target is not None and card and card not in card_name().split():
            notes = [more.get("note"), f"an {card}'s target is {target:g}"]
            more |= {"target": None, "note": "; ".join(filter(None, notes))}
        result = super().add(name + self.variant, value, unit, **more)
        self.names.setdefault(self.part + self.variant, []).append(result.name)
        self.save(self.path)
        return result

    @property
    def new(self) -> list[Measurement]:
        """The figures measured for this part."""
        names = self.names.get(self.part + self.variant, [])
        return [result for result in self.results if result.name in names]

    def as_json(self) -> dict[str, Any]:
        return {**super().as_json(), "parts": self.names}

    def resume(self, without: Sequence[str]) -> None:
        """Take over the figures of this commit on this card, except for the parts that are measured now."""
        record = read(self.path)
        if record and measured_on(record) != (commit(), card_name()):
            Path(self.path).replace(beside(self.path, *measured_on(record)))
            record = {}
        record = record or read(beside(self.path, commit(), card_name()))
        if not record:
            return
        dropped = {part + self.variant for part in without}
        self.names = {part: names for part, names in record["parts"].items() if part not in dropped}
        kept = {name for names in self.names.values() for name in names}
        fields = [each.name for each in dataclasses.fields(Measurement)]
        self.results += [Measurement(**{f: r[f] for f in fields}) for r in record["results"] if r["name"] in kept]
        self.absent |= {part: why for part, why in record["absent"].items() if part not in dropped}
        self.extra["kernels"] = record.get("kernels", {})
        self.began -= record["seconds"]

    def value(self, name: str) -> float:
        return next(result.value for result in self.results if result.name == name + self.variant)


def card_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def measured_on(record: dict[str, Any]) -> tuple[str, str]:
    """(commit, card)"""
    return record["commit"], record["machine"].get("gpu", "")


def beside(path: str, commit: str, card: str) -> str:
    """The path for a file's figures of this commit and card, once the file has others."""
    place = Path(path)
    return str(place.with_stem("-".join([place.stem, *re.findall(r"[\w.]+", f"{card} {commit}")])))


def read(path: str) -> dict[str, Any]:
    """A record; empty if there is none, or only half of one."""
    try:
        found: dict[str, Any] = json.loads(Path(path).read_text())
    except (OSError, ValueError):
        return {}
    return found


def measured(path: str, part: str) -> bool:
    """Whether the file has all of a part, for this commit on this card."""
    record = read(path)
    here = bool(record) and measured_on(record) == (commit(), card_name())
    return here and part in record["parts"] and part not in record["absent"]


def failed(path: str, part: str, why: str) -> None:
    """The record says what is missing in it."""
    record = read(path)
    if record:
        record["absent"][part] = why
        write(path, record)


def apart(limit_s: float, work: Callable[..., None], *arguments: object) -> str:
    """Do `work` in a new process, for `limit_s` at most. Returns why it failed, or nothing. A process that is
    stopped prints where it was."""
    process = multiprocessing.get_context("spawn").Process(target=_watched, args=(work, *arguments))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        os.kill(cast(int, process.pid), signal.SIGUSR1)
        process.join(1)
        process.kill()
        process.join()
        return f"stopped after {limit_s:g} s"
    return f"failed with status {process.exitcode}" if process.exitcode else ""


def _watched(work: Callable[..., None], *arguments: object) -> None:
    faulthandler.register(signal.SIGUSR1)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("petiole.gpu_worker").setLevel(logging.INFO)  # which products were chosen, and why
    settle()
    work(*arguments)
