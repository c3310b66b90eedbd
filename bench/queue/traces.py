"""What a trace costs: processor time of whoever records spans, with the thread that exports them.

The spans are those of a worker, of a producer and of a reader, sampled at 100 %, and exported over HTTP to a
process that only reads them. In the column of the peer stands what it may cost.

    python -m bench.queue.traces [--quick] [--json PATH]

It needs a process of its own, because OpenTelemetry takes one provider for a process."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from bench.harness.report import Report, arguments
from petiole.contract.requests.generation import GenerateRequest
from petiole.contract.results.task_result import StreamDelta
from petiole.tasks.traces import carried, exporting, spans
from petiole.tasks.worker.boot.bootstep import freeze
from petiole.tasks.worker.delivery.attempt_spans import AttemptSpans
from petiole.tasks.worker.delivery.delivery import Delivery
from petiole.tasks.worker.output.outcomes import Outcome

MOST_A_TASK_US, MOST_A_DELTA_US = 200.0, 1.0
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
OUTCOME = Outcome(
    {"text": "", "usage": {"prompt_tokens": 9, "cached_prompt_tokens": 0, "completion_tokens": DELTAS}},
    finish_reason="length",
)


@contextmanager
def collector() -> Iterator[None]:
    """In this context the spans of this process go to a process that reads them."""
    process = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE)
    assert process.stdout is not None
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{int(process.stdout.readline())}"
    try:
        exporting.start("bench")
        yield
    finally:
        process.kill()
        process.wait()


def delivery(headers: dict[str, Any]) -> Delivery:
    """A message of no broker."""
    request = SimpleNamespace(hostname="worker@bench")
    request.accept = lambda pid, at: None
    message = {**headers, "petiole-sent": time.time(), "delivery_info": {"routing_key": "petiole"}}
    bound = _Accepting(request)
    return Delivery(print, ("tasks.generate", "a" * 36, message), bound.accept, print, print, None, None)


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
        span.sent("a" * 36, "petiole")
        return dict(carried.headers())


def reader(headers: dict[str, str]) -> None:
    if (reading := spans.reading("a" * 36, headers)) is not None:
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
    os.environ["OTEL_BSP_SCHEDULE_DELAY"], calls = "100", 200 if options.quick else 1500
    os.environ["OTEL_BSP_MAX_QUEUE_SIZE"] = "100000"
    freeze()  # as a worker does
    report = Report("What a trace of a task costs (processor time, sampled at 100 %)")
    request = GenerateRequest(prompt="p", max_tokens=DELTAS)
    parent = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01"}
    delta = StreamDelta(task_id="a", attempt=1, index=0, token_ids=[1], text="a", finish_reason=None)

    def idle() -> None: ...

    def of_task() -> None:
        headers = producer()
        attempt(headers, request)
        reader(headers)

    floor = microseconds(idle, calls)
    off = microseconds(of_task, calls) - floor
    report.add("a task, without a provider", off, "us")
    with collector():
        report.add("a task: its worker's six spans", microseconds(lambda: attempt(parent, request), calls), "us")
        whole = microseconds(of_task, calls) - floor
        report.add("a task: all its spans, with producer and reader", whole, "us", peer=MOST_A_TASK_US)
        heard = AttemptSpans.of(delivery(parent), time.monotonic(), "bench")
        reading = spans.reading("a", parent)
        assert heard is not None
        assert reading is not None
        many = 100 * calls
        for name, work in (("worker", heard.heard), ("reader", lambda: reading.heard(delta))):
            began = time.thread_time()
            for _ in range(many):
                work()
            spent = (time.thread_time() - began) / many * 1e6
            report.add(f"a delta in the {name}", spent, "us", peer=MOST_A_DELTA_US)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
