"""What a version leaves in Redis when its whole fleet dies at once, as text.

Record it with the version that is about to be released, from the repository:

    python -m tests.upgrade.recording tests/upgrade/recorded/VERSION.json

The next version must go on from it, and must leave nothing less (`test_upgrade`): so the two may run beside each
other, in either order.
"""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import redis

from tests.support.doomed import MET
from tests.support.site import REPOSITORY, Site, eventually

QUEUES = ("petiole", "petiole.ended", "petiole.handed")
LENGTH = 200
"""Tokens of the tasks in whose middle the workers die."""

OF_WHO_LISTENS = ("_kombu.binding.celery", "_kombu.binding.reply", "petiole:lease:")
"""Prefixes of keys that belong to live workers: kombu's for control commands and events, and leases."""

IMAGES = "petiole:image:"
"""The prefix of keys that hold files. A recording has these in base64."""

OPTIONS: dict[str, Any] = {
    "max_tokens": 5,
    "min_tokens": 1,
    "temperature": 0.5,
    "top_k": 50,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"42": -1.5},
    "allowed_token_ids": [1, 2, 3],
    "banned_token_ids": [3],
    "seed": 7,
    "logprobs": 1,
    "ignore_eos": True,
    "stop": ["end"],
    "stop_token_ids": [4],
    "stop_token_sequences": [[5, 6]],
    "skip_special_tokens": False,
    "json_schema": {"type": "array"},
    "salt": "a tenant",
    "affinity": "a conversation",
    "deadline_s": 60.0,
    "cancel_on_disconnect": False,
}
CHAT = {
    "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "well"}],
    "continue_final_message": True,
    "chat_template_kwargs": {"thinking": False},
    "seed": 3,
}

BEGIN = f"""
from celery import chord
from petiole.tasks import chat, generate

def begin(name, **options):
    options = {{"prompt": name, "max_tokens": {LENGTH}, "seed": 1, **options}}
    return generate.si(**options).set(task_id=name)

begin("running").apply_async()
begin("cancelled").apply_async()
begin("linked").apply_async(link=begin("link of linked", max_tokens=3))
begin("ended", max_tokens=3).apply_async(queue="petiole.ended", link=begin("link of ended", max_tokens=3))
begin("handed").apply_async(queue="petiole.handed")
begin("later").apply_async(countdown=5)
chat.apply_async(kwargs={{**{CHAT!r}, "max_tokens": {LENGTH}}}, task_id="chat")
chord([begin("header 1"), begin("header 2")])(begin("body", max_tokens=3))
"""
QUEUE = f"""
from petiole.tasks import chat, generate
from petiole.tasks.fleet.control import cancel

generate.apply_async(kwargs={{"prompt": "queued", **{OPTIONS!r}}}, task_id="queued")
generate.apply_async(kwargs={{"prompt": "batch", "max_tokens": 5, "seed": 1}}, task_id="batch", priority=9)
cancel("cancelled")
"""
STREAMING = ("running", "cancelled", "linked", "chat", "header 1", "header 2")

KEPT_S, CLAIMED_FOR_S = 3600, 1
"""Times to live of what is loaded: streams and results, and a claim to complete a task, whose worker has died."""

Recording = list[dict[str, Any]]
"""One entry for each key: `key`, `type`, `value`, and whether it `expires`."""


