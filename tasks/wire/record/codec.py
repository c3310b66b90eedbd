"""Deltas and ends as JSON, as docs/streams.md describes them: written, joined, cut and read back. Begun attempts.

Everything here follows from the fields that `contract.results` declares. Only log-probabilities have lines of
their own, because they may be infinite. A delta without optional fields is formatted by hand: that is the hot
path."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from json.encoder import encode_basestring_ascii as quote
from types import NoneType
from typing import Any, NamedTuple, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from petiole.contract.results.outputs import Delta, Prepared, TokenLogprobs
from petiole.contract.results.task_result import EndOfOutput, GenerationResult, Piece, ResultSummary, StreamDelta

LEAST = -3.4e38
"""JSON has no infinity and no NaN: this stands for the -inf of masked tokens, and the NaN of a broken model."""


Tokens = Delta | StreamDelta
"""A piece of an output, as the engine has made it or as it was read from the log."""

_HINTS = get_type_hints(StreamDelta) | get_type_hints(GenerationResult)
A_TOKEN = tuple(name for name, field in Piece.model_fields.items() if not field.is_required())
"""The fields of a delta that have one entry for each token."""
AT_THE_END = (*(name for name in EndOfOutput.model_fields if name != "finish_reason"), "error")
"""The fields that only the last delta has."""

_FILLED = {name for name in A_TOKEN if NoneType in get_args(get_args(get_args(_HINTS[name])[0])[0])}
"""The fields that may have no entry for a token: null is in its place."""

_is_plain: Callable[[Any], bool] = eval(f"lambda piece: {' and '.join(f'piece.{one} is None' for one in A_TOKEN)}")
"""Whether a piece has none of them. Written out, it takes half the time of a loop."""


# ------------------------------------------------------------ deltas


def opening(task_id: str, attempt: int) -> str:
    """The beginning of every delta of an attempt. The delta's index follows."""
    return f'{{"task_id":{quote(task_id)},"attempt":{attempt},"index":'


def merged(
    opening: str,
    index: int,
    pieces: Sequence[Tokens],
    end: Mapping[str, Any] | None = None,
    *,
    after_prompt: bool = False,
) -> str:
    """One delta of all `pieces`; the first piece begins at `index`. With an end, it is the last delta."""
    if len(pieces) == 1 and end is None and not after_prompt and _is_plain(piece := pieces[0]):
        ids = piece.token_ids
        some = str(ids[0]) if len(ids) == 1 else ",".join(map(str, ids))
        return f'{opening}{index},"token_ids":[{some}],"text":{quote(piece.text)},"finish_reason":null}}'
    tokens = ",".join([str(token) for piece in pieces for token in piece.token_ids])
    text, reason, extras = "".join([piece.text for piece in pieces]), "null", ""
    if not all(map(_is_plain, pieces)):
        columns = ((name, joined(pieces, name)) for name in A_TOKEN)
        extras = "".join(f",{_json(name, column)}" for name, column in columns if column is not None)
    if after_prompt:
        extras += ',"after_prompt":true'
    if end is not None:
        reason = quote(end["finish_reason"])
        known = {name: end[name] for name in AT_THE_END if name in end}
        extras += f",{json.dumps({'stop_reason': None, **known})[1:-1]}"
    return f'{opening}{index},"token_ids":[{tokens}],"text":{quote(text)},"finish_reason":{reason}{extras}}}'


def joined(pieces: Sequence[Tokens], name: str) -> list[Any] | None:
    """The field `name` of all pieces: one of `A_TOKEN`. None if no piece has it."""
    parts = [getattr(piece, name) for piece in pieces]
    if parts.count(None) == len(parts):
        return None
    entries: list[Any] = []
    for piece, part in zip(pieces, parts, strict=True):
        if part is not None:
            entries += part
        elif name in _FILLED:
            entries += [None] * len(piece.token_ids)
    return [entry or None for entry in entries]


def without(delta: StreamDelta, tokens: int, characters: int) -> StreamDelta:
    """`delta` without its first `tokens` and the first `characters` of its text."""
    tokens = min(tokens, len(delta.token_ids))
    entries = {name: part[tokens:] for name in A_TOKEN if (part := getattr(delta, name)) is not None}
    rest = {"index": delta.index + tokens, "token_ids": delta.token_ids[tokens:], "text": delta.text[characters:]}
    return delta.model_copy(update=rest | entries)


def announced(opening: str, prepared: Prepared) -> str:
    """The delta that says what is known of a task before it is admitted. It begins before every position,
    so a reader that does not ask for it drops it."""
    return f'{opening}-1,"token_ids":[],"text":"","finish_reason":null,{_json("prepared", prepared)}}}'


