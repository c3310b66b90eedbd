"""Whatever is missed, repeated or read in between, what comes out is the stream, once and in order.

The model is the log itself: the deltas of one stream, joined.
"""

from __future__ import annotations

from hypothesis import given, strategies as st

from petiole.contract.results.task_result import StreamDelta
from petiole.tasks.streams.assembly import StreamAssembler, without


def delta(index: int, count: int, attempt: int = 1, *, last: bool = False) -> StreamDelta:
    """Tokens are their own positions; a token's text is its number and, for every third, nothing."""
    tokens = list(range(index, index + count))
    return StreamDelta(
        task_id="t",
        attempt=attempt,
        index=index,
        token_ids=tokens,
        text=text_of(tokens),
        finish_reason="stop" if last else None,
    )


def text_of(tokens: list[int]) -> str:
    return "".join(f"{token}," for token in tokens if token % 3 and token > 0)


@st.composite
def logs(draw: st.DrawFn, start: int | None = None, end: int | None = None) -> list[StreamDelta]:
    """A finished stream in pieces, some of them by later attempts; the last piece may be empty. It may begin with
    pieces of the prompt, and none is of both."""
    total = draw(st.integers(0, 40)) if end is None else end
    index = draw(st.integers(-12, 3).map(lambda n: min(n, 0))) if start is None else start
    attempt, log = 1, list[StreamDelta]()
    while index < total:
        count = draw(st.integers(1, (0 if index < 0 else total) - index))
        attempt += draw(st.booleans())
        log.append(delta(index, count, attempt))
        index += count
    log.append(delta(index, 0, attempt, last=True))
    first = next((place for place, part in enumerate(log) if not part.index), None)
    if first is not None and (start or first):
        log[first] = log[first].model_copy(update={"after_prompt": True})
    return log


class Reader:
    """Reads a log that grows, hearing only what `hears` says, each time perhaps twice."""

    def __init__(self) -> None:
        self.assembler = StreamAssembler()
        self.out: list[StreamDelta] = []

    def hear(self, message: StreamDelta, log: list[StreamDelta]) -> None:
        new = self.assembler.published(message)
        if new is None:
            self.read(log)
        else:
            self.out += new

    def read(self, log: list[StreamDelta]) -> None:
        new = self.assembler.logged(log[self.assembler.read_from :])
        if new is None:
            self.assembler.rewind()
            new = self.assembler.logged(log)
        assert new is not None
        self.out += new

    def check(self, log: list[StreamDelta]) -> None:
        position, tokens = log[0].index, list(range(log[0].index, log[-1].end))
        assert self.assembler.finished
        assert [token for part in self.out for token in part.token_ids] == tokens
        assert "".join(part.text for part in self.out) == text_of(tokens)
        assert [part.finish_reason for part in self.out[:-1]] == [None] * (len(self.out) - 1)
        for part in self.out:
            assert part.index == position
            position = part.end


@given(logs(), st.data())
def test_every_token_once_and_in_order(log: list[StreamDelta], data: st.DataObject) -> None:
    reader = Reader()
    for length, message in enumerate(log, start=1):
        for _ in range(data.draw(st.sampled_from([0, 1, 1, 2]), label="times heard")):
            reader.hear(message, log[:length])
        if data.draw(st.booleans(), label="an echo of something older"):
            reader.hear(data.draw(st.sampled_from(log[:length])), log[:length])
        if data.draw(st.integers(0, 4), label="silence") == 0:
            reader.read(log[:length])
    reader.read(log)
    reader.check(log)


@given(logs(), st.data())
def test_a_log_that_begins_anew_in_other_pieces(log: list[StreamDelta], data: st.DataObject) -> None:
    """Redis loses the log's last entries, and the next attempt writes the same tokens in deltas of its own."""
    reader = Reader()
    seen = data.draw(st.integers(0, len(log) - 1), label="read before the loss")
    reader.read(log[:seen])
    kept = data.draw(st.integers(0, seen), label="entries left")
    start = log[kept - 1].end if kept else log[0].index
    anew = log[:kept] + [
        part.model_copy(update={"attempt": log[-1].attempt + part.attempt})
        for part in data.draw(logs(start, log[-1].end), label="written anew")
    ]
    for length in range(kept + 1, len(anew) + 1):
        if data.draw(st.booleans(), label="heard"):
            reader.hear(anew[length - 1], anew[:length])
    reader.read(anew)
    reader.read(anew)
    reader.check(log)


def test_a_cut_delta_keeps_what_belongs_to_its_tokens() -> None:
    whole = delta(3, 4).model_copy(update={"values": [None, 0.5, None, 0.25], "bins": [None, [512], None, [256]]})
    cut = without(whole, 2, 2)
    assert (cut.index, cut.token_ids, cut.text, cut.values) == (5, [5, 6], whole.text[2:], [None, 0.25])
    assert cut.bins == [None, [256]]
