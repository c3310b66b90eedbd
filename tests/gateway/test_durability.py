"""The durability trial: background responses are streamed to unmodified clients while workers are killed every
five seconds, gateways every seven, and Sentinel makes another Redis the master. Clients come back to any gateway
with the number of their last event. No event is lost or doubled, each text is that of an undisturbed run, and what
has a schema matches it, be it an answer or the arguments of a call. The ledger of usage has each response once,
with the tokens that its client was told, and its sums are those of its entries.

`make durability` runs it with 1,000 responses (`PETIOLE_TRIAL_RESPONSES`), `PETIOLE_TRIAL_SEED` repeats a run. In
`make test` each dies once or twice."""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import openai
import pytest

from petiole.gateway.serving.auth.api_keys import digest_of
from petiole.tasks.fleet import models, usage
from tests.gateway.conftest import REAL
from tests.support import trials
from tests.support.gateway import Gateway
from tests.support.site import PATIENCE_S, Site, eventually
from tests.support.watched import Watched

pytestmark = pytest.mark.e2e

RESPONSES = int(os.environ.get("PETIOLE_TRIAL_RESPONSES", "10" if trials.short else "40"))
SEED = int(os.environ.get("PETIOLE_TRIAL_SEED", "0")) or random.randrange(1, 2**31)
AT_ONCE = 8
WORKER_EVERY_S, GATEWAY_EVERY_S = 5.0, 7.0
KEY, TENANT = "ptl-" + "a" * 43, "acme"
KEYS = {"tenants": {TENANT: {"salt": "x"}}, "keys": {digest_of(KEY): {"tenant": TENANT}}}
MODEL = "petiole-tiny-tools"
LAST = ("response.completed", "response.incomplete", "response.failed", "response.cancelled")

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {"type": "array", "items": {"enum": ["Python", "C", "Lua"]}, "minItems": 3, "maxItems": 8},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
AS_A_PERSON = {"format": {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}}
INTRODUCE = {"type": "function", "name": "introduce", "parameters": PERSON, "strict": True}
KINDS = 5


def asked(kind: int) -> dict[str, Any]:
    """What a response of this kind is asked for. Every kind has another answer."""
    common: dict[str, Any] = {"model": MODEL, "temperature": 0.8, "extra_body": {"seed": kind}}
    match kind % KINDS:
        case 0:
            return {**common, "input": "Count from 1 to 200.", "max_output_tokens": 400}
        case 1:
            return {**common, "input": f"A person who is {20 + kind}.", "text": AS_A_PERSON}
        case 2:
            more = {"seed": kind, "stop": ["42", "!"], "ignore_eos": True}
            return {**common, "input": "Tell a story.", "max_output_tokens": 300, "extra_body": more}
        case 3:
            choice = {"tools": [INTRODUCE], "tool_choice": "required", "parallel_tool_calls": False}
            return {**common, "input": f"Introduce a person who is {20 + kind}.", **choice}
        case _:
            penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
            more = {"seed": kind, "min_tokens": 150, **penalties}
            return {**common, "input": "What is new?", "max_output_tokens": 300, "extra_body": more}


@dataclass
class Seen:
    """What one client has of its response."""

    kind: int
    name: str = ""
    last: int = -1
    text: str = ""
    structural: int = 0
    connections: int = 0
    final: Any = None
    faults: list[str] = field(default_factory=list)

    def add(self, event: Any) -> None:
        if event.sequence_number <= self.last:
            self.faults.append(f"event {event.sequence_number} came after {self.last}")
        self.last = event.sequence_number
        if event.type.endswith(".delta"):
            self.text += event.delta
        else:
            self.structural += 1
        if event.type == "response.created":
            self.name = event.response.id
        if event.type in LAST:
            self.final = event.response


def said(response: Any) -> str:
    """All that the model has written: texts, and arguments of calls."""
    return "".join(
        item.arguments if item.type == "function_call" else "".join(part.text for part in item.content)
        for item in response.output
    )


