"""Petiole's app beside the apps of others."""

from __future__ import annotations

import pytest
from celery import Celery, _state

from petiole.tasks.app.application import make_app
from petiole.tasks.submission import definitions
from petiole.tasks.submission.typed import GenerateTask


@pytest.mark.parametrize("late", [False, True], ids=["before all tasks are made", "after that"])
def test_its_tasks_are_its_own_whatever_names_another_app_has(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An application's own module `tasks` may have a function `generate`."""
    monkeypatch.setattr(_state, "_on_app_finalizers", set())
    theirs, ours = Celery("tasks", set_as_current=False), make_app()
    monkeypatch.setattr(definitions, "app", ours)

    @theirs.task(name="tasks.generate")  # type: ignore[untyped-decorator]
    def other() -> str:
        return "theirs"

    def generate(*given: object, **options: object) -> None:
        """The body is the worker's."""

    if late:
        ours.finalize()
    task = definitions._task(lambda: GenerateTask)(generate)
    ours.finalize()
    assert isinstance(task, GenerateTask)
    assert ours.tasks["tasks.generate"] == task
    assert theirs.tasks["tasks.generate"]() == other() == "theirs"
