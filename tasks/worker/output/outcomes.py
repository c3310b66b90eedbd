"""Outcomes of generations, in the producer side's format."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import redis
from celery.backends.redis import RedisBackend
from pydantic import ValidationError

from petiole.gpu_worker import errors as engine_errors
from petiole.gpu_worker.request import Delta, FinishReason, Result, TokenLogprobs
from petiole.tasks import errors
from petiole.tasks.requests.results import StreamDelta
from petiole.tasks.servers.connections import LOST
from petiole.tasks.submission.handover import hand_over

_MAX_BYTES_A_UNIT = 12
"""Maximum bytes of JSON for a character, or for a token id with its separator. A character may take two escapes of
six bytes."""

_MAX_OTHER_BYTES = 16_384
"""Upper bound in bytes for the JSON of all other fields of a result without log probabilities."""


Ending = Literal["revoked", "expired"]
"""Why a task ends as REVOKED: the `stop_reason` of its last delta, whose finish reason is `cancelled`."""


class Success(NamedTuple):
    """A result to be stored. `context` is Celery's context of the task."""

    task_id: str
    result: dict[str, Any]
    context: Any


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a generation, or its error."""

    result: dict[str, Any] | None = None
    error: Exception | None = None
    finish_reason: str = "error"
    stop_reason: str | int | None = None

    @property
    def revoked(self) -> bool:
        """Whether the task ends as REVOKED. A generation cancelled for lack of a reader has a result instead."""
        return self.finish_reason == FinishReason.CANCELLED and self.stop_reason is not None

    @property
    def record(self) -> dict[str, Any]:
        """The part kept in the state hash: all but text, tokens and log probabilities, which are in the log."""
        if self.result is None:
            assert self.error is not None
            return {"finish_reason": self.finish_reason, "error": errors.describe(self.error)}
        return {
            name: value for name, value in self.result.items() if name not in {"text", "token_ids", "logprobs"}
        }


@dataclass(frozen=True, slots=True)
class Written:
    """The output in a task's log, one delta per entry. An entry is unreadable if it is not a delta, or does not
    begin where the previous one ends. `unreadable`: the number of entries from the first unreadable one on."""

    deltas: Sequence[Delta] = ()
    unreadable: int = 0

    @classmethod
    def of(cls, entries: Sequence[bytes]) -> Written:
        deltas: list[Delta] = []
        end = 0
        for entry in entries:
            try:
                read = StreamDelta.model_validate_json(entry)
            except ValidationError:
                break
            if read.index != end:
                break
            deltas.append(_delta(read))
            end = read.end
        return cls(deltas, len(entries) - len(deltas))

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def bins(self) -> list[Sequence[int] | None]:
        """The bins of each token; empty if no token has any."""
        if all(delta.bins is None for delta in self.deltas):
            return []
        return [bins for delta in self.deltas for bins in delta.bins or [None] * len(delta.token_ids)]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def logprobs(self) -> list[dict[str, Any]]:
        return logprobs_json([entry for delta in self.deltas for entry in delta.logprobs or ()])


def _delta(read: StreamDelta) -> Delta:
    """A log entry as the engine's delta, without its finish reason, which is in the record."""
    values: Any = read.values  # as in the log: None for text tokens
    bins: Any = read.bins
    items: Any = read.items
    return Delta(
        read.index,
        tuple(read.token_ids),
        read.text,
        logprobs=None
        if read.logprobs is None
        else tuple(TokenLogprobs(one.token_id, one.logprob, tuple(one.top)) for one in read.logprobs),
        values=values and tuple(values),
        bins=bins and tuple(bins),
        items=items and tuple(items),
    )


def succeeded(result: Result, attempt: int, before: Written) -> Outcome:
    """The outcome of the engine's result. `before`, from earlier attempts, supplies their log probabilities."""
    value: dict[str, Any] = {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason.value,
        "stop_reason": result.stop_reason,
        "usage": {
            "prompt_tokens": result.usage.prompt_tokens,
            "cached_prompt_tokens": result.usage.cached_prompt_tokens,
            "completion_tokens": result.usage.completion_tokens,
        },
        "timing": {
            "queue_ms": round(result.timing.queue_ms, 3),
            "prefill_ms": round(result.timing.prefill_ms, 3),
            "ttft_ms": None if result.timing.ttft_ms is None else round(result.timing.ttft_ms, 3),
            "total_ms": round(result.timing.total_ms, 3),
        },
        "model": result.model,
        "attempt": attempt,
        **(result.answer or {}),
    }
    if result.logprobs is not None:
        value["logprobs"] = (before.logprobs + logprobs_json(result.logprobs))[-len(result.token_ids) :]
    return Outcome(value, None, value["finish_reason"], result.stop_reason)


