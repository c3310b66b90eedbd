"""The messages that a channel holds, as kombu counts them. The ledger in Redis is authoritative.

Acknowledgements and requeued messages are collected in the ledger and sent together (see `transport`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

import redis
from kombu.transport import redis as stock, virtual

from petiole.tasks.worker.broker.ledger import Ledger

URGENT, URGENT_SHARE = 2, 1 / 4
"""How many messages beyond the prefetch count may wait for a place, each of them more urgent than a held message:
a share of the prefetch count, and at least two. The engine gives them their places together."""

LEAST_URGENT_SHARE = 1 / 4
"""How many messages of the last priority may wait beyond the prefetch count, as a share of it. Rows of a batch end
together, and the engine would wait until as many have been taken."""

_stock: Any = stock  # kombu is only partly typed
_base: Any = virtual.QoS  # kombu's own methods, without those of its Redis transport


class HoldingChannel(Protocol):
    """The channel that holds the messages."""

    priority_steps: Sequence[int]
    ledger: Ledger
    plain_client: redis.Redis

    def priority(self, number: int) -> int:
        """The priority step of a message with this priority."""
        ...

    def acknowledged(self) -> None: ...


class HeldMessages(_stock.QoS):  # type: ignore[misc]
    """kombu's `QoS`: the messages that were delivered to a channel and not acknowledged, and whether it may take
    more."""

    channel: HoldingChannel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_step: defaultdict[int, set[str]] = defaultdict(set)  # a priority step -> the tags held
        self._beyond: dict[str, int] = {}  # a tag taken beyond the prefetch count -> its priority step
        self._begun: set[str] = set()  # the subset that is generating

    @property
    def count(self) -> int:
        """How many messages are held."""
        return len(self._delivered) - len(self._dirty)

    def has_credit(self) -> bool:
        """Whether fewer messages are held than the prefetch count."""
        return bool(_base.can_consume(self))

    def can_consume(self) -> bool:
        return bool(self.room()[0])

    def holds(self, delivery_tag: str) -> bool:
        return delivery_tag in self._delivered and delivery_tag not in self._dirty

    def room(self) -> tuple[list[int], int]:
        """The priority steps from which messages may be taken now, and how many messages; 0 is no limit.

        Beyond the prefetch count, only messages that are more urgent than a held one may be taken. Such a message
        takes a place at once, so messages that generate already do not count: a burst is taken as fast as the
        engine admits it. Messages that a worker without free places cannot begin stay in the queue for other
        workers, but for some of the last priority. Messages that wait here do not keep out more urgent ones."""
        steps: list[int] = list(self.channel.priority_steps)
        if self.has_credit():
            return steps, self.can_consume_max_estimate() if self.prefetch_count else 0
        least = self.least_urgent_step()
        rooms = {step: self._urgent_room(step) for step in steps if step < least}
        rooms[steps[-1]] = int(LEAST_URGENT_SHARE * self.prefetch_count) - self._excess
        steps = [step for step, room in rooms.items() if room > 0]
        return steps, min((rooms[step] for step in steps), default=0)

    def _urgent_room(self, step: int) -> int:
        uncounted = sum(tag in self._begun or other > step for tag, other in self._beyond.items())
        most = max(URGENT, int(URGENT_SHARE * self.prefetch_count))
        return most - max(0, self._excess - uncounted)

    @property
    def _excess(self) -> int:
        """How many messages are held beyond the prefetch count."""
        return self.count - int(self.prefetch_count)

    def begun(self, delivery_tag: str) -> None:
        """The engine has admitted the message's request."""
        if delivery_tag in self._beyond:
            self._begun.add(delivery_tag)

    def least_urgent_step(self) -> int:
        """The priority step of the least urgent held message; 0, the most urgent step, if none is held."""
        return max((step for step, tags in self._by_step.items() if tags), default=0)

    def append(self, message: Any, delivery_tag: str) -> None:
        step = self._step(message)
        self._by_step[step].add(delivery_tag)
        _base.append(self, message, delivery_tag)
        if self.prefetch_count and self._excess > 0:
            self._beyond[delivery_tag] = step

    def ack(self, delivery_tag: str) -> None:
        self.channel.ledger.ack(delivery_tag)
        self._release(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Reject a message. Celery logs and ignores a lost connection here. So `flush` puts the message back, like
        an acknowledgement. If `flush` fails, the channel closes and gives everything back."""
        if not requeue:
            self.ack(delivery_tag)
            return
        self.channel.ledger.give_back(delivery_tag)
        self._release(delivery_tag)

    def restore_unacked(self, client: Any = None) -> None:
        self.channel.ledger.close(self.channel.plain_client)
        self.forget()

    def restore_visible(self, *_: Any, **__: Any) -> None:
        """Does nothing: the lease keeper's sweep restores messages."""

    def forget(self) -> None:
        """The held messages have other owners now."""
        self._delivered.clear()
        self._dirty.clear()
        self._by_step.clear()
        self._forget_beyond()

    def _release(self, delivery_tag: str) -> None:
        if message := self._delivered.get(delivery_tag):  # else forgotten
            self._by_step[self._step(message)].discard(delivery_tag)
            _base.ack(self, delivery_tag)
        self._beyond.pop(delivery_tag, None)
        self._begun.discard(delivery_tag)
        if self._excess <= 0:  # the messages that are left are within the prefetch count again
            self._forget_beyond()
        self.channel.acknowledged()

    def _forget_beyond(self) -> None:
        self._beyond.clear()
        self._begun.clear()

    def _step(self, message: Any) -> int:
        priority = message.properties.get("priority")
        return int(self.channel.priority(priority if type(priority) is int else 0))
