"""The sequence's state machine: what may be scheduled when, and what applying does. No torch, no cache."""

from __future__ import annotations

import subprocess
import sys

import pytest

from petiole.gpu_worker.scheduling.outcomes import (
    AcceptedExceedsScheduled,
    AllocationFailed,
    GenerationComplete,
    MissingTokenOnFinalChunk,
    NotIdle,
    PrefillComplete,
    PrefillNotComplete,
    PrefillOverrun,
    SequenceState,
    TokenOnNonFinalChunk,
    WrongDanglingCount,
    WrongState,
)
from petiole.gpu_worker.scheduling.sequence import SchedulableSequence
from petiole.gpu_worker.threads import history
from petiole.gpu_worker.threads.history import Remembering, history_of
from tests.support.sequences import Pages, prefilled, sequence

# ---------------------------------------------------------------- the classic machine


def test_a_life_from_prefill_to_the_end() -> None:
    seq = sequence(8, 3, max_outstanding=1)
    seq.schedule_prefill(8)
    assert seq.state is SequenceState.PREFILL_SCHEDULED
    seq.apply_prefill(1)
    assert (seq.kv_position, seq.tail_tokens, seq.state) == (8, 1, SequenceState.IDLE)
    seq.schedule_decode()
    seq.apply_decode(2)
    seq.schedule_decode()
    seq.apply_decode(3)
    assert not seq.can_decode
    assert seq.remaining_tokens == 0
    assert seq.generated == [1, 2, 3]
    assert (seq.kv_position, seq.tail_tokens) == (10, 1)
    seq.release()
    assert seq.kv_position == 0


def test_only_the_final_chunk_yields_a_token() -> None:
    seq = sequence(8)
    seq.schedule_prefill(4)
    with pytest.raises(TokenOnNonFinalChunk):
        seq.apply_prefill(1)
    seq.apply_prefill()
    seq.schedule_prefill(4)
    with pytest.raises(MissingTokenOnFinalChunk):
        seq.apply_prefill()
    seq.apply_prefill(1)
    assert (seq.kv_position, seq.tail_tokens) == (8, 1)


def test_speculation_accepts_a_prefix_and_gives_the_rest_back() -> None:
    pages = Pages(64)
    seq = sequence(8)
    seq.match_and_add_prefix(pages, 0)
    seq.schedule_prefill(8)
    seq.apply_prefill(1)
    seq.schedule_speculative(5)
    assert pages.kv_capacity == 13
    with pytest.raises(AcceptedExceedsScheduled):
        seq.apply_speculative([2, 3, 4, 5, 6, 7])
    with pytest.raises(AcceptedExceedsScheduled):
        seq.apply_speculative([])
    seq.apply_speculative([2, 3, 4])
    assert (seq.generated, seq.kv_position, seq.tail_tokens) == ([1, 2, 3, 4], 11, 1)
    assert pages.kv_capacity == 11


def test_a_state_goes_back_before_the_drafts_and_the_accepted_ones_are_repeated() -> None:
    seq = sequence(8, 40, keeps_state=True)
    seq.schedule_prefill(8)
    seq.apply_prefill(1)
    seq.schedule_speculative(5)
    seq.apply_speculative([2, 3, 4])
    assert (seq.generated, seq.kv_position, seq.n_repeated) == ([1, 2, 3, 4], 9, 2)
    seq.schedule_speculative(2)
    assert (seq.newest.n_positions, seq.newest.max_yield) == (4, 2)
    seq.apply_speculative([5])
    assert (seq.kv_position, seq.n_repeated) == (12, 0), "the repeated inputs are certain"
    seq.schedule_speculative(3)
    seq.apply_speculative([6, 7, 8])
    assert (seq.kv_position, seq.n_repeated) == (15, 0), "nothing was rejected"
    seq.schedule_speculative(4)
    seq.apply_speculative([9, 10])
    seq.schedule_decode()
    assert (seq.newest.n_positions, seq.newest.max_yield) == (2, 1)
    assert seq.can_decode, "it yields exactly one token"
    seq.schedule_decode()
    seq.apply_decode(11)
    seq.apply_decode(12)
    assert (seq.kv_position, seq.tail_tokens) == (19, 1)


def test_speculation_is_exclusive_until_it_is_applied() -> None:
    seq = prefilled()
    seq.schedule_speculative(3)
    assert not seq.can_decode
    for schedule in (seq.schedule_decode, lambda: seq.schedule_speculative(2)):
        with pytest.raises(NotIdle):
            schedule()
    seq.apply_speculative([2])
    seq.schedule_decode()
    with pytest.raises(NotIdle):
        seq.schedule_speculative(2)


