"""`petiole serve`, `petiole up` and `petiole demo --http`: the gateway stands above `tasks`, so a string names it.

`petiole up MODEL [MODEL ...]` runs Redis, workers, the gateway and its page from one terminal, until Ctrl-C. Redis
is an embedded one, unless `PETIOLE_BROKER_URL` names another. Each card has a worker; models take cards in turn.
Where there are more models than cards, those on one card share its memory. Without a card all models share the
processor's cores. Workers start one after the other, so that each sees the memory that is left. One that ends is
started again, at most `MOST_STARTS` times in all. Models of one file name answer to their paths."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import PurePath
from types import ModuleType
from typing import NamedTuple

from petiole.tasks.commands.demos import demo
from petiole.tasks.errors import PetioleError
from petiole.tasks.servers import embedded
from petiole.tasks.settings import settings

GATEWAY = "petiole.gateway.http.server"
MOST_STARTS = 5
_START_S = 3600.0
_LOOK_S = 1.0
_QUERY = ("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")


EXAMPLE = """
Try it:

curl {url}/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "petiole-tiny",
  "messages": [{{"role": "user", "content": "Count from 1 to 40."}}],
  "stream": true
}}'

Ctrl-C ends it.
"""


def serve(host: str | None, port: int | None) -> int:
    code: int = gateway_program().run(host, port)
    return code


def show() -> int:
    """An embedded Redis, a worker on petiole-tiny and a gateway, until stopped."""
    program = gateway_program()
    demo.settle("petiole-tiny")
    program.check_address(None, None)
    with demo.running("petiole-tiny"):
        code: int = program.run(None, None, EXAMPLE)
        return code


def gateway_program() -> ModuleType:
    try:
        return import_module(GATEWAY)
    except ImportError as error:
        raise PetioleError(f"a gateway needs 'petiole[gateway]': {error}") from None


# ---------------------------------------------------------------- all of it from one terminal


_Started = tuple[str, "subprocess.Popen[bytes]"]


class Placement(NamedTuple):
    """A worker's model, and what its environment has beside the terminal's."""

    model: str
    environment: Mapping[str, str]

    @property
    def shown(self) -> str:
        card = self.environment.get("CUDA_VISIBLE_DEVICES")
        return f"{self.model} on {'the processor' if card is None else f'card {card}'}"


def placed(models: Sequence[str], cards: Sequence[str], cores: int, share: float) -> list[Placement]:
    """Where each worker runs. `share`: of a card's memory, for all workers on it."""
    if not cards:
        threads = str(max(1, cores // len(models)))
        return [Placement(model, {"PETIOLE_MODEL": model, "PETIOLE_NUM_THREADS": threads}) for model in models]
    workers = max(len(models), len(cards))
    found = []
    for number in range(workers):
        model, card = models[number % len(models)], cards[number % len(cards)]
        on_it = len(range(number % len(cards), workers, len(cards)))
        environment = {"PETIOLE_MODEL": model, "CUDA_VISIBLE_DEVICES": card}
        if on_it > 1:
            environment["PETIOLE_GPU_MEMORY_UTILIZATION"] = f"{share / on_it:.3f}"
        found.append(Placement(model, environment))
    return found


def told_apart(places: Sequence[Placement]) -> list[Placement]:
    """Models with one file name answer only to their whole paths."""
    alike = Counter(PurePath(model).name for model in {place.model for place in places})
    return [
        place._replace(environment={**place.environment, "PETIOLE_SERVED_NAMES": place.model})
        if alike[PurePath(place.model).name] > 1
        else place
        for place in places
    ]


def cards_here() -> list[str]:
    """The cards that this process may use, by number."""
    if os.environ.get("PETIOLE_DEVICE") == "cpu" or shutil.which(_QUERY[0]) is None:
        return []
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [card.strip() for card in visible.split(",") if card.strip()]
    asked = subprocess.run(_QUERY, capture_output=True, text=True, check=False)
    return asked.stdout.split() if asked.returncode == 0 else []


def up(models: Sequence[str], host: str | None, port: int | None) -> int:
    """Returns when the gateway has ended. Raises `PetioleError`."""
    if len(set(models)) < len(models):
        raise PetioleError("model: must be named once each: more workers of one model need more cards")
    program = gateway_program()
    if not (os.environ.get("PETIOLE_BROKER_URL") or os.environ.get("PETIOLE_BROKER_URL_FILE")):
        os.environ["PETIOLE_BROKER_URL"] = "embedded://"
    os.environ.setdefault("PETIOLE_DRAIN_SECONDS", "0")  # the gateway has waited for what runs
    settings.cache_clear()
    program.check_address(host, port)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = float(os.environ.get("PETIOLE_GPU_MEMORY_UTILIZATION") or 0.9)
    places = placed(models, cards_here(), cores, share)
    if not settings().served_names:
        places = told_apart(places)
    over = threading.Event()
    keepers: list[threading.Thread] = []
    try:
        with ExitStack() as running:
            running.callback(over.set)
            for number, place in enumerate(places):
                print(f"Starting {place.shown} ...", flush=True)
                started = running.enter_context(_worker(number, place))
                keepers.append(threading.Thread(target=_keep, args=(number, place, started, over), daemon=True))
            for keeper in keepers:
                keeper.start()
            code: int = program.run(host, port, ". Ctrl-C ends it")
            over.set()
            print("Stopping ...", flush=True)
            for keeper in keepers:
                keeper.join()
            return code
    finally:
        embedded.release()


def _worker(number: int, place: Placement) -> contextlib.AbstractContextManager[_Started]:
    return demo.worker(f"up{number}", _START_S, **place.environment)


def _keep(number: int, place: Placement, started: _Started, over: threading.Event) -> None:
    """Start a worker again that has ended."""
    process = started[1]
    with ExitStack() as running:
        for start in range(1, MOST_STARTS + 1):
            while process.poll() is None:
                if over.wait(_LOOK_S):
                    return
            if over.is_set():
                return
            again = "it starts again" if start < MOST_STARTS else "it is not started again"
            print(f"The worker of {place.shown} has ended ({process.returncode}); {again}.", flush=True)
            if start == MOST_STARTS:
                return
            try:
                process = running.enter_context(_worker(number, place))[1]
            except PetioleError as error:
                print(f"petiole: {error}", file=sys.stderr, flush=True)
                return
