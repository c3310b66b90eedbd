"""Whatever ends a runner, the next one goes on: each row is once in the output, no finished row is sent again."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from petiole.tasks.app.application import app
from petiole.tasks.errors import BatchError
from petiole.tasks.settings import settings
from petiole.tasks.submission.batches import batch as loop, journal, segments
from petiole.tasks.submission.batches.api import batch
from petiole.tasks.submission.batches.batch import Batch
from petiole.tasks.submission.batches.client import BatchClient, Fleet
from petiole.tasks.submission.batches.durable import claims, fair_share, records, runner, submitting
from petiole.tasks.submission.batches.durable.records import BatchRecord, Lease, LeaseLost, Spec
from petiole.tasks.submission.batches.durable.runner import Runner
from petiole.tasks.submission.batches.files import storage
from petiole.tasks.submission.batches.files.storage import StorageError
from petiole.tasks.submission.batches.in_flight import FairShare, RowInFlight
from petiole.tasks.submission.batches.progress import Progress
from petiole.tasks.submission.batches.rows import row_types
from petiole.tasks.submission.batches.rows.output_lines import OutputLine, TaskOutcome
from petiole.tasks.submission.batches.rows.sources import Row
from tests.support.site import RedisServer

ROWS = 40
TTL_S = 30.0


class Killed(BaseException):
    """As by SIGKILL: nothing is written any more."""


class Workers:
    """They end a task as soon as somebody looks for it. `sent`: how often each was sent; `forgotten`: whose result
    is gone."""

    def __init__(self) -> None:
        self.sent: dict[str, int] = {}
        self.forgotten: set[str] = set()
        self.cancelled: set[str] = set()
        self.idle = False
        self.die: Any = lambda: None


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Workers:
    made = Workers()

    class Prompt(BatchClient):
        def fleet(self) -> Fleet:
            return Fleet(4)

        def send(self, rows: Iterable[RowInFlight]) -> Iterator[tuple[RowInFlight, Exception | None]]:
            for sent in rows:
                for task_id in sent.ids:
                    assert task_id not in made.forgotten, "a finished row is not sent again"
                    made.sent[task_id] = made.sent.get(task_id, 0) + 1
                made.die()
                yield sent, None

        def outcomes(self, task_ids: Sequence[str]) -> dict[str, TaskOutcome]:
            if made.idle:
                return {}
            known = [task_id for task_id in task_ids if task_id in made.sent and task_id not in made.forgotten]
            usage = {"prompt_tokens": 2, "completion_tokens": 3}
            return {task_id: TaskOutcome({"text": task_id.split("-")[3], "usage": usage}) for task_id in known}

        def forget(self, task_ids: Sequence[str]) -> None:
            made.forgotten |= {*task_ids}
            made.die()

        def cancel(self, task_ids: Sequence[str]) -> None:
            made.cancelled |= {*task_ids}

    monkeypatch.setattr(loop, "BatchClient", Prompt)
    for pause in ("AWAY_PAUSE_S", "SHORTEST_PAUSE_S", "LONGEST_PAUSE_S"):
        monkeypatch.setattr(loop, pause, 0.0)
    monkeypatch.setattr(segments.PageStore, "sync_s", 0.0)
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("runner"))
    yield server
    server.kill()


@pytest.fixture
def client(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[redis.Redis]:
    monkeypatch.setenv("PETIOLE_BROKER_URL", server.url)
    monkeypatch.setenv("PETIOLE_BATCH_FILES", f"{tempfile.gettempdir()},memory://bucket")
    settings.cache_clear()
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        client.flushall()
        yield client
    settings.cache_clear()


def begun(folder: Path | str, rows: int = ROWS, **more: Any) -> BatchRecord:
    location = storage.joined(str(folder), "in.jsonl")
    lines = "".join(json.dumps({"prompt": str(k)}) + "\n" for k in range(rows))
    storage.write(location, lines.encode())
    made = batch(location, storage.joined(str(folder), "out.jsonl"), fields=["text"], priority=9)
    return submitting.begin(submitting.spec_of(made), **more)


def ran(record: BatchRecord) -> str:
    lease = Lease.claim(record.id, TTL_S)
    assert lease is not None
    return Runner(app, submitting.known(record.id), lease).run()


def output(record: BatchRecord) -> list[dict[str, Any]]:
    return [json.loads(line) for line in storage.read(record.spec.output).splitlines()]


def check(record: BatchRecord, rows: int = ROWS) -> None:
    assert output(record) == [{"row": k, "text": str(k)} for k in range(rows)]


@pytest.mark.parametrize("where", ["folder", "memory://bucket"])
def test_from_beginning_to_end(client: redis.Redis, workers: Workers, tmp_path: Path, where: str) -> None:
    record = begun(tmp_path if where == "folder" else f"{where}/{tmp_path.name}")
    assert (record.status, record.has_runner, records.open_ids()) == ("validating", False, [record.id])
    assert ran(record) == "completed"
    found = submitting.known(record.id)
    assert [found.number(name) for name in ("rows", "ended", "failed")] == [ROWS, ROWS, 0]
    assert [found.number(f"{name}_tokens") for name in ("prompt", "completion")] == [2 * ROWS, 3 * ROWS]
    assert [found.time_of(status) is not None for status in ("in_progress", "finalizing", "completed")] == [
        True
    ] * 3
    check(record)
    assert (records.open_ids(), found.has_runner, [one.id for one in records.listed()]) == ([], False, [record.id])
    assert {*workers.sent} == workers.forgotten
    assert Lease.claim(record.id, TTL_S) is None
    assert sum(client.memory_usage(key) or 0 for key in client.keys("petiole:*")) < 10_000


@pytest.mark.parametrize("seed", range(25))
def test_whatever_ends_a_runner_the_next_one_goes_on(
    client: redis.Redis, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Killed between any two effects, a full disk, a lease that is lost and found by another."""
    random_ = random.Random(seed)
    record, write = begun(tmp_path), storage.write
    leases: list[Lease] = []

    def die() -> None:
        if random_.random() < 0.08:
            raise Killed

    def writing(location: str, data: bytes) -> None:
        match random_.randrange(20):
            case 0:
                raise StorageError(f"{location}: No space left on device")
            case 1:
                raise Killed
            case 2:
                client.delete(f"petiole:batches:{{all}}:lease:{record.id}")
        write(location, data)

    workers.die = die
    monkeypatch.setattr(storage, "write", writing)
    monkeypatch.setattr(runner, "MOST_DEATHS", 200)
    for _ in range(200):
        lease = Lease.claim(record.id, TTL_S)
        assert lease is not None
        leases.append(lease)
        try:
            status = Runner(app, submitting.known(record.id), lease).run()
        except Killed:
            status = "killed"
        if status == "completed":
            break
        client.delete(f"petiole:batches:{{all}}:lease:{record.id}")  # it has run out
    else:
        raise AssertionError(f"seed {seed}: the batch does not end: {submitting.known(record.id).facts}")
    check(record)
    assert [lease.generation for lease in leases] == [*range(1, len(leases) + 1)]


