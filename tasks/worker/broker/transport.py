"""kombu's Redis transport with an atomic take and an owner for every unacknowledged message.

It needs Redis 6.2 or later. It is compatible with stock producers: messages have kombu's format, and publishing is
kombu's code. Only consuming differs:

    stock                                         here
    BRPOP, then ZADD + HSET: a worker killed      BLMOVE of the list's end onto itself waits without removing;
    in between loses the message                  then one script takes as many messages as the credit allows
    unacknowledged messages are keyed by tag,     unacknowledged messages are in a hash per owner: see `ledger`
    which the next owner of a message shares
    any worker restores messages older than its   leases, with the owner's timeout and the server's clock:
    own visibility timeout, by its host's clock   see `leases`

The channel waits on one list: priority 0 of the queue that had a message last, at first of one that models share.
It looks at other queues and priorities when the wait ends, at the latest after `WAIT_S`; after a control command,
so a producer of less urgent messages can send a `ping`; and every `SHARED_WAIT_S` while it holds less urgent
messages, because more of them are likely, and as soon as its model's own queue has had a message. A channel that
took as many messages as it had credit for does not wait when it has credit again, but takes the next messages from
all queues at once. So a backlog adds no delay.

A channel holds as many messages as the prefetch count. Beyond that it takes messages that are more urgent than a
held one and take its place in the engine; a few of these may wait. So a worker that is full of low-priority tasks
receives all urgent ones. And it holds some more of the last priority, because rows of a batch end together. If
tenants have weights, messages are taken one at a time, each from the queue that `fairness` selects.

kombu finds the class by its table of aliases, which `install` changes in the worker process only. So `redis://`,
`rediss://` and `redis+socket://` URLs, failover lists and TLS options work as in stock kombu; so do `sentinel://`
URLs, except that every connection asks the sentinels (see `tasks.servers.sentinels`).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from queue import Empty
from typing import Any, ClassVar

import redis
from kombu import transport as transports
from kombu.transport import redis as stock

from petiole.contract.settings.urls import DEFAULT_PORT, SENTINEL, SentinelUrl, netloc
from petiole.tasks.fleet.queues import list_lengths
from petiole.tasks.servers import redis_py
from petiole.tasks.servers.connections import CONNECT_TIMEOUT_S
from petiole.tasks.servers.failover import demoted, refuses_writes
from petiole.tasks.servers.replies import DamagedKey, answering
from petiole.tasks.servers.sentinels import SYNC, pool_parameters
from petiole.tasks.settings import settings
from petiole.tasks.wire.keys import NAME_PROPERTY, is_own, stream_keys
from petiole.tasks.worker import scripts
from petiole.tasks.worker.broker import gate
from petiole.tasks.worker.broker.fairness import FairShares, tenant_queues
from petiole.tasks.worker.broker.gate.bodies import RedisMessage
from petiole.tasks.worker.broker.held_messages import HeldMessages
from petiole.tasks.worker.broker.ledger import Ledger, TakenMessage
from petiole.tasks.worker.broker.liveness import PING_AFTER_S, HeldSubscription
from petiole.tasks.worker.broker.quarantine import Sign, put_aside
from petiole.tasks.worker.idempotency import trial
from petiole.tasks.worker.reports.incidents import incidents

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Default socket timeout of the broker; kombu has none. Shorter than for streams, because the waiting thread
handles signals."""

WAIT_S = 0.5
SHARED_WAIT_S = 0.05
FULL_PAUSE_S = 1.0
TAKEN_A_CALL = 64

ANSWER_EXPIRES_MS = 60_000
"""How long an answer to a control command waits for its caller."""

LEFT_PAUSE_S = 0.005
"""Pause before the channel looks again at queues whose messages it has left to their homes."""

channels: weakref.WeakSet[Channel] = weakref.WeakSet()
"""The open channels of this process, for the lease keeper."""

orphans: list[Ledger] = []
"""Ledgers of closed channels that could not give their messages back, because Redis failed."""


