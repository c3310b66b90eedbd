"""A header of a message is read by its `Header` alone, so each that the code reads has a rule, a limit, and its
turn in the fuzzer."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from petiole.tasks.wire import keys
from petiole.tasks.wire.headers import KNOWN, OWN
from tests.project.test_structure import MODULES
from tests.support.parsing import parsed

ELSEWHERE = {
    "petiole.tasks.worker.broker.gate": "checks the whole message",
    "petiole.tasks.worker.idempotency": "messages that this worker sends",
}
NOT_HEADERS = frozenset({"args", "kwargs", "delivery_info", "properties"})
"""In Celery's request dictionary, beside the headers."""
READERS = sorted(
    name
    for name in MODULES
    if name.startswith(("petiole.tasks.worker.", "petiole.tasks.wire.record.", "petiole.tasks.fleet."))
    and not any(name == other or name.startswith(f"{other}.") for other in ELSEWHERE)
)


def is_headers(node: ast.expr, aliases: set[str]) -> bool:
    """Whether an expression is a message's headers, or Celery's request dictionary, in which they are."""
    match node:
        case ast.Attribute(attr="headers" | "message"):
            return True
        case ast.Name(id=name):
            return name in {"headers", *aliases}
        case ast.BoolOp(values=values):
            return any(is_headers(value, aliases) for value in values)
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value="headers"), *_]):
            return True
        case ast.Subscript(slice=ast.Constant(value="headers")):
            return True
    return False


def reads(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Where headers are looked into, and by which name."""
    aliases = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and is_headers(node.value, set())
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=where, slice=key, ctx=ast.Load()):
                pass
            case ast.Call(func=ast.Attribute(value=where, attr="get" | "pop"), args=[key, *_]):
                pass
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[where]):
                pass
            case ast.Match(subject=where):
                key = ast.Constant("match")
            case _:
                continue
        if is_headers(where, aliases):
            yield getattr(node, "lineno", 0), key.value if isinstance(key, ast.Constant) else ast.unparse(key)


@pytest.mark.parametrize("name", READERS)
def test_a_header_is_read_by_its_rule(name: str) -> None:
    found = [read for read in reads(parsed(MODULES[name].read_text())) if read[1] not in NOT_HEADERS]
    assert found == [], f"{MODULES[name]}: read headers with a `Header` of `tasks.wire.headers`"


def test_the_check_finds_what_it_looks_for() -> None:
    tree = parsed(
        "a = message.headers.get('x')\nb = self.message[NAME]\nheaders = message.headers or {}\nheaders['y']\n"
        "given = item['headers']\n'z' in given\nrow.get('w')\n"
    )
    assert sorted(reads(tree)) == [(1, "x"), (2, "NAME"), (4, "y"), (6, "z")]


def test_every_header_that_has_a_name_of_ours_has_a_rule() -> None:
    named = {value for name, value in vars(keys).items() if name.endswith("_HEADER")}
    assert named == OWN.keys()
    assert named.isdisjoint(KNOWN)
