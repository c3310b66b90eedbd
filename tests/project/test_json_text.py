"""JSON text of others: the numbers are Python's, and no text is read in another way."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from petiole import json_text
from tests.support.parsing import parsed

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = ["1e308", "-1e308", "1.7976931348623157e308", "5e-324", "1e-999", "-0.0", "1E5", "0.1", "9" * 400]


def test_numbers_are_those_of_python() -> None:
    text = f"[{','.join(NUMBERS)}]"
    assert repr(json_text.decode(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", ["[1e309]", '{"a": [-1e309]}', "1e99999"])
def test_a_number_that_is_too_large_is_refused(text: str) -> None:
    with pytest.raises(msgspec.DecodeError, match=r"must be a number below 1e309, got -?1e"):
        json_text.decode(text)


def test_a_process_refuses_integers_of_many_digits() -> None:
    code = """
from petiole import json_text
json_text.bound_integers()
json_text.decode("9" * 640)
json_text.decode("9" * 641)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert "Integer value out of range" in run.stderr


def test_the_gateway_reads_untyped_text_in_no_other_way() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in (ROOT / "gateway").rglob("*.py")
        for node in ast.walk(parsed(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "msgspec.json.decode"
        and "type" not in {keyword.arg for keyword in node.keywords}
    ]
    assert found == []
