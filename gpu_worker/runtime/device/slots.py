"""The two slots (double buffering): the data of a step that the next step must not overwrite.

While the device computes step t from slot 0, the host fills slot 1 for step t+1. A slot belongs to one step from
`launch_forward` until `commit_step` has consumed its results (I6), so it needs no lock.

    slot 0   | staging t | forward t | sampled t | copy t | commit t |  staging t+2 ...
    slot 1               | staging t+1   | forward t+1   | sampled t+1 | copy t+1 | commit t+1 |

Both slots use the *same* compute stream (I1): step t+1 reads the pending inputs and the KV that step t writes, and
only stream order separates them. Two streams would need an event for each of these dependencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from petiole.gpu_worker.runtime.device.device import DeviceStream
from petiole.gpu_worker.runtime.device.transfer import RenderBuffer

StagingT = TypeVar("StagingT")


@dataclass(frozen=True, slots=True)
class DecodeSlot(Generic[StagingT]):
    """One slot. `staging` is the data of the step that uses it, of a type that the runtime defines."""

    slot_id: int
    compute_stream: DeviceStream
    render: RenderBuffer
    staging: StagingT


def check_shared_stream(slots: tuple[DecodeSlot[StagingT], ...]) -> None:
    """Check invariant I1. Called after a runtime has created its slots."""
    streams = {id(slot.compute_stream) for slot in slots}
    assert len(streams) == 1, f"I1: all slots share one compute stream, these use {len(streams)}"
