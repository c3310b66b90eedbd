"""Whoever installs Petiole gets nothing under a licence that binds their own code."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import metadata

from tests.support.site import REPOSITORY
from tests.support.wheels import brought_by

ADMITTED = {
    *(
        "0BSD",
        "Apache-2.0",
        "Apache-2.0 WITH LLVM-exception",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
    ),
    *("MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Zlib"),
    *("Apache Software License", "BSD License", "MIT License"),
    *("3-Clause BSD License", "Mozilla Public License 2.0 (MPL 2.0)"),
}
"""SPDX's names, and the classifiers of those who name no expression. MPL-2.0 binds its own files alone."""

ABSENT_HERE = ("gpu", "s3", "gcs")
"""Extras that these tests do without."""
FOR_DEVELOPERS = ("bench", "dev", "peers")


def licences_of(name: str) -> set[str]:
    said = metadata(name)
    fields = said.get_all("License-Expression") or said.get_all("License") or [""]
    classifiers = said.get_all("Classifier") or []
    classified = {line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License ::")}
    return classified or set(re.split(r" (?:AND|OR) ", fields[0].replace("(", "").replace(")", "")))


def test_the_licences_of_what_an_installation_brings() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].items()
    others = [line for extra, lines in extras if extra not in ABSENT_HERE + FOR_DEVELOPERS for line in lines]
    found = {
        name: licences_of(name) - ADMITTED
        for name in brought_by([*project["dependencies"], *others]) - {"petiole"}
    }
    assert {name: licences for name, licences in found.items() if licences} == {}
