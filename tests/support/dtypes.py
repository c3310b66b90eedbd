"""Models in another type."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor


def widened(x: Any) -> Any:
    """With float32 in place of what all tensors in it are."""
    if isinstance(x, Tensor):
        return x.float()
    if isinstance(x, tuple):
        return tuple(map(widened, x))
    if is_dataclass(x) and not isinstance(x, type) and any(f.init for f in fields(x)):
        return type(x)(**{f.name: widened(getattr(x, f.name)) for f in fields(x)})
    return x
