"""What stands in Redis of a batch: what is to be done, how far it is, and who has it. No rows.

    batch_key(ID)        hash: a `Spec`, a status, counts, times, why nothing goes on
    batch_lease_key(ID)  string with a TTL: the claim of the runner that has the batch
    batches_key(TENANT)  sorted set: the tenant's batches, by when they were made
    OPEN_BATCHES_KEY     set: the batches that a runner has to work on

Every change of a status, and everything that a runner writes, is a script that looks at the lease first. So a
runner that has lost its lease writes nothing more."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import redis

from petiole.tasks.servers import connections
from petiole.tasks.submission.batches.rows import sorting
from petiole.tasks.traces import carried
from petiole.tasks.wire.keys import OPEN_BATCHES_KEY, batch_key, batch_lease_key, batches_key
from petiole.tasks.wire.record import scripts

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""A runner has to work on it."""
ENDED = ("completed", "failed", "cancelled", "expired")
DEATHS_OF_A_ROW = 2
"""Runners that die while they handle a row, before the row is set aside: it is an error, and no other runner
handles it."""
KEEP_S = 30 * 86_400
"""How long a record is there after the last change of its status, or after its last runner."""
_BLAMED = "blamed:"
_SOURCES = scripts.sources(Path(__file__).parent / "lua", {})


@dataclass(frozen=True)
class Spec:
    """What is to be done. `input`, `output` and `failures` are locations (`storage`). `lines`: the form's name,
    `requests` or `openai`, and `form`, its arguments, with the order if there is one: a host of a version that
    knows no order does not know this form then, and leaves the batch to others. `tenant`: whose batch it is, and
    `caller`, what its rows are submitted with. `marker`: by which a host finds out that it sees the output's
    folder. `most_rows`: of all open batches of the tenant, that have not ended."""

    input: str
    output: str
    form: Mapping[str, Any] = field(default_factory=dict)
    lines: str = "requests"
    format: str | None = None
    failures: str | None = None
    submission: Mapping[str, Any] = field(default_factory=dict)
    in_order: bool = True
    checks_first: bool = False
    tenant: str = ""
    caller: Mapping[str, Any] = field(default_factory=dict)
    marker: str = ""
    most_rows: int | None = None

    @property
    def sort(self) -> sorting.Sort | None:
        """In which order rows are sent."""
        found: sorting.Sort | None = self.form.get("sort")
        return found

    @property
    def beside(self) -> bool:
        """Whether the input is in the output's folder: who sees that folder knows whether the input is there."""
        return self.input.rpartition("/")[0] == self.output.rpartition("/")[0]

    @classmethod
    def read(cls, raw: str) -> Spec:
        """Fields of a later version are left out."""
        found = json.loads(raw)
        return cls(**{name: found[name] for name in found if name in cls.__dataclass_fields__})


@dataclass(frozen=True)
class BatchRecord:
    """`facts`: all other fields of the hash, as text. `has_runner`: somebody has the lease."""

    id: str
    spec: Spec
    facts: Mapping[str, str]
    has_runner: bool = False

    @property
    def status(self) -> str:
        return self.facts.get("status", "")

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def stuck(self) -> bool:
        """Whether its last runner ended because it could not go on."""
        return bool(self.facts.get("stuck"))

    @property
    def rows_left(self) -> int:
        """Rows that have not ended, as far as they were counted."""
        return max(0, self.number("rows") - self.number("ended"))

    @property
    def trace(self) -> dict[str, str]:
        """The headers of the trace of whoever began it."""
        return dict(json.loads(self.facts.get("trace") or "{}"))

    @property
    def age(self) -> tuple[int, str]:
        """Older batches come first."""
        return self.number("created_at"), self.id

    def number(self, name: str) -> int:
        return int(float(self.facts.get(name) or 0))

    def time_of(self, status: str) -> int | None:
        found = self.facts.get(f"{status}_at")
        return int(float(found)) if found else None

    @property
    def errors(self) -> list[dict[str, Any]]:
        """What is wrong with the input as a whole."""
        return list(json.loads(self.facts.get("errors") or "[]"))

    @property
    def deaths(self) -> int:
        """Runners that have died one after the other, while nothing went on."""
        return self.number("deaths")

    @property
    def blamed(self) -> dict[int, int]:
        """By row, the runners that have died while they handled it."""
        return {int(name[7:]): self.number(name) for name in self.facts if name.startswith(_BLAMED)}

    @property
    def aside(self) -> frozenset[int]:
        """The rows that no runner looks at any more."""
        return frozenset(row for row, deaths in self.blamed.items() if deaths >= DEATHS_OF_A_ROW)

    @property
    def blind(self) -> dict[str, str]:
        """By worker, why it cannot run this batch."""
        return {name[6:]: why for name, why in self.facts.items() if name.startswith("blind:") and why}


