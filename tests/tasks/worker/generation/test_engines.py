"""The engine of a worker is the one that the settings name, by the name that it has in a checkout, too."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.tasks.settings import Settings
from petiole.tasks.worker.generation import engines


class Started:
    def __init__(self, config: object) -> None:
        self.config = config

    def start(self) -> object:
        return self


@pytest.mark.parametrize("name", ["gpu_worker.engine:Engine", "petiole.gpu_worker.engine:Engine"])
def test_both_names_of_petioles_engine(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(sys.modules, "gpu_worker", raising=False)
    monkeypatch.setattr("petiole.gpu_worker.engine.Engine", Started)
    assert isinstance(engines.make_engine(Settings(engine_factory=name)), Started)


@pytest.mark.parametrize("name", ["mine:Engine", "gpu_worker.mine:Engine", "gpu_worker.mine.deep:Engine"])
def test_an_engine_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    module, package = ModuleType("mine"), ModuleType("gpu_worker")
    module.Engine = Started  # type: ignore[attr-defined]
    package.__path__ = [str(tmp_path)]
    monkeypatch.setitem(sys.modules, "gpu_worker", package)
    for known in ("mine", "gpu_worker.mine", "gpu_worker.mine.deep"):
        monkeypatch.setitem(sys.modules, known, module)
    assert isinstance(engines.make_engine(Settings(engine_factory=name)), Started)


@pytest.mark.parametrize("name", ["petiole.gpu_worker.engine", "petiole.gpu_worker.engine:nothing"])
def test_what_is_no_engine_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="engine_factory: must be module:callable"):
        engines.make_engine(Settings(engine_factory=name))
