"""Types and tables follow from the declarations in `petiole.contract`: `python -m docs.render` writes them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from docs import address, render, site
from petiole.contract.results.task_result import GenerationResult
from petiole.contract.tasks import TASKS

WRITE = "run: python -m docs.render"


def test_the_types_are_the_rendered_ones() -> None:
    assert render.TYPES.read_text() == render.types(), WRITE
    assert render.TYPED.read_text() == render.typed_tasks(), WRITE
    for path, room in render.OFFERING.items():
        assert path.read_text() == render.offering(path.read_text(), room), WRITE


@pytest.mark.parametrize("path", render.PAGES, ids=lambda path: path.name)
def test_the_tables_are_the_rendered_ones(path: Path) -> None:
    assert path.read_text() == render.page(path.read_text(), path.name), WRITE


@pytest.mark.parametrize("path", address.PAGES, ids=lambda path: path.name)
def test_the_addresses_are_the_rendered_ones(path: Path) -> None:
    assert path.read_text() == address.page(path.read_text()), WRITE
    assert address.CITATION.read_text() == address.citation(address.CITATION.read_text()), WRITE


def test_an_address_stands_in_the_pages_once_it_is_known() -> None:
    known = {"Repository": "https://forge.example/petiole", "Download": "https://index.example/petiole"}
    known["Security"] = "mailto:safe@forge.example"
    said = address.blocks(known, "1.2.3")
    assert "git clone https://forge.example/petiole petiole" in said["try"]
    assert "https://index.example/petiole" in said["install"]
    assert "[safe@forge.example](mailto:safe@forge.example)" in said["report"]
    assert "no package index yet" in address.blocks({}, "1.2.3")["install"]


@pytest.mark.parametrize(
    "model", [*(task.request for task in TASKS.values()), GenerationResult], ids=lambda model: model.__name__
)
def test_every_field_says_what_it_means(model: type[BaseModel]) -> None:
    assert [name for name in model.model_fields if not render.text_of(model, name)] == []


@pytest.mark.parametrize("repository", ["", "https://example.com/petiole"])
def test_the_site_says_its_version_and_where_the_code_is(repository: str) -> None:
    configured = tomllib.loads(site.configuration(repository))["project"]
    assert configured["site_name"] == f"Petiole {address.project()['version']}"
    assert configured.get("repo_url", "") == repository
