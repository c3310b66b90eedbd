"""No constraint ends the process: whatever its shape, it is served or refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from petiole.gpu_worker.children import Child, ChildEnded
from petiole.gpu_worker.constraints import proving
from petiole.gpu_worker.constraints.grammar import MOST, MOST_CHARACTERS, LRUCache
from petiole.gpu_worker.exceptions import InvalidRequest
from tests.gpu_worker.constraints import shapes
from tests.gpu_worker.constraints.walking import accepts, compiled

ROOT = Path(__file__).parents[3]


def outcomes(*arguments: str) -> dict[Any, Any]:
    """What became of each constraint of another process, which must live on until the last one."""
    command = [sys.executable, "-m", "tests.gpu_worker.constraints.shapes", *arguments]
    ran = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    found = dict(json.loads(line) for line in ran.stdout.splitlines())
    assert ran.returncode == 0, f"rc {ran.returncode} after {list(found)[-1:]}"
    return found


def is_named(outcome: Any) -> bool:
    return outcome == "served" or (len(outcome) == 3 and all(outcome) and len(" ".join(outcome)) < 1000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", shapes.KINDS)
def test_every_shape_is_served_or_refused_by_name(kind: str) -> None:
    found = outcomes(kind)
    assert len(found) == 2 * len(shapes.KINDS[kind])
    assert all(map(is_named, found.values()))


def test_random_schemas_are_served_or_refused_by_name() -> None:
    found = outcomes("random", "60")
    assert len(found) == 60
    assert all(map(is_named, found.values()))
    assert "served" in found.values()


KILLERS = {
    "properties": ("json_schema", shapes.SCHEMAS["properties"][0](5_000)),
    "definitions": ("json_schema", shapes.SCHEMAS["chained definitions"][0](9_000)),
    "rules": ("grammar", shapes.GRAMMARS["chained rules"][0](14_000)),
    "terminals": ("grammar", shapes.GRAMMARS["chained terminals"][0](14_000)),
    "references": ("grammar", shapes.GRAMMARS["%json: references"][0](7_000)),
    "patterns": ("grammar", shapes.GRAMMARS["%json: patterns together"][0](300)),
}
"""What ended a process, by a stack of 8 MB, or had no end."""


@pytest.mark.parametrize("name", KILLERS)
def test_what_needs_a_large_stack_is_served_or_refused(name: str) -> None:
    code = f"""
from tests.gpu_worker.constraints.shapes import outcome
from tests.gpu_worker.constraints.test_shapes import KILLERS
from tests.gpu_worker.constraints.walking import tokenizer
print(outcome(tokenizer(), *KILLERS[{name!r}]))
print(outcome(tokenizer(), "choice", ["next"]))
"""
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[1:] == ["served"]


def test_five_thousand_required_properties_are_served() -> None:
    state = compiled("json_schema", shapes.SCHEMAS["required properties"][0](5_000))
    assert accepts(state, json.dumps({f"p{k}": "" for k in range(5_000)}))


@pytest.mark.parametrize(
    ("less", "killer"),
    [
        ("_PROVED_STACK_BYTES = 2**20", ("grammar", shapes.GRAMMARS["chained rules"][0](5_000))),
        ("CPU_S = 0.5", ("grammar", shapes.GRAMMARS["chained rules that may be empty"][0](9_000))),
    ],
    ids=["stack", "time"],
)
def test_a_child_that_ends_refuses_its_constraint_alone_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, less: str, killer: tuple[str, Any]
) -> None:
    job, source = tmp_path / "job.py", proving.JOB.read_text()
    assert less.partition(" ")[0] in source
    job.write_text(f"{source}\n{less}\n")
    child = Child(str(job))
    monkeypatch.setattr(proving, "_child", child)
    assert accepts(compiled("regex", less.replace("*", "x")), less.replace("*", "x"))
    first = child.process
    kind, value = killer
    limit = rf"^constraint.{kind}: must compile within 5 s of processor time .*, got \d+ characters"
    value += f"// {less}"  # not yet known to this process
    with pytest.raises(InvalidRequest, match=limit):
        compiled(kind, value)
    assert child.process is None
    with pytest.raises(InvalidRequest, match=limit):
        compiled(kind, value)
    assert child.process is None, "a refusal is kept"
    assert accepts(compiled("choice", [f"next {less}"]), f"next {less}")
    assert child.process is not first
    child.close()


def test_a_child_starts_anew_and_says_if_its_job_cannot_be_run(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import os\nMEMORY_BYTES = 2**30\ndef answer(code):\n    return os._exit(code) if code else os.getpid()"
    )
    child = Child(str(job))
    first = child.ask(0)
    assert child.ask(0) == first
    with pytest.raises(ChildEnded):
        child.ask(3)
    assert child.ask(0) != first
    child.close()
    with pytest.raises(RuntimeError, match=r"none.py cannot be run: exit status 1"):
        Child(str(tmp_path / "none.py")).ask(0)


def test_a_few_large_grammars_are_kept_or_many_small_ones() -> None:
    small, large = LRUCache[int, int](), LRUCache[int, int]()
    for k in range(2 * MOST):
        small.keep(k, k, 10)
        large.keep(k, k, MOST_CHARACTERS // 4)
    assert [k for k in range(2 * MOST) if small.get(k) is not None] == [*range(MOST, 2 * MOST)]
    assert [k for k in range(2 * MOST) if large.get(k) is not None] == [*range(2 * MOST - 4, 2 * MOST)]
