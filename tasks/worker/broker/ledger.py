"""Ownership of messages: every unacknowledged message belongs to an owner, and every owner has a lease.

    queue ──take──► petiole:unacked:OWNER ──ack──► gone
      ▲                     │
      └──────restore────────┘  by the owner when it closes, by any worker when the lease has expired

An owner is one consuming channel of one process while it keeps its lease; after losing it, the channel uses a new
owner name. A delivery tag is a field of the owner's own hash. So an acknowledgement by a worker that has lost its
lease deletes nothing, and does not affect the message's next owner.

A process has one owner for its tasks, and a second owner for each queue of counts. Only the death of the first one
is counted.

`LedgerKeys` (`tasks.keys`) describes the keys.

Two threads use a ledger, each with its own client: the consumer takes and acknowledges, the lease keeper renews.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import redis

from petiole.tasks.servers.replies import DamagedKey
from petiole.tasks.wire.keys import LedgerKeys
from petiole.tasks.worker import scripts
from petiole.tasks.worker.broker import corruption, liveness
from petiole.tasks.worker.scripts import TakeReply

RESTORED_A_CALL = 200

_REDELIVERED = b'"redelivered": true, '  # added by `restore.lua`
UNLIMITED = 2**31

SECOND = ":second"
"""Ends the names of second owners."""


class TakenMessage(NamedTuple):
    """A message that the ledger now owns. `item` is the envelope as the producer sent it."""

    tag: str
    queue: str
    item: bytes

    @property
    def name(self) -> str:
        """A name of the message, the same at every delivery: a digest of everything that its producer wrote.
        kombu's id makes it unique."""
        return blake2b(self.item.replace(_REDELIVERED, b""), digest_size=12).hexdigest()


class SweepResult(NamedTuple):
    """The result of a sweep: the number of messages that went back, and the owners."""

    restored: int
    alive: list[str]
    dead: list[str]


def lease_ms(visibility_timeout_s: float) -> int:
    return max(100, int(visibility_timeout_s * 1000))


