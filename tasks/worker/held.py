"""The messages that a channel holds, as kombu counts them. The ledger in Redis is authoritative.

Acknowledgements and requeued messages are collected in the ledger and sent together (see `transport`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from kombu.transport import redis as stock
from kombu.transport import virtual

if TYPE_CHECKING:
    from tasks.worker.transport import Channel

URGENT = 2
"""How many messages beyond the prefetch count may be held, each more urgent than one of the others."""

_stock: Any = stock  # kombu is only partly typed
_base: Any = virtual.QoS  # kombu's own methods, without those of its Redis transport


class HeldMessages(_stock.QoS):  # type: ignore[misc]
    """kombu's `QoS`: what was delivered to a channel and not acknowledged, and whether it may take more."""

    channel: Channel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._by_step: defaultdict[int, set[str]] = defaultdict(set)  # a priority step -> the tags held

    def has_credit(self) -> bool:
        """Whether fewer messages are held than the prefetch count."""
        return bool(_base.can_consume(self))

    def can_consume(self) -> bool:
        return self.has_credit() or self.urgent_credit() > 0

    def holds(self, delivery_tag: str) -> bool:
        return delivery_tag in self._delivered and delivery_tag not in self._dirty

    def urgent_credit(self) -> int:
        """How many messages of a step before `least_urgent_step` may be taken beyond the prefetch count."""
        room = self.prefetch_count + URGENT - (len(self._delivered) - len(self._dirty))
        return room if room > 0 and self.least_urgent_step() > 0 else 0

    def least_urgent_step(self) -> int:
        """The priority step of the least urgent held message; 0, the most urgent step, if none is held."""
        return max((step for step, tags in self._by_step.items() if tags), default=0)

    def append(self, message: Any, delivery_tag: str) -> None:
        self._by_step[self._step(message)].add(delivery_tag)
        _base.append(self, message, delivery_tag)

    def ack(self, delivery_tag: str) -> None:
        self.channel.ledger.ack(delivery_tag)
        self._release(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """Celery logs and ignores a lost connection here, so a message is put back by `flush`, like an
        acknowledgement: if that fails, the channel closes and gives everything back."""
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

    def _release(self, delivery_tag: str) -> None:
        if message := self._delivered.get(delivery_tag):
            self._by_step[self._step(message)].discard(delivery_tag)
        _base.ack(self, delivery_tag)
        self.channel.acknowledged()

    def _step(self, message: Any) -> int:
        priority = message.properties.get("priority")
        return int(self.channel.priority(priority if type(priority) is int else 0))