def test_operations_go_ahead_of_a_verification_for_the_most_tokens() -> None:
    pages = Pages(64)
    seq = sequence(8, 40, goes_ahead=True)
    seq.match_and_add_prefix(pages, 0)
    seq.schedule_prefill(8)
    seq.schedule_speculative(4)
    seq.apply_prefill(1)
    assert (seq.scheduled_position, seq.in_doubt) == (12, 3)
    seq.schedule_speculative(3)
    assert (seq.scheduled_position, pages.kv_capacity) == (15, 15)
    assert not seq.can_decode, "two are outstanding"
    seq.apply_speculative([2, 3])
    assert (seq.kv_position, seq.scheduled_position, seq.in_doubt) == (10, 13, 2)
    assert pages.kv_capacity == 13, "what the next operation may write stays"
    seq.schedule_decode()
    seq.apply_speculative([4])
    seq.apply_decode(5)
    assert (seq.generated, seq.kv_position, seq.tail_tokens) == ([1, 2, 3, 4, 5], 12, 1)


def test_an_operation_that_went_ahead_repeats_what_was_accepted_before_a_state() -> None:
    seq = sequence(8, 40, keeps_state=True, goes_ahead=True)
    seq.schedule_prefill(8)
    seq.apply_prefill(1)
    seq.schedule_speculative(5)
    seq.schedule_speculative(2)
    assert (seq.scheduled_position, seq.in_doubt) == (15, 4 + 1)
    seq.apply_speculative([2, 3, 4])
    assert (seq.kv_position, seq.newest.n_positions, seq.scheduled_position) == (9, 4, 13)
    seq.schedule_decode()
    seq.apply_speculative([5, 6])
    assert (seq.kv_position, seq.newest.n_positions) == (13, 1), "nothing was rejected"
    seq.apply_decode(7)
    assert (seq.generated, seq.kv_position, seq.tail_tokens) == ([1, 2, 3, 4, 5, 6, 7], 14, 1)


def test_a_budget_counts_the_most_tokens_in_flight() -> None:
    seq = sequence(4, 6, goes_ahead=True)
    seq.schedule_prefill(4)
    seq.apply_prefill(1)
    seq.schedule_speculative(4)
    with pytest.raises(GenerationComplete):
        seq.schedule_speculative(2)
    seq.schedule_decode()
    seq.apply_speculative([2])
    assert seq.remaining_tokens == 3


def test_revert_takes_back_the_newest_operation() -> None:
    pages = Pages(64)
    seq = sequence(4)
    seq.match_and_add_prefix(pages, 0)
    seq.schedule_prefill(4)
    seq.schedule_decode()
    assert seq.scheduled_position == 5
    seq.revert_schedule()
    assert (seq.scheduled_position, seq.inflight_refs) == (4, 1)
    assert seq.state is SequenceState.PREFILL_SCHEDULED
    seq.revert_schedule()
    assert (seq.scheduled_position, seq.inflight_refs) == (0, 0)
    with pytest.raises(WrongState):
        seq.revert_schedule()


# ---------------------------------------------------------------- named errors


def test_prefill_is_refused_by_name() -> None:
    seq = sequence(4)
    for chunk in (0, 5):
        with pytest.raises(PrefillOverrun):
            seq.schedule_prefill(chunk)
    seq.schedule_prefill(4)
    with pytest.raises(PrefillComplete):
        seq.schedule_prefill(1)


def test_decode_is_refused_by_name() -> None:
    with pytest.raises(PrefillNotComplete):
        sequence(4).schedule_decode()
    done = prefilled(4, 1)
    with pytest.raises(GenerationComplete):
        done.schedule_decode()
    full = prefilled(4, 10, max_outstanding=1)
    full.schedule_decode()
    with pytest.raises(NotIdle):
        full.schedule_decode()


def test_more_than_one_token_without_kv_is_refused() -> None:
    seq = prefilled(4)
    seq.generated.append(9)  # nobody may do this
    with pytest.raises(WrongDanglingCount):
        seq.schedule_decode()


def test_pages_that_are_not_there_are_an_allocation_failure() -> None:
    seq = sequence(4)
    seq.match_and_add_prefix(Pages(4), 0)
    seq.schedule_prefill(4)
    seq.apply_prefill(1)
    with pytest.raises(AllocationFailed):
        seq.schedule_decode()
    assert seq.is_idle


@pytest.mark.parametrize("apply", ["apply_prefill", "apply_decode", "apply_speculative"])
def test_applying_the_wrong_kind_changes_nothing(apply: str) -> None:
    seq = sequence(4)
    argument = {"apply_prefill": None, "apply_decode": 1, "apply_speculative": [1]}[apply]
    with pytest.raises(WrongState):
        getattr(seq, apply)(argument)
    if apply != "apply_prefill":
        seq.schedule_prefill(4)
        with pytest.raises(WrongState):
            getattr(seq, apply)(argument)
        assert seq.inflight_refs == 1


