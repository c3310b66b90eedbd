"""Every record survives the codec: pieces of an output, their joining and cutting, ends, and fields of a later
version."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from hypothesis import given, strategies as st

from petiole.contract.results.outputs import Timing, TokenLogprobs, Usage
from petiole.contract.results.task_result import End, GenerationResult, ResultSummary, ShownPiece, StreamDelta
from petiole.gpu_worker.request import Delta
from petiole.tasks.wire.record import codec
from petiole.tasks.wire.record.codec import A_TOKEN, LoggedOutput, joined, merged, opening, without

numbers = st.floats(allow_nan=False, allow_infinity=False)
logs = st.floats(codec.LEAST, 0)
counts = st.integers(0, 2**31)
texts = st.text(max_size=8)


def logprobs() -> st.SearchStrategy[TokenLogprobs]:
    spelled = st.none() | st.lists(texts, max_size=3)
    top = st.lists(st.tuples(counts, logs), max_size=3)
    return st.builds(TokenLogprobs, counts, logs, top, spelled, st.none() | st.just([[1, 255]]))


ENTRIES: dict[str, st.SearchStrategy[Any]] = {
    "values": st.none() | numbers.map(lambda x: x or 1.0) | st.lists(numbers, min_size=1, max_size=2),
    "bins": st.none() | st.lists(st.integers(0, 1023), min_size=1, max_size=2),
    "items": st.none() | st.dictionaries(st.sampled_from(["x", "y"]), numbers, min_size=1),
    "logprobs": logprobs(),
    "vectors": st.sampled_from(["AACAPw==", "AAA="]),
    "scores": st.lists(numbers, min_size=1, max_size=3),
    "sparse": st.sampled_from(["AAAAAA==", "AQAAAAUAAAAAAIA/"]),
    "colbert": st.sampled_from(["AACAPw==", "AAA="]),
}
UNKNOWN = st.dictionaries(texts.map(lambda name: f"new {name}"), st.none() | counts | texts | st.just({"a": [1]}))


@st.composite
def outputs(draw: st.DrawFn) -> list[Delta]:
    """An output in pieces, as the engine makes them. All of them have log-probabilities, or none."""
    asked = draw(st.booleans())
    pieces: list[Delta] = []
    index = 0
    for n in draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)):
        columns = {name: tuple(draw(st.lists(entry, min_size=n, max_size=n))) for name, entry in ENTRIES.items()}
        kept = {name: c for name, c in columns.items() if (asked if name == "logprobs" else draw(st.booleans()))}
        ids = tuple(draw(st.lists(counts, min_size=n, max_size=n)))
        pieces.append(Delta(index, ids, draw(texts), **kept))
        index += n
    return pieces


ends = st.fixed_dictionaries(
    {"finish_reason": st.sampled_from(["stop", "length", "cancelled", "deadline"]), "attempt": st.integers(1, 9)},
    optional={
        "stop_reason": st.none() | texts | counts,
        "usage": st.builds(Usage, counts, counts, counts, st.none() | counts),
        "timing": st.builds(Timing, numbers, numbers, st.none() | numbers, numbers),
        "model": texts,
        "answer": texts,
        "points": st.just([{"x": 0.5, "y": 0.25}]),
        "dimensions": counts,
        "encoding": st.sampled_from(["float32", "bits"]),
    },
)


def test_the_engine_has_every_field_of_a_token() -> None:
    assert set(A_TOKEN) <= {field.name for field in dataclasses.fields(Delta)}
    assert set(A_TOKEN) == set(ENTRIES)


@given(outputs(), UNKNOWN)
def test_pieces_are_read_as_they_were_written(pieces: list[Delta], unknown: dict[str, Any]) -> None:
    written = {**json.loads(merged(opening("é", 3), 0, pieces)), **unknown}
    read = StreamDelta.model_validate_json(json.dumps(written))
    assert (read.task_id, read.attempt, read.index, read.finish_reason) == ("é", 3, 0, None)
    assert read.token_ids == [token for piece in pieces for token in piece.token_ids]
    assert read.text == "".join(piece.text for piece in pieces)
    for name in A_TOKEN:
        assert getattr(read, name) == joined(pieces, name)
    assert not ShownPiece.model_fields.keys() & written.keys()


@given(outputs(), st.data())
def test_however_a_log_is_split_it_is_the_same_output(pieces: list[Delta], data: st.DataObject) -> None:
    log: list[str] = []
    rest = pieces
    while rest:
        n = data.draw(st.integers(1, len(rest)))
        log.append(merged(opening("t", 1), rest[0].index, rest[:n]))
        rest = rest[n:]
    written, whole = (
        LoggedOutput.of([entry.encode() for entry in log]),
        LoggedOutput.of([b"%b" % merged_whole(pieces)]),
    )
    assert (written.token_ids, written.text, written.unreadable) == (whole.token_ids, whole.text, 0)
    for name in A_TOKEN:
        assert [entry or None for entry in written.entries(name)] == whole.entries(name)
    again = merged(opening("t", 1), 0, list(written.deltas))
    assert again.encode() == merged_whole(list(whole.deltas))


def merged_whole(pieces: list[Any]) -> bytes:
    return merged(opening("t", 1), 0, pieces).encode()


@given(outputs(), st.integers(0, 12))
def test_a_delta_is_cut_at_any_token(pieces: list[Delta], n: int) -> None:
    read = StreamDelta.model_validate_json(merged_whole(pieces))
    rest = without(read, n, 2)
    assert (rest.token_ids, rest.text, rest.end) == (read.token_ids[n:], read.text[2:], read.end)
    assert StreamDelta.model_validate_json(merged(opening("t", 1), rest.index, [rest])) == rest


@given(outputs(), ends, UNKNOWN)
def test_a_result_is_the_log_and_the_end(
    pieces: list[Delta], end: dict[str, Any], unknown: dict[str, Any]
) -> None:
    class Made:
        token_ids, text = joined_ids(pieces), "".join(piece.text for piece in pieces)
        logprobs, vectors = joined(pieces, "logprobs"), joined(pieces, "vectors")
        scores, sparse, colbert = (joined(pieces, name) for name in ("scores", "sparse", "colbert"))

    result = codec.result(Made(), **end)
    kept = json.loads(json.dumps(codec.end_of(result)))
    log = [merged_whole(pieces), merged(opening("t", 1), len(Made.token_ids), [], kept).encode()]
    assert LoggedOutput.of(log).result(kept) == json.loads(json.dumps(result))
    assert LoggedOutput.of(log).result({**kept, **unknown}) == {**json.loads(json.dumps(result)), **unknown}
    assert kept.keys() <= ResultSummary.model_fields.keys()
    read = End.model_validate({**kept, **unknown})
    last = StreamDelta.model_validate_json(json.dumps({**json.loads(log[-1]), **unknown}))
    for name in StreamDelta.model_fields.keys() & end.keys() - {"attempt"}:
        assert getattr(last, name) == getattr(read, name) == end[name]
    if {"stop_reason", "usage", "timing", "model"} <= end.keys():
        whole = GenerationResult.model_validate(result)
        assert (whole.usage, whole.timing, whole.logprobs) == (end["usage"], end["timing"], Made.logprobs)


def joined_ids(pieces: list[Delta]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


def test_a_delta_without_optional_fields_has_the_bytes_that_it_had() -> None:
    assert merged(opening("t", 1), 7, [Delta(7, (5,), 'é"')]) == (
        '{"task_id":"t","attempt":1,"index":7,"token_ids":[5],"text":"\\u00e9\\"","finish_reason":null}'
    )
