"""The protocol between workers and Redis, explored: every order of the steps of all threads, with misfortunes.

`state` says what is known where, `messages` and `protocol` what each thread may do next and what may befall it,
`explore` what must hold. Redis's side is no model: its states are changed by the real scripts. The workers' side
follows the code of `tasks.worker` by hand; who changes the one changes the other.

Misfortunes: a worker is killed, paused beyond its lease, taken for dead while it lives, disconnected, told to shut
down, gives up a task after an error; a reply is lost after Redis has done what was asked; an attempt writes
nothing, or a completion takes, for longer than others wait. All stories with one of them; with two, or with more
workers or messages, if `PETIOLE_CHAOS_MINUTES` is 10 or more (minutes, and 1 GB).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from petiole.tasks.servers.connections import connect
from tests.protocol.explore import Counterexample, explore
from tests.protocol.protocol import Protocol, posted
from tests.protocol.scripts import Scripts
from tests.protocol.state import Job, Scenario, State, Steps
from tests.support.site import RedisServer

FULL = float(os.environ.get("PETIOLE_CHAOS_MINUTES", "1")) >= 10

ONE_MISFORTUNE = [
    Scenario("plain"),
    Scenario("plain", room=False),
    Scenario("linked"),
    Scenario("failing"),
    Scenario("ignored"),
    Scenario("plain", models=True),
    Scenario("plain", revokes=1, faults=0),
    Scenario("linked", messages=2, faults=0),
    Scenario("failing", messages=2, workers=3, faults=0),
]
MORE = [
    Scenario("plain", faults=2),
    Scenario("linked", faults=2),
    Scenario("failing", faults=2),
    Scenario("linked", revokes=1),
    Scenario("linked", messages=2),
    Scenario("linked", room=False, workers=3),
]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripts]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    client = connect(server.url)
    yield Scripts(client)
    client.close()
    server.kill()


@pytest.mark.parametrize("scenario", [*ONE_MISFORTUNE, *(MORE if FULL else [])], ids=str)
def test_whatever_happens_the_task_comes_to_its_one_end(scripts: Scripts, scenario: Scenario) -> None:
    print(explore(Protocol(scripts, scenario)), "states")


class AcknowledgesWhatIsStale(Protocol):
    def _standby(self, s: State, i: int, number: int, job: Job) -> Steps:
        if job.at == "standing by":
            yield f"{s.workers[i].channel} acknowledges", posted(s, i, "leave", number), 0


class CompletesWithoutAClaim(Protocol):
    def _completion(self, s: State, i: int, number: int, job: Job) -> Steps:
        if job.at == "ended":
            yield f"{s.workers[i].channel} claims nothing", s.put_job(i, number, at="complete"), 0
        else:
            yield from super()._completion(s, i, number, job)


class TakesAStoredFailureForACompletion(Protocol):
    def completed(self, s: State) -> bool:
        return bool(s.stored)


class AnnouncesOnce(Protocol):
    def _announces(self, s: State, job: Job) -> bool:
        return super()._announces(s, job) and not s.field("prepared")


class GoesOnWithAnotherModel(Protocol):
    def _start(self, s: State, i: int, number: int, job: Job) -> State:
        _, _, _, _, *rest = job.reply
        return super()._start(s, i, number, job._replace(reply=(*job.reply[:3], self.model(i), *rest)))


@pytest.mark.parametrize(
    ("worse", "scenario", "what"),
    [
        (AcknowledgesWhatIsStale, Scenario("plain"), "the task is lost if the only worker that has it dies"),
        (CompletesWithoutAClaim, Scenario("linked"), "what is linked is sent twice"),
        (AnnouncesOnce, Scenario("plain"), "the task was announced by another attempt"),
        (GoesOnWithAnotherModel, Scenario("plain", models=True), "the stream has tokens of two models"),
        (TakesAStoredFailureForACompletion, Scenario("failing"), "it cannot come to rest|the task is lost"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_worse_protocol_is_found_out(
    scripts: Scripts, worse: type[Protocol], scenario: Scenario, what: str
) -> None:
    with pytest.raises(Counterexample, match=what) as caught:
        explore(worse(scripts, scenario))
    print(caught.value)
