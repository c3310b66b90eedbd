"""docs/requests.md lists every option and every field of a result, with the defaults of `requests.schemas`."""

from __future__ import annotations

import re

from petiole.tasks.requests.schemas import ChatRequest, GenerateRequest, GenerationResult, Options
from tests.support.site import REPOSITORY

PAGE = (REPOSITORY / "docs" / "requests.md").read_text()


def section(title: str) -> list[list[str]]:
    """The cells of a section's table, without its head."""
    lines = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert lines
    rows = [line.strip("|").split(" | ") for line in lines[1].splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def test_every_option_has_a_row_with_its_default() -> None:
    shown = {name: default for cell, default, *_ in section("Options") for name in names(cell)}
    defaults = {name: field.get_default(call_default_factory=True) for name, field in Options.model_fields.items()}
    assert shown == {name: f"`{default!r}`".replace("''", '""') for name, default in defaults.items()}


def test_every_input_has_a_row() -> None:
    shown = {(names(task)[0], names(option)[0]) for task, option, *_ in section("What to generate from")}
    own = {("generate", name) for name in GenerateRequest.model_fields.keys() - Options.model_fields.keys()} | {
        ("chat", name) for name in ChatRequest.model_fields.keys() - Options.model_fields.keys()
    }
    assert shown == own


def test_every_field_of_a_result_has_a_row() -> None:
    assert {names(cells[0])[0] for cells in section("The result")} == set(GenerationResult.model_fields)