def new_id() -> str:
    return f"batch_{os.urandom(12).hex()}"


def is_id(name: str) -> bool:
    return name.startswith("batch_") and "/" not in name and "." not in name


def create(name: str, spec: Spec, expires_in_s: int | None = None, **facts: Any) -> bool:
    """Begin a batch. False if there is one of this name."""
    now = int(time.time())
    said = {**facts, "status": "validating", "created_at": now, "validating_at": now, "spec": _dumped(spec)}
    if trace := carried.headers():
        said["trace"] = dict(trace)
    if expires_in_s is not None:
        said["expires_at"] = now + expires_in_s
    keys = [batch_key(name), batches_key(spec.tenant), OPEN_BATCHES_KEY]
    pairs = [part for pair in _texts(said).items() for part in pair]
    return bool(_script("create")(keys, [name, now, KEEP_S + (expires_in_s or KEEP_S), *pairs]))


def get(name: str) -> BatchRecord | None:
    return next(iter(several([name])), None)


def several(names: Sequence[str]) -> list[BatchRecord]:
    """The records of these batches, without the ones that are gone."""
    commands = [one for name in names for one in (("HGETALL", batch_key(name)), ("EXISTS", batch_lease_key(name)))]
    return list(read(names, connections.perform(commands))) if names else []


def read(names: Sequence[str], replies: Sequence[Any]) -> Iterator[BatchRecord]:
    """`replies`: to HGETALL and EXISTS, for each name."""
    for name, raw, leased in zip(names, replies[::2], replies[1::2], strict=True):
        pairs = raw.items() if isinstance(raw, dict) else zip(raw[::2], raw[1::2], strict=True)
        facts = {key.decode(): value.decode(errors="replace") for key, value in pairs}
        if spec := facts.pop("spec", None):
            yield BatchRecord(name, Spec.read(spec), facts, bool(leased))


def listed(tenant: str = "") -> list[BatchRecord]:
    """The tenant's batches, the newest first. Those that are forgotten leave the list."""
    client, key = connections.streams(), batches_key(tenant)
    raw: Any = client.zrevrange(key, 0, -1)
    names = [name.decode() for name in raw]
    found = several(names)
    if gone := {*names} - {record.id for record in found}:
        client.zrem(key, *gone)
    return found


def open_ids() -> list[str]:
    raw: Any = connections.streams().smembers(OPEN_BATCHES_KEY)
    return sorted(name.decode() for name in raw)


def move(
    record: BatchRecord, sources: Sequence[str], to: str, token: str = "", keep_s: int = KEEP_S, **facts: Any
) -> str | None:
    """Give a batch another status, if it has one of `sources`. The status that it has then; None: it is not
    there, or the lease of `token` is lost."""
    keys = [batch_lease_key(record.id), batch_key(record.id), OPEN_BATCHES_KEY]
    pairs = [part for pair in _texts(facts).items() for part in pair]
    arguments = [token, record.id, _list(sources), to, _list(OPEN), keep_s, *pairs]
    reply = _script("move")(keys, arguments)
    return reply.decode() if isinstance(reply, bytes) else None


