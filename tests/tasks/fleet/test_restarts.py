"""The starts and ends of workers, as Redis has them."""

from __future__ import annotations

import pytest
import redis

from petiole.tasks.fleet import restarts
from petiole.tasks.keys import LIVES_KEY


@pytest.mark.parametrize("life", [b"", b"\xff", b"[]", b"5", b"[" * 100_000, b'{"starts":"x"}', b"1" * 10_000])
def test_a_life_that_cannot_be_read_hides_no_other(client: redis.Redis, life: bytes) -> None:
    restarts.begin(client, "a")
    client.hset(LIVES_KEY, "b\n", life)
    assert list(restarts.lives(client)) == ["a"]
