"""What a release of `petiole` requires beside what pyproject.toml says: the engine, as `petiole-worker`.

A checkout has the engine in `gpu_worker` and `cache`. So has a wheel built there, which requires no other
distribution: `pip install '/path/to/checkout[demo]'` works. An sdist leaves them out, and a release uploads an
sdist's wheel.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Engine(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel" and Path(self.root, "gpu_worker").exists():
            return
        extras = self.metadata.core.optional_dependencies  # hatchling has replaced `petiole[vllm]` by its lines
        build_data["dependencies"] += [
            f"petiole-worker=={self.metadata.version}; extra == '{extra}'"
            for extra, lines in extras.items()
            if {*extras["vllm"]} <= {*lines}
        ]
