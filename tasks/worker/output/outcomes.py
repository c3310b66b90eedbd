"""Outcomes of generations, in the producer side's format."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import redis
from celery.backends.redis import RedisBackend

from petiole.contract.results.task_result import Ranked
from petiole.contract.results.vectors import FIELDS
from petiole.gpu_worker import exceptions as engine_errors
from petiole.gpu_worker.preparation.prompts import NO_SKILLS
from petiole.gpu_worker.request import FinishReason, Result
from petiole.tasks import errors
from petiole.tasks.servers.connections import LOST
from petiole.tasks.submission.task import offered
from petiole.tasks.wire.record import codec
from petiole.tasks.wire.record.codec import LoggedOutput

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
        """The part kept in the state hash: an `End`."""
        if self.result is None:
            assert self.error is not None
            return {"finish_reason": self.finish_reason, "error": errors.describe(self.error)}
        return codec.end_of(self.result)


OF_TEXTS = (*FIELDS.values(), "scores")
"""What is made of texts, by the fields of a result."""


def succeeded(
    result: Result, attempt: int, before: LoggedOutput, parts: Mapping[str, Any] | None = None
) -> Outcome:
    """The outcome of the engine's result. `before`, from earlier attempts, supplies their log probabilities and
    vectors or scores. `parts`: what the worker has found in the text."""
    known: dict[str, Any] = {"attempt": attempt, "answer": None, **(result.answer or {}), **(parts or {})}
    for name in ("logprobs", *OF_TEXTS):
        if (made := getattr(result, name)) is not None:
            known[name] = [*before.entries(name), *made][-len(result.token_ids) :]
    if result.prompt_logprobs is not None:
        known["prompt_logprobs"] = [*before.entries("prompt_logprobs"), *result.prompt_logprobs]
    if result.best is not None:
        known["ranking"] = ranked(known.get("scores", ()), result.best)
    return Outcome(codec.result(result, **known), None, result.finish_reason.value, result.stop_reason)


def ranked(scores: Sequence[Sequence[float]], best: int) -> list[Ranked]:
    """The best of these scores, of equal ones the first."""
    order = sorted(range(len(scores)), key=lambda k: -scores[k][0])
    return [Ranked(index=k, score=scores[k][0]) for k in order[:best]]


def within(limit_bytes: int, outcome: Outcome) -> Outcome:
    """`outcome`, or a failure with `ResultTooLarge`.

    The size is checked before the last delta is written. So stream, record and stored result agree, and the
    backend is never sent a result that it cannot store. Only a result whose upper bound exceeds the limit is
    encoded."""
    result = outcome.result
    if result is None:
        return outcome
    bound = _MAX_OTHER_BYTES + _MAX_BYTES_A_UNIT * (len(result["text"]) + len(result["token_ids"]))
    if bound <= limit_bytes and not {"logprobs", "prompt_logprobs", *OF_TEXTS} & result.keys():
        return outcome
    size = len(json.dumps(result))
    return outcome if size <= limit_bytes else failed(errors.ResultTooLarge(size, limit_bytes))


def largest(backend: Any) -> int:
    """The largest JSON of a result that `backend` can store, in bytes; 512 MiB if Redis does not say.

    Only the user `default` asks. The users of docs/access-lists.md may not, and Redis logs each refusal."""
    if not isinstance(backend, RedisBackend):
        return sys.maxsize
    config, client = {"proto-max-bulk-len": 512 * 2**20}, backend.client
    if client.connection_pool.connection_kwargs.get("username") in (None, "", "default"):
        with suppress(*LOST, redis.RedisError):  # a service may not have the command
            config |= client.config_get("proto-max-bulk-len")
    return int(config["proto-max-bulk-len"]) - _MAX_OTHER_BYTES


def ended(ending: Ending, generated: Outcome | None = None) -> Outcome:
    """The outcome of a revoked or expired task. Its output so far stays in the log. `generated`: what the engine
    made of it here, if anything."""
    so_far = {} if generated is None or generated.result is None else codec.end_of(generated.result)
    value = {**so_far, "finish_reason": FinishReason.CANCELLED.value, "stop_reason": ending}
    return Outcome(value, None, value["finish_reason"], ending)


def failed(error: BaseException) -> Outcome:
    return Outcome(error=public(error))


def unreadable(written: LoggedOutput) -> Outcome:
    return failed(errors.GenerationFailed(f"its log cannot be read after {len(written.token_ids)} tokens"))


def public(error: BaseException) -> Exception:
    """`error` as an exception that a producer can recreate from JSON: see `tasks.errors`."""
    match error:
        case errors.InvalidRequest():
            option = error.field.removeprefix("constraint.")  # a task's option; the engine's request nests it
            elsewhere = (
                " (name the queue of a vision model's workers, queue=...)" if error.limit == NO_SKILLS else ""
            )
            return errors.InvalidRequest(option, error.limit + elsewhere, error.value)
        case errors.PetioleError():
            return error
        case engine_errors.AdapterChanged() | engine_errors.ModelChanged():
            return errors.ModelChanged(str(error))
        case engine_errors.AdapterError():
            return errors.InvalidRequest("adapter", "must be one that can be loaded", str(error))
        case _:
            return errors.GenerationFailed(f"{type(error).__name__}: {error}")


def recorded(record: Mapping[str, Any], written: LoggedOutput) -> Outcome:
    """The outcome of a task that an earlier delivery finished."""
    if "error" in record:
        return Outcome(error=errors.rebuild(record["error"]), finish_reason=record["finish_reason"])
    if written.unreadable:
        return unreadable(written)
    value = written.result(record)
    return Outcome(value, None, value["finish_reason"], value.get("stop_reason"))


@contextmanager
def at_hand(task_id: str, outcome: Outcome) -> Iterator[None]:
    """In this context, the body of task `task_id` finds the outcome on this thread."""
    try:
        with offered(task_id, outcome):
            yield
    finally:
        if outcome.error is not None:
            forget_frames(outcome.error)


def forget_frames(error: BaseException) -> None:
    """Free the objects to which a handled error refers. The frames of its traceback refer to the error, too. So
    the frames, and the task that they belong to, would be kept until a garbage collection."""
    error.__traceback__ = error.__context__ = None