def record(site: Site) -> Recording:
    """Have three workers of this version die in the middle of their work, and return what they leave."""
    main = site.start_worker()
    doomed = site.start_worker(
        "-Q",
        "petiole.ended",
        PETIOLE_ENGINE_FACTORY="tests.support.doomed:DoomedEngine",
        DOOM="to be completed KILL",
    )
    leaving = site.start_worker("-Q", "petiole.handed")
    for worker in site.workers:
        worker.ready()
    site.get(site.generate("finished", max_tokens=3, seed=1, submission={"task_id": "finished"}))
    failed = site.generate("", submission={"task_id": "failed"})
    eventually(lambda: failed.state == "FAILURE", "a failed task")
    site.redis.lpush("petiole", b"no message")
    eventually(lambda: b'"finished":{"' in site.redis.hget("petiole:workers", main.node), "a report of what ended")
    produce(site, BEGIN)
    for name in (*STREAMING, "handed"):
        eventually(lambda name=name: len(site.tokens(name)) >= 5, f"{name} streams")
    eventually(lambda: MET in doomed.output, "a task has ended and is not completed")
    leaving.stop()
    main.kill()
    produce(site, QUEUE)
    return dump(site.redis)


def produce(site: Site, program: str) -> None:
    """Run a producer of this version."""
    environment = {**os.environ, **site.environment, "PYTHONPATH": str(REPOSITORY), "PYTHONWARNINGS": "ignore"}
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, env=environment, check=True)


# ------------------------------------------------------------ Redis as text


def dump(client: redis.Redis) -> Recording:
    entries = []
    for key in sorted(client.keys("*")):
        if key.startswith(tuple(map(str.encode, OF_WHO_LISTENS))):
            continue
        kind = client.type(key).decode()
        value = _value(client, key, kind)
        if kind == "string" and key.startswith(IMAGES.encode()):
            kind, value = "file", base64.b64encode(value)
        entry = {"key": key, "type": kind, "value": value, "expires": client.ttl(key) > 0}
        entries.append(_anonymous(entry))
    return entries


def _value(client: redis.Redis, key: bytes, kind: str) -> Any:
    match kind:
        case "string":
            return client.get(key)
        case "list":
            return client.lrange(key, 0, -1)
        case "hash":
            return dict(sorted(client.hgetall(key).items()))
        case "set":
            return sorted(client.smembers(key))
        case "zset":
            return client.zrange(key, 0, -1, withscores=True)
    raise AssertionError(f"{key!r} is a {kind}")


def _anonymous(value: Any) -> Any:
    """`value` as text, without the names of machine and folders."""
    match value:
        case bytes():
            return _anonymous(value.decode())
        case str():
            text = value.replace(socket.gethostname(), "host")
            return re.sub(r'"traceback": "(\\.|[^"\\])*"', '"traceback": "Traceback"', text)
        case dict():
            return {_anonymous(name): _anonymous(one) for name, one in value.items()}
        case list() | tuple():
            return [_anonymous(one) for one in value]
    return value


def load(client: redis.Redis, recording: Recording) -> None:
    """Put a recording into an empty Redis: its workers died a while ago."""
    for entry in recording:
        key, value = entry["key"], entry["value"]
        match entry["type"]:
            case "string":
                client.set(key, value)
            case "file":
                client.set(key, base64.b64decode(value))
            case "list":
                client.rpush(key, *value)
            case "hash":
                client.hset(key, mapping=value)
            case "set":
                client.sadd(key, *value)
            case "zset":
                client.zadd(key, dict(value))
        if entry["expires"]:
            client.expire(key, CLAIMED_FOR_S if value == "claimed" else KEPT_S)


def main(path: str) -> None:
    with tempfile.TemporaryDirectory(prefix="petiole-") as folder, recording_site(Path(folder)) as site:
        lines = [json.dumps(entry, ensure_ascii=False) for entry in record(site)]
    Path(path).write_text("[\n" + ",\n".join(lines) + "\n]\n")


def recording_site(folder: Path) -> Site:
    """Leases outlive the recording: no worker takes over what another has left."""
    return Site(
        folder,
        PETIOLE_VISIBILITY_TIMEOUT_S=60,
        PETIOLE_DRAIN_SECONDS=0,
        PETIOLE_FAKE_STEP_MS=25,
        PETIOLE_MAX_NUM_SEQS=16,
    )


if __name__ == "__main__":
    main(sys.argv[1])
