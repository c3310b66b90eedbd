"""The line between deciding and computing.

The scheduler decides what a step computes and freezes it in a `StepBatch`; a `Runtime` computes it. The runtime
knows no requests, no prefix cache and no stop conditions; the scheduler knows no tensors. Every step, whatever
its kind, is the same thing: *append `lengths[i]` positions to row `rows[i]`, starting at `starts[i]`, and sample
`outputs[i]` tokens from the last of them*. A decode appends one position whose input the device already has; a
prefill appends a chunk of the prompt; a verify appends the pending token and its drafts and samples all.

Inputs that only the device knows are written as `PENDING`: the row's `_pending_*` buffer, which the previous
sampling of that row wrote. So no host round trip lies between two steps.

Everything that a step reads from the host is in its `StepBatch` and travels in the step's own buffers, in
stream order: a row's binding, page-table changes, sampling parameters, masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from gpu_worker.request import SamplingParams

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

StepKind = Literal["prefill", "decode", "verify"]

PENDING = -1
"""In `StepBatch.token_ids`: read the row's pending input. In `StepBatch.pending`: keep what sampling writes."""


@dataclass(frozen=True, slots=True)
class RowBinding:
    """A sequence takes a row: what the device must know of it before its first step.

    `prompt_token_ids` and `output_token_ids` (known from before a preemption or an earlier attempt) set the
    penalty counts. `seed` is resolved, never None.
    """

    row: int
    sampling: SamplingParams
    seed: int
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array
    adapter_slot: int = 0


@dataclass(frozen=True, slots=True)
class PageUpdates:
    """Changes of the page table since the last launched step: `pages[k]` is now the page of entry
    (`rows[k]`, `columns[k]`). Later entries win."""

    rows: Int32Array
    columns: Int32Array
    pages: Int32Array


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step computes; frozen at launch. B sequences, T = lengths.sum() positions, O = outputs.sum().

    kind:       for staging and statistics; the arrays say everything else
    rows:       int32 [B], page-table rows; distinct, never 0
    starts:     int32 [B], KV length of each row before the step (GPU progress, not committed progress)
    lengths:    int32 [B], positions appended; 1 for decode
    token_ids:  int32 [T], inputs; PENDING only as a row's first
    outputs:    int32 [B], tokens sampled: 0 for a chunk that is not the last and for a recompute, 1 for a final
                chunk or a decode, lengths[i] for a verify
    pending:    int32 [B], a known next input to write to the row's pending buffer (end of a recompute), or PENDING
    bindings:   rows that take their sequence with this step, applied before it
    pages:      page-table changes, applied before it
    values:     float32 [T, n_values], what belongs to the input tokens beside their ids (a recompute of
                coordinates); None where the model has no values or all of them are the device's own
    pending_values: float32 [B, n_values], the values of the known next inputs in `pending`, or None
    """

    kind: StepKind
    rows: Int32Array
    starts: Int32Array
    lengths: Int32Array
    token_ids: Int32Array
    outputs: Int32Array
    pending: Int32Array
    bindings: Sequence[RowBinding]
    pages: PageUpdates
    values: Float32Array | None = None
    pending_values: Float32Array | None = None

    @property
    def size(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class TokenMask:
    """Allowed tokens of the constrained outputs of a step.

    outputs: int32 [M], indices into the step's O outputs; all others are free
    bits:    int32 [M, ceil(vocab / 32)], bit v % 32 of word v // 32 set when token v is allowed
    """

    outputs: Int32Array
    bits: Int32Array


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step sampled, on the host.

    token_ids: int32 [O], in batch order
    accepted:  int32 [B], how many of row i's outputs hold: 1 for a decode or final chunk, 0 where none was
               sampled; for a verify 1 + the number of leading drafts equal to what was sampled in their place
    logprobs:  float32 [O] of the chosen tokens, or None when no row asked
    top_ids, top_logprobs: [O, k] with k the largest asked for, or None
    values:    float32 [O, n_values], what the model decoded beside the tokens (coordinates, sizes), or None
    """

    token_ids: Int32Array
    accepted: Int32Array
    logprobs: Float32Array | None = None
    top_ids: Int32Array | None = None
    top_logprobs: Float32Array | None = None
    values: Float32Array | None = None


class Transfer(Protocol):
    """A step's results on their way to the host."""

    def ready(self) -> bool: ...

    def wait(self) -> StepOutput:
        """Wait for this step's own event (never for a stream) and return its results. Called once, by
        `commit_step`. Raises what the device raised."""
        ...


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the scheduler must know of the model and of the memory behind it.

    `n_pages` and `max_batch_size` include the reserved page 0 and row 0.
    """

    model: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    n_pages: int
    page_size: int
    max_batch_size: int
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    n_values: int = 0
    device: str = ""


class Runtime(Protocol):
    """Computes steps, in launch order, on one compute stream. Owned by the engine thread.

    A runtime may also have `adapter_key(adapter: str) -> str`, which names an adapter by its content: called on
    preparation threads, it keys adapter slots and cached KV, and is what `load_adapter` is asked for; without it
    the adapter's own name is all that. Raises AdapterError.

    `launch_forward` and `launch_sampling` enqueue and return; neither waits for the device. A slot's buffers
    belong to a step from `launch_forward` until its transfer has been waited for. Slots are 0 and 1; either
    takes any kind of step.
    """

    @property
    def limits(self) -> ModelLimits: ...

    def launch_forward(self, slot_id: int, batch: StepBatch) -> None: ...

    def launch_sampling(self, slot_id: int, batch: StepBatch, mask: TokenMask | None) -> Transfer: ...

    def load_adapter(self, adapter: str, slot: int) -> None:
        """Put a LoRA adapter into a device slot (slot 0 is "no adapter"). Raises AdapterError."""
        ...

    def reload(self, model: str) -> None:
        """Replace the weights. The pipeline is drained and nothing is cached when this is called."""
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...
