"""What a request may cost before it is understood, at each door by which requests come."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.contract.requests.bounds import MOST_VALUES, Bounded, Entries
from petiole.contract.requests.generation import GenerateRequest
from petiole.contract.requests.validation import validate
from petiole.gateway.core.failures import Failure
from petiole.gateway.openai.chat import ChatCompletion
from petiole.gateway.serving import request_body
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.submission.batches.rows.sources import Row
from tests.support import overfilled
from tests.support.nursery import surroundings
from tests.support.site import REPOSITORY

MOST_MIB = 14
"""What the wrong entries of a text may take in all: they take 1, and their errors would take 20."""
OF_A_CALL_MIB = 100
"""Python copies the names of a call, which takes 54. The errors would take 200."""
COUNTED = {"list", "set", "frozenset", "tuple", "deque", "generator", "dict"}


def uncounted(schema: Any, where: str, counted: bool = False) -> Iterator[str]:
    """The lists and maps of a schema that are not counted before their entries are looked at."""
    if isinstance(schema, list):
        for one in schema:
            yield from uncounted(one, where)
    if not isinstance(schema, dict):
        return
    kind = schema.get("type")
    if kind == "function-plain":  # a function of ours looks at the whole value, and raises its first error
        return
    if kind == "function-before" and isinstance(
        getattr(schema["function"]["function"], "__self__", None), Entries
    ):
        counted = True
    counted |= kind == "dict" and schema.get("values_schema", {}).get("type") == "any"  # which have no errors
    if kind in COUNTED and not (counted and schema.get("max_length") and schema.get("fail_fast")):
        yield f"{where}: {kind}"
    for name, inner in schema.items():
        passes = kind == "function-before" and name == "schema"
        yield from uncounted(inner, f"{where}.{name}" if kind is None else where, counted and passes)


@pytest.mark.parametrize("kind", overfilled.kinds(), ids=lambda kind: kind.__name__)
def test_every_list_and_map_is_counted_first(kind: type[Bounded]) -> None:
    kind.model_rebuild()
    assert [*uncounted(kind.__pydantic_core_schema__, kind.__name__)] == []


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("door", ["producer", "message", "body", "line"])
def test_wrong_entries_take_no_memory_of_their_own(door: str) -> None:
    command = [sys.executable, "-m", "tests.support.overfilled", door]
    nowhere = surroundings(PETIOLE_BROKER_URL="redis://127.0.0.1:1/0")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY, env=nowhere)
    assert done.returncode == 0, done.stderr[-4000:]
    taken: dict[str, float] = json.loads(done.stdout)
    most = OF_A_CALL_MIB if door == "producer" else MOST_MIB
    assert taken
    assert {case: size for case, size in taken.items() if size > most} == {}


# ---------------------------------------------------------------- what is said


def refusal(body: bytes) -> Failure:
    with pytest.raises(Failure) as refused:
        request_body.as_request(request_body.decoded(body), ChatCompletion)
    return refused.value


def test_a_body_with_too_many_values_is_too_large() -> None:
    failure = refusal(b'{"a":[' + b"[]," * MOST_VALUES + b"[]]}")
    assert failure.status == 413
    assert f"must have at most {MOST_VALUES} lists, objects, commas and colons, got {2 * MOST_VALUES + 4}" in str(
        failure
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop": [1] * 65}, "stop: must have at most 64 entries, got [1, 1,"),
        ({"stop": [1] * 64}, "stop[0]: must be text, got 1"),
        ({"stop": 1}, "stop: must be a list, got 1"),
        ({"metadata": {str(k): "" for k in range(17)}}, "metadata: must have at most 16 entries"),
        ({"seed": 2**63}, "seed: must be at most 9223372036854775807, got 9223372036854775808"),
        ({"seed": -(2**63) - 1}, "seed: must be at least -9223372036854775808, got -9223372036854775809"),
        ({f"a{k}": k for k in range(1000)}, "a0: is not a parameter of this endpoint"),
    ],
    ids=["too many", "wrong ones", "no list", "too many names", "too high", "too low", "unknown ones"],
)
def test_the_first_error_is_told(given: dict[str, Any], said: str) -> None:
    asked = {"model": "a", "messages": [{"role": "user", "content": "b"}], **given}
    assert said in str(refusal(json.dumps(asked).encode()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stop": [1] * 65}, "stop: must have at most 64 entries, got [1, 1,"),
        (
            {"logit_bias": dict.fromkeys(map(str, range(65_537)), 0.0)},
            "logit_bias: must have at most 65536 entries",
        ),
        ({f"a{k}": k for k in range(1000)}, "a0: is not an option of this task, got 0"),
    ],
    ids=["entries", "names", "options"],
)
def test_so_is_that_of_a_call(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        validate(GenerateRequest, {"prompt": "a", **given})
    assert str(refused.value).startswith(said)


def test_a_row_with_too_many_values_is_not_parsed() -> None:
    with pytest.raises(
        InvalidRequest, match=f"row: must have at most {MOST_VALUES} lists, objects, commas and colons"
    ):
        Row(0, b"[" + b"[]," * MOST_VALUES + b"[]]").value()
