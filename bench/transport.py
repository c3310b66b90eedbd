"""How fast Petiole's transport hands out and acknowledges messages, beside kombu's own.

Both consume the same messages from the same embedded Redis, in turn, in this process, through kombu's event
loop as a worker does. And how many deltas a second go through the script that publishes, and what one costs the
publisher.

    python -m bench.transport [--quick] [--json PATH]
"""

from __future__ import annotations

import gc
import statistics
import sys
import threading
import time
from typing import Any

import redis
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu import transport as transports
from kombu.asynchronous import Hub, set_event_loop
from kombu.transport import redis as stock

from bench.report import Report, arguments, compare
from gpu_worker.request import Delta
from tasks import embedded
from tasks.connections import connect
from tasks.schemas import stream_keys
from tasks.worker import transport as leased
from tasks.worker.publisher import Publisher, Stream
from tasks.worker.results import Outcome, Written

PREFETCH = 68
BODY = {"prompt": "Count from 1 to 100.", "max_tokens": 64}


def consume(url: str, transport: type, messages: int) -> float:
    """Messages a second: put, then take and acknowledge them through an event loop."""
    transports.TRANSPORT_ALIASES["redis"] = f"{transport.__module__}:{transport.__name__}"
    transports._transport_cache.clear()
    queue = Queue("bench-transport", Exchange("bench-transport"), routing_key="bench-transport")
    with Connection(url) as connection:
        queue(connection.default_channel).declare()
        producer = Producer(connection.default_channel)
        for _ in range(messages):
            producer.publish([[], BODY, {}], routing_key=queue.name, exchange=queue.exchange, declare=[])
    hub = Hub()
    set_event_loop(hub)
    done = 0

    def on_message(message: Any) -> None:
        nonlocal done
        message.ack()
        done += 1

    with Connection(url) as connection:
        connection.transport.register_with_event_loop(connection.connection, hub)
        channel = connection.default_channel
        channel.basic_qos(0, PREFETCH, False)
        consumer = Consumer(channel, [queue], on_message=on_message, accept=["json"])
        consumer.consume()
        loop = hub.create_loop()
        gc.collect()
        began = time.perf_counter()
        while done < messages:
            next(loop)
        next(loop)
        elapsed = time.perf_counter() - began
        consumer.cancel()
    hub.close()
    return messages / elapsed


class Everybody:
    """Listens to all streams, and counts them out."""

    def __init__(self, streams: int) -> None:
        self.left, self.over = streams, threading.Event()

    def on_finished(self) -> None:
        self.left -= 1
        if not self.left:
            self.over.set()

    def on_stale(self) -> None:
        raise AssertionError("stale")

    on_released = on_stale

    def on_cancel(self, *, flagged: bool) -> None:
        raise AssertionError("cancelled")


def script(client: redis.Redis, streams: int, rounds: int) -> float:
    """Deltas a second through one script call a flush, encoding included, from one thread."""
    publisher = Publisher(client, interval_s=3600, ttl_s=60)
    everybody = Everybody(streams)
    all_streams = [Stream(publisher, f"bench-{i}", 1, Written(), everybody) for i in range(streams)]
    began = time.perf_counter()
    for step in range(rounds):
        for stream in all_streams:
            stream.pieces.append(Delta(step, (1234,), " word"))
        publisher.flush(all_streams)
    elapsed = time.perf_counter() - began
    client.flushdb()
    return streams * rounds / elapsed


BARE = """
for k = 1, #KEYS, 2 do
  if redis.call('HGET', KEYS[k + 1], 'attempt') then return 0 end
  redis.call('RPUSH', KEYS[k], ARGV[(k + 1) / 2])
  redis.call('PEXPIRE', KEYS[k], 60000)
  redis.call('PUBLISH', string.sub(KEYS[k], 1, -4) .. 'ch', ARGV[(k + 1) / 2])
end
"""


