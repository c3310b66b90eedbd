"""What stands beside the code: the changelog, the citation, the forms of issues and pull requests."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.site import REPOSITORY

CHECKER = Path(sys.executable).parent / "check-jsonschema"
MOST_WORDS = 1_000
"""Of a version in the changelog: it is for users who decide and upgrade."""
SCHEMAS = {
    "vendor.citation-file-format": "CITATION.cff",
    "vendor.dependabot": ".github/dependabot.yml",
    "vendor.github-issue-config": ".github/ISSUE_TEMPLATE/config.yml",
    "vendor.github-issue-forms": ".github/ISSUE_TEMPLATE/[!c]*.yml",
    "vendor.github-workflows": ".github/workflows/*.yml",
}

pytestmark = pytest.mark.skipif(not (REPOSITORY / ".github").exists(), reason="a checkout")


def version() -> str:
    declared: str = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    return declared


def versions() -> dict[str, str]:
    """By version, what the changelog says of it. The newest comes first."""
    _, *sections = re.split(r"^## ", (REPOSITORY / "CHANGELOG.md").read_text(), flags=re.M)
    return {section.split()[0]: section for section in sections}


def test_the_newest_version_of_the_changelog_is_the_one_that_is_built() -> None:
    assert next(iter(versions())) == version()


def test_a_version_is_read_in_minutes() -> None:
    assert {name: count for name, text in versions().items() if (count := len(text.split())) > MOST_WORDS} == {}


def test_the_version_is_written_in_one_place() -> None:
    """Beside it, only what tells of a version in particular has its number."""
    of_versions = ("CHANGELOG.md", "SECURITY.md", "bench/results/", "docs/maintaining.md", "tests/")
    number = rf"(?<![\w.]){re.escape(version())}(?![\w.])"
    found = subprocess.run(
        ["git", "grep", "-lP", rf"[vV]ersion\W+{number}"], cwd=REPOSITORY, capture_output=True, text=True
    )
    if found.returncode > 1:
        pytest.skip("no checkout")
    places = {name for name in found.stdout.split() if not name.startswith(of_versions)}
    assert places == {"pyproject.toml"}


def test_later_versions_are_tried_with_what_this_one_leaves() -> None:
    assert (REPOSITORY / "tests" / "upgrade" / "recorded" / f"{version()}.json").exists()


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_form_is_one_that_its_reader_takes(schema: str) -> None:
    if not CHECKER.exists():
        pytest.skip("check-jsonschema is not installed")
    files = sorted(REPOSITORY.glob(SCHEMAS[schema]))
    assert files
    done = subprocess.run([CHECKER, "--builtin-schema", schema, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
