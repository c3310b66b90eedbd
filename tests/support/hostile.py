"""Messages as no producer sends them: a valid one with one or more of its keys left out or replaced, its body or
its envelope damaged. All of it follows from the generator's seed.

Half of them are a valid message with one value of `JUNK` at one place, in turn: each header, property and option
that the code reads (`reading`) gets each value, as long as there are enough messages."""

from __future__ import annotations

import base64
import copy
import json
import random
import zlib
from collections.abc import Iterator
from typing import Any

from kombu import message as kombu
from kombu.transport import redis, virtual

from petiole.contract.tasks import COUNT
from petiole.tasks.worker.broker.gate.bodies import BrokerMessage, RedisMessage
from tests.support import reading

SIGNATURE = {
    "task": "tasks.nothing",
    "args": [],
    "kwargs": {},
    "options": {"task_id": "a-link"},
    "subtask_type": None,
    "immutable": True,
}

FORGED = "a\n[2026-01-01 00:00:00,000: CRITICAL/MainProcess] FORGED \x1b[2J\x9b31m\r\u2028\u202e"
"""A name that would begin a line of a log, and clear a terminal."""

JUNK: tuple[Any, ...] = (
    FORGED,
    [FORGED],
    {FORGED: FORGED},
    ["key", 1, 2, 3],
    ["\ud800", 1, 2, 3],
    ["key", 10**400, -1, 0.5],
    "x" * 300,
    "\u0661",
    None,
    True,
    False,
    0,
    -1,
    5,
    60,
    2**31,
    2**63,
    10**400,
    -(10**400),
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x",
    "nope",
    "rot13",
    "gzip",
    "base64",
    "2020-01-01T00:00:00+00:00",
    "0001-01-01T00:00:00",
    "9999-12-31T23:59:59-23:59",
    "\ud800",
    "\x00",
    "%s{}",
    "x" * 10_000,
    [],
    [1, 2],
    [[]],
    [None],
    ["\ud800"],
    [{}],
    [SIGNATURE],
    {},
    {"a": 1},
    {"\ud800": 1},
    {"self": 1},
    {"id": 5, "task": []},
    {"task": "tasks.generate", "subtask_type": "chord"},
    {"task": "tasks.generate", "subtask_type": "nothing"},
    {"task": "tasks.generate", "subtask_type": "group", "kwargs": {"tasks": 5}},
    {"__type__": "datetime", "__value__": "soon"},
    {"__type__": ["unhashable"], "__value__": 5},
    {"__type__": "uuid", "__value__": {"hex": 5}},
)

CUSTOM = ("x-death", "self", "\ud800", "", FORGED)
"""Names that nobody reads."""


_TEXTS = ["a text", "another"]
NEEDED: dict[str, dict[str, Any]] = {
    "tasks.chat": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "tasks.query": {"question": "what?", "image": "https://nowhere"},
    "tasks.caption": {"image": "data:image/png;base64,AAAA"},
    "tasks.point": {"image": "", "object": "cat"},
    "tasks.detect": {"image": "", "object": "cat"},
    "tasks.embed": {"texts": _TEXTS},
    "tasks.rerank": {"query": "a", "documents": _TEXTS},
    "tasks.score": {"pairs": [_TEXTS]},
    "tasks.classify": {"texts": _TEXTS},
    COUNT: {"texts": _TEXTS},
}
"""By task, options that it needs."""


def headers(task_id: str, task: str = "tasks.generate") -> dict[str, Any]:
    """All that Celery 5.7 sends."""
    return {
        "lang": "py",
        "task": task,
        "id": task_id,
        "shadow": None,
        "eta": None,
        "expires": None,
        "group": None,
        "group_index": None,
        "retries": 0,
        "timelimit": [None, None],
        "root_id": task_id,
        "parent_id": None,
        "argsrepr": "()",
        "kwargsrepr": "{}",
        "origin": "gen1@host",
        "ignore_result": False,
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
        "petiole-sent": 1.5,
    }


