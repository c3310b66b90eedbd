"""Sequences of the state machine, with as many pages as a test wants."""

from __future__ import annotations

from petiole.gpu_worker.scheduling.sequence import SchedulableSequence


class Pages:
    """Blocks for one sequence out of a limited number of positions."""

    def __init__(self, limit: int, block_size: int = 1) -> None:
        self.limit, self.block_size, self.kv_capacity = limit, block_size, 0

    def reserve(self, kv_length: int) -> bool:
        needed = -(-kv_length // self.block_size) * self.block_size
        if needed > self.limit:
            return False
        self.kv_capacity = max(self.kv_capacity, needed)
        return True

    def trim(self, kv_length: int) -> int:
        before = self.kv_capacity
        self.kv_capacity = min(before, -(-kv_length // self.block_size) * self.block_size)
        return (before - self.kv_capacity) // self.block_size


def sequence(n_prompt: int = 8, max_output: int = 10, **kwargs: object) -> SchedulableSequence:
    return SchedulableSequence(list(range(100, 100 + n_prompt)), max_output, **kwargs)  # type: ignore[arg-type]


def prefilled(n_prompt: int = 8, max_output: int = 10, **kwargs: object) -> SchedulableSequence:
    seq = sequence(n_prompt, max_output, **kwargs)
    seq.schedule_prefill(n_prompt)
    seq.apply_prefill(1)
    return seq
