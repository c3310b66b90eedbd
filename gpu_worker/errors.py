"""What can go wrong in the engine, by whose fault it is.

`InvalidRequest` is the caller's: it names the field, the limit and the value, and is never retried.
`ModelError` is the operator's: the checkpoint cannot be served. `EngineError` is the engine's own.
`HandedBack` is no error at all: the request ends here, unfinished, so that another worker continues it.
"""

from __future__ import annotations

_SHOWN = 200


class InvalidRequest(ValueError):  # noqa: N818 - the name that users see in a task's result
    """A request that cannot be served as it stands.

    `field` is the request's field, `limit` what it must satisfy, `value` what was given (shortened).
    """

    def __init__(self, field: str, limit: str, value: object) -> None:
        shown = value if isinstance(value, str) and len(value) <= _SHOWN else repr(value)
        shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}… ({len(shown)} characters)"
        super().__init__(field, limit, shown)
        self.field, self.limit, self.value = field, limit, shown

    def __str__(self) -> str:
        return f"{self.field}: {self.limit}, got {self.value}"


def require(condition: bool, field: str, limit: str, value: object) -> None:
    """Raises InvalidRequest unless it holds."""
    if not condition:
        raise InvalidRequest(field, limit, value)


class EngineError(RuntimeError):
    """The engine failed; the request did nothing wrong and may run again elsewhere."""


class EngineClosed(EngineError):  # noqa: N818
    """The engine has shut down or was never started."""


class EngineBusy(EngineError):  # noqa: N818
    """The waiting queue is full."""


class HandedBack(EngineError):  # noqa: N818
    """The request was given back unfinished; what was generated so far has been delivered as deltas."""


class ModelError(ValueError):
    """A model folder or adapter that cannot be loaded: missing, truncated, or of an unknown kind."""


class AdapterError(ModelError):
    """A LoRA adapter that cannot be loaded; fails the request that named it, and no other."""


class AdapterChanged(AdapterError):  # noqa: N818
    """A request cannot go on where it stopped: its adapter's files are others than those it began with."""
