"""Records that users send in: `petiole bench share` packs what a run has measured, without a name or an address.

A record keeps the fields that the tables need, and no other: a field that somebody adds later is not sent before
it is listed here. A note, or the reason for a missing peer, may hold a path or a name: those of this machine and
of its user are replaced.

`petiole bench share --unpack RECORD FOLDER` unpacks a record that was sent in, as `bench.render` reads it.
"""

from __future__ import annotations

import argparse
import getpass
import json
import platform
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import __main__ as workloads
from bench.harness.report import write

RECORD = "petiole-record.json"
USUAL = ("models", "latency", "recovery")
"""The workloads that are shared if none is named: a quarter of an hour on two cores."""
RUN = ("title", "versions", "commit", "command", "seconds", "results", "absent")
MACHINE = ("cpu", "cores", "memory_gib", "load_1m", "gpu", "cuda", "driver")
HIDDEN = "..."
_PATH = re.compile(r"(?<![\w.])(?:/|~/|[A-Za-z]:\\)[\w.\-~/\\]+")
_ADDRESS = re.compile(r"\b[a-z][a-z0-9+]*://\S+|\b\d{1,3}(?:\.\d{1,3}){3}\b")


def private_words() -> list[str]:
    """What names this machine or its user, the longest first."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        user = ""
    host = platform.node()
    found = {user, host, host.partition(".")[0], str(Path.home()), Path.home().name, tempfile.gettempdir()}
    return sorted((word for word in found if len(word) > 2 and word != "root"), key=len, reverse=True)


def anonymous(value: Any, words: Iterable[str]) -> Any:
    """The same JSON value without paths, addresses and these words."""
    if isinstance(value, str):
        for word in words:
            value = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", HIDDEN, value, flags=re.IGNORECASE)
        return _PATH.sub(HIDDEN, _ADDRESS.sub(HIDDEN, value))
    if isinstance(value, dict):
        return {name: anonymous(inner, words) for name, inner in value.items()}
    if isinstance(value, list):
        return [anonymous(inner, words) for inner in value]
    return value


def packed(folder: Path, words: Iterable[str] | None = None) -> dict[str, Any]:
    """One record of all workloads whose JSON lies in `folder`. Raises ValueError if there is none."""
    runs = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    if not runs:
        raise ValueError("nothing was measured")
    words = private_words() if words is None else list(words)
    kept = {name: {field: run[field] for field in RUN if field in run} for name, run in runs.items()}
    for name, run in runs.items():
        facts = {fact: run["machine"][fact] for fact in MACHINE if fact in run["machine"]}
        kept[name]["machine"] = {**facts, "system": run["machine"]["system"].partition(" ")[0]}
    record: dict[str, Any] = anonymous({"petiole": 1, "workloads": kept}, words)
    return record


def unpack(record: Path, folder: Path) -> list[str]:
    """Write each workload of a record where `bench.render` finds it. Returns their names. Raises ValueError."""
    found = json.loads(record.read_text())
    if found.get("petiole") != 1:
        raise ValueError(f"{record.name} is no record of `petiole bench share`")
    for name, run in found["workloads"].items():
        if not re.fullmatch(r"[a-z_]{1,40}", name):
            raise ValueError(f"{name!r} is no name of a workload")
        write(str(folder / f"{name}.json"), run)
    return sorted(found["workloads"])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="petiole bench share", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("workload", nargs="*", metavar="WORKLOAD", help=f"which (default: {', '.join(USUAL)})")
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, to see that everything runs")
    parser.add_argument(
        "--unpack", nargs=2, type=Path, metavar=("RECORD", "FOLDER"), help="write a record's workloads"
    )
    options = parser.parse_args(argv)
    if options.unpack:
        print(*unpack(*options.unpack), sep="\n")
        return 0
    with TemporaryDirectory() as folder:
        chosen = options.workload or [*USUAL]
        status = workloads.main([*chosen, *(["--quick"] if options.quick else []), "--json", folder])
        try:
            record = packed(Path(folder))
        except ValueError as error:
            print(f"petiole: {error}", file=sys.stderr)
            return 1
    write(RECORD, record)
    print(f"{RECORD}: look through it, then send it with the form 'Figures of my machine'")
    return status
