"""What a trace costs: tokens a second of a worker that records all, in turns with one that records none; and
processor time of whoever records spans, with the thread that exports them.

The spans are those of a worker, of a producer and of a reader, sampled at 100 %, and exported over HTTP to a
process that only reads them. Of processor time, the column of the peer has what it may cost. What these messages
cost without traces is taken off.

    python -m bench.queue.traces [--quick] [--json PATH]

It needs a process of its own, because OpenTelemetry takes one provider for a process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from bench.harness.checkpoints.decoders import TINY, checkpoint
from bench.harness.load import Case
from bench.harness.report import Report, arguments
from bench.queue.serving import all_at_once
from petiole.contract.requests.generation import GenerateRequest
from petiole.contract.results.task_result import StreamDelta
from petiole.tasks.traces import carried, exporting, spans
from petiole.tasks.worker.boot.bootstep import freeze
from petiole.tasks.worker.delivery.attempt_spans import AttemptSpans
from petiole.tasks.worker.delivery.delivery import Delivery
from petiole.tasks.worker.output.outcomes import Outcome

MOST_A_TASK_US, MOST_A_DELTA_US, LEAST_OF_TOKENS = 200.0, 1.0, 0.98
DELTAS = 64
COLLECTOR = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): ...
server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""
TASKS = iter([str(uuid4()) for _ in range(20_000)])
"""Ids, of which no two spans' are the same for a task that is not."""
OUTCOME = Outcome(
    {"text": "", "usage": {"prompt_tokens": 9, "cached_prompt_tokens": 0, "completion_tokens": DELTAS}},
    finish_reason="length",
)


@contextmanager
def collector() -> Iterator[str]:
    """The URL of a process that reads spans."""
    process = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


# ------------------------------------------------------------ tokens a second


def served(report: Report, case: Case, url: str) -> None:
    """Two workers of the same model, each with a queue; the one that waits for its turn is idle."""
    from petiole.tasks import generate
    from petiole.tasks.commands.demos import demo
    from petiole.tasks.settings import settings

    os.environ.update(demo.environment())
    of = {"PETIOLE_DTYPE": case.shape.dtype, "PETIOLE_DEVICE": "cpu", "PETIOLE_PREFIX_CACHE": "off"}
    os.environ.update({**of, "PETIOLE_MAX_NUM_SEQS": str(case.concurrency)})
    settings.cache_clear()
    with ExitStack() as stack:
        model = stack.enter_context(checkpoint(case.shape))
        queues = []
        for name, traces in (("traced", {"OTEL_EXPORTER_OTLP_ENDPOINT": url}), ("plain", {})):
            queues.append(f"{settings().queue}-{name}")
            stack.enter_context(demo.worker(name, PETIOLE_MODEL=model, PETIOLE_QUEUE=queues[-1], **traces))

        def tokens_a_second(queue: str) -> float:
            rate, _ = all_at_once(lambda request: generate.delay(queue=queue, **request), case)
            return rate

        for queue in queues:
            tokens_a_second(queue)
        with_traces, without = queues
        report.compare(
            f"{case.name}: all traced, beside none",
            "tokens/s",
            lambda: tokens_a_second(with_traces),
            lambda: tokens_a_second(without),
            rounds=case.rounds,
            target=LEAST_OF_TOKENS,
        )


# ------------------------------------------------------------ processor time


def delivery(headers: dict[str, Any]) -> Delivery:
    """A message of no broker."""
    request = SimpleNamespace(hostname="worker@bench")
    request.accept = lambda pid, at: None
    message = {**headers, "petiole-sent": time.time(), "delivery_info": {"routing_key": "petiole"}}
    bound = _Accepting(request)
    return Delivery(print, ("tasks.generate", next(TASKS), message), bound.accept, print, print, None, None)


class _Accepting:
    hostname = "worker@bench"

    def __init__(self, request: object) -> None:
        self._request = request

    def accept(self, pid: int, at: float) -> None: ...


def attempt(headers: dict[str, Any], request: GenerateRequest) -> None:
    """What a worker does for one task, without its deltas."""
    found = AttemptSpans.of(delivery(headers), time.monotonic(), "bench")
    if found is None:
        return
    found.begin(1, None, died=False, marked=True)
    found.asks(request, content=False)
    found.submitted_ns = found.prepared_ns = found.admitted_ns = time.time_ns()
    found.heard()
    found.end(OUTCOME, "settled")


def producer() -> dict[str, str]:
    with spans.sending("tasks.generate") as span:
        span.sent(next(TASKS), "petiole")
        return dict(carried.headers())


def reader(headers: dict[str, str]) -> None:
    if (reading := spans.reading(next(TASKS), headers)) is not None:
        reading.end()


def microseconds(work: Callable[[], object], calls: int) -> float:
    """The processor time of each call, of the process with all its threads."""
    work()
    time.sleep(0.3)
    began = time.process_time()
    for _ in range(calls):
        work()
    time.sleep(1.0)  # what is left in the queue goes out
    return (time.process_time() - began) / calls * 1e6


def main(argv: list[str] | None = None) -> int:
    options = arguments(__doc__).parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    freeze()  # as a worker does
    report = Report("What a trace of a task costs (sampled at 100 %)")
    with collector() as url:
        case = Case(TINY, 4, 16, 8, 4, 1) if options.quick else Case(TINY, 256, 32, 96, 64, 9)
        served(report, case, url)
        report.save(options.json)
        spent(report, url, 200 if options.quick else 1500)
    report.finish(options.json)
    return 0


def spent(report: Report, url: str, calls: int) -> None:
    """Processor time. A provider is for a whole process, so what goes without one comes first."""
    request = GenerateRequest(prompt="p", max_tokens=DELTAS)
    parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    delta = StreamDelta(task_id="a", attempt=1, index=0, token_ids=[1], text="a", finish_reason=None)

    def of_task() -> None:
        headers = producer()
        attempt(headers, request)
        reader(headers)

    floor = microseconds(lambda: delivery(parent), calls)
    report.add("a task, without a provider", microseconds(of_task, calls) - floor, "us")
    variables = {"BSP_SCHEDULE_DELAY": 100, "BSP_MAX_QUEUE_SIZE": 100_000, "EXPORTER_OTLP_ENDPOINT": url}
    os.environ.update({f"OTEL_{name}": str(value) for name, value in variables.items()})
    exporting.start("bench")
    of_worker = microseconds(lambda: attempt(parent, request), calls) - floor
    report.add("a task: its worker's six spans", of_worker, "us")
    most: dict[str, Any] = {"target": 1.0, "better": "lower"}
    whole = microseconds(of_task, calls) - floor
    report.add("a task: all its spans, with producer and reader", whole, "us", peer=MOST_A_TASK_US, **most)
    heard, reading = AttemptSpans.of(delivery(parent), time.monotonic(), "bench"), spans.reading("a", parent)
    assert heard is not None
    assert reading is not None
    many = 100 * calls
    for name, work in (("worker", heard.heard), ("reader", lambda: reading.heard(delta))):
        began = time.thread_time()
        for _ in range(many):
            work()
        spent_us = (time.thread_time() - began) / many * 1e6
        report.add(f"a delta in the {name}", spent_us, "us", peer=MOST_A_DELTA_US, **most)


if __name__ == "__main__":
    sys.exit(main())