def close_orphans(client: redis.Redis) -> None:
    """Give their messages back. Several threads may, because the channels of one process have several."""
    while orphans:
        try:
            ledger = orphans.pop()
        except IndexError:  # another thread has the last one
            return
        try:
            ledger.close(client)
        except BaseException:
            orphans.append(ledger)
            raise


def install() -> None:
    """Make kombu use this transport for Redis broker URLs in this process."""
    for alias in ("redis", "rediss"):
        transports.TRANSPORT_ALIASES[alias] = f"{__name__}:Transport"
    transports.TRANSPORT_ALIASES[SENTINEL] = f"{__name__}:SentinelTransport"
    transports._transport_cache.clear()  # an earlier connection may have cached the stock transport


_stock: Any = stock  # kombu is only partly typed


def lost_errors(connection_errors: Iterable[type[Exception]]) -> tuple[type[Exception], ...]:
    """What a lost connection raises. kombu's list has KeyError, too, which a message or a command can cause."""
    return tuple(kind for kind in connection_errors if kind is not KeyError)


@dataclass(frozen=True, slots=True)
class _Unread:
    """A refused message among the held ones, until the quarantine has it."""

    properties: Mapping[str, Any] = field(default_factory=dict)


class Channel(_stock.Channel):  # type: ignore[misc]
    """kombu's channel with another way of consuming."""

    QoS = HeldMessages
    Message = RedisMessage
    socket_connect_timeout = CONNECT_TIMEOUT_S
    socket_timeout = ANSWER_S
    ledger: Ledger
    subscription: HeldSubscription | None = None
    deferred = False
    fair = False
    _own_is_used = False
    _unseen: frozenset[int] = frozenset()  # priority steps whose lists may have messages
    _full_until = _left_until = 0.0
    _look_at = float("inf")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        ours = settings()
        self.ledger = Ledger(
            prefix=self.global_keyprefix,
            db=int(self._connparams().get("db") or 0),
            visibility_timeout_s=ours.visibility_timeout_s,
            affinity_wait_ms=0 if ours.prefix_cache == "off" else ours.affinity_wait_ms,
        )
        self.fair = bool(ours.weights)
        if self.fair:
            self._queue_cycle = FairShares(tenant_queues(ours.queue, ours.weights))
        channels.add(self)

    @cached_property
    def lost_errors(self) -> tuple[type[Exception], ...]:
        return lost_errors(self.connection_errors)

    # ------------------------------------------------------------ waiting

    def _update_queue_cycle(self) -> None:
        self._queue_cycle.update(sorted(self.active_queues, key=is_own, reverse=True))

    def _brpop_start(self, timeout: float | None = None) -> None:
        """Wait for a message without removing it; if the queues may still have some, do not wait."""
        if time.monotonic() < max(self._full_until, self._left_until):
            return
        queues = self._queue_cycle.consume(len(self.active_queues))
        if not queues:
            return
        key = self.global_keyprefix + self._q_for_pri(queues[-1], 0)
        wait_s = SHARED_WAIT_S if self.fair or self._own_is_used else WAIT_S
        self._in_poll = self.client.connection
        self._brpop_sent_at = time.monotonic()
        wait = ("LMOVE",) if self.more else ("BLMOVE", wait_s)
        self.client.connection.send_command(wait[0], key, key, "RIGHT", "RIGHT", *wait[1:])

    def _brpop_read(self, **options: Any) -> bool:
        try:
            try:
                self.client.parse_response(self.client.connection, "BLMOVE", **options)
            except DamagedKey:
                self._full_until = time.monotonic() + WAIT_S  # the take names the key, and finds other queues
                self.connection.turn_after(WAIT_S)
            except redis.ResponseError as error:
                self._refused(error)
                raise Empty from None
            except self.connection_errors:
                self.client.connection.disconnect()
                raise
        finally:
            self._in_poll = None
            self._flush_brpop_reauth()
        if not self.deliver():
            raise Empty
        return True

    # ------------------------------------------------------------ taking

    def deliver(self) -> int:
        """Take as many messages as the credit allows, and pass them to the consumers. Returns their number."""
        if self._closing:
            return 0
        if self.ledger.lost:
            self._lost()
        delivered = 0
        while delivered < TAKEN_A_CALL and (taken := self._take(most=1 if self.fair else TAKEN_A_CALL)):
            delivered += taken
            if not self.fair:
                break
        return delivered

    def tick(self) -> None:
        """Called in every iteration of the event loop."""
        self.deferred = True
        self.flush()
        now = time.monotonic()
        if now >= self._look_at:
            self.look()
        if self.more and now >= self._left_until:
            self.deliver()

    @property
    def more(self) -> bool:
        """Whether a take without waiting may find messages."""
        return not self._unseen.isdisjoint(self.qos.room()[0])

    def look(self) -> None:
        """Let the next turn of the event loop take messages of all queues and priorities."""
        self._unseen, self._look_at = frozenset(self.priority_steps), float("inf")

    def _take(self, most: int) -> int:
        """Take and deliver up to `most` messages."""
        self.look()
        steps, room = self.qos.room()
        credit = min(most, room or most)
        queues = {
            self.global_keyprefix + self._q_for_pri(queue, priority): queue
            for priority in steps
            for queue in self._queue_cycle.consume(len(self.active_queues))
        }
        if not queues:
            return 0
        try:
            client = self.plain_client
            close_orphans(client)
            limit = self.qos.prefetch_count
            self._be_present()
            taken = self.ledger.take(client, list(queues), credit, limit=limit)
            if taken is None:
                self._lost()
                self._be_present()
                taken = self.ledger.take(client, list(queues), credit, limit=limit) or []
        except redis.ResponseError as error:
            self._unseen = frozenset()
            self._refused(error)
            return 0
        if self.ledger.left:
            self._left_until = time.monotonic() + LEFT_PAUSE_S
            self.connection.turn_after(LEFT_PAUSE_S)
        elif len(taken) < credit:
            self._unseen = self._unseen.difference(steps)
        for message in taken:
            queue = queues[message.queue]
            self._queue_cycle.rotate(queue)
            self._own_is_used |= is_own(queue)
            self._deliver(message, queue)
        if len(taken) < credit and self.qos.least_urgent_step():
            self._look_at = time.monotonic() + SHARED_WAIT_S
            self.connection.turn_after(SHARED_WAIT_S)
        return len(taken)

    def _be_present(self) -> None:
        """Subscribe to the owner's channel. Called before the owner is registered."""
        subscribed = self.subscription
        if self.ledger.registered or (subscribed and subscribed.channel == self.ledger.channel):
            return
        if subscribed:
            subscribed.close()
        self.subscription = subscription = HeldSubscription(self._own_pool(PING_AFTER_S), self.ledger.channel)
        subscription.start()
        self.ledger.present_on = lambda: subscription.server

    def _deliver(self, taken: TakenMessage, queue: str) -> None:
        """Pass the message to its consumer. Only errors of the consumer are raised. Any other error refuses the
        message."""
        if queue not in self.connection._callbacks:
            self.ledger.give_back(taken.tag)
            self.acknowledged()
            return
        read = gate.envelope(taken.item)
        if isinstance(read, gate.RefusedMessage):
            self._refuse(taken, queue, read)
            return
        read.payload["properties"] |= {"delivery_tag": taken.tag, NAME_PROPERTY: taken.name}
        read.payload["queue"] = queue
        try:
            self.connection._deliver(read.payload, queue)
        except Exception as error:
            if isinstance(error, self.lost_errors) or self.qos.holds(taken.tag):
                raise
            logger.exception("a message could not be read")
            self._refuse(taken, queue, gate.RefusedMessage(f"cannot be read: {type(error).__name__}"))

    def _refuse(self, taken: TakenMessage, queue: str, refused: gate.RefusedMessage) -> None:
        """Hold the message until the quarantine has it."""
        tag = taken.tag
        self.qos.append(_Unread(), tag)

        def acknowledge() -> None:  # keeps the tag alive, not the message
            if self.holds(tag):
                self.qos.ack(tag)

        put_aside(
            *(taken.item, queue, refused.reason, refused.task_id),
            sign=Sign(taken.name),
            headers=refused.headers,
            done=acknowledge,
        )

    def _handle_message(self, client: Any, response: Any) -> Any:
        """What the subscription has received. A broadcast that the gate refuses is logged, and is empty."""
        received = super()._handle_message(client, response)
        data = received["data"]
        if _stock.bytes_to_str(received["channel"]).endswith(".pidbox"):
            for channel in self.connection.channels:
                channel.look()
        if isinstance(data, bytes) and data:
            refused = gate.broadcasts.envelope(data)
            if refused is not None:
                logger.error("a message on %r was refused: %s", received["channel"], refused.reason)
                received["data"] = None
        return received

    def _receive_one(self, client: Any) -> Any:
        """Receive a control command or an event. One that cannot be handled is logged and dropped."""
        try:
            return super()._receive_one(client)
        except Empty:
            raise
        except self.lost_errors:
            raise
        except Exception:
            logger.exception("a control command or an event could not be handled")
            return True

    def _lost(self) -> None:
        logger.warning("the lease on %d message%s was lost", self.qos.count, "s" * (self.qos.count != 1))
        if not self.ledger.second:
            incidents.count("lost_leases")
        self.qos.forget()
        self.ledger.begin_anew()

    def _refused(self, error: redis.ResponseError) -> None:
        """Stop taking for a while if Redis is full; raise ConnectionError if it became a replica."""
        if demoted(error):
            self.client.connection.disconnect()
            raise redis.ConnectionError(str(error)) from error
        if time.monotonic() > self._full_until + 10 * FULL_PAUSE_S:
            logger.error("Redis refuses to hand out messages: %s", error)
        self._full_until = time.monotonic() + FULL_PAUSE_S

    def queue_declare(self, *args: Any, **options: Any) -> Any:
        with self._writable():
            return super().queue_declare(*args, **options)

    def queue_bind(self, *args: Any, **options: Any) -> Any:
        with self._writable():
            return super().queue_bind(*args, **options)

    def _size(self, queue: str) -> int:
        """How many messages a queue has. A key that is not a list counts as empty."""
        return sum(list_lengths(self, [queue])[queue].values())

    @contextmanager
    def _writable(self) -> Iterator[None]:
        """Treat a Redis that refuses writes as a lost connection when a consumer starts."""
        try:
            yield
        except redis.ResponseError as error:
            if not refuses_writes(error):
                raise
            logger.error("Redis takes no writes: %s", error)
            time.sleep(FULL_PAUSE_S)
            raise redis.ConnectionError(str(error)) from error

    def maybe_refresh_binding_expiry(self) -> None:
        """Refresh the bindings; called once a second. kombu would log a traceback for each failure."""
        try:
            super().maybe_refresh_binding_expiry()
        except redis.ResponseError as error:
            if not refuses_writes(error):
                raise
            self._refused(error)

    # ------------------------------------------------------------ putting

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        """Put a message into a queue; one that follows the end of a task, once (see `once`). An answer to a
        control command expires, because its caller may be gone."""
        if queue.endswith(".pidbox"):
            self._expires[queue] = ANSWER_EXPIRES_MS
            try:
                super()._put(queue, message, **options)
            finally:
                del self._expires[queue]
            return
        once = trial()
        if once is None or once.message is None:
            super()._put(queue, message, **options)
            return
        key = self._q_for_pri(queue, self._get_message_priority(message, reverse=False))
        put = scripts.load(self.plain_client, "put")
        prefix = self.global_keyprefix
        keys = [prefix + key, prefix + stream_keys(once.scope).sent]
        try:
            put(keys, [f"{once.message} {queue}", settings().stream_ttl_s, _stock.dumps(message)])
        except redis.ResponseError as error:
            if not demoted(error):
                raise
            self.pool.disconnect()
            raise redis.ConnectionError(str(error)) from error

    # ------------------------------------------------------------ holding and acknowledging

    def basic_consume(
        self, queue: str, no_ack: bool, callback: Callable[[Any], object], *more: Any, **options: Any
    ) -> None:
        """Like kombu's. But a message that needs no acknowledgement, such as a worker's reply to a control
        command, is not held. If it were given back when the channel closes, it would stay for ever in a queue that
        nobody reads."""

        def unheld(message: Any) -> None:
            self.ledger.ack(message.delivery_tag)
            self.acknowledged()
            callback(message)

        held = not no_ack or queue in self._fanout_queues  # messages published to all are never in the ledger
        super().basic_consume(queue, no_ack, callback if held else unheld, *more, **options)

    def holds(self, tag: str) -> bool:
        return self.qos.holds(tag) and not (self.closed or self.ledger.lost)

    def acknowledged(self) -> None:
        """Flush at once if there is no event loop, whose ticks would flush."""
        if not self.deferred:
            self.flush()

    def flush(self) -> None:
        if self.ledger.settled or self.closed:
            return
        try:
            self.ledger.flush(self.plain_client)
        except redis.ResponseError as error:
            self._refused(error)

    def close(self) -> None:
        in_poll, self._in_poll = self._in_poll, None
        if in_poll:  # the pending reply may be discarded: BLMOVE removes nothing
            self.client.connection.disconnect()
        channels.discard(self)
        if not self.closed:
            self.qos.forget()
            try:
                self.ledger.close(self.plain_client)
            except (*self.connection_errors, redis.ResponseError) as error:
                logger.warning("messages could not be given back yet: %s", error)
                orphans.append(self.ledger)
        if self.subscription:
            self.subscription.close()
        try:
            super().close()
        except self.connection_errors:  # auto-delete queues cannot be deleted now
            self.auto_delete_queues.clear()
            super().close()

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        parameters: dict[str, Any] = super()._connparams(asynchronous)
        return {**parameters, "connection_class": answering(parameters["connection_class"])}

    @cached_property
    def plain_client(self) -> redis.Redis:
        """kombu's clients put the global key prefix before some keys; the ledger's have it already."""
        return redis.Redis(connection_pool=self.pool)

    def own_client(self, timeout_s: float) -> redis.Redis:
        """A client with this channel's parameters and one connection of its own. It does not reconnect: after the
        connection is lost, every call fails."""
        return redis.Redis(connection_pool=self._own_pool(timeout_s), single_connection_client=True)

    def _own_pool(self, timeout_s: float) -> redis.ConnectionPool:
        own = {"max_connections": 1, "socket_timeout": timeout_s, "health_check_interval": 0, **redis_py.RESP2}
        return redis.ConnectionPool(**{**self._connparams(), **own})


