"""What docs/streams.md says can be done with nothing but a Redis client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import redis

from petiole.tasks.servers import embedded
from petiole.tasks.wire.keys import stream_keys
from tests.tasks.streams.conftest import Server, Writer

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "streams.md").read_text()


def test_the_plain_client_reads_a_whole_stream(server: Server, client: redis.Redis) -> None:
    (program,) = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "import redis" in block
    )
    writer = Writer(client, "t")
    writer.write(1, 2)
    reader = subprocess.Popen([sys.executable, "-c", program, "t", server.url], stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.read(6) == "<1><2>"
    writer.write(3)
    writer.finish(4)
    assert reader.stdout.read() == "<3><4>"
    assert reader.wait() == 0


def test_redis_cli_shows_the_log(server: Server, client: redis.Redis) -> None:
    (command,) = re.findall(r"^redis-cli (LRANGE .*)$", PAGE, re.MULTILINE)
    Writer(client, "t").finish(1)
    cli = os.path.join(os.path.dirname(embedded.server_binary()), "redis-cli")
    words = command.replace("TASK_ID", "t").replace("'", "").split()
    shown = subprocess.run([cli, "-s", str(server.socket), *words], capture_output=True, text=True, check=True)
    assert json.loads(shown.stdout)["token_ids"] == [1]


def test_the_keys_are_those_of_the_page() -> None:
    for key in stream_keys("<task_id>"):
        assert f"`{key}`" in PAGE
