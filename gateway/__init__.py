"""HTTP for any client of OpenAI's or Anthropic's interface, on top of the producer side: `petiole serve`, or `app`
in an ASGI application of your own.

    from petiole.gateway import app
    fastapi_app.mount("/llm", app)

No torch, no numpy, no tokenizer: workers render, count and parse. A gateway holds nothing that another one needs.
What was asked is a record in Redis, what is generated is the log of a task. The answer of every interface is a
pure function of the two:

    deltas of the log ─ core.assembly ─► parts ─ a view ─► events ─ core.numbering ─► numbered events ─► bytes

An interface is a view. A view says which events a part makes, and how an event is written. All else is the same
for all of them: see docs/gateway.md.

Each line may import what stands below it.

    http/       the server and the ASGI application: connections, headers, origins, keys, access log, errors
    routes/     the handlers of each interface's paths: they hold nothing but rooms together
    batches/    OpenAI's files and batches
    pooling/    vectors and scores of texts: OpenAI's embeddings, rerank, score
    openai/     OpenAI's interface: requests become tasks, parts become chunks
    anthropic/  Anthropic's interface
    page/       the page at `/`: chat and fleet, in static files
    serving/    everything with input or output: bodies, records in Redis, submission, following, streams
    core/       what is pure: records, parts of an output, numbers of events, failures
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from petiole import _alias, _lazy

if TYPE_CHECKING:
    from petiole.gateway.http.application import app

__all__ = ["app"]

__getattr__ = _lazy.names(__name__, {"app": "petiole.gateway.http.application:app"})

_alias.claim(__name__)