class Transport(_stock.Transport):  # type: ignore[misc]
    """kombu's transport with `Channel`: every iteration of the event loop sends acknowledgements together, and
    takes the messages that they make room for."""

    Channel = Channel
    _every_turn: ClassVar[set[Callable[[], None]]] = set()
    _loop: Any = None

    def turn_after(self, pause_s: float) -> None:
        """Make the event loop, if there is one, turn again."""
        if self._loop is not None:
            self._loop.call_later(pause_s, lambda: None)

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Register, and remove the callbacks of the previous connection, which would stay and keep it alive."""
        loop.on_tick.difference_update(Transport._every_turn)
        others = set(loop.on_tick)
        super().register_with_event_loop(connection, loop)

        def tick() -> None:
            for channel in self.channels:
                channel.tick()

        self._loop = loop
        loop.on_tick.add(tick)
        Transport._every_turn = loop.on_tick - others


class SentinelChannel(Channel):
    """A channel whose connections ask the sentinels for the master."""

    from_transport_options = (*Channel.from_transport_options, "master_name", "sentinel_kwargs")
    connection_class, connection_class_ssl = SYNC
    master_name: str | None = None
    sentinel_kwargs: dict[str, Any] | None = None

    def _connparams(self, asynchronous: bool = False) -> dict[str, Any]:
        parameters: dict[str, Any] = super()._connparams(asynchronous)
        others = {name: value for name, value in parameters.items() if name not in {"host", "port"}}
        urls = self.connection.client.alt or [netloc(parameters["host"], parameters["port"])]
        options = {"master_name": self.master_name, "sentinel_kwargs": self.sentinel_kwargs}
        return {**pool_parameters(SentinelUrl.parse(";".join(urls)), options, SYNC), **others}


class SentinelTransport(Transport):
    default_port = DEFAULT_PORT
    Channel = SentinelChannel
