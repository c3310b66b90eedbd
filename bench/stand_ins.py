"""Runtimes that stand in for a model, to measure the engine around it.

`NullRuntime` computes nothing: what is left is the scheduler's own cost. `SleepingRuntime` sleeps on the compute
stream instead of computing, as a GPU looks to the host: it shows what overlaps with what.
"""

from __future__ import annotations

import time

import numpy as np

from gpu_worker.runtime.device import CpuDevice
from gpu_worker.runtime.interface import ModelLimits, StepBatch, StepOutput, TokenMask, Transfer
from gpu_worker.runtime.transfer import TransferHandle


class _Ready:
    """A transfer that has arrived."""

    __slots__ = ("_output",)

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def ready(self) -> bool:
        return True

    def wait(self) -> StepOutput:
        return self._output


class NullRuntime:
    """Samples token `token_id` for ever."""

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
        )
        self._token_id = token_id

    def launch_forward(self, slot_id: int, batch: StepBatch) -> None:
        pass

    def launch_sampling(self, slot_id: int, batch: StepBatch, mask: TokenMask | None) -> Transfer:
        return _Ready(self._output(batch))

    def _output(self, batch: StepBatch) -> StepOutput:
        tokens = np.full(int(batch.outputs.sum()), self._token_id, np.int32)
        return StepOutput(tokens, np.minimum(batch.outputs, 1))

    def load_adapter(self, adapter: str, slot: int) -> None:
        pass

    def reload(self, model: str) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass


class SleepingRuntime(NullRuntime):
    """A device that takes `device_s` for each step, and a host that takes `host_s` more for each launch."""

    def __init__(
        self, *, device_s: float, host_s: float = 0.0, device: CpuDevice | None = None, rows: int = 8
    ) -> None:
        super().__init__(rows=rows)
        self.device_s, self.host_s = device_s, host_s
        self.device = device or CpuDevice()
        self._compute = self.device.new_stream("compute")
        self._copy = self.device.new_stream("copy")

    def launch_forward(self, slot_id: int, batch: StepBatch) -> None:
        if self.host_s:  # a sleep of nothing gives the interpreter away all the same
            time.sleep(self.host_s)
        self._compute.enqueue(lambda: time.sleep(self.device_s), "forward")

    def launch_sampling(self, slot_id: int, batch: StepBatch, mask: TokenMask | None) -> Transfer:
        ready = self._compute.record()
        output = self._output(batch)
        self._copy.wait_event(ready)
        self._copy.enqueue(lambda: None, "copy")
        return TransferHandle(self._copy.record(), lambda: output)

    def synchronize(self) -> None:
        self.device.synchronize()

    def close(self) -> None:
        self.device.close()
