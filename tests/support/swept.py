"""Faults of the host in everything that an engine does to start, launch and commit sequences."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from petiole.cache import KVAllocation
from petiole.gpu_worker import Engine
from petiole.gpu_worker.scheduling.launching import Preparation
from tests.support.interrupted import InjectedFaultError, Interrupted


class Swept:
    """Faults for one engine: at any call inside of an acceptance, a plan, the preparation of a launch, what
    follows the launch, and the host's part of a commit. After a fault there is none before the engine has
    dealt with it.

    `chooses`: whether this call raises, by its place and how often the place has raised. `raised`: how often each
    place has."""

    def __init__(self, engine: Engine, chooses: Callable[[str, int], bool]) -> None:
        self.raised = Counter[str]()
        self._interrupted = Interrupted(lambda place: chooses(place, self.raised[place]))
        self._inside = False
        self._engine = engine
        scheduler = engine.scheduler
        for owner, name in (
            (engine._requests, "_accept"),
            (scheduler, "schedule_step"),
            (scheduler, "_apply_all"),
            (scheduler, "_on_chunk"),
            (scheduler, "_slide"),
            (scheduler.planner, "on_launch"),
            (scheduler.planner, "on_commit"),
        ):
            setattr(owner, name, self._watched(getattr(owner, name)))

    def _watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.call(function, *args, **kwargs)

        return call

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside or self._engine.scheduler.state.faults.doubtful:
            return function(*args, **kwargs)
        self._inside, self._interrupted.place = True, None
        try:
            return self._interrupted(function, *args, **kwargs)
        finally:
            self._inside = False
            if self._interrupted.place is not None:
                self.raised[self._interrupted.place] += 1

    def stop(self) -> None:
        """From now on there is no fault."""
        self._interrupted.chooses = lambda place: False

    def patch_classes(self, patch: Any) -> None:
        """For methods of objects that are made later."""
        for owner, name in ((Preparation, "prepare"), (KVAllocation, "share")):
            method = getattr(owner, name)

            def call(this: Any, *args: Any, method: Any = method) -> Any:
                return self.call(method, this, *args)

            patch.setattr(owner, name, call)


def is_injected(error: BaseException | None) -> bool:
    """Whether a request ended by such a fault."""
    while error is not None:
        if isinstance(error, InjectedFaultError) or "InjectedFault" in repr(error):
            return True
        error = error.__cause__
    return False


def at_random(seed: int, often: float) -> Callable[[str, int], bool]:
    """A choice that raises at this share of all calls, the rarer the more often their place has raised."""
    dice = random.Random(seed)
    return lambda place, n: dice.random() < often * 30 ** -min(n, 2) * 30
