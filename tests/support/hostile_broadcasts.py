"""Control commands and events as no Celery sends them: all commands with all kinds of arguments, events whose
fields are left out, added or replaced. It all follows from the generator's seed."""

from __future__ import annotations

import base64
import bz2
import inspect
import json
from typing import Any

from celery.worker.control import Panel

from petiole.tasks.worker.boot import configure  # noqa: F401 - a worker's commands exist once it is imported
from tests.support.hostile import Hostile

COMMANDS = dict(Panel.data)
"""All control commands of a worker: Celery's and Petiole's."""

ENDS_WORKERS = {"shutdown"}
"""The command that is meant to end a worker."""

PLAUSIBLE = ("tasks.generate", "5/m", "-5/s", "nan/s", "inf", "celery@host", "KILL", ["a-task"], "worker-online")
NESTED = b"[" * 100_000 + b"]" * 100_000
PATTERNS = ("*", "w0*", "(w+0*)+#", "[", "")
ROUTES = (
    "worker.heartbeat",
    "worker.online",
    "worker.offline",
    "worker.elect",
    "worker.elect.ack",
    "worker",
    "task.sent",
    "",
)
HEADERS = ("clock", "expires", "ticket", "hostname", "compression", "id", "task", "\ud800")


class HostileBroadcasts(Hostile):
    """An endless supply of bodies, and of messages on Redis' channels that have them."""

    def value(self) -> Any:
        return self.random.choice(PLAUSIBLE) if self.random.random() < 0.3 else self.junk()

    def command(self) -> Any:
        """The body of a control command."""
        choose = self.random
        method = choose.choice(sorted(COMMANDS.keys() - ENDS_WORKERS))
        parameters = [*inspect.signature(COMMANDS[method]).parameters][1:]
        arguments = {name: self.value() for name in parameters if choose.random() < 0.8}
        body = {"method": method, "arguments": arguments, "destination": None}
        for name in ("destination", "pattern", "matcher", "ticket", "reply_to", "method", "arguments", "self"):
            if choose.random() < 0.05:
                body[name] = self.value()
        if choose.random() < 0.1:
            body |= {"pattern": choose.choice(PATTERNS), "matcher": choose.choice(("glob", "pcre", "nope"))}
        if choose.random() < 0.3:
            body |= {
                "reply_to": {"exchange": "reply.celery.pidbox", "routing_key": "nobody"},
                "ticket": "a-ticket",
            }
        return body if choose.random() < 0.95 else self.value()

    def event(self) -> Any:
        """The body of an event."""
        choose = self.random
        body = {
            "type": choose.choice(("worker-heartbeat", "worker-online", "worker-offline", "worker-elect")),
            "hostname": "celery@other",
            "pid": 5,
            "clock": 7,
            "timestamp": 1.7e9,
            "utcoffset": 0,
            "freq": 2.0,
            "active": 0,
            "processed": 3,
            "loadavg": [0.5, 0.5, 0.5],
            "id": "an-election",
            "topic": "task",
            "action": {"task": "tasks.nothing"},
            "cver": 1,
        }
        for _ in range(choose.choice((0, 1, 1, 2, 5))):
            name = choose.choice((*body, "heartbeats", "event", "local_received", "__class__"))
            if choose.random() < 0.3:
                body.pop(name, None)
            else:
                body[name] = self.value()
        return body if choose.random() < 0.95 else choose.choice((self.value(), [body]))

    def encoded(self, body: Any) -> bytes:
        """A body's bytes; some are damaged, nested or compressed."""
        chance = self.random.random()
        if chance < 0.03:
            return NESTED
        text = json.dumps(body).encode()
        if chance < 0.06:
            return self._damaged(text)
        return bz2.compress(bytes(2**22)) if chance < 0.09 else text

    def headers(self) -> dict[str, Any]:
        choose = self.random
        given: dict[str, Any] = {"clock": 3, "expires": 0}
        if choose.random() < 0.3:
            given[choose.choice(HEADERS)] = self.value()
        if choose.random() < 0.1:
            given["compression"] = choose.choice(("bzip2", "gzip", "zstd", "nope"))
        return given

    def content_type(self) -> tuple[Any, Any]:
        kinds: tuple[Any, ...] = ("application/json",) * 6 + (
            "text/plain",
            "application/data",
            "application/x-yaml",
        )
        return self.random.choice(kinds), self.random.choice(("utf-8",) * 6 + ("punycode", "nope", "binary"))

    def on_a_channel(self, body: Any, exchange: str, routing_key: str) -> bytes:
        """As kombu publishes it on a channel of Redis."""
        content_type, content_encoding = self.content_type()
        envelope: dict[str, Any] = {
            "body": base64.b64encode(self.encoded(body)).decode(),
            "content-type": content_type,
            "content-encoding": content_encoding,
            "headers": self.headers(),
            "properties": {
                "delivery_mode": 1,
                "delivery_info": {"exchange": exchange, "routing_key": routing_key},
                "priority": 0,
                "body_encoding": "base64",
                "delivery_tag": "a-tag",
            },
        }
        chance = self.random.random()
        if chance < 0.05:
            return NESTED
        if chance < 0.1:
            return self._damaged(json.dumps(envelope).encode())
        if chance < 0.3:
            self._change(envelope)
        return json.dumps(envelope).encode()
