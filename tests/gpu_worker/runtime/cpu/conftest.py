"""The models of these tests are small: one thread would compute all of their steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from petiole.gpu_worker.runtime.cpu.native import stack


@pytest.fixture(scope="package", autouse=True)
def several_threads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "SMALL", 0)
        yield
