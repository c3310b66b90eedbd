"""`petiole plan`: what a model needs, and what a machine serves of it, before anything is downloaded or loaded."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from typing import Any, NamedTuple

from petiole.tasks.app import worker_side
from petiole.tasks.commands.terminal import table_text


class Card(NamedTuple):
    """memory: GiB that CUDA reports. capability: the compute capability."""

    memory: float
    capability: tuple[int, int]


CARDS = {
    "l4": Card(22.0, (8, 9)),
    "a10": Card(22.0, (8, 6)),
    "4090": Card(23.6, (8, 9)),
    "a100-40": Card(39.4, (8, 0)),
    "a100": Card(79.1, (8, 0)),
    "h100": Card(79.1, (9, 0)),
    "h200": Card(139.8, (9, 0)),
}

_UNITS = {
    f"{prefix}{end}": base**power
    for end, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT", 1)
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]*)")


def add_options(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "model",
        nargs="?",
        help="a folder, its config.json, or a hub id in the hub's cache (default: PETIOLE_MODEL)",
    )
    machine = command.add_mutually_exclusive_group()
    machine.add_argument(
        "--memory",
        type=_size,
        metavar="SIZE",
        help="such as 24GiB: of a card, or free on a host (default: this machine's)",
    )
    machine.add_argument("--gpu", type=str.lower, choices=CARDS, help="a card: --device cuda and its memory")
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: PETIOLE_DEVICE")
    command.add_argument("--length", type=int, metavar="TOKENS", help="of a sequence (default: the longest)")
    command.add_argument("--json", action="store_true", help="print all numbers as JSON")


def show(options: argparse.Namespace) -> int:
    if options.gpu and options.device == "cpu":
        print(f"petiole: device: must be cuda beside --gpu {options.gpu}, got cpu", file=sys.stderr)
        return 2
    try:
        plan = worker_side.load(worker_side.PLAN)
    except ImportError as error:
        print(f"petiole: a plan needs 'petiole[worker]': {error}", file=sys.stderr)
        return 1
    card = CARDS[options.gpu] if options.gpu else None
    memory = int(card.memory * 2**30) if card else options.memory
    given = {"model": options.model, "device": "cuda" if card else options.device}
    try:
        known = {name: value for name, value in given.items() if value}
        sizes = dataclasses.asdict(plan(known, memory, options.length, card and card.capability))
    except (OSError, ValueError) as error:  # about the model, a setting or the memory
        print(f"petiole: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    print(json.dumps(sizes, indent=2) if options.json else _text(sizes))
    return 0


def _text(sizes: dict[str, Any]) -> str:
    by_type = ", ".join(f"{name} {_shown(n)}" for name, n in sizes["weights"].items())
    each = "1 token" if sizes["page_size"] == 1 else f"{sizes['page_size']} tokens"
    batched, states = sizes["max_num_batched_tokens"], sizes["state_bytes"]
    copies = f"{sizes['snapshots']:,} snapshots of {_shown(sizes['snapshot_bytes'])}"
    pages = [
        ("KV of a token", f"{_shown(sizes['kv_bytes_per_token'])} in {sizes['kv_type']}"),
        *(("", _window(window)) for window in sizes["windows"]),
        *([("state of a sequence", f"{_shown(states)}; {copies}")] if states else []),
        ("pages", f"{sizes['pages']:,} of {each}, with the reserved one; all pools {_shown(sizes['pool_bytes'])}"),
        ("tokens that fit", f"{sizes['tokens']:,}"),
    ]
    rows = [
        ("model", f"{sizes['model']} ({sizes['architecture']})"),
        ("memory", f"{_shown(sizes['memory_bytes'])}, {sizes['device']}"),
        ("weights", f"{_shown(sizes['weight_bytes'])} in {sizes['weight_format']} ({by_type})"),
        *(pages if sizes["tokens"] else [("pages", "none: each text is computed in one step")]),
        ("rows", f"{sizes['rows']:,}; {batched:,} tokens of prompts in a step"),
        ("longest sequence", f"{sizes['max_model_len']:,} tokens"),
        ("at once", f"{sizes['sequences']:,} of {sizes['length']:,} tokens, bounded by {sizes['bounded_by']}"),
    ]
    return table_text(("", ""), rows).strip()


def _window(window: dict[str, int]) -> str:
    pages = f"; {window['pages']:,} pages of their own" if window["pages"] else "; in the others' pages"
    return f"{_shown(window['bytes_per_token'])} of it in layers with a window of {window['window']:,}{pages}"


def _shown(n_bytes: int) -> str:
    """A size such as 1.50 GiB."""
    size, units = float(n_bytes), iter(("KiB", "MiB", "GiB", "TiB"))
    unit = "bytes"
    while size >= 1024 and (larger := next(units, None)):
        size, unit = size / 1024, larger
    return f"{n_bytes} bytes" if unit == "bytes" else f"{size:.2f} {unit}"


def _size(text: str) -> int:
    match = _SIZE.fullmatch(text)
    unit = {name.lower(): n for name, n in _UNITS.items()} | {"": 1, "b": 1}
    if match is None or match[2].lower() not in unit or float(match[1]) * unit[match[2].lower()] < 1:
        raise argparse.ArgumentTypeError(f"must be a number of bytes above 0 such as 24GiB or 24GB, got {text!r}")
    return int(float(match[1]) * unit[match[2].lower()])
