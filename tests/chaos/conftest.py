from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "chaos" in Path(item.fspath).parts:
            item.add_marker(pytest.mark.e2e)