def embed() -> dict[str, Any]:
    return {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


def message(task_id: str, prompt: str, queue: str = "petiole", task: str = "tasks.generate") -> dict[str, Any]:
    """A valid message whose body is not encoded yet: see `raw`."""
    return {
        "body": [[], {"prompt": prompt, "max_tokens": 2, "seed": 1}, embed()],
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers(task_id, task),
        "properties": {
            "correlation_id": task_id,
            "reply_to": "",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": f"tag-{task_id}",
        },
    }


def raw(envelope: Any) -> bytes:
    """As in the queue. A body that is no text yet is encoded."""
    if isinstance(envelope, dict) and "body" in envelope and not isinstance(envelope["body"], str):
        body = envelope["body"]
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        envelope = {**envelope, "body": base64.b64encode(text).decode()}
    return json.dumps(envelope).encode()


SECTIONS = ("envelope", "headers", "properties", "delivery_info", "options", "embed")
"""The places of a valid message, in the order of `_places`."""
PROPERTIES = (*message("", "")["properties"], "expiration", "message_id", "type", "user_id", "petiole-message")


class Received(BrokerMessage, kombu.Message):  # type: ignore[misc]
    """As both brokers' messages are, without a broker."""


def received(payload: dict[str, Any]) -> RedisMessage:
    """As kombu's Redis transport makes it of an envelope."""
    channel = object.__new__(redis.Channel)
    channel.codecs = virtual.Channel.codecs
    payload["properties"]["delivery_tag"] = "1"
    read = RedisMessage(payload, channel=channel)
    read.accept = {"application/json"}
    return read


class Hostile:
    """An endless supply. `next` returns a message's text and the id that it says, if it says one."""

    def __init__(self, seed: int, queue: str = "petiole", task: str = "") -> None:
        """`task`: empty: any task of Petiole's."""
        self.random, self.queue, self.task = random.Random(seed), queue, task
        self._swept = self._sweep()

    def message(self, task_id: str) -> bytes:
        """One with at least one fault, most of which a worker must refuse."""
        chance = self.random.random()
        given = message(task_id, f"prompt {task_id}", self.queue, self.task or "tasks.generate")
        if not self.task and self.random.random() < 0.5:
            given["headers"]["task"] = self.random.choice(sorted(NEEDED))
            given["body"][1] = copy.deepcopy(NEEDED[given["headers"]["task"]])
        if chance > 0.5:
            section, name, value = next(self._swept)
            dict(zip(SECTIONS, self._places(given), strict=True))[section][name] = copy.deepcopy(value)
            return raw(given)
        if chance < 0.05:
            return self._damaged(raw(given))
        if chance < 0.10:
            return self._deep(given)
        if chance < 0.15:
            given = self._older(given)
        elif chance < 0.20:
            return self._compressed(given)
        for _ in range(self.random.choice((1, 1, 1, 2, 5))):
            self._change(given)
        return raw(given)

    def _sweep(self) -> Iterator[tuple[str, str, Any]]:
        """Every value at every place, in random order, again and again."""
        known = {
            "headers": [*reading.names(), *CUSTOM],
            "properties": (*PROPERTIES, *CUSTOM),
            "delivery_info": ("exchange", "routing_key", "priority", "redelivered", *CUSTOM),
            "options": (*reading.options(), *CUSTOM),
            "embed": (*embed(), *CUSTOM),
        }
        places = [(section, name, value) for section in known for name in known[section] for value in JUNK]
        while True:
            self.random.shuffle(places)
            yield from places

    def junk(self, levels: int = 2) -> Any:
        if levels and self.random.random() < 0.15:
            if self.random.random() < 0.5:
                return [self.junk(levels - 1) for _ in range(self.random.randrange(4))]
            return {str(self.junk(0))[:20]: self.junk(levels - 1) for _ in range(self.random.randrange(4))}
        return copy.deepcopy(self.random.choice(JUNK))

    def _places(self, given: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield given
        for name in ("headers", "properties"):
            if isinstance(given.get(name), dict):
                yield given[name]
        where = given.get("properties")
        if isinstance(where, dict) and isinstance(where.get("delivery_info"), dict):
            yield where["delivery_info"]
        body = given.get("body")
        if isinstance(body, list) and len(body) == 3:
            yield from (part for part in body if isinstance(part, dict))
        elif isinstance(body, dict):
            yield body

    def _change(self, given: dict[str, Any]) -> None:
        choose = self.random
        place = choose.choice(list(self._places(given)))
        action = choose.random()
        if action < 0.2 and place:
            del place[choose.choice(list(place))]
        elif action < 0.7 and place:
            place[choose.choice(list(place))] = self.junk()
        elif action < 0.9:
            place[choose.choice((*reading.names(), *CUSTOM, *reading.options()))] = self.junk()
        elif isinstance(given.get("body"), list) and given["body"]:
            given["body"][choose.randrange(len(given["body"]))] = self.junk()
        else:
            given["body"] = self.junk()

    def _damaged(self, text: bytes) -> bytes:
        kind = self.random.randrange(4)
        where = self.random.randrange(len(text))
        if kind == 0:
            return text[:where]
        if kind == 1:
            return text[:where] + bytes([self.random.randrange(256)]) + text[where + 1 :]
        if kind == 2:
            return text[where:] + text[:where]
        return self.random.randbytes(self.random.randrange(100))

    def _deep(self, given: dict[str, Any]) -> bytes:
        levels = self.random.choice((50, 199, 250, 900, 5_000, 100_000))
        opening, closing = self.random.choice((("[", "]"), ('{"a":', "}")))
        text = opening * levels + ("1" if opening != "[" else "") + closing * levels
        place = self.random.choice(("body", "headers", "properties", "kwargs"))
        mark = "deep-mark"
        if place == "kwargs":
            given["body"][1]["prompt"] = mark
            body = json.dumps(given["body"]).replace(f'"{mark}"', text)
            return raw({**given, "body": body.encode()})
        if place == "body":
            return raw({**given, "body": text.encode()})
        given[place]["deep"] = mark
        return raw(given).replace(f'"{mark}"'.encode(), text.encode())

    def _older(self, given: dict[str, Any]) -> dict[str, Any]:
        """Protocol 1, whose headers are in the body."""
        args, kwargs, embedded = given["body"]
        said = given["headers"]
        body = {
            "task": said["task"],
            "id": said["id"],
            "args": args,
            "kwargs": kwargs,
            "group": None,
            "retries": 0,
            "eta": None,
            "expires": None,
            "utc": True,
            "callbacks": embedded["callbacks"],
            "errbacks": embedded["errbacks"],
            "timelimit": [None, None],
            "taskset": None,
            "chord": None,
        }
        return {**given, "headers": {}, "body": body}

    def _compressed(self, given: dict[str, Any]) -> bytes:
        name = self.random.choice(("gzip", "zlib", "bzip2", "lzma", "nope", 5, ["gzip"], "brotli"))
        given["headers"]["compression"] = name
        if self.random.random() < 0.5:
            given["body"] = zlib.compress(json.dumps(given["body"]).encode())
        return raw(given)