def test_release_needs_no_outstanding_operation() -> None:
    seq = prefilled()
    seq.schedule_decode()
    with pytest.raises(NotIdle):
        seq.release()


def test_an_empty_prompt_is_no_sequence() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        SchedulableSequence([], 4)


# ---------------------------------------------------------------- two outstanding operations


def test_a_decode_may_be_scheduled_behind_a_final_chunk_and_behind_a_decode() -> None:
    seq = sequence(4)
    seq.schedule_prefill(4)
    seq.schedule_decode()
    assert (seq.scheduled_position, seq.kv_position) == (5, 0)
    seq.apply_prefill(1)
    seq.schedule_decode()
    assert (seq.scheduled_position, seq.kv_position) == (6, 4)
    seq.apply_decode(2)
    seq.apply_decode(3)
    assert seq.generated == [1, 2, 3]


def test_a_decode_may_not_follow_a_chunk_that_yields_nothing() -> None:
    seq = sequence(4)
    seq.schedule_prefill(3)
    with pytest.raises(PrefillNotComplete):
        seq.schedule_decode()


def test_the_budget_counts_tokens_that_are_still_outstanding() -> None:
    seq = prefilled(4, 2)
    seq.schedule_decode()
    assert seq.remaining_tokens == 0
    with pytest.raises(GenerationComplete):
        seq.schedule_decode()


def test_one_outstanding_operation_is_the_classic_machine() -> None:
    seq = sequence(4, max_outstanding=1)
    seq.schedule_prefill(4)
    with pytest.raises(NotIdle):
        seq.schedule_decode()


def test_a_zombie_discards_and_is_released_after_its_last_operation() -> None:
    seq = prefilled()
    seq.schedule_decode()
    seq.schedule_decode()
    seq.apply_decode(2)
    seq.finalized = True
    assert not seq.can_decode
    seq.discard()
    assert seq.is_idle
    assert seq.generated == [1, 2]
    seq.release()


def test_only_a_finalized_sequence_discards() -> None:
    seq = prefilled()
    seq.schedule_decode()
    with pytest.raises(WrongState):
        seq.discard()


# ---------------------------------------------------------------- recompute


def test_a_preempted_sequence_recomputes_all_but_its_tail() -> None:
    seq = prefilled(4)
    seq.schedule_decode()
    seq.apply_decode(2)
    seq.release()
    assert (seq.prefill_target, seq.is_recompute, seq.last_token) == (5, True, 2)
    seq.match_and_add_prefix(None, 3)
    seq.schedule_prefill(2)
    seq.schedule_decode()  # behind a final chunk whose next input is known
    with pytest.raises(TokenOnNonFinalChunk):
        seq.apply_prefill(9)
    seq.apply_prefill()
    seq.apply_decode(3)
    assert (seq.generated, seq.kv_position, seq.tail_tokens) == ([1, 2, 3], 6, 1)


def test_one_known_token_is_a_recompute_of_exactly_the_prompt() -> None:
    seq = sequence(4, generated=[7])
    assert (seq.prefill_target, seq.is_recompute) == (4, True)
    seq.schedule_prefill(4)
    seq.apply_prefill()
    assert (seq.generated, seq.tail_tokens) == ([7], 1)


def test_at_least_one_position_is_computed() -> None:
    with pytest.raises(PrefillOverrun):
        sequence(4).match_and_add_prefix(None, 4)
    seq = sequence(4)
    assert seq.match_and_add_prefix(None, 3) == 3
    seq.schedule_prefill(1)
    seq.apply_prefill(1)


def test_tokens_are_sliced_across_prompt_and_output() -> None:
    seq = sequence(3, generated=[7, 8, 9])
    assert seq.tokens(0, 2).tolist() == [100, 101]
    assert seq.tokens(2, 5).tolist() == [102, 7, 8]
    assert seq.tokens(4).tolist() == [8, 9]


# ---------------------------------------------------------------- history


def test_history_is_a_bounded_ring_and_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert history_of(prefilled()) == ""
    monkeypatch.setattr(history, "LENGTH", 3)
    seq = Remembering(list(range(4)), 8)
    seq.schedule_prefill(4)
    seq.apply_prefill(1)
    seq.schedule_decode()
    seq.revert_schedule()
    assert history_of(seq) == "apply_prefill@4+0 schedule_decode@4+1 revert_schedule@4+0"


def test_the_state_machines_need_no_torch() -> None:
    code = "import sys; import petiole.gpu_worker.scheduling.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
