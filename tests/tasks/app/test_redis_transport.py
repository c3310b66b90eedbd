"""A submission that asks for confirmation waits for replicas on the message's own connection."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu import Connection

from petiole.tasks import InvalidRequest, Unavailable, Unconfirmed
from petiole.tasks.app import redis_transport, thread_executor
from petiole.tasks.app.application import make_app
from petiole.tasks.app.thread_executor import ProcessThreads, TooManyWait
from petiole.tasks.fleet import control
from petiole.tasks.fleet.queues import aqueue_length, queue_lengths
from petiole.tasks.servers.connections import async_streams, connect
from petiole.tasks.settings import settings
from petiole.tasks.submission import bundles
from petiole.tasks.submission.bundles import SUBMISSIONS
from petiole.tasks.submission.definitions import generate
from petiole.tasks.submission.task import GenerationTask
from petiole.tasks.wire.keys import stream_keys
from tests.support.site import RedisServer, eventually
from tests.support.watched import free_ports

pytestmark = pytest.mark.e2e


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[RedisServer]:
    (tmp_path / "primary").mkdir()
    server = RedisServer(tmp_path / "primary", "--repl-diskless-sync-delay", "0")
    yield server
    server.kill()


@pytest.fixture
def replica(tmp_path: Path, primary: RedisServer) -> Iterator[RedisServer]:
    (port,) = free_ports(1)
    client = connect(primary.url)
    client.config_set("port", port)
    (tmp_path / "replica").mkdir()
    server = RedisServer(tmp_path / "replica")
    replica = redis.Redis(unix_socket_path=str(server.socket))
    replica.replicaof("127.0.0.1", str(port))
    eventually(lambda: replica.info("replication")["master_link_status"] == "up", "it follows")
    yield server
    server.process.send_signal(signal.SIGCONT)
    server.kill()


@pytest.fixture
def task(primary: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("PETIOLE_BROKER_URL", primary.url)
    monkeypatch.setenv("PETIOLE_CONFIRM_TIMEOUT_S", "60")
    settings.cache_clear()
    app = make_app()

    def body(*given: object, **request: object) -> None:
        """The body is the worker's."""

    yield app.task(body, base=GenerationTask, name=generate.name, shared=False)
    app.close()
    settings.cache_clear()


