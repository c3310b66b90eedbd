"""What is collected for a machine without internet suffices there."""

from __future__ import annotations

import importlib.metadata
import re

import pytest
from packaging.requirements import Requirement

from bench.gpu.wheelhouse.collecting import PACKAGES

GIVEN = {"torch", "numpy", "setuptools", "packaging", "typing-extensions"}
"""Of the machine: a CUDA build of torch, and what every installation of Python or torch has."""


def name(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


COLLECTED = {name(package.partition("==")[0]) for package in PACKAGES}


@pytest.mark.parametrize("package", sorted(COLLECTED - {"flashinfer-python"}))  # which lists more than it imports
def test_a_collected_package_finds_what_it_needs(package: str) -> None:
    try:
        required = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed here")
    needed = [one for one in map(Requirement, required) if not one.marker or one.marker.evaluate({"extra": ""})]
    assert {name(one.name) for one in needed} <= COLLECTED | GIVEN