def closing(task_id: str, error: dict[str, Any]) -> list[str]:
    """The last delta and the end of a task that no worker ran: the arguments of `close.lua`, which adds attempt
    and index to the delta."""
    end = {"finish_reason": "error", "error": error}
    head, tail = merged(opening(task_id, 0), 0, [], end).split('"attempt":0,"index":0')
    return [f'{head}"attempt":', ',"index":', tail, json.dumps(end)]


@cache
def _writer(name: str) -> Callable[..., bytes]:
    """Made at the first use, so that importing this module takes no time for it."""
    return TypeAdapter(_HINTS[name]).serializer.to_json


def _json(name: str, value: Any) -> str:
    """A field and its value."""
    write = partial(_writer(name), exclude_defaults=True, warnings=False)
    text = write(value)
    if name in ("logprobs", "prompt_logprobs") and b"null" in text:  # infinite, or no number
        text = write([_finite(entry) for entry in value])
    return f'"{name}":{text.decode()}'


def _finite(entry: TokenLogprobs) -> TokenLogprobs:
    """The constant comes first in a comparison, because NaN is not greater."""
    top = [(token, max(LEAST, value)) for token, value in entry.top]
    return replace(entry, logprob=max(LEAST, entry.logprob), top=top)


# ------------------------------------------------------------ ends and results


def result(made: Any, /, **known: Any) -> dict[str, Any]:
    """The result that is stored: every declared field that `made`, an object, has, and those in `known`."""
    declared = GenerationResult.model_fields.items()
    given = {name: getattr(made, name) for name, _ in declared if hasattr(made, name)} | known
    kept = [name for name, field in declared if name in given and given[name] != field.default]
    value: dict[str, Any] = json.loads(f"{{{','.join(_json(name, given[name]) for name in kept)}}}")
    return value


def end_of(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the task's state keeps of a result: all that is not in the log."""
    return {name: result[name] for name in ResultSummary.model_fields if name in result}


# ------------------------------------------------------------ the log


@dataclass(frozen=True, slots=True)
class LoggedOutput:
    """The output in a task's log, one delta per entry. An entry is unreadable if it is not a delta, or does not
    begin where the previous one ends. `unreadable`: the number of entries from the first unreadable one on."""

    deltas: Sequence[StreamDelta] = ()
    unreadable: int = 0

    @classmethod
    def of(cls, entries: Sequence[bytes]) -> LoggedOutput:
        deltas: list[StreamDelta] = []
        end: int | None = None
        for entry in entries:
            try:
                read = StreamDelta.model_validate_json(entry)
            except ValidationError:
                break
            if read.index != end and (end is not None or read.index > 0):
                break
            deltas.append(read)
            end = read.end
        return cls(deltas, len(entries) - len(deltas))

    @property
    def prompt(self) -> Sequence[StreamDelta]:
        """The deltas of the prompt."""
        return [delta for delta in self.deltas if delta.index < 0]

    @property
    def output(self) -> Sequence[StreamDelta]:
        return [delta for delta in self.deltas if delta.index >= 0]

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.output for token in delta.token_ids]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    def entries(self, name: str) -> list[Any]:
        """A field of `A_TOKEN`: one entry for each token of the output, or none. `prompt_logprobs`: one for each
        token of the prompt."""
        if name == "prompt_logprobs":
            return joined(self.prompt, "logprobs") or []
        return joined(self.output, name) or []

    def result(self, end: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a task with this log and this end."""
        value: dict[str, Any] = {"text": self.text, "token_ids": self.token_ids, **end}
        for name in (*A_TOKEN, "prompt_logprobs"):
            if name in GenerationResult.model_fields and (entries := self.entries(name)):
                value |= json.loads(f"{{{_json(name, entries)}}}")
        return value


# ------------------------------------------------------------ attempts

_BEGUN = "begun:"
"""With the number of an attempt behind it: the field of the state."""


class BegunAttempt(NamedTuple):
    """An attempt, as `begin.lua` has noted it in the task's state. `at`: when it began, in Unix seconds by Redis's
    clock. `why`: `new`; `died`, because the worker of the attempt before has died; `again`, because that attempt
    was handed back, or its message came twice. `span`: its span as `traceparent`, empty without one."""

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


def begun_attempts(state: Mapping[bytes, bytes]) -> list[BegunAttempt]:
    """The attempts in a task's state, in the order in which they began."""
    found = []
    for name, entry in state.items():
        number = name.decode(errors="replace").removeprefix(_BEGUN)
        if number.isdecimal() and name.startswith(_BEGUN.encode()):
            found.append(BegunAttempt.parse(int(number), entry))
    return sorted(one for one in found if one is not None)
