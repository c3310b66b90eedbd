"""The engine's errors.

`InvalidRequest` is an error of the caller. It names the field, the limit and the value, and is never retried.
`ModelError` is an error of the operator: the checkpoint cannot be served, or not on this machine (`MachineError`).
`EngineError` is an internal error.
`HandedBack` is not a failure: the request ends here unfinished, so that another worker continues it.
"""

from __future__ import annotations

from petiole.contract.errors import InvalidRequest as InvalidRequest, require as require


class EngineError(RuntimeError):
    """The engine failed. The request is valid and may be retried elsewhere."""


def failed(request_id: str, error: BaseException) -> EngineError:
    """The EngineError of a request that an unexpected error has ended."""
    cause = EngineError(f"request {request_id} failed: {error!r}")
    cause.__cause__ = error
    return cause


class EngineClosed(EngineError):  # noqa: N818
    """The engine has shut down or was never started."""


class EngineBusy(EngineError):  # noqa: N818
    """The waiting queue is full."""


class HandedBack(EngineError):  # noqa: N818
    """The request ended unfinished. The tokens generated so far have been delivered as deltas."""


class ModelChanged(EngineError):  # noqa: N818
    """A part of the request was answered by a model that the engine no longer serves. Its texts must all be
    answered by one model."""


class ModelError(ValueError):
    """A model folder or adapter that cannot be loaded: missing, truncated, or of an unknown kind."""


class MachineError(ModelError):
    """This machine cannot serve the model now: a device, memory, a kernel or the hub is missing. Checkpoint and
    the settings may be right."""


class AdapterError(ModelError):
    """A LoRA adapter that cannot be loaded. Fails only the request that names it."""


class AdapterChanged(AdapterError):  # noqa: N818
    """A resumed request cannot continue, because its adapter's files have changed since it started."""
