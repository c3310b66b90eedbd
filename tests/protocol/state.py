"""What a state of the protocol consists of: Redis, and of each worker what its threads know and have in hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from petiole.tasks.wire.keys import LedgerKeys, stream_keys
from tests.protocol.scripts import Keys

Kind = Literal["plain", "linked", "failing", "ignored"]
"""plain: no callbacks; linked: a success with `link`; failing: a failure with `link_error`; ignored: `linked`,
without a stored result."""


@dataclass(frozen=True)
class Scenario:
    kind: Kind = "plain"
    messages: int = 1  # with the same task id
    workers: int = 2
    faults: int = 1
    revokes: int = 0
    room: bool = True  # whether a task has a slot at once
    models: bool = False  # whether each worker serves another model


class Tag(NamedTuple):
    """A delivery: its channel and the number there."""

    channel: str
    number: int


class Job(NamedTuple):
    """Of a `tasks.worker.generation.driver.JobDriver`, what its threads have in hand; `at` names its step."""

    delivery: Tag
    call_name: str  # of the call of begin.lua, repeated if it has no reply
    at: str = "queued"
    reply: Any = None  # of begin.lua
    superseded: tuple[Tag, ...] = ()
    attempt: int = 0
    tokens: int = 0  # made
    sent: int = 0  # of them in the log
    entries: int = 0  # of the log
    marked: bool = False  # `running` is set
    prepared: bool = False  # by the engine
    announced: bool = False  # in Redis
    admitted: bool = False
    final: str = ""  # the outcome, once known
    ending: bool = False  # revoked
    handing_back: bool = False
    released: bool = False
    call: Any = None  # of publish.lua: its reply, the tokens and entries after it, its operations
    claimed: bool = False  # the completion
    over: bool = False


class Worker(NamedTuple):
    channel: str
    owner: str
    registered: bool = False
    lost: bool = False  # the lease keeper has found that the owner is gone
    next_tag: int = 1
    delivered: frozenset[Tag] = frozenset()
    acks: frozenset[int] = frozenset()  # not flushed yet
    rejects: frozenset[int] = frozenset()  # not flushed yet
    jobs: tuple[tuple[int, Job], ...] = ()
    current: int = 0  # the job that the pool knows for the task; 0: none
    mailbox: tuple[tuple[str, int], ...] = ()
    timers: frozenset[Tag] = frozenset()  # messages of given-up jobs, requeued later
    draining: bool = False

    def job(self, number: int) -> Job:
        return dict(self.jobs)[number]

    def holds(self, tag: Tag) -> bool:
        return tag in self.delivered and not self.lost


class State(NamedTuple):
    broker: Keys
    task: Keys
    workers: tuple[Worker, ...]
    alone: bool  # whether only one message has the task's id
    stored: str = ""  # in the result backend
    completion: str = ""  # "claimed" or "done"
    called: int = 0  # how often callbacks were sent
    to_send: int = 0  # messages
    to_revoke: int = 0
    faults: int = 0  # that may still happen
    may_count_deaths: int = 0  # workers that were killed, disconnected, silent, or gave up
    may_call_again: int = 0  # workers that sent callbacks, and died before that was recorded

    # ------------------------------------------------------------ what Redis holds

    @property
    def log(self) -> list[dict[str, Any]]:
        return _parsed(value(self.task, LOG, ()))

    def field(self, name: str) -> str:
        return str(dict(value(self.task, TASK_STATE, ())).get(name, ""))

    @property
    def done(self) -> str:
        return json.loads(self.field("done") or '""')

    @property
    def queued(self) -> int:
        return len(value(self.broker, QUEUE, ()))

    @property
    def held(self) -> dict[str, int]:
        """The number of messages of each owner."""
        return {key.removeprefix(UNACKED): len(items) for key, items in self.broker if key.startswith(UNACKED)}

    @property
    def owners(self) -> frozenset[str]:
        return frozenset(value(self.broker, OWNERS, ()))

    @property
    def leases(self) -> frozenset[str]:
        return frozenset(key.removeprefix(LEASE) for key, _ in self.broker if key.startswith(LEASE))

    # ------------------------------------------------------------ what follows

    def put(self, i: int, **changes: Any) -> State:
        workers = list(self.workers)
        workers[i] = workers[i]._replace(**changes)
        return self._replace(workers=tuple(workers))

    def put_job(self, i: int, number: int, **changes: Any) -> State:
        jobs = dict(self.workers[i].jobs)
        jobs[number] = jobs[number]._replace(**changes)
        return self.put(i, jobs=tuple(sorted(jobs.items())))

    def post(self, i: int, what: str, number: int) -> State:
        return self.put(i, mailbox=(*self.workers[i].mailbox, (what, number)))


QUEUE = "petiole"
OWNERS, LEASE, UNACKED, _, PRESENT, SERVER = LedgerKeys.under("")
LOG, CHANNEL, TASK_STATE, ASKED, _, COMPLETION, *_ = stream_keys("t")
MESSAGE = '{"properties": {"delivery_info": {"exchange": ""}}}'

AT_WORK = ("begun", "replaying", "ended", "complete", "called", "stored", "settle")
"""Where a job is in the hands of the intake or of a completion thread."""

FINISHED = {"success": "SUCCESS", "failure": "FAILURE", "revoked": "REVOKED"}

Step = tuple[str, State, int]
"""What happens, the state after it, and how many faults it is."""

Steps = Iterator[Step]


@cache
def _parsed(log: tuple[str, ...]) -> list[dict[str, Any]]:
    return [json.loads(entry) for entry in log]


def value(keys: Keys, key: str, otherwise: Any) -> Any:
    return dict(keys).get(key, otherwise)


def with_key(keys: Keys, key: str, item: Any) -> Keys:
    """`keys` with `item` as the value of `key`; None deletes it."""
    others = [pair for pair in keys if pair[0] != key]
    return tuple(others if item is None else sorted([*others, (key, item)], key=lambda pair: pair[0]))


def blamed(s: State, called: bool = False) -> State:
    """After something for which a death may be counted, and, if `called`, links sent again."""
    return s._replace(may_count_deaths=s.may_count_deaths + 1, may_call_again=s.may_call_again + called)


def fresh(slot: int, epoch: int = 1) -> Worker:
    name = f"{'ABC'[slot]}{epoch}"
    return Worker(channel=name, owner=name)


def initial(scenario: Scenario) -> State:
    return State(
        broker=(),
        task=(),
        workers=tuple(fresh(slot) for slot in range(scenario.workers)),
        alone=scenario.messages == 1,
        to_send=scenario.messages,
        to_revoke=scenario.revokes,
        faults=scenario.faults,
    )
