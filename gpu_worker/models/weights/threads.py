"""Work in parts on torch's number of threads. Each thread computes its parts alone: hundreds of short operations
that all threads shared would wait for the slowest one each time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Part = TypeVar("Part")


def for_each(work: Callable[[Part], object], parts: Iterable[Part]) -> None:
    """Raises what `work` raises."""
    n = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(n, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            for _ in threads.map(work, parts):
                pass
    finally:
        torch.set_num_threads(n)  # which new threads take over
