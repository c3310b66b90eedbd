"""Copies of a step's outputs from the device to the host, and the slots that they belong to.

`RenderBuffer` is a slot's pinned host memory for the outputs of a step. `start_transfer` enqueues the copies on
the copy stream and returns a `TransferHandle`; only `commit_step` calls its `wait`.

The copy waits for an event, not for the compute stream. When the copy is enqueued, the next step's forward may
already be on that stream. Waiting for the stream would wait for that forward too and serialize the pipeline.
`ready` is recorded directly after this step's sampling and marks exactly this step (I3).

The arrays that `wait` returns are views of the buffer. They are valid until the slot is reused, which is after
`commit_step` has consumed them (I6).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from petiole.gpu_worker.runtime.device.device import DeviceEvent, DeviceStream
from petiole.gpu_worker.runtime.interface import StepOutput

_OUTPUTS = {field.name for field in fields(StepOutput)}
_NOTHING: Mapping[str, npt.NDArray[Any]] = {}


class HostArray(Protocol):
    """A numpy array, or a host tensor of torch."""

    def __getitem__(self, key: Any) -> Any: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...


class TransferHandle:
    """The results of a step while they are copied. Implements `interface.Transfer`."""

    __slots__ = ("_collect", "_done")

    def __init__(self, done: DeviceEvent, collect: Callable[[], StepOutput]) -> None:
        self._done = done
        self._collect = collect

    def wait(self) -> StepOutput:
        self._done.synchronize()
        return self._collect()


class RenderBuffer:
    """The host buffers of one slot's outputs.

    `host` maps output names to buffers (`token_ids` and `accepted` always; `logprobs`, `top_ids`, `top_logprobs`
    if a request has them; all other names are side outputs of the model): numpy arrays, or tensors from
    `Device.host_buffer`. Each is at least as long as the largest output.
    """

    def __init__(self, host: Mapping[str, HostArray], copy_stream: DeviceStream) -> None:
        assert {"token_ids", "accepted"} <= set(host), "every step samples tokens"
        self._host = dict(host)
        self._copy_stream = copy_stream

    def extended(self, host: Mapping[str, HostArray]) -> RenderBuffer:
        """A copy with additional buffers, for a step with optional outputs."""
        return RenderBuffer({**self._host, **host}, self._copy_stream)

    def start_transfer(
        self,
        ready: DeviceEvent | None,
        sources: Mapping[str, HostArray],
        lengths: Mapping[str, int],
        known: Mapping[str, npt.NDArray[Any]] = _NOTHING,
    ) -> TransferHandle:
        """Copy the first `lengths[name]` rows of each of `sources` once `ready` has completed.

        `ready` None: the copy stream is the compute stream. `sources` is read when the copy runs, so it may still
        be incomplete now; outputs with 0 rows may be missing. `known`: outputs that the host knows without a copy.
        """

        def copy() -> None:
            for name, n in lengths.items():
                if n:
                    _copy(self._host[name], sources[name], n)

        if ready is not None:
            self._copy_stream.wait_event(ready)
        self._copy_stream.enqueue(copy, "copy")
        return TransferHandle(self._copy_stream.record(), lambda: self._collect(lengths, known))

    def _collect(self, lengths: Mapping[str, int], known: Mapping[str, npt.NDArray[Any]]) -> StepOutput:
        found = {name: _numpy(self._host[name])[:n] for name, n in lengths.items()}
        own = {name: found.pop(name) for name in _OUTPUTS & found.keys()}
        return StepOutput(**known, **own, side_outputs=found)


def _copy(target: HostArray, source: Any, n: int) -> None:
    if isinstance(target, np.ndarray):
        target[:n] = source[:n]
    elif source.device.type == "cpu":
        target.numpy()[:n] = source.numpy()  # type: ignore[attr-defined]
    else:
        target[:n].copy_(source, non_blocking=True)


def _numpy(array: Any) -> npt.NDArray[Any]:
    return array if isinstance(array, np.ndarray) else array.numpy()


StagingT = TypeVar("StagingT")


@dataclass(frozen=True, slots=True)
class DecodeSlot(Generic[StagingT]):
    """One of two slots (double buffering): the data of a step that the next step must not overwrite. `staging` is
    the data of the step that uses it, of a type that the runtime defines.

    While the device computes step t from slot 0, the host fills slot 1 for step t+1. A slot belongs to one step
    from `launch_forward` until `commit_step` has consumed its results (I6), so it needs no lock.

        slot 0   | staging t | forward t | sampled t | copy t | commit t |  staging t+2 ...
        slot 1               | staging t+1   | forward t+1   | sampled t+1 | copy t+1 | commit t+1 |

    Both slots use the *same* compute stream (I1): step t+1 reads the pending inputs and the KV that step t writes,
    and only stream order separates them. Two streams would need an event for each of these dependencies."""

    slot_id: int
    compute_stream: DeviceStream
    render: RenderBuffer
    staging: StagingT


def check_shared_stream(slots: tuple[DecodeSlot[StagingT], ...]) -> None:
    """Check invariant I1. Called after a runtime has created its slots."""
    streams = {id(slot.compute_stream) for slot in slots}
    assert len(streams) == 1, f"I1: all slots share one compute stream, these use {len(streams)}"
