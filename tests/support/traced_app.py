"""A web app that is traced, as a process of its own: it submits a task in a span, reads the task's stream, and
prints the task's id, and what it has read.

    python -m tests.support.traced_app PROMPT MAX_TOKENS [celery] [redis]

With a word it has the instrumentation of that library, too."""

from __future__ import annotations

import json
import sys

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.instrumentation.redis import RedisInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from petiole import generate, stream


def main() -> None:
    prompt, max_tokens, *instrumented = sys.argv[1:]
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    if "celery" in instrumented:
        CeleryInstrumentor().instrument()
    if "redis" in instrumented:
        RedisInstrumentor().instrument()
    with trace.get_tracer("shop").start_as_current_span("GET /answer"):
        result = generate.delay(prompt=prompt, max_tokens=int(max_tokens), seed=3)
        print(result.id, flush=True)
        tokens = [token for delta in stream(result) for token in delta.token_ids]
        print(json.dumps(tokens), flush=True)
    provider.shutdown()


if __name__ == "__main__":
    main()
