"""Subscriptions that ended readers leave for others, in whichever thread these are."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from petiole.tasks.streams import readers, subscriptions
from tests.tasks.streams.conftest import Writer, token_ids


class Contested(list[Any]):
    """Another thread takes the last one, after it was seen and before it can be taken."""

    def __bool__(self) -> bool:
        return True


def test_a_reader_whose_idle_subscription_another_took_makes_its_own(
    app: Celery, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriptions, "_idle", Contested())
    Writer(client, "t").finish(1)
    assert token_ids(list(readers.Stream("t", app=app))) == [1]
