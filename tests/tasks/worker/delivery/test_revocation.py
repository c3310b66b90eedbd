"""A revocation of thousands of tasks leaves the event loop its turns."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from celery.worker import state
from kombu.asynchronous import Hub

from petiole.tasks.worker.delivery import delivery
from petiole.tasks.worker.delivery.mailbox import Mailbox


def test_many_ids_are_noted_in_turns(monkeypatch: Any) -> None:
    monkeypatch.setattr(state, "revoked", noted := set[str]())
    hub, mailbox, seen = Hub(), Mailbox(), list[int]()
    mailbox.attach(hub)
    reader, writer = os.pipe()  # of another connection, which always has something to read
    os.write(writer, b"x")
    hub.add_reader(reader, lambda: seen.append(len(noted)))
    consumer = SimpleNamespace(hub=hub, pool=SimpleNamespace(services=SimpleNamespace(mailbox=mailbox)))
    ids = [f"t{k}" for k in range(10_000)]
    answer = delivery.revoke(SimpleNamespace(consumer=consumer), ids)
    assert "flagged as revoked" in answer["ok"]
    turns = hub.create_loop()
    while len(noted) < len(ids):
        next(turns)
    assert noted == set(ids)
    assert {*range(delivery.AT_ONCE, len(ids), delivery.AT_ONCE)} <= set(seen), "it was read in each turn"
    hub.close()
    os.close(reader)
    os.close(writer)


def test_few_ids_are_noted_at_once(monkeypatch: Any) -> None:
    monkeypatch.setattr(state, "revoked", noted := set[str]())
    delivery.revoke(SimpleNamespace(consumer=None), ["a", "b"])
    assert noted == {"a", "b"}
