"""Numbers and places: a client that comes back with any number gets exactly the rest, however deltas were
split."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, strategies as st

from petiole.contract.results.outputs import Prepared, TokenLogprobs, Usage
from petiole.contract.results.task_result import StreamDelta
from petiole.gateway.core.assembly import OutputAssembler
from petiole.gateway.core.events import StreamEvent
from petiole.gateway.core.failures import Failure
from petiole.gateway.core.parts import (
    CollectedOutput,
    ItemDone,
    ItemStarted,
    OutputEnded,
    OutputStarted,
    Part,
    PromptTokens,
    TextDelta,
    TokenCount,
)
from petiole.gateway.core.record import RequestRecord, dump, load
from petiole.gateway.core.streams import ClientStream, Frame, cursor_of

RECORD = RequestRecord(id="x-1", kind="test", created=1, model="m", tasks=["t"])


class Plain:
    """The least view: an event for each part, as JSON."""

    def begin(self, choice: int) -> Iterable[StreamEvent]:
        return [StreamEvent("begin"), StreamEvent("more")]

    def events(self, choice: int, part: Part) -> Iterable[StreamEvent]:
        if isinstance(part, TextDelta):
            return [StreamEvent("text", None, part.text, part.tokens)]
        fields = [placed.token.token_id for placed in part.tokens] if isinstance(part, OutputEnded) else None
        return [StreamEvent(type(part).__name__, fields)]

    def finish(self) -> Iterable[StreamEvent]:
        return [StreamEvent("finish")]

    def encode(self, choice: int, number: int, event: StreamEvent) -> bytes:
        ids = [placed.token.token_id for placed in event.tokens]
        return json.dumps([choice, number, event.name, event.text, event.fields, ids]).encode()

    def event_name(self, event: StreamEvent) -> str | None:
        return event.name


def spelled(text: str) -> list[TokenLogprobs]:
    """The tokens of a text: some have half a character."""
    data, tokens = text.encode(), []
    while data:
        size = 1 + data[0] % 3
        tokens.append(TokenLogprobs(len(tokens), -0.5, [], None, [list(data[:size])]))
        data = data[size:]
    return [*tokens, TokenLogprobs(len(tokens), -0.1, [], None, [list(b"<end>")])]


def deltas(text: str, cuts: Sequence[int], logprobs: bool = True) -> list[StreamDelta]:
    """A log of this text, split behind these tokens, whose text is held back as a worker holds it back."""
    tokens, found, at, shown = spelled(text), [], 0, 0
    for cut in [*sorted({cut for cut in cuts if 0 < cut < len(tokens)}), len(tokens)]:
        last = cut == len(tokens)
        data = b"".join(bytes(token.bytes[0]) for token in tokens[:cut] if token.bytes)
        whole = text if last else data.decode(errors="ignore")
        found.append(
            StreamDelta(
                task_id="t",
                attempt=1,
                index=at,
                token_ids=[token.token_id for token in tokens[at:cut]],
                text=whole[shown:],
                logprobs=tokens[at:cut] if logprobs else None,
                finish_reason="stop" if last else None,
                usage=Usage(3, 0, len(tokens)) if last else None,
            )
        )
        at, shown = cut, len(whole)
    return found


def frames(log: Iterable[StreamDelta], after: Sequence[int] = ()) -> list[Frame]:
    stream = ClientStream(Plain(), RECORD, after)
    found = stream.begin()
    for delta in log:
        found += stream.read(0, delta)
    assert stream.finished
    return found


def atoms(found: Iterable[Frame]) -> list[object]:
    """What each number stands for: a character with its tokens, or a structural event."""
    seen: list[object] = []
    for frame in found:
        _, number, name, text, fields, ids = json.loads(frame.data)
        assert frame.cursor == str(number)
        if text is None:
            seen.append((name, fields))
        else:
            seen += list(text)
            seen.append(("tokens", ids)) if ids else None
    return seen


TEXTS = st.text(alphabet="ab é€😀\n", max_size=12)
CUTS = st.lists(st.integers(1, 40), max_size=8)


@given(TEXTS, CUTS)
def test_a_log_replayed_from_each_number_gives_the_suffix(text: str, cuts: list[int]) -> None:
    log = deltas(text, cuts)
    whole = frames(log)
    last = int(whole[-1].cursor)
    tokens = sum(len(json.loads(frame.data)[5]) for frame in whole)
    for after in range(-1, last + 1):
        rest = frames(log, [after])
        before = [frame for frame in whole if int(frame.cursor) <= after]
        assert [frame.cursor for frame in rest] == [frame.cursor for frame in whole[len(before) :]]
        assert not rest or int(rest[-1].cursor) == last
        shown = "".join(json.loads(frame.data)[3] or "" for frame in rest)
        structural = sum(json.loads(frame.data)[3] is None for frame in rest)
        assert structural + len(shown) == last - after
        assert text.endswith(shown)
        assert sum(len(json.loads(frame.data)[5]) for frame in rest) <= tokens


@given(TEXTS, CUTS, CUTS, st.data())
def test_numbers_do_not_depend_on_how_the_output_fell_into_deltas(
    text: str, cuts: list[int], others: list[int], data: st.DataObject
) -> None:
    """A client reads one split up to any event of it, and the rest from another split: each token once, too."""
    one, other = frames(deltas(text, cuts)), deltas(text, others)
    seen = one[: data.draw(st.integers(0, len(one)))]
    rest = frames(other, [int(seen[-1].cursor) if seen else -1])
    assert joined([*seen, *rest]) == joined(one)


def joined(found: Iterable[Frame]) -> tuple[str, list[int], list[str]]:
    read = [json.loads(frame.data) for frame in found]
    text = "".join(one[3] or "" for one in read)
    ids = [token for one in read for token in [*one[5], *(one[4] or ())]]
    return text, ids, [one[2] for one in read if one[3] is None]


@given(TEXTS, CUTS)
def test_every_token_comes_once_in_order_with_its_first_character(text: str, cuts: list[int]) -> None:
    at = ids = 0
    for frame in frames(deltas(text, cuts)):
        _, _, _, shown, rest, tokens = json.loads(frame.data)
        for token in [*tokens, *(rest or ())]:
            assert token == ids
            ids += 1
        at += len(shown or "")
    assert (at, ids) == (len(text), len(spelled(text)))


@given(TEXTS, CUTS, CUTS)
def test_streamed_and_whole_are_the_same(text: str, cuts: list[int], others: list[int]) -> None:
    wholes = []
    for split in (cuts, others):
        reading, whole = OutputAssembler(), CollectedOutput()
        for delta in deltas(text, split):
            for part in reading.read(delta):
                whole.add(part)
        tokens = [placed.token for placed in whole.tokens]
        wholes.append((whole.text(), tokens, whole.ended and whole.ended.usage))
    assert wholes[0] == wholes[1]
    assert wholes[0][:2] == (text, spelled(text))


def test_parts_open_and_close_and_a_failed_output_just_ends() -> None:
    def parts(*log: StreamDelta) -> list[str]:
        reading = OutputAssembler()
        return [type(part).__name__ for delta in log for part in reading.read(delta)]

    assert parts(*deltas("abc", [1])) == ["ItemStarted", "TextDelta", "TextDelta", "ItemDone", "OutputEnded"]
    assert parts(*deltas("", [])) == ["ItemStarted", "ItemDone", "OutputEnded"]
    begun, last = deltas("abcdef", [1])[0], deltas("", [])[0]
    failed = last.model_copy(update={"finish_reason": "error", "error": {"type": "WorkersLost"}})
    assert parts(begun, failed) == ["ItemStarted", "TextDelta", "OutputEnded"]
    prepared = deltas("", [])[0].model_copy(update={"prepared": Prepared("m", "f", 3, ""), "finish_reason": None})
    assert [*OutputAssembler("t").read(prepared)] == [OutputStarted(3)]
    of_prompt = begun.model_copy(update={"index": -1, "text": ""})
    assert parts(of_prompt, begun) == ["PromptTokens", "ItemStarted", "TextDelta"]
    counting = OutputAssembler("t", counts=True)
    assert [counting.read(one)[0] for one in (prepared, begun)] == [
        TokenCount(3, one.end) for one in (prepared, begun)
    ]
    assert {OutputStarted, PromptTokens, TokenCount, ItemStarted, TextDelta, ItemDone, OutputEnded} == set(
        Part.__args__
    )


def test_choices_have_numbers_of_their_own() -> None:
    record = RequestRecord(id="x-1", kind="test", created=1, model="m", tasks=["t0", "t1"])
    log = deltas("abc", [1, 2], logprobs=False)

    def read(order: str, after: Sequence[int] = ()) -> list[tuple[str, list[object]]]:
        stream, left = ClientStream(Plain(), record, after), {"0": list(log), "1": list(log)}
        found = stream.begin()
        for choice in order:
            found += stream.read(int(choice), left[choice].pop(0))
        return [(frame.cursor, json.loads(frame.data)[:4]) for frame in found]

    one = read("001101" + "0" * (len(log) - 3) + "1" * (len(log) - 3))
    for cut, (cursor, _) in enumerate(one):
        rest = read("0" * len(log) + "1" * len(log), cursor_of(cursor, 2))
        for choice in (0, 1):
            of = [event for _, event in [*one[: cut + 1], *rest] if event[0] == choice]
            assert "".join(str(event[3] or "") for event in of) == "abc"
            assert sum(event[2] == "OutputEnded" for event in of) == 1


@pytest.mark.parametrize("text", ["", "1.2", "x", "1e3", "-2", "९", "1" * 17])
def test_a_cursor_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(Failure) as refused:
        cursor_of(text, 1)
    assert (refused.value.status, refused.value.param) == (400, "starting_after")


def test_a_record_survives_its_codec_and_a_later_versions_fields() -> None:
    record = RequestRecord(id="x", kind="k", created=2, model="m", tasks=["a", "b"], asked={"n": 2}, readers=True)
    assert load(dump(record)) == record
    assert load(dump(record)[:-1] + b',"later":{"x":1}}') == record
