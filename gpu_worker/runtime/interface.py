"""The interface between the scheduler and the runtime.

The scheduler describes a step in an immutable `StepBatch`; a `Runtime` computes it. The runtime does not know
requests, the prefix cache or stop conditions; the scheduler does not know tensors. All kinds of steps have the
same form: *append `lengths[i]` positions to row `rows[i]`, starting at `starts[i]`, and sample `outputs[i]` tokens
from the last of them*. A decode appends one position whose input is already on the device. A prefill appends a
chunk of the prompt. A verify appends the pending token and its drafts, and samples all of them.

`PENDING` stands for an input that only the device knows: it is read from the row's pending buffer, which the
previous sampling of that row wrote. So there is no host round trip between two steps.

All host data of a step (row bindings, page-table updates, sampling parameters, masks) is in its `StepBatch` and is
copied through the step's own buffers, in stream order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from gpu_worker.request import SamplingParams

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

StepKind = Literal["prefill", "decode", "verify"]

PENDING = -1
"""In `StepBatch.token_ids`: read the row's pending input. In `StepBatch.pending`: keep the sampled input."""


@dataclass(frozen=True, slots=True)
class RowBinding:
    """Assigns a sequence to a row; applied before its first step.

    `prompt_token_ids` and `output_token_ids` (from before a preemption or an earlier attempt) initialize the
    penalty counts. `seed` is resolved, never None. `end_token_ids` are the tokens that `sampling.min_tokens` bars.
    """

    row: int
    sampling: SamplingParams
    seed: int
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array
    end_token_ids: Collection[int] = ()
    adapter_slot: int = 0


@dataclass(frozen=True, slots=True)
class PageUpdates:
    """Updates of distinct entries of the device's page table: `pages[k]` is the new page of entry (`rows[k]`,
    `columns[k]`)."""

    rows: Int32Array
    columns: Int32Array
    pages: Int32Array


NO_UPDATES = PageUpdates(*(np.empty(0, np.int32) for _ in range(3)))


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The inputs of one step; immutable. B sequences, T = lengths.sum() positions, O = outputs.sum().

    kind:       for staging and statistics; the arrays define the computation
    rows:       int32 [B], page-table rows; distinct, never 0
    starts:     int32 [B], KV length of each row before the step (GPU progress, not committed progress)
    lengths:    int32 [B], positions appended; 1 for decode
    token_ids:  int32 [T], inputs; PENDING only as a row's first
    outputs:    int32 [B], tokens sampled: 0 for a chunk that is not the last and for a recompute, 1 for a final
                chunk or a decode, lengths[i] for a verify
    pending:    int32 [B], a known next input to write to the row's pending buffer (end of a recompute), or PENDING
    bindings:   bindings of rows whose first step this is, applied before it
    pages:      page-table updates, applied before it
    values:     float32 [T, n_values], values of the input tokens (a recompute of coordinates); None if the model
                has no values or all of them are in pending buffers
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
    """The outputs of one step, on the host.

    token_ids: int32 [O], in batch order
    accepted:  int32 [B], the number of valid outputs of row i: 1 for a decode or final chunk, 0 if none was
               sampled; for a verify 1 + the number of leading drafts equal to the tokens sampled in their place
    logprobs:  float32 [O] of the sampled tokens, or None if no row requests them
    top_ids, top_logprobs: [O, k] with k the largest requested, or None
    values:    float32 [O, n_values], values decoded with the tokens (coordinates, sizes), or None
    """

    token_ids: Int32Array
    accepted: Int32Array
    logprobs: Float32Array | None = None
    top_ids: Int32Array | None = None
    top_logprobs: Float32Array | None = None
    values: Float32Array | None = None


class Transfer(Protocol):
    """A step's results while they are copied to the host."""

    def ready(self) -> bool: ...

    def wait(self) -> StepOutput:
        """Wait for this step's own event (never for a stream) and return its results. Called once, by
        `commit_step`. Raises DeviceError."""
        ...


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Properties of the model and its memory that the scheduler uses.

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
    """Computes steps, in launch order, on one compute stream. Owned by the engine thread, which makes all calls,
    except where noted.

    `launch_forward` and `launch_sampling` enqueue work and return without waiting for the device. A slot's buffers
    belong to a step from `launch_forward` until its transfer has been waited for. The slots are 0 and 1; both
    accept any kind of step.
    """

    @property
    def limits(self) -> ModelLimits: ...

    def launch_forward(self, slot_id: int, batch: StepBatch) -> None: ...

    def launch_sampling(self, slot_id: int, batch: StepBatch, mask: TokenMask | None) -> Transfer: ...

    def adapter_key(self, adapter: str) -> str:
        """A key for the content of an adapter, for adapter slots, cached KV and `load_adapter`. May read or
        download the adapter. Raises AdapterError. Called on preparation threads."""
        ...

    def adapter_at_hand(self, adapter: str) -> bool:
        """Whether `adapter_key` returns at once. Called on any thread."""
        ...

    def load_adapter(self, adapter: str, slot: int) -> None:
        """Put the LoRA adapter with this key into a device slot (slot 0 is "no adapter"). Raises AdapterError."""
        ...

    def reload(self, model: str) -> None:
        """Replace the weights. Called with a drained pipeline and an empty prefix cache."""
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...