@pytest.fixture
def hasty(task: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`task`, for submissions that no replica will confirm."""
    monkeypatch.setenv("PETIOLE_CONFIRM_TIMEOUT_S", "0.2")
    settings.cache_clear()
    return task


def calls(server: RedisServer, command: str) -> int:
    return int(connect(server.url).info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


def test_a_replica_has_what_is_confirmed(primary: RedisServer, replica: RedisServer, task: Any) -> None:
    for _ in range(5):
        task.delay(prompt="x", confirm=1)
    assert redis.Redis(unix_socket_path=str(replica.socket)).llen("petiole") == 5
    task.delay(prompt="x")
    task.delay(prompt="x", confirm=0)
    assert calls(primary, "wait") == 5


def test_a_replica_that_hangs_confirms_nothing(
    primary: RedisServer, replica: RedisServer, hasty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The primary has the message, and would lose it if it died now. The same submission again is safe."""
    replica.process.send_signal(signal.SIGSTOP)
    with pytest.raises(
        Unconfirmed, match=r"^confirm: the task must be at 1 replica within 0\.2 s, but it is at 0$"
    ):
        hasty.delay(prompt="x", task_id="mine", confirm=1)
    assert connect(primary.url).llen("petiole") == 1
    replica.process.send_signal(signal.SIGCONT)
    monkeypatch.setenv("PETIOLE_CONFIRM_TIMEOUT_S", "60")
    settings.cache_clear()
    assert hasty.delay(prompt="x", task_id="mine", confirm=1).id == "mine"


def test_without_a_replica_nothing_is_confirmed(hasty: Any) -> None:
    with pytest.raises(Unconfirmed, match="but it is at 0"):
        hasty.delay(prompt="x", confirm=1)


def test_the_setting_holds_for_all_submissions(
    replica: RedisServer, hasty: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PETIOLE_CONFIRM_REPLICAS", "2")
    settings.cache_clear()
    with pytest.raises(Unconfirmed, match=r"at 2 replicas within .* it is at [01]$"):
        hasty.delay(prompt="x")
    monkeypatch.setenv("PETIOLE_CONFIRM_TIMEOUT_S", "60")
    settings.cache_clear()
    hasty.delay(prompt="x", confirm=1)


@pytest.mark.parametrize("confirm", [-1, 101, True, "1", 1.0])
def test_a_bad_number_of_replicas_is_named(task: Any, confirm: object) -> None:
    with pytest.raises(InvalidRequest, match=r"^confirm: must be a number of replicas, 0 to 100, got "):
        task.delay(prompt="x", confirm=confirm)


def test_a_connection_that_is_lost_is_replaced(primary: RedisServer, task: Any) -> None:
    client = connect(primary.url)
    for _ in range(3):
        task.delay(prompt="x")
        client.client_kill_filter(_type="normal", skipme=True)
    assert client.llen("petiole") == 3


# ---------------------------------------------------------------- in one event loop


def test_many_submissions_fail_together_while_the_broker_is_away(
    primary: RedisServer, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None waits for the patience of the ones before it."""
    task.delay(prompt="x")
    primary.kill()
    tried, stock = [], bundles.ensured
    monkeypatch.setattr(bundles, "ensured", lambda *call: tried.append(1) or stock(*call))

    async def submit() -> list[Any]:
        return await asyncio.gather(*(task.adelay(prompt="x") for _ in range(1000)), return_exceptions=True)

    found = asyncio.run(submit())
    assert {type(error) for error in found} == {Unavailable}
    assert len({str(error) for error in found}) == 1
    assert len(tried) <= 2 * 4, "each thread has tried, and perhaps one of them again"
    primary.start()

    def sent() -> bool:
        with suppress(Unavailable):
            return bool(task.delay(prompt="x"))
        return False

    eventually(sent, "the breaker closes")


def test_asyncio_keeps_its_own_threads(primary: RedisServer, task: Any) -> None:
    primary.kill()

    async def submit() -> list[str]:
        waiting = [asyncio.create_task(task.adelay(prompt="x")) for _ in range(50)]
        names = [await asyncio.to_thread(lambda: threading.current_thread().name) for _ in range(3)]
        assert not any(one.done() for one in waiting)
        await asyncio.gather(*waiting, return_exceptions=True)
        return names

    assert not any(name.startswith("petiole") for name in asyncio.run(submit()))


def test_more_submissions_than_may_wait_are_refused(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SUBMISSIONS, "most", 3)

    async def submit() -> list[Any]:
        return await asyncio.gather(*(task.adelay(prompt="x") for _ in range(10)), return_exceptions=True)

    found = asyncio.run(submit())
    refused = [one for one in found if isinstance(one, Unavailable)]
    assert len(refused) == 7
    assert str(refused[0]).endswith("3 submissions of this process wait already")


def test_a_call_that_waits_can_be_cancelled() -> None:
    threads, gate, ran = ProcessThreads("test", 1, 2), threading.Event(), []

    async def main() -> None:
        first = asyncio.create_task(threads.run(gate.wait))
        second = asyncio.create_task(threads.run(ran.append, 1))
        await asyncio.sleep(0)
        with pytest.raises(TooManyWait):
            await threads.run(ran.append, 2)
        second.cancel()
        with suppress(asyncio.CancelledError):
            await second
        gate.set()
        await first
        await threads.run(ran.append, 3)

    asyncio.run(main())
    assert ran == [3]


def test_cancelling_and_counting_need_no_thread(
    primary: RedisServer, task: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"t{k}" for k in range(1500)]
    monkeypatch.setattr(thread_executor.ThreadPoolExecutor, "submit", lambda *_: pytest.fail("a thread"))
    for priority in (0, 3, 9):
        task.apply_async(kwargs={"prompt": "x"}, priority=priority)
    task.apply_async(kwargs={"prompt": "x"}, queue="other")

    async def main() -> tuple[int, int, int]:
        await async_streams().ping()
        connected = len(connect(primary.url).client_list())
        await control.acancel(*names)
        lengths = await aqueue_length(), await aqueue_length("other")
        return *lengths, len(connect(primary.url).client_list()) - connected

    lengths = asyncio.run(main())
    assert lengths[:2] == (3, 1)
    assert lengths[2] <= 1, "the one that counts"
    assert sum(queue_lengths(task.app).values()) == 3
    client = connect(primary.url)
    assert all(client.hget(stream_keys(name).asked, "cancel") == b"1" for name in names)
    assert settings().stream_ttl_s < client.ttl(stream_keys("t0").asked) <= control.CANCELLED_FOR_S


def test_counting_many_queues_takes_no_more_connections_than_counting_one(primary: RedisServer, task: Any) -> None:
    client = connect(primary.url)

    def connections_for_counting() -> int:
        before = client.info("stats")["total_connections_received"]
        assert queue_lengths(task.app)["petiole", 0] == 0
        return int(client.info("stats")["total_connections_received"]) - int(before)

    of_one = connections_for_counting()
    client.sadd("_kombu.binding.petiole", *(f"x\x06\x16\x06\x16petiole.{k}" for k in range(300)))
    assert connections_for_counting() == of_one
    client.lpush("petiole.7", "x")
    assert queue_lengths(task.app)["petiole.7", 0] == 1


def test_a_damaged_state_harms_no_other(primary: RedisServer, task: Any) -> None:
    client = connect(primary.url)
    client.set(stream_keys("damaged").asked, "x")
    client.hset(stream_keys("ended").state, "done", 1)
    with pytest.raises(redis.ResponseError):
        asyncio.run(control.acancel("damaged", "t", "ended"))
    assert client.hget(stream_keys("t").asked, "cancel") == b"1"
    assert 0 < client.ttl(stream_keys("ended").asked) <= settings().stream_ttl_s


def test_the_event_loop_goes_on_while_many_submit(task: Any) -> None:
    async def main() -> int:
        beats, done = 0, asyncio.gather(*(task.adelay(prompt="x") for _ in range(500)))
        while not done.done():
            await asyncio.sleep(0)
            beats += 1
        await done
        return beats

    began = time.process_time()
    assert asyncio.run(main()) > 50
    assert time.process_time() > began


@pytest.mark.parametrize("scheme", ["redis", "sentinel"])
def test_a_connection_that_goes_on_to_another_url_publishes_as_before(scheme: str) -> None:
    """kombu's failover takes the transport of the next URL: after one, no bundle of messages was sent any more."""
    connection = redis_transport.through(Connection(";".join(f"{scheme}://127.0.0.1:{port}/0" for port in (1, 2))))
    for port in (2, 1, 2):
        connection.maybe_switch_next()
        assert connection.port == port
        assert hasattr(connection.get_transport_cls().Channel, "collecting")
        assert hasattr(connection.transport.Channel, "collecting")