def within(limit_bytes: int, outcome: Outcome) -> Outcome:
    """`outcome`, or a failure with `ResultTooLarge`.

    The size is checked before the last delta is written. So stream, record and stored result agree, and the
    backend is never sent a result that it cannot store. Only a result whose upper bound exceeds the limit is
    encoded."""
    result = outcome.result
    if result is None:
        return outcome
    bound = _MAX_OTHER_BYTES + _MAX_BYTES_A_UNIT * (len(result["text"]) + len(result["token_ids"]))
    if bound <= limit_bytes and "logprobs" not in result:
        return outcome
    size = len(json.dumps(result))
    return outcome if size <= limit_bytes else failed(errors.ResultTooLarge(size, limit_bytes))


def largest(backend: Any) -> int:
    """The largest JSON of a result that `backend` can store, in bytes; 512 MiB if Redis does not say."""
    if not isinstance(backend, RedisBackend):
        return sys.maxsize
    stock_bytes = 512 * 2**20
    try:
        config = backend.client.config_get("proto-max-bulk-len")
    except (*LOST, redis.RedisError):  # not permitted, or unreachable
        config = {}
    return int(config.get("proto-max-bulk-len", stock_bytes)) - _MAX_OTHER_BYTES


def logprobs_json(logprobs: Sequence[Any]) -> list[dict[str, Any]]:
    """Log-probabilities as JSON. JSON has no infinity and no NaN. So -inf, of masked tokens, becomes -3.4e38; so
    does NaN, of a broken model. (The constant comes first in the comparison, because NaN is not greater.)"""
    return [
        {
            "token_id": entry.token_id,
            "logprob": max(-3.4e38, entry.logprob),
            "top": [[token, max(-3.4e38, value)] for token, value in entry.top],
        }
        for entry in logprobs
    ]


def ended(ending: Ending) -> Outcome:
    """The outcome of a revoked or expired task. Its output so far stays in the log."""
    value = {"finish_reason": FinishReason.CANCELLED.value, "stop_reason": ending}
    return Outcome(value, None, value["finish_reason"], ending)


def failed(error: BaseException) -> Outcome:
    return Outcome(error=public(error))


def unreadable(written: Written) -> Outcome:
    return failed(errors.GenerationFailed(f"its log cannot be read after {len(written.token_ids)} tokens"))


def public(error: BaseException) -> Exception:
    """`error` as an exception that a producer can recreate from JSON: see `tasks.errors`."""
    match error:
        case errors.PetioleError():
            return error
        case engine_errors.InvalidRequest():
            option = error.field.removeprefix("constraint.")  # a task's option; the engine's request nests it
            return errors.InvalidRequest(option, error.limit, error.value)
        case engine_errors.AdapterChanged():
            return errors.ModelChanged(str(error))
        case engine_errors.AdapterError():
            return errors.InvalidRequest("adapter", "must be one that can be loaded", str(error))
        case _:
            return errors.GenerationFailed(f"{type(error).__name__}: {error}")


def recorded(record: Mapping[str, Any], written: Written) -> Outcome:
    """The outcome of a task that an earlier delivery finished."""
    if "error" in record:
        return Outcome(error=errors.rebuild(record["error"]), finish_reason=record["finish_reason"])
    if written.unreadable:
        return unreadable(written)
    value = {"text": written.text, "token_ids": written.token_ids, **record}
    if written.logprobs:
        value["logprobs"] = written.logprobs
    return Outcome(value, None, value["finish_reason"], value.get("stop_reason"))


@contextmanager
def at_hand(task_id: str, outcome: Outcome) -> Iterator[None]:
    """In this context, the body of task `task_id` finds the outcome on this thread."""
    try:
        with hand_over(task_id, outcome):
            yield
    finally:
        if outcome.error is not None:
            forget_frames(outcome.error)


def forget_frames(error: BaseException) -> None:
    """Free the objects to which a handled error refers. The frames of its traceback refer to the error, too. So
    the frames, and the task that they belong to, would be kept until a garbage collection."""
    error.__traceback__ = error.__context__ = None
