"""How many files and open batches a tenant may have. Rows are counted by the runner, which reads them: see
`Spec.most_rows`."""

from __future__ import annotations

from petiole.gateway.core.caller import caller, tell
from petiole.gateway.core.failures import Failure

_WHAT = {"files": "files that are uploaded", "file_bytes": "bytes of these files", "batches": "open batches"}


def limited(*names: str) -> bool:
    """Whether the caller has one of these limits."""
    return any(caller().most(name) is not None for name in names)


def check(name: str, count: int) -> None:
    """Raises `Failure` if this is more than the caller may have. SDKs are told not to try again: that is no matter
    of seconds."""
    most = caller().most(name)
    if most is not None and count > most:
        tell("x-should-retry", "false")
        raise Failure(429, f"{name}: {_WHAT[name]} must be at most {most}, got {count}", code="quota_exceeded")
