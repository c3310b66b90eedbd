"""In PYTHONPATH: a Python without what `petiole[worker]` brings and `petiole[vllm]` does not."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec


class Untorched:
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] in ("torch", "flashinfer", "triton", "safetensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


sys.meta_path.insert(0, Untorched())  # type: ignore[arg-type]
