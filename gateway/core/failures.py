"""What a client is told of an error, whatever the interface: a status, a message, a code, the field that it is
about. How it is written is each interface's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

from celery.exceptions import TaskRevokedError, TimeoutError as GaveUp

from petiole.gateway.core.parts import OutputEnded
from petiole.tasks import errors

Kind = Literal[
    "invalid_request_error",
    "authentication_error",
    "rate_limit_error",
    "insufficient_quota",
    "not_found_error",
    "server_error",
    "service_unavailable_error",
]
RETRY_AFTER_S = 2
LATE = (GaveUp, TaskRevokedError)
"""What a task that expires while somebody waits for it ends with. A worker that takes it after that revokes it."""
_LENGTH = re.compile("must have at most ([0-9]+) tokens")
_CACHE = re.compile("must fit, with the prompt, into the KV cache: ([0-9]+) pages of ([0-9]+) tokens")
_ROUTES = {
    "embed asks for them": "use /v1/embeddings",
    "embed needs another": "use one with the capability embeddings in /v1/models",
    "no chat template; use a prompt": "no chat template: use /v1/completions, or the input of /v1/embeddings",
    "score, rerank and classify ask for them": "use /v1/score, /v1/rerank or /v1/classify",
}
"""By what the engine says of a task: what a client of HTTP does."""


class Failure(Exception):  # noqa: N818
    """A request has no answer, or no whole one. `retry_after_s`: the same request may succeed after this time.
    `allow`: the methods that its path has."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(status, message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.retry_after_s, self.allow = retry_after_s, allow

    @property
    def kind(self) -> Kind:
        if self.code == "insufficient_quota":
            return "insufficient_quota"
        if self.status in (401, 429):
            return "authentication_error" if self.status == 401 else "rate_limit_error"
        if self.status == 503:
            return "service_unavailable_error"
        if self.status >= 500:
            return "server_error"
        return "not_found_error" if self.status == 404 else "invalid_request_error"


def invalid(param: str | None, message: str, code: str | None = None, status: int = 400) -> Failure:
    return Failure(status, message, code=code, param=param)


def unavailable(message: str, code: str = "unavailable") -> Failure:
    return Failure(503, message, code=code, retry_after_s=RETRY_AFTER_S)


def unknown_model(name: str) -> Failure:
    return Failure(404, f"model: no worker has served {name[:256]!r}", code="model_not_found", param="model")


def ended_early(reason: str) -> Failure:
    """The failure of a request whose answer is whole or none. `reason`: its finish reason, which is not `stop`."""
    return Failure(499, f"the request has ended early: {reason}", code=reason)


def failure_of(error: BaseException, names: Mapping[str, str] | None = None) -> Failure:
    """What a client is told of this error. `names`: by an option of the task, the client's field."""
    match error:
        case Failure():
            return error
        case errors.InvalidRequest(field=field):
            return _refused(error, field, names or {})
        case errors.NoWorker():
            return unavailable("no worker serves this model at the moment", "no_worker")
        case errors.Unavailable() | errors.Unconfirmed():
            return unavailable("the fleet cannot be reached at the moment; the same request may succeed soon")
        case TaskRevokedError():
            return _cancelled()
        case errors.StreamExpired() | errors.UnknownTask():
            return Failure(404, "the output has expired", code="expired")
        case errors.StreamError():
            return unavailable(
                "the output cannot be read at the moment; it can be asked for by its id", "unreadable"
            )
        case _:
            return Failure(500, "the generation has failed", code="server_error")


def of_end(ended: OutputEnded) -> Failure | None:
    """What a client is told in place of this end. None: it is a good one."""
    if ended.error is not None:
        return failure_of(errors.rebuild(ended.error))
    if ended.finish_reason == "cancelled":
        return _cancelled()
    return None


def _cancelled() -> Failure:
    return Failure(499, "the generation was cancelled", code="cancelled")


def _refused(error: errors.InvalidRequest, field: str, names: Mapping[str, str]) -> Failure:
    head = field.partition("[")[0].partition(".")[0]
    shown = names.get(head, head) + field[len(head) :]
    limit = error.limit
    for task, route in _ROUTES.items():
        limit = limit.replace(task, route)
    message = f"{shown}: {limit}" if limit != error.limit else f"{shown}: {limit}, got {error.value}"
    if (longest := _context(error)) is None:
        return invalid(shown, message, "invalid_value")
    told = f"This model's maximum context length is {longest} tokens. {message}"
    return invalid(shown, told, "context_length_exceeded")


def _context(error: errors.InvalidRequest) -> int | None:
    """The model's context, in tokens, if the request is too long for it; None: it is not. The sentence about it
    begins as OpenAI's: by this proxies choose a model with a longer one."""
    if error.field in ("prompt", "messages") and (found := _LENGTH.match(error.limit)) is not None:
        return int(found[1]) + 1  # a prompt leaves room for a token
    if error.field == "max_tokens" and (found := _CACHE.match(error.limit)) is not None:
        return int(found[1]) * int(found[2])
    return None
