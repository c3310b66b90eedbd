"""The starts and ends of workers, as Redis has them."""

from __future__ import annotations

from pathlib import Path

from petiole.tasks.fleet import restarts
from petiole.tasks.servers.connections import connect
from petiole.tasks.wire.keys import LIVES_KEY
from tests.support.site import RedisServer

ODD = (b"", b"\xff", b"[]", b"5", b"[" * 100_000, b'{"starts":"x"}', b"1" * 10_000)


def test_a_life_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    try:
        client = connect(server.url)
        restarts.begin(client, "a")
        for number, life in enumerate(ODD):
            client.hset(LIVES_KEY, f"b\n{number}", life)
        assert list(restarts.lives(client)) == ["a"]
    finally:
        server.kill()
