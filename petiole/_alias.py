"""In a checkout and in the images, `gateway`, `tasks`, `gpu_worker` and `cache` are `petiole`'s own modules.

A folder can be imported by two names there: `petiole/tasks` is a link to `tasks`. Python would make two modules of
it, with two Celery apps, and two classes for each error. So each of the four packages ends with
`_alias.claim(__name__)`. If the package was imported by its full name, this call does nothing. If it was imported
by its short name, the module with the full name takes its place, and from then on a finder answers for the modules
below it.

    import tasks            tasks/__init__ runs under its short name; its claim makes sys.modules["tasks"]
                            the module petiole.tasks
    import tasks.streams    the finder makes sys.modules["tasks.streams"] the module petiole.tasks.streams

The finder answers only while `tasks` is ours: beside an application's own `tasks.py` it does nothing. A wheel has
no short names.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

PACKAGE = "petiole"


def claim(name: str) -> None:
    """Called by a package, with its own name: under a short one, the real module takes its place."""
    if name.startswith(f"{PACKAGE}."):
        return
    real = import_module(f"{PACKAGE}.{name}")
    if not any(isinstance(finder, _ShortNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ShortNames())
    sys.modules[name] = real


class _ShortNames(MetaPathFinder, InspectLoader):
    """Finds and loads `tasks.x` as the module `petiole.tasks.x`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        short, _, below = fullname.partition(".")
        ours = sys.modules.get(f"{PACKAGE}.{short}")
        if not below or ours is None or sys.modules.get(short) is not ours:
            return None
        real = find_spec(f"{PACKAGE}.{fullname}")
        if real is None:
            return None
        is_package = real.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=real.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        # `create_module` could return the real module, but Python would then overwrite its `__spec__`.
        sys.modules[module.__name__] = import_module(f"{PACKAGE}.{module.__name__}")

    def get_code(self, fullname: str) -> CodeType | None:
        """The code of a module, for `python -m tasks.x`."""
        real = find_spec(f"{PACKAGE}.{fullname}")
        loader = real and real.loader
        return loader.get_code(f"{PACKAGE}.{fullname}") if isinstance(loader, InspectLoader) else None

    def get_source(self, fullname: str) -> str | None:
        real = find_spec(f"{PACKAGE}.{fullname}")
        loader = real and real.loader
        return loader.get_source(f"{PACKAGE}.{fullname}") if isinstance(loader, InspectLoader) else None
