"""The attempts of a task, as `begin.lua` has noted them in its state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

FIELD = "begun:"
"""With the number of an attempt behind it: the field of the state."""


class BegunAttempt(NamedTuple):
    """`at`: when it began, in Unix seconds by Redis's clock. `why`: `new`; `died`, because the worker of the
    attempt before has died; `again`, because that attempt was handed back, or its message came twice. `span`: its
    span as `traceparent`, empty without one."""

    number: int
    at: float
    why: str
    span: str
    worker: str

    @classmethod
    def parse(cls, number: int, entry: bytes | str) -> BegunAttempt | None:
        """None: nothing is known of it, or the entry cannot be read."""
        text = entry.decode(errors="replace") if isinstance(entry, bytes) else entry
        at, _, rest = text.partition(" ")
        why, _, rest = rest.partition(" ")
        span, _, worker = rest.partition(" ")
        if not (at.isdecimal() and worker):
            return None
        return cls(number, int(at) / 1000, why, span.strip("-") and span, worker)


def of_state(state: Mapping[bytes, bytes]) -> list[BegunAttempt]:
    """The attempts in a task's state, in the order in which they began."""
    found = []
    for name, entry in state.items():
        number = name.decode(errors="replace").removeprefix(FIELD)
        if number.isdecimal() and name.startswith(FIELD.encode()):
            found.append(BegunAttempt.parse(int(number), entry))
    return sorted(one for one in found if one is not None)
