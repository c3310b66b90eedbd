"""Messages with one affinity go to the worker that took the last one, unless others would wait for that."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest
import redis
from hypothesis import HealthCheck, given, settings as hypothesis_settings, strategies as st
from kombu import Connection, Consumer, Queue
from kombu.asynchronous import Hub

from petiole.contract.requests.generation import ChatRequest, GenerateRequest
from petiole.contract.requests.validation import validate
from petiole.tasks.submission.options import affinity_key
from petiole.tasks.wire.keys import AFFINITY_HEADER
from petiole.tasks.worker.broker.ledger import Ledger
from petiole.tasks.worker.broker.transport import LEFT_PAUSE_S, Transport
from tests.support.site import RedisServer, eventually

QUEUE, BEHIND = "jobs", "jobs\x06\x163"
LONG_MS = 60_000


def ledger(wait_ms: int = LONG_MS) -> Ledger:
    return Ledger(prefix="", visibility_timeout_s=60, affinity_wait_ms=wait_ms)


def envelope(name: str, key: str | None) -> str:
    headers = {"id": name, "argsrepr": '"petiole-affinity": "argument"', **({AFFINITY_HEADER: key} if key else {})}
    return json.dumps({"body": name, "headers": headers, "properties": {"delivery_info": {}}})


def put(client: redis.Redis, *names: str, key: str | None = "k", queue: str = QUEUE) -> None:
    for name in names:
        client.lpush(queue, envelope(name, key))


def take(client: redis.Redis, mine: Ledger, most: int = 10, limit: int = 8) -> list[str]:
    taken = mine.take(client, [QUEUE, BEHIND], most, limit=limit)
    assert taken is not None
    return [json.loads(message.item)["body"] for message in taken]


def test_it_is_left_to_its_home(client: redis.Redis) -> None:
    home, other = ledger(), ledger()
    put(client, "first")
    assert take(client, home) == ["first"]
    put(client, "second")
    put(client, "free", key=None)
    put(client, "another", key="other")
    assert (take(client, other), other.left) == (["free", "another"], 1)
    assert (take(client, home), home.left) == (["second"], 0)
    assert (take(client, other), other.left) == ([], 0)


def test_a_key_that_is_too_long_has_no_home(client: redis.Redis) -> None:
    put(client, "a", key="x" * 255)
    put(client, "b", key="x" * 256)
    assert take(client, ledger()) == ["a", "b"]
    assert len([name for name in client.scan_iter() if b"x" * 255 in name]) == 1


def test_other_priorities_of_a_queue_have_the_same_home_and_other_queues_have_not(client: redis.Redis) -> None:
    home, other = ledger(), ledger()
    put(client, "first")
    take(client, home)
    put(client, "behind", queue=BEHIND)
    put(client, "elsewhere", queue="others")
    taken = other.take(client, [QUEUE, BEHIND, "others"], 10, limit=8) or []
    assert [json.loads(message.item)["body"] for message in taken] == ["elsewhere"]


@pytest.mark.parametrize("gone", ["closed", "dead"])
def test_a_home_that_is_gone_is_not_waited_for(client: redis.Redis, gone: str) -> None:
    home, other = ledger(), ledger()
    put(client, "first")
    take(client, home)
    if gone == "closed":
        home.close(client)
        assert take(client, other) == ["first"]
    else:
        client.delete(home.lease)
    put(client, "second")
    assert take(client, other) == ["second"]
    put(client, "third")
    assert take(client, ledger()) == []  # it lives with the other now


def test_a_home_that_does_not_come_loses_it(client: redis.Redis) -> None:
    home, other = ledger(), ledger(wait_ms=30)
    put(client, "first")
    take(client, home)
    put(client, "second", "third")
    assert take(client, other, most=1) == []
    time.sleep(0.04)
    assert take(client, other, most=1) == ["second"]
    assert take(client, home) == []
    assert take(client, other) == ["third"]


def test_it_goes_home_again_if_it_did_once(client: redis.Redis) -> None:
    """The wait for one message says nothing of the next."""
    home, other = ledger(), ledger(wait_ms=30)
    put(client, "first")
    take(client, home)
    put(client, "second")
    assert take(client, other) == []
    assert take(client, home) == ["second"]
    time.sleep(0.04)
    put(client, "third")
    assert take(client, other) == []


@pytest.mark.parametrize(
    ("theirs", "mine", "left"),
    [(2, 0, True), (3, 0, False), (4, 1, True), (5, 1, False), (7, 6, True), (8, 6, False)],
)
def test_who_has_much_more_to_do_is_not_waited_for(
    client: redis.Redis, theirs: int, mine: int, left: bool
) -> None:
    home, other = ledger(), ledger()
    put(client, *(f"other {i}" for i in range(mine)), key=None)
    take(client, other)
    put(client, *(f"home {i}" for i in range(theirs)))
    take(client, home)
    put(client, "one more")
    assert take(client, other) == ([] if left else ["one more"])


def test_no_more_than_some_are_left_at_a_time(client: redis.Redis) -> None:
    """A script must be short, and the queue is not searched to its end."""
    home, other = ledger(), ledger()
    put(client, "first")
    take(client, home)
    put(client, *(f"{i}" for i in range(100)))
    put(client, "free", key=None)
    assert take(client, other) == []
    assert 0 < other.left < 100


def test_homes_are_forgotten_and_can_be_turned_off(client: redis.Redis) -> None:
    home, other = ledger(), ledger(wait_ms=0)
    put(client, "first")
    take(client, home)
    (key,) = client.keys("petiole:home:*")
    assert 0 < client.pttl(key) <= 600_000
    put(client, "second")
    assert take(client, ledger()) == []
    assert 0 < client.pttl(key) <= 600_000  # nor does waiting for it make it eternal
    assert take(client, other) == ["second"]


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("put"), st.sampled_from([None, "a", "b", "c"]), st.sampled_from([QUEUE, BEHIND])),
            st.tuples(st.just("take"), st.integers(0, 2), st.integers(1, 5)),
            st.tuples(st.just("ack"), st.integers(0, 2), st.just(None)),
            st.tuples(st.just("close"), st.integers(0, 2), st.just(None)),
            st.tuples(st.just("die"), st.integers(0, 2), st.just(None)),
        ),
        max_size=60,
    )
)
def test_no_message_is_lost_doubled_or_kept_from_all(
    client: redis.Redis, steps: list[tuple[str, object, object]]
) -> None:
    client.flushall()
    ledgers, held = [ledger() for _ in range(3)], [dict[str, str]() for _ in range(3)]
    waiting = list[str]()
    for number, (action, what, argument) in enumerate(steps):
        if action == "put":
            put(client, str(number), key=what, queue=argument)  # type: ignore[arg-type]
            waiting.append(str(number))
            continue
        assert isinstance(what, int)
        mine, mine_held = ledgers[what], held[what]
        if action == "take":
            assert isinstance(argument, int)
            taken = mine.take(client, [QUEUE, BEHIND], argument, limit=8) or []
            names = [json.loads(message.item)["body"] for message in taken]
            assert len(taken) <= argument
            assert mine.left or len(taken) == min(argument, len(waiting))
            for name, message in zip(names, taken, strict=True):
                waiting.remove(name)
                mine_held[message.tag] = name
        elif action == "ack" and mine_held:
            tag, _ = mine_held.popitem()
            mine.ack(tag)
        elif action == "close":
            mine.close(client)
            waiting += mine_held.values()
            mine_held.clear()
        elif action == "die":  # its messages come back with the next sweep, or not yet
            client.delete(mine.lease)
    last, got = ledger(wait_ms=0), list[str]()
    while names := take(client, last, limit=0):
        got += names
    assert sorted(got) == sorted(waiting)


def chat(*texts: str, **options: object) -> ChatRequest:
    roles = ["system", "user", "assistant", "user", "assistant", "user"]
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return validate(ChatRequest, {"messages": messages, **options})


def test_the_turns_of_a_conversation_have_one_key() -> None:
    opening = affinity_key(chat("be brief", "hello"))
    assert opening is not None
    assert len(opening) == 16
    assert affinity_key(chat("be brief", "hello", "hi", "how are you?", temperature=0, max_tokens=5)) == opening
    others = [
        chat("be long", "hello"),
        chat("be brief", "hallo"),
        chat("be brief", "hello", salt="acme"),
        chat("be brief", "hello", adapter="support"),
        chat("be brief", "hello", affinity="mine"),
    ]
    assert len({opening, *map(affinity_key, others)}) == 1 + len(others)
    assert affinity_key(chat("no user yet")) is not None


def test_generate_has_one_if_it_says_so() -> None:
    assert affinity_key(validate(GenerateRequest, {"prompt": "a"})) is None
    keys = {affinity_key(validate(GenerateRequest, {"prompt": p, "affinity": "book 5"})) for p in ("a", "b")}
    assert len(keys) == 1
    assert keys != {None}


class Worker:
    """A consumer in kombu's event loop, as in a worker."""

    def __init__(self, server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connection, self.hub, self.seen = Connection(server.url), Hub(), list[str]()
        self.connection.transport_cls = Transport
        self.channel = self.connection.channel()
        self.channel.basic_qos(0, 8, False)
        monkeypatch.setattr(self.channel.ledger, "affinity_wait_ms", LONG_MS)
        self.consumer = Consumer(self.channel, [Queue(QUEUE, routing_key=QUEUE)], on_message=self.handle)
        self.consumer.consume()
        self.connection.register_with_event_loop(self.hub)
        self.loop = self.hub.create_loop()
        self.takes = 0
        take = self.channel.ledger.take

        def counted(*args: object, **options: object) -> object:
            self.takes += 1
            return take(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(self.channel.ledger, "take", counted)

    def handle(self, message: object) -> None:
        self.seen.append(str(message.headers["id"]))  # type: ignore[attr-defined]

    def turn(self) -> None:
        next(self.loop)

    def close(self) -> None:
        self.connection.release()
        self.hub.close()


@pytest.fixture
def worker(server: RedisServer, client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Worker]:
    return lambda: Worker(server, monkeypatch)


def test_what_is_left_is_looked_at_again_soon_and_not_all_the_time(
    client: redis.Redis, worker: Callable[[], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop neither spins on a queue that is not empty nor waits until something else happens."""
    home, mine = ledger(), worker()
    put(client, "first")
    take(client, home)
    put(client, "second")
    began = time.monotonic()
    eventually(lambda: mine.turn() or mine.takes >= 20)
    assert time.monotonic() - began > 18 * LEFT_PAUSE_S
    assert mine.seen == []
    client.delete(home.lease)
    eventually(lambda: mine.turn() or mine.seen == ["second"])
    mine.close()
