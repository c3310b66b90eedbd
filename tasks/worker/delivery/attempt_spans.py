"""The spans of a task's attempts, in the trace of its message.

    <sender's span>
    ├── petiole.queue       from the submission until a worker has taken the task
    ├── chat MODEL          attempt 1, CONSUMER: until its message is answered
    │   ├── petiole.prepare   until the prompt is tokenized
    │   ├── petiole.wait      until it has a place
    │   ├── petiole.prefill   until the first token
    │   └── petiole.decode    until the last, with counts of deltas and drafts
    └── chat MODEL          attempt 2, with a link to attempt 1

Until its end an attempt only notes times. A worker that is killed cannot end its span. So the attempt that follows
a death tells of the attempt before, and one that has lost its task to a newer attempt tells nothing: each attempt
has one span. Only an attempt whose worker is killed before the attempt has a place has none.

The names of attributes are those of OpenTelemetry's conventions for generative models and messages. Neither prompt
nor answer is among them, unless `PETIOLE_TRACE_CONTENT` says so; and of an error, its type alone."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from petiole.contract.requests.generation import ChatRequest, Common, GenerateRequest
from petiole.tasks.traces import carried, spans
from petiole.tasks.traces.spans import SYSTEM, fail
from petiole.tasks.wire.headers import ETA, SENT
from petiole.tasks.wire.record.codec import BegunAttempt
from petiole.tasks.worker.delivery.delivery import Delivery
from petiole.tasks.worker.output.outcomes import Outcome

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, Tracer

    from petiole.gpu_worker.request import Result

logger = logging.getLogger(__name__)

PROVIDER = "petiole"
"""`gen_ai.provider.name`."""
_OPERATIONS = {"tasks.chat": "chat", "tasks.generate": "text_completion", "tasks.embed": "embeddings"}
_ASKED = {"max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty"}
"""Options that are `gen_ai.request.*`, if the request has them."""
_USED = {
    "prompt_tokens": "input_tokens",
    "cached_prompt_tokens": "cache_read.input_tokens",
    "completion_tokens": "output_tokens",
    "reasoning_tokens": "reasoning.output_tokens",
}
"""`gen_ai.usage.*`, by the fields of a result's `usage`."""
_DRAFTS = "draft_tokens", "accepted_draft_tokens"
"""`petiole.*` of the decode, if there were any drafts."""


P = ParamSpec("P")
T = TypeVar("T")


def harmless(step: Callable[P, T]) -> Callable[P, T | None]:
    """A step that fails is logged: no task fails because of its trace."""

    @wraps(step)
    def tried(*given: P.args, **named: P.kwargs) -> T | None:
        try:
            return step(*given, **named)
        except Exception:
            logger.exception("a trace is not whole")
            return None

    return tried