def tell_blind(name: str, worker: str, why: str) -> None:
    """Note why a worker cannot run this batch; empty: it can."""
    _script("tell")([batch_key(name)], [f"blind:{worker}", why])


def tell_death(name: str, why: str, row: int | None) -> None:
    """Note why a runner has died, and which row it handled."""
    _script("died")([batch_key(name)], [why, "" if row is None else f"{_BLAMED}{row}", DEATHS_OF_A_ROW])


def as_new(record: BatchRecord) -> dict[str, Any]:
    """The fields of a record that speak of its runners, as they are before the first one."""
    return {
        **dict.fromkeys(("running", "deaths", "aside"), "0"),
        **{f"{_BLAMED}{row}": "0" for row in record.blamed},
    }


def remove(record: BatchRecord) -> None:
    client = connections.streams()
    client.srem(OPEN_BATCHES_KEY, record.id)
    client.zrem(batches_key(record.spec.tenant), record.id)
    client.delete(batch_key(record.id), batch_lease_key(record.id))


class Lease:
    """A runner's hold on a batch; also a `segments.Cursor`. `held` is true while nobody else can have it: the time
    is this process's, from before each renewal was sent."""

    def __init__(self, name: str, token: str, ttl_s: float, generation: int, sent: int) -> None:
        self.name, self.token, self.ttl_s = name, token, ttl_s
        self.generation, self.sent = generation, sent
        self._until = time.monotonic() + ttl_s

    @classmethod
    def claim(cls, name: str, ttl_s: float) -> Lease | None:
        """None: somebody has it, or it is not open."""
        token = os.urandom(12).hex()
        keys = [batch_lease_key(name), batch_key(name), OPEN_BATCHES_KEY]
        generation = _script("claim")(keys, [token, int(ttl_s * 1000), name, _list(OPEN)])
        return None if generation is None else cls.taken_over(name, token, ttl_s, int(generation))

    @classmethod
    def taken_over(cls, name: str, token: str, ttl_s: float, generation: int) -> Lease:
        """As the process that has claimed it gave it to this one."""
        sent = connections.streams().hget(batch_key(name), "sent")
        return cls(name, token, ttl_s, generation, int(sent or 0))

    @property
    def left_s(self) -> float:
        return max(0.0, self._until - time.monotonic())

    @property
    def held(self) -> bool:
        return self.left_s > 0

    def hold(self, **facts: Any) -> str | None:
        """Renew it, and write these fields. The batch's status; None: the lease is lost."""
        began_at = time.monotonic()
        pairs = [part for pair in _texts(facts).items() for part in pair]
        keys = [batch_lease_key(self.name), batch_key(self.name)]
        reply = _script("hold")(keys, [self.token, int(self.ttl_s * 1000), KEEP_S, *pairs])
        self._until = began_at + self.ttl_s if isinstance(reply, bytes) else 0.0
        return reply.decode() if isinstance(reply, bytes) else None

    def send(self, rows: int) -> None:
        if self.hold(sent=rows) is None:
            raise LeaseLost(f"{self.name}: another runner has this batch")
        self.sent = rows

    def check(self) -> None:
        if not self.held:
            raise LeaseLost(f"{self.name}: another runner may have this batch")

    def release(self) -> None:
        """The runner ends, and another one may go on."""
        self._until = 0.0
        _script("release")([batch_lease_key(self.name), batch_key(self.name)], [self.token])


class LeaseLost(Exception):  # noqa: N818
    """Another runner has the batch."""


def _dumped(spec: Spec) -> str:
    return json.dumps(asdict(spec), default=str)


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}


def _list(names: Sequence[str]) -> str:
    return f",{','.join(names)},"


def _script(name: str) -> scripts.Script:
    return _loaded(connections.streams(), name)


@cache
def _loaded(client: redis.Redis, name: str) -> scripts.Script:
    return scripts.load(client, name, _SOURCES)
