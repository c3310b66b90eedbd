"""How fast Petiole's transport hands out and acknowledges messages, beside kombu's own.

Both consume the same messages from the same embedded Redis, in turns, in this process, through kombu's event loop
as a worker does. Also measured: how many deltas a second go through the script that publishes, and what a delta
costs the publisher.

    python -m bench.queue.transport [--quick] [--json PATH]
"""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from typing import Any

import redis
from kombu import transport as transports
from kombu.asynchronous import Hub, set_event_loop
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.messaging import Consumer, Producer
from kombu.transport import redis as stock

from bench.harness.report import Report, arguments, compare
from petiole.gpu_worker.request import Delta
from petiole.tasks.servers import embedded
from petiole.tasks.servers.connections import connect
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.wire.record.codec import LoggedOutput
from petiole.tasks.worker.broker import transport as leased
from petiole.tasks.worker.output.publisher import Outbox, Publisher

PREFETCH = 68
BODY = {"prompt": "Count from 1 to 100.", "max_tokens": 64}


def consume(url: str, transport: type, messages: int) -> float:
    """Messages a second, taken and acknowledged through an event loop."""
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


class Nobody:
    """The listener of all streams. It is never called, because no stream ends."""

    def on_finished(self) -> None:
        raise AssertionError("nobody ends it")

    on_stale = on_released = on_damaged = on_mismatch = on_finished

    def on_fault(self, error: Exception) -> None:
        raise error

    def on_cancel(self, *, flagged: bool) -> None:
        raise AssertionError("nobody cancels it")


def open_outboxes(publisher: Publisher, streams: int) -> list[Outbox]:
    return [Outbox(publisher, f"bench-{i}", 1, LoggedOutput(), Nobody()) for i in range(streams)]


def published(client: redis.Redis, streams: int, flushes: int, samples: list[float]) -> float:
    """Deltas a second. Each flush has one delta of every stream, as the publisher's own thread writes them."""
    publisher = Publisher(client, ttl_s=60)
    opened = open_outboxes(publisher, streams)
    elapsed = 0.0
    for step in range(flushes):
        delta = Delta(step, (1234,), " word")
        for stream in opened:
            stream.pieces.append(delta)
        began = time.perf_counter()
        publisher.flush(opened)
        elapsed += time.perf_counter() - began
    publisher._pipe.close()
    client.flushdb()
    samples.append(streams * flushes / elapsed)
    return samples[-1]


BARE = """
for k = 1, #KEYS, 2 do
  if redis.call('HGET', KEYS[k + 1], 'attempt') then return 0 end
  redis.call('RPUSH', KEYS[k], ARGV[(k + 1) / 2])
  redis.call('PEXPIRE', KEYS[k], 60000)
  redis.call('PUBLISH', string.sub(KEYS[k], 1, -4) .. 'ch', ARGV[(k + 1) / 2])
end
"""
SAME = '{"task_id":"bench-63","attempt":1,"index":1000,"token_ids":[1234],"text":" word","finish_reason":null}'


def bare(client: redis.Redis, streams: int, flushes: int) -> float:
    """A prototype's script: check, append, expire, publish. Its delta is always the same, made beforehand."""
    run = client.register_script(BARE)
    keys = [key for i in range(streams) for key in stream_keys(f"bench-{i}")[0:3:2]]
    payloads = [SAME] * streams
    began = time.perf_counter()
    for _ in range(flushes):
        run(keys, payloads)
    elapsed = time.perf_counter() - began
    client.flushdb()
    return streams * flushes / elapsed


def cpu_a_delta(client: redis.Redis, streams: int, steps: int) -> tuple[float, float]:
    """Processor time of a delta of one token, in us: making its text, passing it to the publisher, publishing
    it."""
    from petiole.gpu_worker.models.checkpoint.finding import resolve_model
    from petiole.gpu_worker.text import TextAssembler, load_tokenizer

    tokenizer = load_tokenizer(resolve_model("petiole-tiny"))
    ids = tokenizer.encode(" ".join(map(str, range(200))))
    publisher = Publisher(client, ttl_s=60)
    pairs = [(stream, TextAssembler(tokenizer)) for stream in open_outboxes(publisher, streams)]
    making = publishing = 0.0
    for step in range(steps):
        token = ids[step % len(ids)]
        began = time.thread_time()
        for stream, text in pairs:
            stream.push(Delta(step, (token,), text.push((token,)).text))
        made = time.thread_time()
        publisher.flush([stream for stream, _ in pairs])
        making += made - began
        publishing += time.thread_time() - made
    publisher._pipe.close()
    client.flushdb()
    return 1e6 * making / (streams * steps), 1e6 * publishing / (streams * steps)


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(argv)
    messages, deltas, rounds = (300, 640, 1) if options.quick else (6000, 64_000, 5)
    url = f"redis+socket://{embedded.socket_path()}?virtual_host=0"
    client = connect(url.replace("virtual_host=0", "virtual_host=9"))
    report = Report("The transport against kombu's own, and the script that publishes (embedded Redis)")
    report.compare(
        "messages taken and acknowledged",
        "1/s",
        lambda: consume(url, leased.Transport, messages),
        lambda: consume(url, stock.Transport, messages),
        rounds=rounds,
        target=0.9,
        note="peer: kombu",
    )
    for streams in (64, 256):
        flushes = -(-deltas // streams)
        samples: list[float] = []
        ours, prototype, spread = compare(
            partial(published, client, streams, flushes, samples),
            partial(bare, client, streams, flushes),
            rounds=rounds,
        )
        label = f"deltas published, {streams} streams a flush"
        report.add(f"{label}, best round", max(samples), "1/s", target=100_000)
        report.add(label, ours, "1/s", peer=prototype, spread=spread, note="peer: a bare script")
    making, publishing = min((cpu_a_delta(client, 64, deltas // 64) for _ in range(rounds)), key=sum)
    report.add("processor time of a delta: text and hand-over", making, "us", better="lower")
    report.add("processor time of a delta: publishing", publishing, "us", better="lower")
    report.add("processor time of a delta", making + publishing, "us", target=15.0, better="lower")
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
