"""The cost of the log, fencing and leases: the same engine, once with all of them and once with none.

One process runs one engine, with 64 requests at a time on the tiny model. With: every request is a message that is
taken under a lease, begins an attempt, publishes through the script that checks the fencing number and writes the
log, and is acknowledged after its end. Without: the deltas go to a function that drops them. Neither side has
Celery."""

from __future__ import annotations

import json
import threading
import time

import redis

from bench.harness.report import Report, arguments
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.engine import Engine
from petiole.gpu_worker.request import Delta, Request, SamplingParams
from petiole.gpu_worker.request.handle import Handle
from petiole.tasks.servers import embedded
from petiole.tasks.servers.connections import connect
from petiole.tasks.settings import Settings
from petiole.tasks.wire.keys import stream_keys
from petiole.tasks.worker import scripts
from petiole.tasks.worker.broker.leases import LeaseKeeper
from petiole.tasks.worker.broker.ledger import Ledger
from petiole.tasks.worker.generation.attempts import BeginReply
from petiole.tasks.worker.output.outcomes import succeeded
from petiole.tasks.worker.output.publisher import Outbox, Publisher

BATCH = 64
QUEUE = "petiole-bench"


class Held:
    """One request with its stream and its message: the work of a `JobDriver`, without Celery."""

    def __init__(self, bench: Bench, task_id: str, tag: str, begun: BeginReply) -> None:
        self.bench, self.tag, self.begun = bench, tag, begun
        self.outbox = Outbox(bench.publisher, task_id, begun.attempt, begun.written, self, marked=True)

    def on_fault(self, error: Exception) -> None:
        raise error

    def on_admitted(self, handle: Handle) -> None:
        self.outbox.admit("")

    def on_delta(self, handle: Handle, delta: Delta) -> None:
        self.outbox.push(delta)

    def on_done(self, handle: Handle) -> None:
        self.outbox.finish(succeeded(handle.result(), self.begun.attempt, self.begun.written))

    def on_finished(self) -> None:
        self.bench.ledger.ack(self.tag)
        self.bench.over.release()

    def on_stale(self) -> None:
        raise AssertionError("nobody else has this task")

    on_released = on_damaged = on_mismatch = on_stale

    def on_cancel(self, *, flagged: bool) -> None:
        raise AssertionError("nobody cancels it")


class Bench:
    """An engine, and the parts that make it reliable."""

    def __init__(self, client: redis.Redis, url: str, tokens: int) -> None:
        settings = Settings(device="cpu", dtype="float32", max_num_seqs=BATCH, num_threads=1)
        self.tokens, self.client, self.runs = tokens, client, 0
        self.engine = Engine(EngineConfig(**settings.engine_options()))
        self.engine.start()
        self.over = threading.Semaphore(0)
        self.publisher = Publisher(client, ttl_s=60)
        self.publisher.start()
        self.ledger = Ledger(prefix="", visibility_timeout_s=settings.visibility_timeout_s)
        self.leases = LeaseKeeper(
            ledgers=lambda: [self.ledger],
            connect=lambda: connect(url),
            heartbeat_age_s=self.engine.heartbeat_age_s,
            visibility_timeout_s=settings.visibility_timeout_s,
        )
        self.leases.start()

    def close(self) -> None:
        self.leases.stop()
        self.ledger.close(self.client)
        self.publisher.close()
        self.engine.shutdown(drain=False)

    def request(self, i: int) -> Request:
        sampling = SamplingParams(max_tokens=self.tokens, ignore_eos=True, seed=i)
        return Request(prompt=f"Count from {i} to {i + 9}.", sampling=sampling, request_id=f"{self.runs}-{i}")

    def with_everything(self) -> float:
        """Tokens a second."""
        self.runs += 1
        requests = [self.request(i) for i in range(BATCH)]
        for request in requests:
            self.client.lpush(QUEUE, json.dumps({"body": request.request_id}))
        began = time.perf_counter()
        taken = self.ledger.take(self.client, [QUEUE], BATCH)
        assert taken is not None
        names = [stream_keys(request.request_id) for request in requests]
        keys = [key for name in names for key in (name.log, name.state, name.completion, name.asked)]
        facts = [fact for message in taken for fact in (0, message.name, 0, "")]
        args = [60_000, self.engine.limits.fingerprint, BATCH, str(self.runs), "bench", *facts]
        begun = [BeginReply.parse(reply) for reply in scripts.load(self.client, "begin")(keys, args)]
        for request, message, begins in zip(requests, taken, begun, strict=True):
            assert begins is not None
            held = Held(self, request.request_id, message.tag, begins)
            self.engine.submit(request, on_admitted=held.on_admitted, on_delta=held.on_delta, on_done=held.on_done)
        for _ in requests:
            self.over.acquire()
        self.ledger.flush(self.client)
        rate = BATCH * self.tokens / (time.perf_counter() - began)
        assert all(self.client.llen(name.log) > 1 for name in names)
        return rate

    def with_nothing(self) -> float:
        """Tokens a second."""
        self.runs += 1
        requests = [self.request(i) for i in range(BATCH)]
        began = time.perf_counter()
        for request in requests:
            self.engine.submit(request, on_delta=lambda *_: None, on_done=lambda _: self.over.release())
        for _ in requests:
            self.over.acquire()
        return BATCH * self.tokens / (time.perf_counter() - began)


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(argv)
    report = Report("Log, fencing and leases")
    url = f"redis+socket://{embedded.socket_path()}?virtual_host=0"
    bench = Bench(connect(url), url, tokens=16 if options.quick else 256)
    try:
        bench.with_everything()
        bench.with_nothing()
        rounds = 2 if options.quick else 9
        report.compare(
            "64 requests on petiole-tiny, with log, fencing and leases",
            "tokens/s",
            bench.with_everything,
            bench.with_nothing,
            rounds=rounds,
            target=0.9,
            note="peer: the same engine whose deltas are dropped",
        )
    finally:
        bench.close()
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
