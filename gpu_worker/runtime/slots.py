"""The two ping-pong slots: everything of a step that the next step must not overwrite.

While the device computes step t out of slot 0, the host fills slot 1 for step t+1. A slot belongs to one step from
`launch_forward` until `commit_step` has consumed its results (I6), so nothing in it needs a lock.

    slot 0   | staging t | forward t | sampled t | copy t | commit t |  staging t+2 ...
    slot 1               | staging t+1   | forward t+1   | sampled t+1 | copy t+1 | commit t+1 |

Both slots name the *same* compute stream (I1): the pending inputs and the KV that step t writes are read by step
t+1, and only stream order keeps them apart. Two streams would need an event for each of these edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from gpu_worker.runtime.device import Stream
from gpu_worker.runtime.transfer import RenderBuffer

StagingT = TypeVar("StagingT")


@dataclass(frozen=True, slots=True)
class DecodeSlot(Generic[StagingT]):
    """One slot. `staging` is what the runtime keeps for it: pinned metadata, device staging of logits and sampled
    ids, attention context and graphs; the runtime decides its type, the slot decides its lifetime."""

    slot_id: int
    compute_stream: Stream
    render: RenderBuffer
    staging: StagingT


def check_shared_stream(slots: tuple[DecodeSlot[StagingT], ...]) -> None:
    """Invariant I1, checked when a runtime has made its slots."""
    streams = {id(slot.compute_stream) for slot in slots}
    assert len(streams) == 1, f"I1: all slots share one compute stream, these use {len(streams)}"
