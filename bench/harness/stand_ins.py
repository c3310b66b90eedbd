"""Runtimes that stand in for a model, to measure the engine around it.

`NullRuntime` computes nothing, so only the scheduler's own cost is left. `TimedRuntime` only takes time, as a GPU
seems to for the host, so it shows what overlaps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from petiole.gpu_worker.runtime.device.device import SpanHook
from petiole.gpu_worker.runtime.interface import (
    KVCopies,
    LoadWeights,
    ModelLimits,
    Progress,
    StepBatch,
    StepOutput,
    TokenMask,
    Transfer,
    nothing,
)


class _Due:
    """A transfer that arrives at `at`, seconds of `time.perf_counter`."""

    __slots__ = ("_at", "_output")

    def __init__(self, output: StepOutput, at: float = 0.0) -> None:
        self._output, self._at = output, at

    def wait(self) -> StepOutput:
        left = self._at - time.perf_counter()
        if left > 0:  # even a sleep of 0 s releases the interpreter
            time.sleep(left)
        return self._output


class NullRuntime:
    """Samples token `token_id` for ever, and accepts every draft."""

    def __init__(
        self,
        *,
        rows: int = 256,
        n_pages: int = 1 << 19,
        page_size: int = 1,
        max_model_len: int = 4096,
        token_id: int = 7,
    ) -> None:
        self.limits = ModelLimits(
            model="null",
            fingerprint="null",
            vocab_size=1024,
            max_model_len=max_model_len,
            n_pages=n_pages,
            page_size=page_size,
            max_batch_size=rows + 1,
            eos_token_ids=frozenset({0}),
            goes_ahead=True,
        )
        self._token_id = token_id
        self.progress: Progress = nothing
        self.kv_copies: KVCopies | None = None

    def launch_forward(self, slot_id: int, batch: StepBatch) -> None:
        pass

    def launch_sampling(self, slot_id: int, batch: StepBatch, mask: TokenMask | None) -> Transfer:
        return _Due(self._output(batch))

    def _output(self, batch: StepBatch) -> StepOutput:
        tokens = np.full(int(batch.outputs.sum()), self._token_id, np.int32)
        return StepOutput(tokens, batch.outputs)

    def forget_images(self, keys: Sequence[int]) -> None:
        pass

    def encoded_images(self) -> int:
        return 0

    def feature_hits(self) -> int:
        return 0

    def expert_tokens(self) -> Sequence[Sequence[int]]:
        return ()

    def adapter_key(self, adapter: str) -> str:
        return adapter

    def adapter_at_hand(self, adapter: str) -> bool:
        return True

    def load_adapter(self, adapter: str, slot: int) -> None:
        pass

    def prepare_reload(self, model: str) -> LoadWeights:
        return lambda *progress: None

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


class _CopyDue:
    def __init__(self, block: npt.NDArray[np.uint8], at: float, free: deque[npt.NDArray[np.uint8]]) -> None:
        self._block, self._at, self._free = block, at, free

    def wait(self) -> npt.NDArray[np.uint8]:
        time.sleep(max(0.0, self._at - time.perf_counter()))
        return self._block

    def release(self) -> None:
        self._free.append(self._block)


class TimedCopies:
    """Copies of what nobody has computed. A gather takes time of the device, and a copy time of its bus, of which
    the next copy waits for the end. See `KVCopies`."""

    layout = "timed"

    def __init__(
        self, runtime: TimedRuntime, position_bytes: int, *, bus: float = 50e9, memory: float = 3e12
    ) -> None:
        """bus, memory: bytes a second."""
        self.position_bytes = position_bytes
        self._runtime, self._bus, self._memory, self._bus_free_at = runtime, bus, memory, 0.0
        self._free: deque[npt.NDArray[np.uint8]] = deque()

    def make_ring(self, n_blocks: int, n_positions: int) -> None:
        self._free.extend(np.zeros((n_blocks, n_positions * self.position_bytes), np.uint8))

    def to_host(self, slots: npt.NDArray[np.int64]) -> _CopyDue | None:
        if not self._free:
            return None
        n_bytes = len(slots) * self.position_bytes
        gathered_at = self._runtime.occupy(2 * n_bytes / self._memory)
        self._bus_free_at = max(self._bus_free_at, gathered_at) + n_bytes / self._bus
        return _CopyDue(self._free.popleft(), self._bus_free_at, self._free)

    def staging(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        return np.empty(n_bytes, np.uint8)

    def from_host(self, slots: npt.NDArray[np.int64], staged: npt.NDArray[np.uint8], first: int) -> None:
        self._runtime.occupy(2 * len(slots) * self.position_bytes / self._memory)


class TimedRuntime(NullRuntime):
    """A device that only keeps time: each step takes `device_s`, whatever the host does meanwhile. Like a GPU, and
    unlike a thread that sleeps, it waits for neither the interpreter nor a processor.

    `launch` does the host's work of a launch. The tokens repeat `token_ids`. `on_span`: see `Device.on_span`.
    """

    def __init__(
        self,
        device_s: float,
        launch: Callable[[], object] = lambda: None,
        *,
        rows: int = 8,
        token_ids: Sequence[int] = (7,),
    ) -> None:
        super().__init__(rows=rows)
        self.device_s = device_s
        self.on_span: SpanHook | None = None
        self._launch = launch
        self._token_ids = np.array(token_ids, np.int32)
        self._sampled = 0
        self.restart()

    def restart(self) -> None:
        """Count from the next step on. `idle_s`: seconds without work since the first of `steps`."""
        self.steps, self.idle_s, self._free_at = 0, 0.0, float("inf")

    def launch_forward(self, slot_id: int, batch: StepBatch) -> None:
        self._launch()
        now = time.perf_counter()
        self.idle_s += max(0.0, now - self._free_at)
        start = max(now, self._free_at) if self.steps else now
        self.steps += 1
        self._free_at = start + self.device_s
        if self.on_span is not None:
            self.on_span("compute", "forward", start, self._free_at)

    def occupy(self, seconds: float) -> float:
        """Keep the device busy for longer. Returns until when."""
        self._free_at = max(time.perf_counter(), self._free_at if self.steps else 0.0) + seconds
        return self._free_at

    def launch_sampling(self, slot_id: int, batch: StepBatch, mask: TokenMask | None) -> Transfer:
        return _Due(self._output(batch), self._free_at)

    def _output(self, batch: StepBatch) -> StepOutput:
        n = int(batch.outputs.sum())
        tokens = self._token_ids.take(np.arange(self._sampled, self._sampled + n), mode="wrap")
        self._sampled += n
        return StepOutput(tokens, batch.outputs)