def bare(client: redis.Redis, streams: int, rounds: int) -> float:
    """The least that a script could do: check, append, expire, publish; of a delta that is always the same."""
    run = client.register_script(BARE)
    keys = [key for i in range(streams) for key in stream_keys(f"bench-{i}")[0:3:2]]
    payloads = ['{"task_id":"bench","attempt":1,"index":0,"token_ids":[1234],"text":" word"}'] * min(streams, 64)
    began = time.perf_counter()
    for _ in range(rounds):
        for start in range(0, len(keys), 128):
            run(keys[start : start + 128], payloads)
    elapsed = time.perf_counter() - began
    client.flushdb()
    return streams * rounds / elapsed


def cpu_a_delta(client: redis.Redis, streams: int, steps: int, interval_s: float) -> dict[str, float]:
    """CPU of the publisher's thread a delta (one token of one stream), and of making its text."""
    from gpu_worker.models.loading import resolve_model
    from gpu_worker.text import TextStream, load_tokenizer

    tokenizer = load_tokenizer(resolve_model("petiole-tiny"))
    ids = tokenizer.encode("Count from 1 to 1000: " + " ".join(map(str, range(200))))
    publisher = Publisher(client, interval_s=interval_s, ttl_s=60)
    cpu: list[float] = []
    run = publisher._run

    def timed() -> None:
        began = time.thread_time()
        run()
        cpu.append(time.thread_time() - began)

    publisher._thread = threading.Thread(target=timed, daemon=True)
    everybody = Everybody(streams)
    pairs = [
        (Stream(publisher, f"cpu-{i}", 1, Written(), everybody), TextStream(tokenizer)) for i in range(streams)
    ]
    publisher.start()
    began = time.thread_time()
    for step in range(steps):
        for stream, text in pairs:
            token = ids[step % len(ids)]
            stream.push(Delta(step, (token,), text.push((token,)).text))
    detokenize = time.thread_time() - began
    for stream, _ in pairs:
        stream.finish(Outcome({"finish_reason": "length"}, None, "length"))
    everybody.over.wait(60)
    publisher.close()
    client.flushdb()
    total = streams * steps
    publish_us, text_us = 1e6 * cpu[0] / total, 1e6 * detokenize / total
    return {"publisher_us": publish_us, "text_us": text_us, "total_us": publish_us + text_us}


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(argv)
    messages, rounds, repeats = (300, 10, 1) if options.quick else (10_000, 1000, 7)
    url = f"redis+socket://{embedded.socket_path()}?virtual_host=0"
    client = connect(url.replace("virtual_host=0", "virtual_host=9"))
    report = Report("The transport against kombu's own, and the script that publishes (embedded Redis)")
    ours, stock_s, spread = compare(
        lambda: consume(url, leased.Transport, messages),
        lambda: consume(url, stock.Transport, messages),
        rounds=repeats,
    )
    report.add(
        "messages taken and acknowledged", ours, "1/s", peer=stock_s, target=0.9, spread=spread, note="peer: kombu"
    )
    for streams in (64, 512):
        pairs = [(script(client, streams, rounds), bare(client, streams, rounds)) for _ in range(repeats)]
        best = max(ours for ours, _ in pairs)
        label = f"deltas published, {streams} streams"
        report.add(f"{label}, best round", best, "1/s", target=100_000)
        ratio = statistics.median(ours / bare_s for ours, bare_s in pairs)
        report.add(f"{label}, beside a bare script", ratio, "ratio")
    cpu = min((cpu_a_delta(client, 64, rounds, 0.025) for _ in range(repeats)), key=lambda f: f["total_us"])
    for name, target in (("publisher_us", None), ("text_us", None), ("total_us", 15.0)):
        label = {"publisher_us": "publisher", "text_us": "text and hand-over", "total_us": "both"}[name]
        report.add(f"CPU of a delta: {label}", cpu[name], "us", target=target, better="lower")
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