class Ledger:
    """The messages held by one channel. Messages are left to their homes for `affinity_wait_ms`."""

    def __init__(
        self, *, prefix: str, visibility_timeout_s: float, affinity_wait_ms: int = 0, db: int = 0
    ) -> None:
        self.names = LedgerKeys.under(prefix, db)
        self.visibility_timeout_s, self.affinity_wait_ms = visibility_timeout_s, affinity_wait_ms
        self.left = 0
        """How many messages the last `take` left to their homes: after a while, they are anyone's."""
        self.owner = new_owner()
        self.present_on: Callable[[], str] = str
        """The run of the server on which the owner's subscription holds; empty if there is none."""
        self.registered = False
        self.lost = False
        self._closing = False
        self._next_tag = 1
        self._acknowledged: list[str] = []
        self._rejected: list[str] = []
        self._mutex = threading.Lock()

    def be_second(self) -> None:
        """Have a name of a second owner. Called before the first `take`."""
        self.owner = new_owner(SECOND)

    @property
    def second(self) -> bool:
        return is_second(self.owner)

    @property
    def unacked(self) -> str:
        return self.names.unacked + self.owner

    @property
    def lease(self) -> str:
        return self.names.lease + self.owner

    @property
    def channel(self) -> str:
        """The channel that says whether the owner is present."""
        return self.names.present + self.owner

    # ------------------------------------------------------------ consumer

    def take(
        self, client: redis.Redis, queues: Sequence[str], most: int, *, limit: int = UNLIMITED
    ) -> list[TakenMessage] | None:
        """Take up to `most` messages, from the first queue first. None: the lease and all messages are lost.

        `limit`: the maximum number of messages of this owner. It is assumed for other owners, too, because workers
        of one queue are alike."""
        self.flush(client)
        new, ttl_ms = int(not self.registered), lease_ms(self.visibility_timeout_s)
        names = self.names
        affinity = (self.affinity_wait_ms, limit or UNLIMITED, names.lease, names.unacked, names.home)
        reply = scripts.load(client, "take")(
            [self.names.owners, self.lease, self.unacked, *queues],
            [self.owner, ttl_ms, new, self._next_tag, most, *affinity],
        )
        if reply[0] != TakeReply.TAKEN:
            if reply[0] == TakeReply.DAMAGED:
                corruption.report(self.unacked, "a hash: its messages are lost")
            return None
        self.registered, self.left, taken = True, reply[1], []
        for tag, position, item in triples(reply[2:]):
            if tag:
                taken.append(TakenMessage(str(tag), queues[position], item))
            else:
                corruption.report(queues[position], "a list: its messages are not taken")
        self._next_tag += len(taken)
        return taken

    def ack(self, tag: str) -> None:
        """Acknowledge at the next `flush`."""
        self._acknowledged.append(tag)

    def give_back(self, tag: str) -> None:
        """Put the message back at the head of its queue, at the next `flush`."""
        self._rejected.append(tag)

    @property
    def settled(self) -> bool:
        """Whether there is nothing to flush."""
        return not (self._acknowledged or self._rejected)

    def flush(self, client: redis.Redis) -> None:
        """Delete acknowledged messages and put rejected ones back, the oldest message at the head of its queue.
        May be repeated after an error: Redis does nothing twice."""
        with self._mutex:
            if self._acknowledged:
                try:
                    client.hdel(self.unacked, *self._acknowledged)
                except DamagedKey:
                    corruption.report(self.unacked, "a hash: its messages are lost")
                    self.lost = True
                self._acknowledged.clear()
            if self._rejected:
                self._restore(client, forget=False, tags=self._rejected)
                self._rejected.clear()

    def close(self, client: redis.Redis) -> int:
        """Give all messages back and delete the owner. Returns the number of messages."""
        if not self.registered:
            return 0
        self.flush(client)
        self._closing = True  # before the call to Redis: a renewal right after it must not report a lost lease
        restored = self._restore(client, forget=True)
        self.registered = False
        return restored

    def begin_anew(self) -> None:
        """Continue as a new owner after losing the lease and, with it, all held messages."""
        with self._mutex:
            self._acknowledged.clear()
            self._rejected.clear()
        self.owner = new_owner(SECOND if self.second else "")
        self.registered = self.lost = False

    def _restore(self, client: redis.Redis, *, forget: bool, tags: Sequence[str] = ()) -> int:
        return restore(client, self.names, self.owner, forget=forget, tags=tags)

    # ------------------------------------------------------------ lease keeper

    def renew(self, client: redis.Redis, *, hanging: bool = False) -> bool:
        """Renew the lease. Returns False if the lease was lost and the messages were given back. A worker whose
        engine hangs shows a sign of life, but does not extend its lease."""
        if not self.registered or self.lost:
            return True
        owner = self.owner
        ttl_ms = 0 if hanging else lease_ms(self.visibility_timeout_s)
        keys = [self.names.owners, self.names.lease + owner, self.names.server + owner]
        kept = scripts.load(client, "renew")(keys, [owner, ttl_ms, self.present_on()])
        if kept or owner != self.owner or self._closing:
            return True
        self.lost = True
        return False


def restore(
    client: redis.Redis, names: LedgerKeys, owner: str, *, forget: bool = True, tags: Sequence[str] = ()
) -> int:
    """Give back `owner`'s messages, in short calls. Returns their number."""
    return _give_back(client, names, owner, int(forget), *tags).restored


def sweep(client: redis.Redis, names: LedgerKeys, absent: Sequence[str] = ()) -> SweepResult:
    """Give back the messages of all dead owners, in short calls. These are owners whose lease has expired, and
    owners of `absent`, which the caller misses, that have shown no sign of life."""
    return _give_back(client, names, "", 1, names.present, liveness.QUIET_MS, *absent)


def _give_back(client: redis.Redis, names: LedgerKeys, *arguments: Any) -> SweepResult:
    script, total, dead = scripts.load(client, "restore"), 0, []
    while True:
        args: list[Any] = [names.lease, names.unacked, RESTORED_A_CALL, *arguments]
        answer: tuple[int, list[bytes], list[bytes], list[bytes], list[bytes]] = script([names.owners], args)
        restored, damaged, strange, alive, deleted = answer
        for key in damaged:
            corruption.report(key, "a hash" if key.startswith(names.unacked.encode()) else "a list")
        for key, tag, entry in triples(strange):
            corruption.put_aside(entry, key, f"the entry {corruption.text(tag)} is not a message")
        total += restored
        dead += [name.decode() for name in deleted]
        if restored < RESTORED_A_CALL:
            return SweepResult(total, [name.decode() for name in alive], dead)


def triples(flat: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


def new_owner(ending: str = "") -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}{ending}"


def is_second(owner: str) -> bool:
    return owner.endswith(SECOND)
