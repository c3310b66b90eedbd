"""The long trials: the tests that `make test` leaves to `make test-all`. All of them have the marker `slow`.

A trial repeats with many seeds, kills, versions, servers or cases what one short test shows. `TRIALS` names files
of trials and, beside each, its representatives: the tests of that file that `make test` runs. So `make test` has
every kind of test. A name without brackets stands for the test with all its parameters.

`rest` does the same for the parameters of one test; a single test has the marker itself. Of the examples of
slow properties `make test` tries a quarter (`examples`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

TRIALS: dict[str, tuple[str, ...]] = {
    "tests/bench/test_workloads.py": (
        "test_a_workload_writes_its_results[cache]",
        "test_a_workload_writes_its_results[scheduler]",
        "test_a_workload_writes_its_results[transport]",
        "test_the_command_line_names_every_workload",
    ),
    "tests/chaos": (),
    "tests/e2e/test_adapters.py": (),
    "tests/e2e/test_completing.py": ("test_when_a_worker_dies_while_it_completes_another_does_the_rest",),
    "tests/e2e/test_counting.py": (
        "test_counts_of_the_real_engine_are_those_of_its_requests",
        "test_bad_input_is_named_where_it_is_given",
    ),
    "tests/e2e/test_cut_connections.py": ("test_wherever_the_connection_is_cut[redis-linked]",),
    "tests/e2e/test_damaged_broker.py": ("test_a_worker_whose_queue_is_no_list_serves_the_other_priorities",),
    "tests/e2e/test_exporter.py": (
        "test_a_fleet_is_scraped",
        "test_every_metric_is_documented",
        "test_a_port_that_is_none",
    ),
    "tests/e2e/test_fault_list.py": ("test_a_worker_is_silenced", "test_nobody_serves_a_queue"),
    "tests/e2e/test_foreign_tasks.py": ("test_foreign_tasks_run_beside_the_engine",),
    "tests/e2e/test_homes.py": ("test_each_conversation_stays_where_it_began",),
    "tests/e2e/test_limits.py": (
        "test_urgent_tasks_overtake_the_queue",
        "test_a_job_that_has_ended_is_freed_without_the_garbage_collector",
    ),
    "tests/e2e/test_models.py": ("test_a_name_finds_workers_and_the_queue_of_a_fleet_that_is_scaled_to_zero",),
    "tests/e2e/test_named_faults.py": (
        "test_a_death_a_redelivery_and_what_was_resumed_are_counted",
        "test_each_token_takes_a_step",
    ),
    "tests/e2e/test_one_process.py": (),
    "tests/e2e/test_recovery.py": (
        "test_after_sigkill_the_next_delta_comes_long_before_the_lease_expires",
        "test_a_stopped_worker_loses_its_tasks_and_cannot_write_when_it_goes_on",
        "test_a_warm_shutdown_hands_over_at_once",
        "test_a_redis_restart_is_survived",
    ),
    "tests/e2e/test_refused_results.py": ("test_what_nobody_can_store_fails_at_once_and_holds_up_no_other",),
    "tests/e2e/test_sentinel.py": (
        "test_a_submission_that_is_confirmed_survives_the_primary",
        "test_a_name_that_no_sentinel_knows_is_named",
    ),
    "tests/e2e/test_steering.py": ("test_a_paused_worker_keeps_its_tasks_and_takes_no_more",),
    "tests/e2e/test_stop_while_loading.py": ("test_a_second_interrupt_changes_nothing",),
    "tests/fuzz": ("test_what_the_gate_lets_through_is_handled", "test_a_valid_message_runs_as_it_is"),
    "tests/gateway/test_survival.py": (
        "test_a_stream_goes_on_at_another_gateway_when_its_own_has_died",
        "test_a_stream_goes_on_while_its_worker_is_killed",
    ),
    "tests/project/test_wheel.py": ("test_without_a_checkout_there_are_no_benchmarks",),
    "tests/protocol": ("test_a_worse_protocol_is_found_out",),
}


def is_slow(path: str, name: str) -> bool:
    """Whether `TRIALS` has the test: `path` is that of its file, `name` has its parameters in brackets."""
    for trials, representatives in TRIALS.items():
        if path == trials or path.startswith(f"{trials}/"):
            return not {name, name.partition("[")[0]} & set(representatives)
    return False


def rest(values: Iterable[Any], short: int = 1) -> list[Any]:
    """Parameters: the first `short` of them for `make test`, the rest for `make test-all`. A tuple has several."""
    listed = [value if isinstance(value, tuple) else (value,) for value in values]
    marks = [()] * short + [pytest.mark.slow] * (len(listed) - short)
    return [pytest.param(*value, marks=mark) for value, mark in zip(listed, marks, strict=False)]


short = False
"""Whether this is `make test`."""

forks = False
"""Whether a nursery forks workers and gateways: in `make test` and in `make trials`."""


def examples(most: int) -> int:
    """How many examples a property tries that takes long for each."""
    return most // 4 if short else most