def test_a_runner_that_has_lost_its_lease_writes_nothing_more(client: redis.Redis, tmp_path: Path) -> None:
    record = begun(tmp_path)
    old = Lease.claim(record.id, TTL_S)
    assert old is not None
    assert Lease.claim(record.id, TTL_S) is None
    client.delete(f"petiole:batches:{{all}}:lease:{record.id}")
    new = Lease.claim(record.id, TTL_S)
    assert new is not None
    assert new.generation == old.generation + 1
    before = submitting.known(record.id).facts
    assert old.hold(ended=7) is None
    assert records.move(record, ("validating",), "completed", old.token) is None
    old.release()
    with pytest.raises(LeaseLost):
        old.send(5)
    with pytest.raises(LeaseLost):
        old.check()
    assert submitting.known(record.id).facts == before
    assert new.hold(ended=7) == "validating"


def test_a_batch_that_redis_has_forgotten_goes_on_where_its_pages_end(
    client: redis.Redis, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die() -> None:
        if workers.forgotten:
            raise Killed

    workers.die = die
    monkeypatch.setattr(segments, "_MOST_PAGES", 1)  # pages are read again
    with pytest.raises(Killed):
        ran(begun(tmp_path))
    workers.die = lambda: None
    finished = {*workers.forgotten}
    client.flushall()
    record = begun(tmp_path)
    assert record.facts.get("generation") is None
    assert ran(record) == "completed"
    check(record)
    assert {workers.sent[task_id] for task_id in finished} == {1}


def test_two_runners_of_one_generation_write_no_page_over_each_other(
    client: redis.Redis, workers: Workers, tmp_path: Path
) -> None:
    """As when the primary of Redis dies with the claim that its replica has not heard of."""
    record = begun(tmp_path)
    leases = [Lease(record.id, "token", TTL_S, 1, 0) for _ in range(2)]
    tapes = [segments.PageStore(record.spec.output, lease) for lease in leases]
    for k, one in enumerate(tapes):
        one.write(b"%d\n" % k)
        one.sync()
    found = segments.PageStore(record.spec.output, leases[0]).lines()
    assert sorted(line for _, line in found) == [b"0\n", b"1\n"]


def test_a_batch_that_breaks_each_runner_fails(
    client: redis.Redis, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = begun(tmp_path)

    def broken() -> None:
        raise LookupError("of the form")

    workers.die = broken
    for deaths in range(runner.MOST_DEATHS):
        found = submitting.known(record.id)
        assert found.deaths == max(0, deaths - 1), "the last one is counted by the next claim"
        assert ran(record) in ("validating", "in_progress")
        assert "LookupError" in submitting.known(record.id).facts["note"]
        assert submitting.known(record.id).has_runner  # a pause until the next try
        client.delete(f"petiole:batches:{{all}}:lease:{record.id}")
    workers.die = lambda: None
    assert list(claims.claimed("w0", TTL_S)) == []
    assert submitting.known(record.id).status == "failed"
    [fault] = submitting.known(record.id).errors
    assert (fault["code"], "LookupError" in fault["message"]) == ("runner_died", True)
    assert ran(submitting.resume(submitting.known(record.id))) == "completed"
    check(record)


def test_runners_that_die_after_progress_are_not_counted_together(
    client: redis.Redis, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = begun(tmp_path, 400)

    def die() -> None:
        if workers.forgotten - finished:
            raise Killed

    workers.die = die
    monkeypatch.setattr(loop, "window", lambda *_: 16)
    for _ in range(runner.MOST_DEATHS + 1):
        finished = {*workers.forgotten}
        with pytest.raises(Killed):
            ran(record)
        client.delete(f"petiole:batches:{{all}}:lease:{record.id}")
    assert submitting.known(record.id).deaths <= 1
    workers.die = lambda: None
    assert ran(record) == "completed"
    check(record, 400)


@pytest.mark.parametrize("checks_first", [False, True])
def test_a_row_that_ends_two_runners_is_set_aside_and_the_rest_goes_on(
    client: redis.Redis, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks_first: bool
) -> None:
    record, poison, handled = begun(tmp_path), random.Random(5).sample(range(ROWS), 3), []
    if checks_first:
        spec = {**asdict(record.spec), "checks_first": True}
        client.hset(f"petiole:batches:{{all}}:batch:{record.id}", "spec", json.dumps(spec, default=dict))
    value = Row.value

    def killing(row: Row) -> Any:
        if row.number in poison and not row.fault:
            handled.append(row.number)
            raise MemoryError
        return value(row)

    monkeypatch.setattr(Row, "value", killing)
    monkeypatch.setattr(row_types.RequestRows, "faults", lambda _, rows: iter([row.value() for row in rows][:0]))
    for _ in range(2 * len(poison)):
        assert ran(submitting.known(record.id)) in ("validating", "in_progress")
        client.delete(f"petiole:batches:{{all}}:lease:{record.id}")
    assert ran(submitting.known(record.id)) == "completed"
    assert sorted(handled) == sorted(poison * 2)
    found = output(record)
    assert [line["row"] for line in found if "error" in line] == sorted(poison)
    assert {line["error"]["message"].partition(",")[0] for line in found if "error" in line} == {
        "row: ended 2 processes that handled it"
    }
    assert [line["text"] for line in found if "text" in line] == [str(k) for k in range(ROWS) if k not in poison]
    assert submitting.known(record.id).aside == {*poison}
    assert submitting.resume(submitting.known(record.id)).aside == frozenset()


def test_a_batch_that_this_version_cannot_read_is_another_hosts(client: redis.Redis, tmp_path: Path) -> None:
    strange, known = begun(tmp_path / "later"), begun(tmp_path / "now")
    spec = json.loads(client.hget(f"petiole:batches:{{all}}:batch:{strange.id}", "spec") or b"")
    spec["form"]["of_a_later_version"] = 1
    client.hset(f"petiole:batches:{{all}}:batch:{strange.id}", "spec", json.dumps(spec))
    assert [lease.name for lease in claims.claimed("w0", TTL_S)] == [known.id]
    list(claims.claimed("w0", TTL_S))
    assert "of_a_later_version" in submitting.known(strange.id).blind["w0"]


def test_what_redis_has_forgotten_comes_back_by_no_runner_and_no_host(
    client: redis.Redis, workers: Workers, tmp_path: Path
) -> None:
    record = begun(tmp_path)
    key = f"petiole:batches:{{all}}:batch:{record.id}"
    lease = Lease.claim(record.id, TTL_S)
    assert lease is not None
    client.expire(key, 60)
    assert lease.hold() == "validating"
    assert int(str(client.ttl(key))) > 60, "a batch that runs is not forgotten"
    client.delete(key)
    assert lease.hold(ended=1) is None
    records.tell_blind(record.id, "w0", "no such file")
    assert client.exists(key) == 0
    lease.release()
    assert ran(begun(tmp_path)) == "completed"


def test_an_output_appears_only_by_the_runner_that_has_the_batch(
    client: redis.Redis, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stood still while it made the output of a cancelled batch, which went on meanwhile, and is complete."""
    record = begun(tmp_path)
    workers.idle = True
    submitting.cancel(record)
    old = Lease.claim(record.id, TTL_S)
    assert old is not None
    refusal = row_types.RequestRows.refusal

    def standing(self: row_types.RequestRows, row: Row, error: Exception) -> OutputLine:
        monkeypatch.setattr(row_types.RequestRows, "refusal", refusal)
        client.delete(f"petiole:batches:{{all}}:lease:{record.id}")
        assert ran(submitting.known(record.id)) == "cancelled"
        workers.idle = False
        assert ran(submitting.resume(submitting.known(record.id))) == "completed"
        old._until = 0.0  # its time is over, too
        return refusal(self, row, error)

    monkeypatch.setattr(row_types.RequestRows, "refusal", standing)
    assert Runner(app, submitting.known(record.id), old).run() != "cancelled"
    assert submitting.known(record.id).status == "completed"
    check(record)


def test_a_batch_that_expires_while_its_runner_dies_runs_no_further_row(
    client: redis.Redis, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, written = begun(tmp_path, expires_in_s=-1), storage.written

    def dying(location: str) -> Any:
        if location == record.spec.output:
            raise Killed
        return written(location)

    with monkeypatch.context() as patched:
        patched.setattr(storage, "written", dying)
        with pytest.raises(Killed):
            ran(record)
    client.delete(f"petiole:batches:{{all}}:lease:{record.id}")
    assert (ran(submitting.known(record.id)), workers.sent) == ("expired", {})


def test_failed_rows_are_sent_again_although_the_first_runner_dies(
    client: redis.Redis, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = tmp_path / "in.jsonl"
    location.write_text("[]\n" + '{"prompt": "0"}\n' * (ROWS - 1))
    record = submitting.begin(submitting.spec_of(batch(str(location), str(tmp_path / "out.jsonl"))))

    def die() -> None:
        if workers.forgotten:
            raise Killed

    workers.die = die
    with pytest.raises(Killed):
        ran(record)
    client.delete(f"petiole:batches:{{all}}:lease:{record.id}")
    workers.die = lambda: None
    assert submitting.cancel(record) == "cancelling"
    assert ran(submitting.known(record.id)) == "cancelled"
    record = submitting.resume(submitting.known(record.id), again=True)
    with monkeypatch.context() as patched:
        patched.setattr(journal.Journal, "forget_failures", lambda _: killed())
        with pytest.raises(Killed):
            ran(record)
    client.delete(f"petiole:batches:{{all}}:lease:{record.id}")
    noted: list[dict[str, Any]] = []
    note = journal.Journal.note

    def noting(self: journal.Journal, **facts: Any) -> None:
        noted.append(facts)
        note(self, **facts)

    monkeypatch.setattr(journal.Journal, "note", noting)
    assert ran(submitting.known(record.id)) == "completed"
    assert [facts["again"] for facts in noted] == [1]
    assert submitting.known(record.id).facts["again"] == ""


def killed() -> None:
    raise Killed


def test_a_cancelled_batch_has_a_line_for_each_row_and_goes_on_when_it_is_resumed(
    client: redis.Redis, workers: Workers, tmp_path: Path
) -> None:
    record = begun(tmp_path)
    workers.idle = True
    lease = Lease.claim(record.id, 0.4)
    assert lease is not None
    workers.die = lambda: submitting.cancel(record)  # while rows are on their way
    assert Runner(app, record, lease).run() == "cancelled"
    sent = {*workers.sent}
    assert sent == workers.cancelled
    found = output(record)
    assert [line["row"] for line in found] == [*range(ROWS)]
    assert {line["error"]["message"] for line in found} == {
        "This request was not run before the batch was cancelled."
    }
    workers.idle, workers.die = False, lambda: None
    assert ran(submitting.resume(submitting.known(record.id))) == "completed"
    check(record)
    assert not {*workers.sent} - sent & sent


def test_cancelled_while_nobody_runs_it(client: redis.Redis, workers: Workers, tmp_path: Path) -> None:
    record = begun(tmp_path)
    assert submitting.cancel(record) == "cancelling"
    assert ran(record) == "cancelled"
    assert (len(output(record)), workers.sent) == (ROWS, {})


def test_a_batch_whose_time_is_over_expires(client: redis.Redis, workers: Workers, tmp_path: Path) -> None:
    record = begun(tmp_path, expires_in_s=-1)
    assert ran(record) == "expired"
    assert {line["error"]["message"] for line in output(record)} == {
        "This request was not run before the batch expired."
    }


def test_failed_rows_are_sent_again_where_that_is_asked(
    client: redis.Redis, workers: Workers, tmp_path: Path
) -> None:
    location = tmp_path / "in.jsonl"
    location.write_text('{"prompt": "0"}\n[]\n')
    spec = submitting.spec_of(batch(str(location), str(tmp_path / "out.jsonl"), fields=["text"]))
    assert ran(submitting.begin(spec)) == "completed"
    record = submitting.begin(spec)
    assert (record.status, record.number("failed")) == ("validating", 1)
    assert ran(record) == "completed"
    assert submitting.known(record.id).number("failed") == 1


def test_the_same_command_finds_its_batch_and_another_is_refused(
    client: redis.Redis, workers: Workers, tmp_path: Path
) -> None:
    record = begun(tmp_path)
    assert begun(tmp_path).facts["created_at"] == record.facts["created_at"]
    location, out = str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl")
    with pytest.raises(BatchError, match="has other rows or options"):
        submitting.begin(submitting.spec_of(batch(location, out, fields=["text"], priority=9, max_tokens=3)))
    with pytest.raises(BatchError, match="no such file"):
        submitting.begin(Spec(str(tmp_path / "missing.jsonl"), out))
    with pytest.raises(BatchError, match="is of a batch with --detach"):
        batch(location, out, fields=["text"]).run()
    other = str(tmp_path / "other.jsonl")
    Path(f"{other}.journal").write_text("")
    with pytest.raises(BatchError, match="is of a batch without --detach"):
        submitting.begin(submitting.spec_of(batch(location, other)))
    assert ran(record) == "completed"
    assert ran(begun(tmp_path)) == "completed"
    check(record)


def test_a_host_claims_what_it_can_run_and_says_why_not(client: redis.Redis, tmp_path: Path) -> None:
    record = begun(tmp_path)
    (tmp_path / "out.jsonl.pages" / "marker").write_text("of another folder")
    assert list(claims.claimed("w0", TTL_S)) == []
    assert list(submitting.known(record.id).blind) == ["w0"]
    segments.mark(record.spec.output, record.spec.marker)
    [lease] = claims.claimed("w0", TTL_S)
    assert lease.name == record.id
    assert submitting.known(record.id).blind == {}
    assert list(claims.claimed("w1", TTL_S)) == []
    lease.release()
    (tmp_path / "in.jsonl").unlink()
    assert submitting.known(record.id).spec.beside
    [lease] = claims.claimed("w1", TTL_S)  # it sees the folder, so the input is nowhere
    assert Runner(app, submitting.known(record.id), lease).run() == "failed"
    assert [fault["code"] for fault in submitting.known(record.id).errors] == ["input_file_missing"]


def test_an_input_elsewhere_may_be_seen_by_another_host(client: redis.Redis, tmp_path: Path) -> None:
    record = begun(tmp_path)
    elsewhere = tmp_path / "more" / "in.jsonl"
    spec = {**json.loads(json.dumps(asdict(record.spec))), "input": str(elsewhere)}
    client.hset(f"petiole:batches:{{all}}:batch:{record.id}", "spec", json.dumps(spec))
    assert list(claims.claimed("w1", TTL_S)) == []
    assert submitting.known(record.id).blind == {"w1": f"{elsewhere}: no such file here"}


def test_a_batch_without_a_host_is_left_only_if_it_has_had_a_runner(
    client: redis.Redis, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitting, "_hopeless", lambda _: True)
    record = begun(tmp_path)
    with pytest.raises(BatchError, match="no worker can run"):
        submitting.taken(record)
    assert (records.get(record.id), records.listed()) == (None, [])
    assert not Path(record.spec.output + segments.PAGES).exists()
    record = begun(tmp_path)
    workers.die = lambda: killed() if workers.forgotten else None
    with pytest.raises(Killed):
        ran(record)
    client.delete(f"petiole:batches:{{all}}:lease:{record.id}")
    with pytest.raises(BatchError, match="no worker can run"):
        submitting.taken(record)
    workers.die = lambda: None
    assert ran(submitting.known(record.id)) == "completed"
    check(record)


def test_two_clients_that_begin_a_batch_at_once_leave_the_marker_of_its_record(
    client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = segments.mark

    def marking(output: str, token: str) -> None:
        monkeypatch.setattr(segments, "mark", mark)
        begun(tmp_path)
        mark(output, token)

    monkeypatch.setattr(segments, "mark", marking)
    record = begun(tmp_path)
    assert segments.sees(record.spec.output, record.spec.marker) == ""


def test_rows_that_have_changed_fail_the_batch(client: redis.Redis, workers: Workers, tmp_path: Path) -> None:
    record = begun(tmp_path)

    def die() -> None:
        if workers.forgotten:
            raise Killed

    workers.die = die
    with pytest.raises(Killed):
        ran(record)
    client.delete(f"petiole:batches:{{all}}:lease:{record.id}")
    (tmp_path / "in.jsonl").write_text('{"prompt": "other"}\n' * ROWS)
    assert ran(record) == "failed"
    [fault] = submitting.known(record.id).errors
    assert "has changed since its result was written" in fault["message"]


def of_tenants(folder: Path, *names: str) -> list[BatchRecord]:
    """Open batches; a tenant is the first letter of its batches' names."""
    (folder / "in.jsonl").write_text("{}\n")
    for name in names:
        spec = Spec(str(folder / "in.jsonl"), str(folder / f"{name}.jsonl"), tenant=name[0])
        assert records.create(f"batch_{name}", spec)
    return records.several([f"batch_{name}" for name in names])


def test_tenants_take_turns_at_the_hosts(client: redis.Redis, tmp_path: Path) -> None:
    def claimed() -> Lease:
        return next(iter(claims.claimed("w", TTL_S)))

    of_tenants(tmp_path, "a0", "a1", "a2", "a3", "a4", "b0")
    leases = {lease.name: lease for lease in (claimed() for _ in range(4))}
    assert [*leases] == ["batch_a0", "batch_b0", "batch_a1", "batch_a2"]
    assert claims.makes_room("w", leases) is None, "a has 3 runners, b one, and none of b waits"
    of_tenants(tmp_path, "c0")
    assert claims.makes_room("w", ["batch_b0"]) is None
    assert claims.makes_room("w", []) is None
    client.hset("petiole:batches:{all}:batch:batch_c0", "stuck", "1")
    assert claims.makes_room("w", leases) is None, "c's last runner could not write"
    client.hset("petiole:batches:{all}:batch:batch_c0", "stuck", "")
    assert claims.makes_room("w", reversed([*leases])) == "batch_a2"
    stopped = claims.makes_room("w", leases)
    assert stopped == "batch_a0", "it runs for longest"
    leases.pop(stopped).release()
    leases |= {"batch_c0": claimed()}
    assert leases["batch_c0"].name == "batch_c0"
    assert claims.makes_room("w", leases) is None, "a has 2 runners: more than its share is waiting, not running"


def test_a_batch_whose_output_cannot_be_written_is_stuck_until_a_runner_reads_it(
    client: redis.Redis, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = begun(tmp_path)

    def full(location: str, data: bytes) -> None:
        raise StorageError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", full)
        assert ran(record) == "validating"
    found = submitting.known(record.id)
    assert (found.stuck, found.facts["note"]) == (True, "no space left on device")
    client.delete(f"petiole:batches:{{all}}:lease:{record.id}")
    assert ran(found) == "completed"
    assert not submitting.known(record.id).stuck
    check(record)


def beside(name: str, tenant: str, queue: str, on_their_way: int = 5, rows_per_s: float = 2.5) -> Any:
    """A batch with rows on their way: whom it shares with, and what is called at its end."""
    sharing = fair_share.SharingWithOthers(name, tenant)
    shown = Progress(on_their_way=on_their_way, rows_per_s=rows_per_s)
    return partial(sharing.look, queue, shown), sharing.leave


def test_batches_that_run_beside_each_other_share_by_tenant(client: redis.Redis) -> None:
    names = ("batch_a0", "batch_a1", "batch_b0")
    looks = {name: beside(name, name[6], "q")[0] for name in names}
    beside("batch_b2", "b", "q", on_their_way=0)[0]()
    elsewhere, _ = beside("batch_c0", "c", "other")
    for look in looks.values():
        look()
    assert elsewhere() == (1.0, 0.0)
    assert [look() for look in looks.values()] == [(1 / 4, 5.0), (1 / 4, 5.0), (1 / 2, 5.0)]


def test_a_batch_that_a_runner_has_run_shares_with_nobody_any_more(
    client: redis.Redis, workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOOK_S", 0.0)
    told, seen = fair_share._tell, list[fair_share.RunningBatch]()
    monkeypatch.setattr(fair_share, "_tell", lambda mine: (seen.append(mine), told(mine)))
    record = begun(tmp_path)
    assert ran(record) == "completed"
    assert {one.id for one in seen} == {record.id}
    assert not client.keys("petiole:batches:{all}:running*")


def test_batches_that_processes_run_share_with_each_other_and_with_those_of_runners(
    client: redis.Redis, workers: Workers
) -> None:
    made = [batch([{"prompt": "x"}], queue=queue) for queue in ("q", "q", "other")]

    def looked(one: Batch) -> FairShare:
        return one.sharing.look(str(one.submission["queue"]), one.progress)

    assert [looked(one) for one in made] == [(1.0, 0.0)] * 3, "none has a row on its way"
    for one in made:
        one.progress.on_their_way, one.progress.rows_per_s = 5, 2.0
        looked(one)
    assert [looked(one) for one in made] == [(1 / 2, 2.0), (1 / 2, 2.0), (1.0, 0.0)]
    durable, left = beside("batch_a0", "a", "q", rows_per_s=3.0)
    assert durable() == (1 / 2, 4.0)
    assert looked(made[0]) == (1 / 4, 5.0)
    gone = next(key for key in client.keys("petiole:batches:{all}:running:process*") if b'"q"' in client.get(key))
    client.delete(gone)
    assert durable() == (1 / 2, 2.0)
    assert client.scard("petiole:batches:{all}:running") == 3
    left()
    assert client.ttl("petiole:batches:{all}:running") > 0
    for one in made:
        one.sharing.leave()
    assert not client.keys("petiole:batches:{all}:running*"), "whose batch has ended shares no more"


def test_a_batch_of_a_process_leaves_its_neighbours_when_it_ends(
    client: redis.Redis, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LOOK_S", 0.0)
    workers.idle, seen = True, []
    made = batch([{"prompt": "x"}] * 3)

    def watch(shown: Any) -> None:
        if client.exists("petiole:batches:{all}:running"):
            seen.append(shown.on_their_way)
            workers.idle = False

    made.run(watch)
    assert seen
    assert not client.keys("petiole:batches:{all}:running*")


def test_open_batches_of_a_tenant_have_so_many_rows_in_all(
    client: redis.Redis, workers: Workers, tmp_path: Path
) -> None:
    found = []
    for name, rows in (("one", 20), ("two", 20), ("three", 40)):
        (tmp_path / name).mkdir()
        record = begun(tmp_path / name, rows)
        spec = {**asdict(record.spec), "tenant": "acme", "checks_first": True, "most_rows": 39}
        client.hset(f"petiole:batches:{{all}}:batch:{record.id}", "spec", json.dumps(spec, default=dict))
        client.zadd("petiole:batches:{all}:of:acme", {record.id: 1})
        found.append(submitting.known(record.id))
    workers.idle = True
    lease = Lease.claim(found[0].id, TTL_S)
    assert lease is not None
    first = Runner(app, found[0], lease)
    workers.die = first.stop
    first.run()
    workers.die = lambda: None
    assert submitting.known(found[0].id).status == "in_progress"
    workers.idle = False
    assert [ran(one) for one in found[1:]] == ["failed", "failed"]
    [fault] = submitting.known(found[1].id).errors
    assert (fault["code"], fault["message"][-35:]) == ("row_limit_exceeded", "got 20, and 20 in the other batches")
    assert ran(found[0]) == "completed"
    assert ran(submitting.resume(submitting.known(found[1].id))) == "completed"


def test_a_process_that_may_not_see_batches_asks_once(
    client: redis.Redis, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refused(*_: Any) -> None:
        asked.append(1)
        raise redis.exceptions.NoPermissionError("smembers")

    monkeypatch.setattr(fair_share, "running", refused)
    look, leave = beside("process_x", "", "q", on_their_way=0)
    assert [look() for _ in range(3)] == [(1.0, 0.0)] * 3
    assert len(asked) == 1
    leave()


ODD = (b"", b"\xff", b"[]", b"5", b"[" * 100_000, b'{"tenant":"a"}', b'{"tenant":1,"queue":"q","rows_per_s":1}')
ODD_RATES = (b"null", b"-1", b"1e999", b"NaN", b"1" * 400, b"{}")


def test_what_nobody_can_read_of_others_is_no_batch(client: redis.Redis) -> None:
    """Every producer may write these keys."""
    rates = (b'{"tenant":"a","queue":"q","rows_per_s":%b}' % rate for rate in ODD_RATES)
    for number, said in enumerate([*ODD, *rates, b'{"tenant":"a","queue":"q","rows_per_s":2}']):
        client.set(fair_share.running_batch_key(f"b{number:02}"), said)
        client.sadd(fair_share.RUNNING_BATCHES_KEY, f"b{number:02}")
    client.sadd(fair_share.RUNNING_BATCHES_KEY, b"\xff\xfe")
    assert [*fair_share.running()] == [fair_share.RunningBatch(f"b{number:02}", "a", "q", 2.0)]
