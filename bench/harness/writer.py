"""Streams as a worker writes them, without a worker.

    python -m bench.harness.writer TASK_ID DELTAS TOGETHER          one, as fast as Redis takes it
    python -m bench.harness.writer NAME DELTAS 1 STREAMS PER_S      many, each at its pace

It is a process of its own, so that a reader's cost is measured in a process that does nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from petiole.tasks.servers import connections
from petiole.tasks.wire.keys import stream_keys

FLUSH = 64
"""Streams that a worker writes in one call."""


def writing(task_id: str, deltas: int, together: int = 1) -> subprocess.Popen[bytes]:
    """Start the process. It writes `deltas` deltas of one token, `together` of them in each round trip."""
    return _started(task_id, str(deltas), str(together))


def writing_all(name: str, streams: int, deltas: int, per_s: float) -> subprocess.Popen[bytes]:
    """Start the process, and wait until it is ready. Once its input is closed it writes `streams` streams,
    `name-0` and so on: a delta of each, `per_s` times a second."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writer = _started(name, str(deltas), "1", str(streams), str(per_s), **pipes)
    assert writer.stdout is not None
    writer.stdout.readline()
    return writer


def _started(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "bench.harness.writer", *arguments], **options)


def write(pipe: Any, task_id: str, index: int, deltas: int) -> None:
    """One delta of `deltas`."""
    keys, finish = stream_keys(task_id), "stop" if index == deltas - 1 else None
    delta = {"task_id": task_id, "attempt": 1, "index": index, "token_ids": [index], "text": " word"}
    message = json.dumps({**delta, "finish_reason": finish})
    pipe.rpush(keys.log, message)
    pipe.publish(keys.channel, message)


def main(task_id: str, deltas: int, together: int) -> None:
    client = connections.streams()
    for start in range(0, deltas, together):
        with client.pipeline(transaction=False) as pipe:
            for index in range(start, min(deltas, start + together)):
                write(pipe, task_id, index, deltas)
            pipe.execute()
    client.expire(stream_keys(task_id).log, 60)


def paced(name: str, deltas: int, streams: int, per_s: float) -> None:
    """Each group of streams has its own time within the period, as streams of several workers have."""
    client, tasks = connections.streams(), [f"{name}-{one}" for one in range(streams)]
    client.ping()
    print("ready", flush=True)
    sys.stdin.read()
    groups = [tasks[at : at + FLUSH] for at in range(0, streams, FLUSH)]
    began = time.perf_counter()
    for index in range(deltas):
        for at, group in enumerate(groups):
            due = began + (index + at / len(groups)) / per_s
            time.sleep(max(0.0, due - time.perf_counter()))
            with client.pipeline(transaction=False) as pipe:
                for task_id in group:
                    write(pipe, task_id, index, deltas)
                pipe.execute()
    with client.pipeline(transaction=False) as pipe:
        for task_id in tasks:
            pipe.delete(stream_keys(task_id).log)
        pipe.execute()


if __name__ == "__main__":
    _, named, many, at_once, *rest = sys.argv
    if rest:
        paced(named, int(many), int(rest[0]), float(rest[1]))
    else:
        main(named, int(many), int(at_once))
