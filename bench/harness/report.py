"""Shared by all benchmarks: turns samples into ratios, and ratios into a table and a JSON file.

Machines are shared and noisy, so an absolute figure says little. Each figure stands beside a *peer* (another
program that does the same work) or a *floor* (the least that the hardware needs), measured in turns in the same
run. `compare` alternates the two sides and reports the median of the rounds' ratios with its spread."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

PACKAGES = (
    "petiole",
    "torch",
    "triton",
    "numpy",
    "celery",
    "kombu",
    "redis",
    "transformers",
    "llama-cpp-python",
    "flashinfer-python",
    "vllm",
)


@dataclass
class Measurement:
    """One figure. `ratio` is value / peer, or value / floor without a peer. `better`: whether more or less is
    better.

    `met` follows from `target`, which limits `ratio` if there is a ratio, and `value` otherwise.
    """

    name: str
    value: float
    unit: str
    peer: float | None = None
    floor: float | None = None
    target: float | None = None
    better: str = "higher"
    spread: tuple[float, float] | None = None
    samples: Sequence[float] = ()
    note: str = ""

    @property
    def ratio(self) -> float | None:
        base = self.peer if self.peer is not None else self.floor
        return self.value / base if base else None

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        judged = self.ratio if self.ratio is not None else self.value
        return judged >= self.target if self.better == "higher" else judged <= self.target

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ratio": self.ratio, "met": self.met}


class NotFiniteError(ValueError):
    """A figure that is not a finite number: its samples are missing, or something was divided by zero."""


class NotAvailableError(RuntimeError):
    """A peer that this machine does not have, and why."""


@dataclass
class Report:
    """The results of one run, with everything that is needed to repeat it. `absent`: missing peers, and why."""

    title: str
    results: list[Measurement] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    extra: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, value: float, unit: str, *, card: str = "", **more: Any) -> Measurement:
        """card: whose target it is, for reports of cards (`bench.harness.parts`)."""
        result = Measurement(name, value, unit, **more)
        figures = (value, result.peer, result.floor, result.target, *(result.spread or ()), *result.samples)
        if wrong := [figure for figure in figures if figure is not None and not math.isfinite(figure)]:
            raise NotFiniteError(f"{name.strip()}: {wrong[0]} {unit} is not a finite number")
        self.results.append(result)
        return result

    def compare(
        self,
        name: str,
        unit: str,
        ours: Callable[[], float],
        peers: Callable[[], float],
        *,
        rounds: int = 5,
        **more: Any,
    ) -> Measurement:
        """One figure beside another of the same run: see `compare`."""
        value, peer, spread = compare(ours, peers, rounds=rounds)
        return self.add(name, value, unit, peer=peer, spread=spread, **more)

    def as_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "machine": machine(),
            "versions": versions(),
            "commit": commit(),
            "command": command(sys.argv),
            "seconds": round(time.monotonic() - self.began, 1),
            "results": [result.as_json() for result in self.results],
            "absent": self.absent,
            **self.extra,
        }

    def finish(self, json_path: str | None) -> None:
        """Print the table and, if asked, write the JSON."""
        print(f"\n{self.title}\n{table(self.results)}")
        for peer, why in self.absent.items():
            print(f"{peer}: {why}")
        self.save(json_path)

    def save(self, json_path: str | None) -> None:
        """Write the JSON, if asked. The figures so far are kept even if the rest of a long run fails."""
        if json_path:
            write(json_path, self.as_json())


def command(argv: Sequence[str]) -> str:
    """The command line, without output paths and addresses of servers. Of an absolute path it has the name."""
    places = {"--json", "--plots", "--rabbitmq", "--broker", "--checkpoint"}
    options = [option for before, option in pairwise(argv) if not places & {before, option.partition("=")[0]}]
    program = Path(argv[0])
    if program.name == "__main__.py":  # of a folder that has the workload's name
        program = program.parent.with_suffix(".py")
    options = [Path(option).name if option.startswith("/") else option for option in options]
    return shlex.join([program.name, *options])


def write(path: str, record: dict[str, Any]) -> None:
    """Write a whole file or nothing: a process that is killed here leaves the old file."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    half = Path(f"{path}.part")
    half.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    half.replace(path)


def table(results: Iterable[Measurement]) -> str:
    """A plain-text table: figures right-aligned, a target with its verdict."""
    rows = [("", "value", "unit", "peer", "floor", "ratio", "spread", "target", "")]
    for r in results:
        bound = ">=" if r.better == "higher" else "<="
        verdict = {None: "", True: "met", False: "missed"}[r.met]
        spread = f"{r.spread[0]:.2f}-{r.spread[1]:.2f}" if r.spread else ""
        target = f"{bound} {r.target:g}" if r.target is not None else ""
        rows.append(
            (
                r.name,
                number(r.value),
                r.unit,
                number(r.peer),
                number(r.floor),
                number(r.ratio),
                spread,
                target,
                verdict,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if i in (0, 2) else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def compare(
    ours: Callable[[], float], peers: Callable[[], float], *, rounds: int = 5
) -> tuple[float, float, tuple[float, float]]:
    """Run the two sides in turn; each returns its figure. -> (our median, peer's median, spread of the ratios)."""
    pairs = [(ours(), peers()) if i % 2 else tuple(reversed((peers(), ours()))) for i in range(rounds)]
    ratios = [a / b for a, b in pairs]
    return (
        statistics.median(a for a, _ in pairs),
        statistics.median(b for _, b in pairs),
        (min(ratios), max(ratios)),
    )


def best_of(work: Callable[[], object], *, rounds: int = 5, number: int = 1) -> float:
    """Seconds for one call of `work`: the least over the rounds, because noise only makes calls longer."""
    return min(_calls(work, rounds, number))


def median_of(work: Callable[[], object], *, rounds: int = 5, number: int = 1) -> float:
    """Seconds for one call of `work`: the median over the rounds."""
    return statistics.median(_calls(work, rounds, number))


def _calls(work: Callable[[], object], rounds: int, number: int) -> list[float]:
    """Seconds for one of `number` calls, in each round."""
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(number):
            work()
        seconds.append((time.perf_counter() - start) / number)
    return seconds


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below which `share` of the samples lie; nan if there are none."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def progress(items: Sequence[T], what: str) -> Iterator[T]:
    """`items`, with a progress bar on a terminal if rich is installed."""
    try:
        from rich.progress import track
    except ImportError:
        return iter(items)
    return iter(track(items, what, transient=True, disable=not sys.stderr.isatty()))


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--json", type=_file, metavar="PATH", help="write all samples and results here")
    parser.add_argument("--plots", metavar="FOLDER", help="write plots (PNG) here")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that everything runs")
    return parser


def _file(path: str) -> str:
    """What `--json` names. A long run learns now, and not at its end, that nothing can be written there."""
    if Path(path).is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    return path


def machine() -> dict[str, Any]:
    facts: dict[str, Any] = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "load_1m": os.getloadavg()[0],
    }
    if "torch" in sys.modules:
        import torch

        if torch.cuda.is_available():
            facts["gpu"] = torch.cuda.get_device_name()
            facts["cuda"] = torch.version.cuda
            facts["driver"] = driver_version()
    return facts


def driver_version() -> str:
    """The version of NVIDIA's driver; empty if unknown."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The checked-out commit, with a plus sign if the working tree differs from it. In a copy without history, the
    value of GIT_COMMIT."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        dirty = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("GIT_COMMIT", "unknown")
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
