"""When deltas come: first tokens and ends at once, all else once an interval."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest

from petiole.gpu_worker import Delta, FinishReason, HandedBack
from petiole.gpu_worker.exceptions import EngineClosed
from petiole.gpu_worker.preparation.output import RequestOutput
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.scheduling.scheduled_sequence import Followers, ScheduledSequence, SequenceInputs
from petiole.gpu_worker.scheduling.state import Admitted, Emission, Generated, SequenceEnded
from petiole.gpu_worker.scheduling.stopping import Finish, StopRules
from petiole.gpu_worker.threads.detokenization import TextThread
from tests.support.toy_engine import request
from tests.support.toy_text import ToyTokenizer

NEVER_S = 1e6
LENGTH = Finish(FinishReason.LENGTH, "max_tokens")


class Output:
    """One request, whose tokens the test makes up."""

    def __init__(self, text: TextThread, **options: Any) -> None:
        self.text = text
        asked = request(**options)
        self.deltas: queue.Queue[Delta] = queue.Queue()
        self.handle = Handle(asked, text, on_delta=lambda _, delta: self.deltas.put(delta))  # type: ignore[arg-type]
        output = RequestOutput(self.handle)
        rules = StopRules.of(asked.sampling, frozenset(), 4, 96)
        output.open(ToyTokenizer(), [5, 6, 7, 8], rules)  # type: ignore[arg-type]
        self.seq = ScheduledSequence(
            asked, SequenceInputs([5, 6, 7, 8]), rules, followers=Followers(output=output)
        )

    def post(self, *tokens: int, end: Finish | BaseException | None = None) -> None:
        generated: Emission = Generated(self.seq, tokens, None) if tokens else Admitted(self.seq)
        self.text.post([generated] if end is None else [generated, SequenceEnded(self.seq, end)])

    def next(self) -> tuple[int, tuple[int, ...]]:
        delta = self.deltas.get(timeout=30)
        return delta.index, delta.token_ids

    @property
    def waits(self) -> bool:
        """Has nothing come, though the thread has delivered for another since?"""
        other = Output(self.text)
        other.post(1)
        other.next()
        return self.deltas.empty()


def text_thread(interval_s: float) -> TextThread:
    text = TextThread(
        "toy", lambda seq: None, lambda handle: None, time.perf_counter, lambda error: None, interval_s
    )
    text.start()
    return text


@pytest.fixture
def text() -> Iterator[TextThread]:
    """One that has just delivered, and will never again for the interval's sake."""
    text = text_thread(NEVER_S)
    text.flush()
    yield text
    text.close()


def test_the_first_token_and_the_end_come_at_once_and_all_between_as_one_delta(text: TextThread) -> None:
    output = Output(text)
    output.post(1)
    assert output.next() == (0, (1,))
    output.post(2)
    output.post(3)
    assert output.waits
    output.post(4, end=LENGTH)
    assert output.next() == (1, (2, 3, 4))
    assert output.handle.result(timeout=30).token_ids == (1, 2, 3, 4)


def test_an_output_is_held_until_a_stop_string_ends_it(text: TextThread) -> None:
    output = Output(text, stop=["de"])
    output.post(0)
    assert output.next() == (0, (0,))
    output.post(1)
    output.post(3)
    assert output.waits
    output.post(4)
    assert output.next() == (1, (1, 3, 4))
    result = output.handle.result(timeout=30)
    assert (result.text, result.stop_reason) == ("ab", "de")


def test_an_admission_is_heard_of_at_once(text: TextThread) -> None:
    output = Output(text)
    output.seq.scheduled_s = 1.0
    output.post()
    assert output.waits
    assert output.handle.admitted


def test_what_is_held_comes_when_the_interval_has_passed() -> None:
    text = text_thread(interval_s=0.001)
    output = Output(text)
    for i in range(50):
        output.post(i)
        assert output.next() == (i, (i,))
    text.close()


@pytest.mark.parametrize("way", ["flush", "close"])
def test_what_is_held_is_not_lost(text: TextThread, way: str) -> None:
    output = Output(text)
    output.post(1)
    output.next()
    output.post(2)
    getattr(text, way)()
    assert output.next() == (1, (2,))


def test_what_was_made_is_delivered_before_a_request_is_handed_back(text: TextThread) -> None:
    output = Output(text)
    output.post(1)
    output.post(2)
    output.post(end=HandedBack("the worker ends"))
    with pytest.raises(HandedBack):
        output.handle.result(timeout=30)
    tokens = [token for delta in output.deltas.queue for token in delta.token_ids]
    assert tokens == [1, 2]


def test_a_refusal_ends_its_request_whenever_it_comes() -> None:
    text = text_thread(NEVER_S)
    refused: list[Handle] = []

    def refuse() -> None:
        output = Output(text)
        refused.append(output.handle)
        text.refuse(output.seq.output, EngineClosed("closed"))

    text.call(lambda: (text._close(), refuse()))  # type: ignore[func-returns-value]
    text.close()
    refuse()
    for handle in refused:
        with pytest.raises(EngineClosed):
            handle.result(timeout=30)
