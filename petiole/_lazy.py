"""Imports names and modules when they are first used.

`from petiole import generate` costs a web app little more than the Celery that it has. The first submission
imports redis-py and pydantic.

    names    for a package: the names that its rooms offer under the package's own name
    module   for a room: another module, which is not needed before a task is submitted

Type checkers, and the test for circles, follow both if the same is imported under TYPE_CHECKING.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`. `homes`: the place of each of its names, as module or module:name."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, _, attribute = homes[name].partition(":")
        found = import_module(home)
        return getattr(found, attribute) if attribute else found

    return find


class module:  # noqa: N801 - it stands for one
    """Stands for the module of this name."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, attribute: str) -> Any:
        if (found := self.__dict__.get("_found")) is None:
            found = self._found = import_module(self.__name__)
        return getattr(found, attribute)