class AttemptSpans:
    """The spans of one attempt. `traceparent`: its own span, in the form of the header.

    Times are in nanoseconds since 1970; 0: not yet. The threads of the engine write them.
    """

    def __init__(
        self, tracer: Tracer, span: Span, parent: Context | None, delivery: Delivery, model: str, taken_ns: int
    ) -> None:
        self._tracer, self._span, self._parent = tracer, span, parent
        self._delivery, self._model, self._taken_ns = delivery, model, taken_ns
        self._attributes: dict[str, Any] = {}
        self._drafts: dict[str, int] = {}
        self._content = self._marked = False
        self.traceparent = carried.of_context(span.get_span_context())["traceparent"]
        self.submitted_ns = self.prepared_ns = self.admitted_ns = self.first_ns = self.ended_ns = 0
        self.deltas = 0

    @classmethod
    @harmless
    def of(cls, delivery: Delivery, taken_at: float, model: str) -> AttemptSpans | None:
        """The spans of an attempt that begins. None: nobody records spans, or not of this trace. `taken_at`: of
        `time.monotonic`."""
        if (tracer := spans.tracer()) is None:
            return None
        from opentelemetry.trace import SpanKind

        taken_ns = time.time_ns() - int((time.monotonic() - taken_at) * 1e9)
        parent = spans.context_of(delivery.message)
        name = _name(delivery, model)
        span = tracer.start_span(name, context=parent, kind=SpanKind.CONSUMER, start_time=taken_ns)
        if not span.is_recording():
            return None
        return cls(tracer, span, parent, delivery, model, taken_ns)

    # ------------------------------------------------------------ the beginning

    @harmless
    def begin(self, attempt: int, before: BegunAttempt | None, *, died: bool, marked: bool) -> None:
        """The attempt has its number. `before`: the attempt before it, whose worker has `died`, perhaps. `marked`:
        its death would count from now on, not only once it has a place."""
        self._marked = marked
        self._attributes |= self._about(attempt, self._delivery.request.hostname)
        sent = SENT.of(self._delivery.message)
        if attempt == 1 and sent is not None and ETA.of(self._delivery.message) is None:
            self._beside("petiole.queue", int(sent * 1e9)).end(self._taken_ns)
        if before is not None and died:
            self._span.add_link(self._tell_of(before).get_span_context())
        elif before is not None and (link := _link(before)) is not None:
            self._span.add_link(link.context, link.attributes)
        # What follows the end belongs to the attempt: links, and the span of Celery's instrumentation.
        self._delivery.message.update(carried.of_context(self._span.get_span_context()))

    def _about(self, attempt: int, worker: str) -> dict[str, Any]:
        info = self._delivery.message.get("delivery_info") or {}
        return {
            "messaging.system": SYSTEM,
            "messaging.operation.type": "process",
            "messaging.message.id": self._delivery.task_id,
            "messaging.destination.name": str(info.get("routing_key") or ""),
            "gen_ai.operation.name": _operation(self._delivery),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "petiole.worker": worker,
            "petiole.attempt": attempt,
        }

    def _tell_of(self, dead: BegunAttempt) -> Span:
        """The span of an attempt whose worker has died."""
        span = self._beside(_name(self._delivery, self._model), int(dead.at * 1e9), consumer=True)
        span.set_attributes(self._about(dead.number, dead.worker))
        span.add_event("worker died", timestamp=self._taken_ns)
        fail(span, "WorkerLost")
        span.end(max(self._taken_ns, int(dead.at * 1e9)))
        return span

    def _beside(self, name: str, start_ns: int, *, consumer: bool = False) -> Span:
        """A span with the attempt's parent; without one, below the attempt."""
        from opentelemetry.trace import SpanKind, set_span_in_context

        context = self._parent or set_span_in_context(self._span)
        kind = SpanKind.CONSUMER if consumer else SpanKind.INTERNAL
        return self._tracer.start_span(name, context=context, kind=kind, start_time=start_ns)

    @harmless
    def asks(self, request: Common, *, content: bool) -> None:
        """What the request says. `content`: its prompt, too, and at the end the answer."""
        for name in _ASKED & request.model_fields_set:
            if isinstance(value := getattr(request, name), int | float):
                self._attributes[f"gen_ai.request.{name}"] = value
        self._content = content
        if content and (messages := _messages(request)):
            self._attributes["gen_ai.input.messages"] = json.dumps(messages)

    # ------------------------------------------------------------ on its way

    def heard(self) -> None:
        """The engine has handed out a delta."""
        self.deltas += 1
        if not self.first_ns:
            self.first_ns = time.time_ns()

    def generated(self, result: Result | None) -> None:
        """The engine has ended the request. `result`: None after an error."""
        self.ended_ns = time.time_ns()
        if result is not None and result.draft_tokens:
            self._drafts = {f"petiole.{name}": getattr(result, name) for name in _DRAFTS}

    # ------------------------------------------------------------ the end

    @property
    def counts(self) -> bool:
        """Whether a death of the worker would count as the task's: then the attempt after this one tells."""
        return self._marked or bool(self.admitted_ns)

    @harmless
    def end(self, outcome: Outcome | None, state: str) -> None:
        """The attempt is over. `state`: of its job, if the task has not ended here."""
        from opentelemetry.trace import set_span_in_context

        span, now_ns = self._span, time.time_ns()
        self.ended_ns = self.ended_ns or now_ns
        within = set_span_in_context(span)
        usage = {} if outcome is None or outcome.result is None else outcome.result.get("usage") or {}
        for name, start_ns, end_ns in self._stages():
            counts = {"petiole.deltas": self.deltas, **self._drafts} if name == "petiole.decode" else None
            self._tracer.start_span(name, context=within, start_time=start_ns, attributes=counts).end(end_ns)
        known = self._attributes
        known |= {f"gen_ai.usage.{_USED[name]}": n for name, n in usage.items() if name in _USED and n is not None}
        if self.first_ns:
            span.add_event("first token", timestamp=self.first_ns)
            known["gen_ai.response.time_to_first_chunk"] = (self.first_ns - self._taken_ns) / 1e9
        if outcome is None:
            known["petiole.end"] = state
        else:
            known["gen_ai.response.model"] = self._model
            known["gen_ai.response.finish_reasons"] = [outcome.finish_reason]
            if outcome.error is not None:
                fail(span, type(outcome.error).__name__)
            elif self._content and outcome.result is not None:
                said = _message("assistant", outcome.result.get("text", ""))
                known["gen_ai.output.messages"] = json.dumps([said | {"finish_reason": outcome.finish_reason}])
        span.set_attributes(known)
        span.end()

    def _stages(self) -> Iterator[tuple[str, int, int]]:
        """The stages that have begun, with their times. The last one ends with the output."""
        marks = (
            ("petiole.prepare", self.submitted_ns),
            ("petiole.wait", self.prepared_ns),
            ("petiole.prefill", self.admitted_ns),
            ("petiole.decode", self.first_ns),
        )
        begun = [(name, at) for name, at in marks if at]
        ends = [*(at for _, at in begun[1:]), self.ended_ns]
        for (name, start_ns), end_ns in zip(begun, ends, strict=True):
            yield name, start_ns, max(start_ns, end_ns)


def _operation(delivery: Delivery) -> str:
    return _OPERATIONS.get(delivery.task_name, delivery.task_name.removeprefix("tasks."))


def _name(delivery: Delivery, model: str) -> str:
    return f"{_operation(delivery)} {model}"


def _link(attempt: BegunAttempt) -> Link | None:
    """A link to the span of an attempt that has told of itself."""
    from opentelemetry.trace import Link, get_current_span

    if (context := spans.context_of({"traceparent": attempt.span})) is None:
        return None
    return Link(get_current_span(context).get_span_context(), {"petiole.attempt": attempt.number})


def _messages(request: Common) -> list[dict[str, Any]]:
    """The prompt, in the form of `gen_ai.input.messages`. Empty for what has no text prompt."""
    match request:
        case ChatRequest():
            return [_message(str(one.get("role")), one.get("content")) for one in request.messages]
        case GenerateRequest(prompt=str(prompt)):
            return [_message("user", prompt)]
    return []


def _message(role: str, content: object) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": content}]}
