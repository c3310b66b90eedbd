"""Which messages are whose: every unacknowledged message belongs to an owner, and every owner has a lease.

    queue ──take──► petiole:unacked:OWNER ──ack──► gone
      ▲                     │
      └──────restore────────┘  by the owner when it closes, by anybody when its lease has run out

An owner is one consuming channel of one process, for as long as it keeps its lease; afterwards it takes a new
name. A tag is a field of the owner's own hash. So the acknowledgement of a worker that has lost its lease finds
nothing to delete, and cannot touch what the message's next owner holds.

    petiole:owners          set of owners that hold, or have held, messages
    petiole:lease:OWNER     string with a TTL; its expiry, by the server's clock, is the loss of the lease
    petiole:unacked:OWNER   hash: tag -> queue and message, byte for byte as the producer sent it

Several threads use a ledger: the consumer takes and acknowledges, the lease keeper renews. Each brings its client.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from tasks.worker import scripts

logger = logging.getLogger(__name__)

RESTORED_A_CALL = 200


class Taken(NamedTuple):
    """A message that is now ours. `item` is the envelope as the producer sent it."""

    tag: str
    queue: str
    item: bytes


class Names(NamedTuple):
    """The keys of the broker, under its global key prefix."""

    owners: str
    lease: str
    unacked: str

    @classmethod
    def under(cls, prefix: str) -> Names:
        return cls(f"{prefix}petiole:owners", f"{prefix}petiole:lease:", f"{prefix}petiole:unacked:")


def lease_ms(visibility_timeout_s: float) -> int:
    return max(100, int(visibility_timeout_s * 1000))


class Ledger:
    """The messages that one channel holds."""

    def __init__(self, *, prefix: str, visibility_timeout_s: float) -> None:
        self.names = Names.under(prefix)
        self.visibility_timeout_s = visibility_timeout_s
        self.owner = new_owner()
        self.registered = False
        self.lost = False
        self._next_tag = 1
        self._acknowledged: list[str] = []
        self._mutex = threading.Lock()

    @property
    def unacked(self) -> str:
        return self.names.unacked + self.owner

    @property
    def lease(self) -> str:
        return self.names.lease + self.owner

    # ------------------------------------------------------------ consumer

    def take(self, client: redis.Redis, queues: Sequence[str], most: int) -> list[Taken] | None:
        """Up to `most` messages, the first queue's first. None: the lease was lost, and all that was held."""
        self.flush(client)
        reply = scripts.load(client, "take")(
            [self.names.owners, self.lease, self.unacked, *queues],
            [self.owner, lease_ms(self.visibility_timeout_s), int(not self.registered), self._next_tag, most],
        )
        if reply[0] == 0:
            return None
        self.registered = True
        taken = [Taken(str(reply[i]), queues[reply[i + 1]], reply[i + 2]) for i in range(1, len(reply), 3)]
        self._next_tag += len(taken)
        return taken

    def ack(self, tag: str) -> None:
        """Done with: gone at the next `flush`."""
        self._acknowledged.append(tag)

    def flush(self, client: redis.Redis) -> None:
        with self._mutex:
            if self._acknowledged:
                client.hdel(self.unacked, *self._acknowledged)
                self._acknowledged.clear()

    def give_back(self, client: redis.Redis, tags: Sequence[str]) -> None:
        """These messages are for somebody else: at the head of their queues, the oldest first."""
        if tags:
            self._restore(client, forget=False, tags=tags)

    def close(self, client: redis.Redis) -> int:
        """Give everything back and forget the owner. Returns how many messages that were."""
        if not self.registered:
            return 0
        self.flush(client)
        restored = self._restore(client, forget=True)
        self.registered = False
        return restored

    def begin_anew(self) -> None:
        """The lease is lost: what this channel held is in the queues again, or in other hands."""
        with self._mutex:
            self._acknowledged.clear()
        self.owner, self.registered, self.lost = new_owner(), False, False

    def _restore(self, client: redis.Redis, *, forget: bool, tags: Sequence[str] = ()) -> int:
        return restore(client, self.names, self.owner, forget=forget, tags=tags)

    # ------------------------------------------------------------ lease keeper

    def renew(self, client: redis.Redis) -> bool:
        """False: somebody has given our messages back."""
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
    """Give back one owner's messages, or those of all owners without a lease. In calls that are short."""
    script, total = scripts.load(client, "restore"), 0
    while True:
        args: list[Any] = [names.lease, names.unacked, RESTORED_A_CALL, owner, int(forget), *tags]
        restored = int(script([names.owners], args))
        total += restored
        if restored < RESTORED_A_CALL:
            return total


def new_owner() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"
