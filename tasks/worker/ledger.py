"""Ownership of messages: every unacknowledged message belongs to an owner, and every owner has a lease.

    queue ──take──► petiole:unacked:OWNER ──ack──► gone
      ▲                     │
      └──────restore────────┘  by the owner when it closes, by any worker when the lease has expired

An owner is one consuming channel of one process while it keeps its lease; after losing it, the channel uses a new
owner name. A delivery tag is a field of the owner's own hash. So an acknowledgement by a worker that has lost its
lease deletes nothing, and does not affect the message's next owner.

    petiole:owners          set of owners that hold, or have held, messages
    petiole:lease:OWNER     string with a TTL; the lease is lost when it expires, by the server's clock
    petiole:unacked:OWNER   hash: tag -> queue and message, byte for byte as the producer sent it
    petiole:home:QUEUE:KEY  string with a TTL: the owner that took the last message with this affinity (`take.lua`)

Two threads use a ledger, each with its own client: the consumer takes and acknowledges, the lease keeper renews.
"""

from __future__ import annotations

import os
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import redis

from tasks.masters import wrong_type
from tasks.worker import damage, scripts

RESTORED_A_CALL = 200
UNLIMITED = 2**31


class Taken(NamedTuple):
    """A message that the ledger now owns. `item` is the envelope as the producer sent it."""

    tag: str
    queue: str
    item: bytes


class Names(NamedTuple):
    """The ledger's keys in the broker, under its global key prefix."""

    owners: str
    lease: str
    unacked: str
    home: str

    @classmethod
    def under(cls, prefix: str) -> Names:
        return cls(*(f"{prefix}petiole:{name}" for name in ("owners", "lease:", "unacked:", "home:")))


def lease_ms(visibility_timeout_s: float) -> int:
    return max(100, int(visibility_timeout_s * 1000))


class Ledger:
    """The messages held by one channel. Messages are left to their homes for `affinity_wait_ms`."""

    def __init__(self, *, prefix: str, visibility_timeout_s: float, affinity_wait_ms: int = 0) -> None:
        self.names = Names.under(prefix)
        self.visibility_timeout_s, self.affinity_wait_ms = visibility_timeout_s, affinity_wait_ms
        self.left = 0
        """How many messages the last `take` left to their homes: after a while, they are anyone's."""
        self.owner = new_owner()
        self.registered = False
        self.lost = False
        self._next_tag = 1
        self._acknowledged: list[str] = []
        self._rejected: list[str] = []
        self._mutex = threading.Lock()

    @property
    def unacked(self) -> str:
        return self.names.unacked + self.owner

    @property
    def lease(self) -> str:
        return self.names.lease + self.owner

    # ------------------------------------------------------------ consumer

    def take(
        self, client: redis.Redis, queues: Sequence[str], most: int, *, limit: int = UNLIMITED
    ) -> list[Taken] | None:
        """Take up to `most` messages, from the first queue first. None: the lease and all messages are lost.

        `limit`: how many an owner holds at most, this one and, since workers of one queue are alike, any other.
        """
        self.flush(client)
        new, ttl_ms = int(not self.registered), lease_ms(self.visibility_timeout_s)
        affinity = (self.affinity_wait_ms, limit or UNLIMITED, *self.names[1:])
        reply = scripts.load(client, "take")(
            [self.names.owners, self.lease, self.unacked, *queues],
            [self.owner, ttl_ms, new, self._next_tag, most, *affinity],
        )
        if reply[0] < 1:
            if reply[0] < 0:
                damage.report(self.unacked, "a hash: what it held is lost")
            return None
        self.registered, self.left, taken = True, reply[1], []
        for tag, position, item in triples(reply[2:]):
            if tag:
                taken.append(Taken(str(tag), queues[position], item))
            else:
                damage.report(queues[position], "a list: its messages are not taken")
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
        """Delete acknowledged messages and put rejected ones back, the oldest of a queue at its head. May be
        repeated after an error: what Redis has done already is not done again."""
        with self._mutex:
            if self._acknowledged:
                try:
                    client.hdel(self.unacked, *self._acknowledged)
                except redis.ResponseError as error:
                    if not wrong_type(error):
                        raise
                    damage.report(self.unacked, "a hash: what it held is lost")
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
        restored = self._restore(client, forget=True)
        self.registered = False
        return restored

    def begin_anew(self) -> None:
        """Continue as a new owner after losing the lease and, with it, all held messages."""
        with self._mutex:
            self._acknowledged.clear()
            self._rejected.clear()
        self.owner, self.registered, self.lost = new_owner(), False, False

    def _restore(self, client: redis.Redis, *, forget: bool, tags: Sequence[str] = ()) -> int:
        return restore(client, self.names, self.owner, forget=forget, tags=tags)

    # ------------------------------------------------------------ lease keeper

    def renew(self, client: redis.Redis) -> bool:
        """False if the lease was lost and the messages were given back."""
        if not self.registered or self.lost:
            return True
        owner = self.owner
        kept = scripts.load(client, "renew")(
            [self.names.owners, self.names.lease + owner], [owner, lease_ms(self.visibility_timeout_s)]
        )
        if not kept and owner == self.owner:
            self.lost = True
        return bool(kept)


def restore(
    client: redis.Redis, names: Names, owner: str = "", *, forget: bool = True, tags: Sequence[str] = ()
) -> int:
    """Give back `owner`'s messages, or those of all owners without a lease, in short calls. Returns the number."""
    script, total = scripts.load(client, "restore"), 0
    while True:
        args: list[Any] = [names.lease, names.unacked, RESTORED_A_CALL, owner, int(forget), *tags]
        answer: tuple[int, list[bytes], list[bytes]] = script([names.owners], args)
        restored, damaged, strange = answer
        for key in damaged:
            damage.report(key, "a hash" if key.startswith(names.unacked.encode()) else "a list")
        for key, tag, entry in triples(strange):
            damage.put_aside(entry, key, f"the entry {damage.text(tag)} is no message")
        total += restored
        if restored < RESTORED_A_CALL:
            return total


def triples(flat: Sequence[Any]) -> Iterator[tuple[Any, Any, Any]]:
    return zip(flat[::3], flat[1::3], flat[2::3], strict=True)


def new_owner() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
