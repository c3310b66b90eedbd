"""What a release of `petiole-worker` requires: the `petiole` of its version, with its extra `vllm`: a worker's
packages without torch."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Producer(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build_data["dependencies"].append(f"petiole[vllm]=={self.metadata.version}")
