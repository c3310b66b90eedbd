"""Whether the installed FlashInfer can be relied on.

Versions before `VERSIONS` have two faults. With tensor cores, CUDA graphs and rows that are not split
(`flashinfer.DecodeWrappers`), they read entries of a plan that were never written (FlashInfer's issue 4002). With
eight queries for each head of keys, they ask for more workspace than there is. Nobody has tried later versions.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from contextlib import contextmanager

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from petiole.gpu_worker.exceptions import MachineError

PACKAGE = "flashinfer-python"
VERSIONS = ">=0.7.2.post1,<0.8"


def require_version() -> None:
    """Raises MachineError if FlashInfer is missing or has another version than those of `VERSIONS`."""
    found = installed_version()
    if found is None:
        raise MachineError(
            f"the CUDA path needs FlashInfer, which is not installed: pip install '{PACKAGE}{VERSIONS}'"
        )
    if not SpecifierSet(VERSIONS, prereleases=True).contains(found):
        raise MachineError(
            f"the CUDA path needs {PACKAGE} {VERSIONS}, found {found}: pip install '{PACKAGE}{VERSIONS}'"
        )
    try:
        import flashinfer  # noqa: F401
    except Exception as error:  # a broken installation may raise anything
        raise MachineError(f"{PACKAGE} {found} cannot be imported: {error!r}") from error


@contextmanager
def kernels_at_hand() -> Iterator[None]:
    """Raises MachineError, in one line, if FlashInfer would have to compile a kernel and cannot."""
    try:
        yield
    except MachineError:
        raise
    except (RuntimeError, OSError) as error:
        lines = str(error).strip().splitlines()
        if not any(tool in str(error).lower() for tool in ("nvcc", "ninja")):
            raise
        raise MachineError(
            f"a kernel of FlashInfer that this model needs is not compiled, and it cannot be compiled here "
            f"({lines[0]}): install flashinfer-jit-cache of the same version, or nvcc and ninja"
        ) from error


def installed_version() -> Version | None:
    try:
        return Version(importlib.metadata.version(PACKAGE))
    except importlib.metadata.PackageNotFoundError:
        return None
