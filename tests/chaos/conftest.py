from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "chaos" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.slow)
