"""Liveness: a killed process closes its connections at once, long before its lease expires.

    owner    subscribes to a channel that is named after the owner: `HeldSubscription`
    Redis    counts subscribers (PUBSUB NUMSUB): none as soon as it has seen the owner's connection close
    sweeper  reads these counts every half second. `MissingOwners` names the owners that may be dead; the script
             that gives messages back (`lua/restore.lua`) decides

Before an owner's lease has expired, it is regarded as dead only if all of these are true:

1. The sweeper has seen the channel with a subscriber, on the connection that it has now. After a restart of Redis
   or a failover, it has not yet seen any owner. Then the leases of these owners alone decide. A sweeper that has
   just started has seen nobody, and its predecessor may be dead. So each owner notes on which run of the server
   its subscription holds (`run_of`). At its first look, the sweeper counts an owner as seen if it is connected to
   the same run.
2. The sweeper sees no subscriber in two consecutive looks.
3. The owner's last sign of life is older than `QUIET_MS`. The value of its lease is the time of that sign, by
   Redis's clock. A live worker whose subscription alone was cut shows a sign every second.

A wrong guess does no harm: the owner's next renewal is refused, and its attempts are fenced.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import redis

from petiole.tasks.servers.connections import LOST
from petiole.tasks.worker.periodic import Periodic
from petiole.tasks.worker.reports.incidents import incidents

logger = logging.getLogger(__name__)

QUIET_MS = 1200
CONFIRM_S = 5.0
"""How long a new owner waits for its subscription. If Redis has not confirmed it by then, the lease alone
decides."""

PING_AFTER_S = 15.0
"""After this much silence a subscription is pinged. If no answer comes, it is made again."""

AGAIN_S = 0.25
"""Pause after an attempt to subscribe that failed."""


class MissingOwners:
    """The owners that seem to be gone, as seen on one connection. It only decides; the lease keeper acts."""

    def __init__(self) -> None:
        self.owners: tuple[str, ...] = ()
        self._seen: set[str] = set()
        self._absent: set[str] = set()

    def know(self, owners: Iterable[str]) -> None:
        """Take in the list of all owners whose lease has not expired."""
        self.owners = tuple(owners)
        self._seen.intersection_update(self.owners)
        self._absent.intersection_update(self.owners)

    def trust(self, owners: Iterable[str]) -> None:
        """Count these owners as seen."""
        self._seen.update(set(self.owners).intersection(owners))

    def look(self, subscribers: Mapping[str, int]) -> list[str]:
        """Take in the number of subscribers of each owner's channel. Returns the owners that are absent for the
        second time."""
        self._seen.update(owner for owner, count in subscribers.items() if count)
        before = self._absent
        self._absent = {owner for owner, count in subscribers.items() if not count and owner in self._seen}
        return sorted(self._absent & before)


def run_of(answer: bytes) -> str:
    """The id of the server's run, from its answer to INFO: another one after each restart, and on each replica.
    Empty if the server does not say."""
    found = re.search(rb"^run_id:([0-9a-f]+)", answer, re.M)
    return found[1].decode() if found and found[1].strip(b"0") else ""


class HeldSubscription:
    """Keeps `channel` subscribed until it is closed, on a thread and a connection of its own.

    `pool` has the connection's parameters. They must ask for RESP2: with RESP3, redis-py hides the confirmation.
    """

    def __init__(self, pool: redis.ConnectionPool, channel: str) -> None:
        self.channel = channel
        self._connection: Any = pool.make_connection()
        self._made = threading.Event()
        self.server = ""
        """The run of the server on which the subscription holds."""
        self._thread = Periodic("petiole-presence", self._hold)
        _open.add(self)

    def start(self) -> None:
        """Subscribe, and wait a while for Redis to confirm it."""
        self._thread.start()
        if not self._made.wait(CONFIRM_S):
            logger.warning(
                "Redis has not confirmed the subscription to %s within %g s: until it does, "
                "this worker's death would be noticed by its lease alone",
                self.channel,
                CONFIRM_S,
            )

    def close(self) -> None:
        self._thread.stop(wait_s=0.0)
        if (sock := self._connection._sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread, which waits for something to read

    def leave_to_parent(self) -> None:
        """In a forked process: close its copy of the socket, which would keep the parent's connection open."""
        if (sock := self._connection._sock) is not None:
            sock.close()

    def _hold(self) -> float:
        """Subscribe, until the subscription is lost. Returns the seconds until it is made again."""
        held = False
        try:
            for _ in self._replies():
                held = True
                self._made.set()
        except redis.exceptions.NoPermissionError as error:
            logger.warning("this worker's death will be noticed by its lease alone: %s", error)
            self._made.set()
            return threading.TIMEOUT_MAX
        except Exception as error:  # any exception: the subscription is made again
            if not isinstance(error, (*LOST, redis.RedisError)) and not self._thread.stopped:
                logger.exception("presence: the subscription was lost")
        finally:
            self.server = ""
            self._connection.disconnect()
        return 0.0 if held else AGAIN_S

    def _replies(self) -> Iterator[None]:
        """Subscribe, and yield at each reply: the confirmation, and answers to pings."""
        connection = self._connection
        connection.connect()
        run = self._ask_run()
        incidents.saw_server(run)
        connection.send_command("SUBSCRIBE", self.channel, check_health=False)
        asked = False
        while not self._thread.stopped:
            try:
                connection.read_response(disconnect_on_error=False)
            except redis.TimeoutError:
                if asked:
                    raise
                connection.send_command("PING", check_health=False)
                asked = True
            else:
                asked, self.server = False, run
                yield

    def _ask_run(self) -> str:
        self._connection.send_command("INFO", "server", check_health=False)
        try:
            return run_of(self._connection.read_response(disconnect_on_error=False))
        except redis.ResponseError as error:
            logger.info("a worker that starts after this one's death will notice it by its lease alone: %s", error)
            return ""


_open: weakref.WeakSet[HeldSubscription] = weakref.WeakSet()


def _in_a_forked_process() -> None:
    for subscription in list(_open):
        subscription.leave_to_parent()


os.register_at_fork(after_in_child=_in_a_forked_process)
