"""Deltas as a gateway reads them: in a sixth of the time that pydantic takes, which was a tenth of what a delta
cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, get_type_hints

import msgspec

from petiole.tasks.requests.results import ShownPiece, StreamDelta

if TYPE_CHECKING:
    from collections.abc import Callable


def _copy(delta: msgspec.Struct, *, update: dict[str, Any]) -> msgspec.Struct:
    return msgspec.structs.replace(delta, **update)


def _decoder() -> Callable[[bytes], StreamDelta]:
    """"""
    hints, fields, shown = get_type_hints(StreamDelta), StreamDelta.model_fields, ShownPiece.model_fields.keys()
    declared = [
        (name, hints[name], msgspec.NODEFAULT if field.is_required() else field.default)
        for name, field in fields.items()
        if name not in shown
    ]
    more = {"end": StreamDelta.end, "is_heartbeat": StreamDelta.is_heartbeat, "model_copy": _copy}
    kind = msgspec.defstruct("Delta", declared, namespace=more | dict.fromkeys(shown), frozen=True, gc=False)
    return cast("Callable[[bytes], StreamDelta]", msgspec.json.Decoder(kind).decode)


_decode = _decoder()


def read(raw: bytes) -> StreamDelta:
    """The delta; it is of another class than `StreamDelta`, and has the same fields. Raises pydantic's
    ValidationError."""
    try:
        return _decode(raw)
    except msgspec.MsgspecError:
        return StreamDelta.model_validate_json(raw)
