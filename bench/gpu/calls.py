"""What to run on a card that is lent for a quarter of an hour: `python -m bench.gpu.calls a FOLDER`.

    a      tests of kernels; those that no card has timed beside today's, one by one
    b      steps and workloads of whole models, with today's kernels and with the others
    vllm   beside vLLM, where it is installed

FOLDER survives the machine. Each figure is there as soon as it is measured (`gpu.json`), and what each command
prints (`a-tests.txt`, ...). A command is stopped when its seconds are over, or those of the call. A second run
measures the parts that the first one did not finish, from their beginning."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

UNTIMED = (("PETIOLE_UNTIMED", "on"),)


@dataclass(frozen=True)
class Command:
    """Arguments of Python, and the seconds that they may take; switches: of the environment."""

    name: str
    arguments: Sequence[str]
    seconds: float
    switches: tuple[tuple[str, str], ...] = ()


def tests(seconds: float, *chosen: str) -> Command:
    return Command("tests", ("-m", "pytest", "tests/gpu", "-q", *chosen), seconds, (("OMP_NUM_THREADS", "2"),))


def parts(name: str, seconds: float, each: float, *names: str, untimed: bool = False) -> Command:
    """Parts of `bench.gpu`, each of which may take `each` seconds."""
    only = [word for part in names for word in ("--only", part)]
    arguments = ("-m", "bench.gpu", "--missing", "--limit", f"{each:g}", *only)
    return Command(name, arguments, seconds, UNTIMED if untimed else ())


CALLS: dict[str, tuple[float, tuple[Command, ...]]] = {
    "a": (
        300,
        (
            tests(80, "-n", "12", "--dist", "load", "-m", "not slow", "-k", "not takes_the_memory"),
            parts("kernels", 150, 60, "sampling", "attention", "layers", "codes"),
            parts("rules", 80, 80, "rules"),  # most of it are fla-core's kernels, which are tuned first
            parts("models", 150, 60, "states", "four-bits", "mixtures"),
        ),
    ),
    "b": (
        200,
        (
            parts("steps", 90, 60, "8b", "0.6b"),
            parts("workload", 60, 40, "workload", "workload-fp8"),
            parts("untimed", 60, 40, "workload", "workload-fp8", untimed=True),
            parts("fp8", 40, 40, "8b-fp8"),
            tests(40, "-n", "4", "-m", "slow"),
        ),
    ),
    "vllm": (280, (parts("vllm", 280, 280, "vllm"),)),
}
"""The seconds of each call, and its commands."""


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("call", choices=list(CALLS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--within", type=float, metavar="S", help="seconds, in place of the call's own")
    options = parser.parse_args(argv)
    options.folder.mkdir(parents=True, exist_ok=True)
    whole, commands = CALLS[options.call]
    ends, failed = time.monotonic() + (whole if options.within is None else options.within), []
    for command in commands:
        log = options.folder / f"{options.call}-{command.name}.txt"
        began, left = time.monotonic(), ends - time.monotonic()
        why = run(command, options.folder, log, min(command.seconds, left)) if left > 1 else "not begun"
        print(f"{command.name}: {why or 'done'}, {time.monotonic() - began:.0f} s, {log}", flush=True)
        failed += [command.name] if why else []
    if failed:
        raise SystemExit(f"not all of it: {', '.join(failed)}")


def run(command: Command, folder: Path, log: Path, seconds: float) -> str:
    """Returns why it is not done, or nothing. What it started ends with it."""
    arguments = [sys.executable, *command.arguments]
    if "bench.gpu" in arguments:
        arguments += ["--json", str(folder / "gpu.json"), "--within", f"{seconds - 1:g}"]
    with log.open("w") as out:
        process = subprocess.Popen(
            arguments, stdout=out, stderr=out, env={**os.environ, **dict(command.switches)}, start_new_session=True
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"stopped after {seconds:.0f} s"
    return f"ended with {status}" if status else ""


if __name__ == "__main__":
    main()
