"""A stream as a worker writes it, without a worker: `python -m bench.writer TASK_ID DELTAS TOGETHER`.

It is a process of its own, so that a reader's cost is measured in a process that does nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys

from petiole.tasks.keys import stream_keys
from petiole.tasks.servers import connections


def writing(task_id: str, deltas: int, together: int = 1) -> subprocess.Popen[bytes]:
    """Start the process. It writes `deltas` deltas of one token, `together` of them in each round trip."""
    return subprocess.Popen([sys.executable, "-m", "bench.writer", task_id, str(deltas), str(together)])


def main(task_id: str, deltas: int, together: int) -> None:
    client, keys = connections.streams(), stream_keys(task_id)
    for start in range(0, deltas, together):
        with client.pipeline(transaction=False) as pipe:
            for index in range(start, min(deltas, start + together)):
                finish = "stop" if index == deltas - 1 else None
                delta = {"task_id": task_id, "attempt": 1, "index": index, "token_ids": [index], "text": " word"}
                message = json.dumps({**delta, "finish_reason": finish})
                pipe.rpush(keys.log, message)
                pipe.publish(keys.channel, message)
            pipe.execute()
    client.expire(keys.log, 60)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