class Trial:
    """A fleet of two workers and two gateways, and those who kill them."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site, self.folder = site, folder
        self.random = random.Random(SEED)
        self.begun, self.over = threading.Event(), threading.Event()
        self.killed = {"worker": 0, "gateway": 0, "master": 0}
        self.gateways = [self.gateway(), self.gateway()]
        for _ in range(2):
            site.start_worker()
        for worker in site.workers:
            worker.ready()
        eventually(lambda: models.models(site.redis), "the workers have said what they serve")

    def gateway(self) -> Gateway:
        settings: dict[str, Any] = {"PETIOLE_CONFIRM_REPLICAS": 1, "PETIOLE_CONFIRM_TIMEOUT_S": 10}
        settings["PETIOLE_GATEWAY_KEYS"] = json.dumps(KEYS)
        return Gateway(self.folder, PETIOLE_BROKER_URL=self.site.url, **settings)

    # ------------------------------------------------------------ accidents

    def kill_a_worker(self) -> None:
        """One that is ready: a fleet whose workers never start serves nobody."""
        alive = [worker for worker in self.site.workers if worker.alive()]
        ready = [worker for worker in alive if f"{worker.node} ready." in worker.output]
        if len(ready) == len(alive):
            self.random.choice(ready).kill()
            self.killed["worker"] += 1
            self.site.start_worker()

    def kill_a_gateway(self) -> None:
        """Both serve by then."""
        assert all(gateway.url for gateway in self.gateways)
        at = self.killed["gateway"] % len(self.gateways)
        dead, self.gateways[at] = self.gateways[at], self.gateway()
        dead.kill()
        self.killed["gateway"] += 1

    def kill_the_master(self) -> None:
        watched: Watched = self.site.server
        old = watched.master()
        old.kill()
        self.killed["master"] += 1
        eventually(lambda: watched.master() is not old, "the failover")

    def repeat(self, every_s: float, accident: Callable[[], None]) -> None:
        """The first accident when the first text has come."""
        self.begun.wait(PATIENCE_S)
        accident()
        while not self.over.wait(every_s):
            accident()

    # ------------------------------------------------------------ clients

    def follow(self, kind: int) -> Seen:
        """An unmodified client: it creates a response, and comes back for the rest until it has all."""
        seen = Seen(kind)
        while seen.final is None:
            gateway = self.gateways[(kind + seen.connections) % len(self.gateways)]
            seen.connections += 1
            with contextlib.suppress(openai.APIError, httpx2.HTTPError):
                client = openai.OpenAI(base_url=gateway.url, api_key=KEY, max_retries=0, timeout=20)
                events = (
                    client.responses.retrieve(seen.name, stream=True, starting_after=seen.last)
                    if seen.name
                    else client.responses.create(**asked(kind), background=True, stream=True)
                )
                with client, events:
                    for event in events:
                        seen.add(event)
                        if seen.text:
                            self.begun.set()
            assert seen.connections < 200, f"kind {kind}: no end; seed {SEED}"
        return seen

    def undisturbed(self, kind: int) -> str:
        with openai.OpenAI(base_url=self.gateways[0].url, api_key=KEY) as client:
            return said(client.responses.create(**asked(kind)))


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    from petiole.tasks.app.application import BACKENDS
    from petiole.tasks.settings import settings
    from tests.support.watched import SENTINEL_PASSWORD

    monkeypatch.setenv("PETIOLE_SENTINEL_PASSWORD", SENTINEL_PASSWORD)
    watched = Watched(tmp_path / "redis", replicas=2)
    monkeypatch.setenv("PETIOLE_BROKER_URL", watched.url)
    settings.cache_clear()
    often = {
        "PETIOLE_EXACT": "on",
        "PETIOLE_VISIBILITY_TIMEOUT_S": 2,
        "PETIOLE_MAX_ATTEMPTS": 1000,
        "PETIOLE_DRAIN_SECONDS": 0,
    }
    with Site(tmp_path, server=watched, **REAL, **often, PETIOLE_MODEL=MODEL) as site:
        site.app.loader.override_backends = BACKENDS
        trial = Trial(site, tmp_path)
        yield trial
        for gateway in trial.gateways:
            gateway.kill()
    monkeypatch.undo()
    settings.cache_clear()


def test_no_event_is_lost_or_doubled_whoever_dies(trial: Trial) -> None:
    kinds = list(range(min(RESPONSES // 2, 40)))
    seen = list[Seen]()
    with ThreadPoolExecutor(AT_ONCE + 3) as threads:
        expected = dict(zip(kinds, threads.map(trial.undisturbed, kinds), strict=True))
        accidents = [
            threads.submit(trial.repeat, WORKER_EVERY_S, trial.kill_a_worker),
            threads.submit(trial.repeat, GATEWAY_EVERY_S, trial.kill_a_gateway),
            threads.submit(trial.repeat, 1e9, trial.kill_the_master),
        ]
        running = [threads.submit(trial.follow, kinds[one % len(kinds)]) for one in range(RESPONSES)]
        began_at = time.monotonic()
        try:
            for one in as_completed(running):
                seen.append(one.result())
                is_whole(seen[-1], expected)
                if len(seen) % 100 == 0:
                    told = f"{len(seen)} of {RESPONSES} after {time.monotonic() - began_at:.0f} s"
                    print(f"{told}: {trial.killed}", flush=True)
        finally:
            trial.over.set()
            for one in running:
                one.cancel()
        for accident in accidents:
            accident.result()
    print(f"seed {SEED}: {trial.killed}, {sum(one.connections for one in seen)} connections")
    assert all(trial.killed.values())
    the_ledger_is_exact(seen)


def is_whole(one: Seen, expected: Mapping[int, str]) -> None:
    where = f"kind {one.kind}, {one.name}, seed {SEED}"
    assert not one.faults, where
    assert one.structural + len(one.text) == one.last + 1, f"events are missing: {where}"
    assert one.final.status != "failed", (where, one.final.error)
    assert one.text == said(one.final) == expected[one.kind], where
    if one.kind % KINDS in (1, 3):
        jsonschema.validate(json.loads(one.text), PERSON)


def the_ledger_is_exact(seen: Sequence[Seen]) -> None:
    entered = [json.loads(entry) for entry in usage.entries(2, TENANT)]
    used = {entry["task"]: (entry["prompt"], entry["output"]) for entry in entered}
    assert len(used) == len(entered), f"a task is entered twice: seed {SEED}"
    told = {one.name: (one.final.usage.input_tokens, one.final.usage.output_tokens) for one in seen}
    assert {name: used.get(name) for name in told} == told, f"the ledger: seed {SEED}"
    days = [one.sums for one in usage.usage(2, TENANT)]
    sums = [sum(day[what] for day in days) for what in ("requests", "prompt", "output")]
    whole = [len(entered), *(sum(entry[what] for entry in entered) for what in ("prompt", "output"))]
    assert sums == whole, f"the sums of the ledger: seed {SEED}"
