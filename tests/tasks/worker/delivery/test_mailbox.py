"""Letters to the consumer's thread."""

from __future__ import annotations

import threading

from kombu.asynchronous import Hub

from petiole.tasks.worker.delivery.mailbox import Mailbox


def test_letters_are_read_in_order_and_one_that_raises_stops_no_other() -> None:
    mailbox, seen = Mailbox(), []
    mailbox.post(lambda: seen.append(1))
    mailbox.post(lambda: 1 / 0)
    mailbox.post(lambda: seen.append(2))
    mailbox.read()
    assert seen == [1, 2]


def test_a_letter_wakes_the_event_loop_and_may_call_it_in_turn() -> None:
    mailbox, seen, hub = Mailbox(), [], Hub()
    mailbox.attach(hub)
    loop = hub.create_loop()
    threading.Timer(0.01, lambda: mailbox.post(lambda: hub.call_soon(seen.append, "acknowledged"))).start()
    while not seen:
        next(loop)
    assert seen == ["acknowledged"]
    hub.close()


def test_waiting_without_an_event_loop_reads_letters() -> None:
    mailbox, seen, pumped = Mailbox(), [], []
    threading.Timer(0.01, lambda: mailbox.post(lambda: seen.append(1))).start()
    assert mailbox.wait(lambda: bool(seen), 10.0, lambda: pumped.append(1))
    assert pumped
    assert not mailbox.wait(lambda: False, 0.01, lambda: None)
