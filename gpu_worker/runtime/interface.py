"""The interface between the scheduler and the runtime.

The scheduler describes a step in an immutable `StepBatch`; a `Runtime` computes it. The runtime does not know
requests, the prefix cache or stop conditions; the scheduler does not know tensors. All kinds of steps have the
same form: *append `lengths[i]` positions to row `rows[i]`, starting at `starts[i]`, and sample `outputs[i]` tokens
from the last of them*. A decode appends one position whose input is already on the device. A prefill appends a
chunk of the prompt. A verify appends the pending token and its drafts, and samples all of them. An encode appends
nothing: it makes the features of images, which later prefills take as inputs.

`PENDING` stands for an input that only the device knows: it is read from the row's pending buffer, which the
previous sampling of that row wrote. So there is no host round trip between two steps.

Nor is there one behind a verification, where the runtime `goes_ahead`: the row is *in doubt*, its step is planned
for the case that all drafts are accepted, and in stream order the runtime finds where it begins (`in_doubt`).

All host data of a step (row bindings, page-table updates, sampling parameters, masks) is in its `StepBatch` and is
copied through the step's own buffers, in stream order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from petiole.cache import WindowPages
from petiole.contract.settings.engine import Batching
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.request.pooling import Judge, TextLimits
from petiole.gpu_worker.request.prepared_images import ImageLimits, PreparedImage
from petiole.gpu_worker.request.skills import Pictures, Processor
from petiole.gpu_worker.request.values import ValueKinds
from petiole.gpu_worker.request.videos import Videos

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Float32Array = npt.NDArray[np.float32]

StepKind = Literal["prefill", "decode", "verify", "mixed", "encode"]

PENDING = -1
"""In `StepBatch.token_ids`: read the row's pending input. In `StepBatch.pending`: keep the sampled input."""

DRAFTED = -3
"""In `StepBatch.token_ids`: read what the runtime drafted behind the row's pending input, one after the other."""

VALUES = "values"
TYPES = "types"
"""The side input and side output of a model with values: a line of numbers for each token (`request.values`). What
is made with a sampled token is an input with that token."""

FEATURES = "features"
"""The side input of a model with images: what an encode has made of them. It stays on the device."""


VECTORS = "vectors"
OF_TOKENS = "of_tokens"
"""The side output of a model of texts: float32 [O, vector_size], in place of tokens that mean something."""


@dataclass(frozen=True, slots=True)
class RowBinding:
    """Assigns a sequence to a row; applied before its first step.

    `prompt_token_ids` and `output_token_ids` (from before a preemption or an earlier attempt) initialize the
    penalty counts. `seed` is resolved, never None. `end_token_ids` are the tokens that `sampling.min_tokens` bars.
    `rotary_offset`: a decode's rotary position less its KV index.
    """

    row: int
    sampling: SamplingParams
    seed: int
    prompt_token_ids: Int32Array
    output_token_ids: Int32Array
    end_token_ids: Collection[int] = ()
    adapter_slot: int = 0
    rotary_offset: int = 0


@dataclass(frozen=True, slots=True)
class PageUpdates:
    """Updates of distinct entries of the device's page table: `pages[k]` is the new page of entry (`rows[k]`,
    `columns[k]`). windows: the same entries' pages in the table of each group of layers with a window
    (`ModelLimits.windows`); 0 where none of the row's next steps reads."""

    rows: Int32Array
    columns: Int32Array
    pages: Int32Array
    windows: Sequence[Int32Array] = ()


_NONE = np.empty(0, np.int32)
NO_UPDATES = PageUpdates(_NONE, _NONE, _NONE)


@dataclass(frozen=True, slots=True)
class StateUpdates:
    """What a step does with the states of layers that keep one, beside advancing those of its rows by its
    positions. begun: rows whose first step this is; sources: the snapshot from which each goes on, 0: from
    nothing; starts: their first positions. kept: the sequence index of each state that is copied; positions:
    after which the copy is made; snapshots: where to. undecided: the sequence index of each row with drafts;
    certain: its positions before these, after which its state is kept: its next step begins there unless all
    drafts are accepted. All int32, in order."""

    begun: Int32Array
    sources: Int32Array
    starts: Int32Array
    kept: Int32Array
    positions: Int32Array
    snapshots: Int32Array
    undecided: Int32Array = field(default_factory=lambda: _NONE)
    certain: Int32Array = field(default_factory=lambda: _NONE)


@dataclass(frozen=True, slots=True)
class EncodeInput:
    """An image to encode. The runtime keeps its features under `key` until a step has used them, or until
    `forget_images`; and for requests with the same `salt` while they are among those last used. salt None: not of
    a request."""

    key: int
    image: PreparedImage
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class KeptInput:
    """A part of a side input that the runtime keeps on the device: it belongs to `n_positions` of the step's T
    inputs, from index `at` on. skipped: positions that earlier steps have used. last: no later step uses any."""

    key: int
    at: int
    n_positions: int
    skipped: int = 0
    last: bool = True


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """The inputs of a step whose logits score a given token: the next one of the prompt. S of them.

    inputs: int32 [S], indices among the step's T inputs, ascending; none of these is sampled from. token_ids:
    int32 [S], the tokens that are scored. counts: int32 [B], how many there are of each row. top: how many of the
    likeliest tokens are wanted at each."""

    inputs: Int32Array
    token_ids: Int32Array
    counts: Int32Array
    top: int


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The inputs of one step; immutable. B sequences, T = lengths.sum() positions, O = outputs.sum().

    kind:       for staging and statistics; the arrays define the computation
    rows:       int32 [B], page-table rows; distinct, never 0
    starts:     int32 [B], KV length of each row before the step (GPU progress, not committed progress)
    lengths:    int32 [B], positions appended; 1 for decode
    token_ids:  int32 [T], inputs; PENDING only as a row's first, DRAFTED only behind PENDING
    outputs:    int32 [B], tokens sampled: 0 for a chunk that is not the last and for a recompute, 1 for a final
                chunk or a decode, 1 + the number of drafts for a verify
    in_doubt:   int32 [B], the drafts of each row that an earlier step verifies, unknown to the host: the row
                begins at `starts` if all are accepted. Else it begins as many positions before as are rejected; a
                row with states begins at the state before the drafts, and repeats those that are accepted before
                its first input. None if all rows begin at `starts`
    ahead:      int32 [B], how many tokens the runtime drafts behind each row's last valid output, if the row has
                outputs. `pages` has a page for each position that it needs for them. None: it drafts none
    pending:    int32 [B], a known next input to write to the row's pending buffer (end of a recompute), or PENDING
    bindings:   bindings of rows whose first step this is, applied before it
    pages:      page-table updates, applied before it
    following:  int32 [B], the token after each row's last input, PENDING where the host does not know it; None: it
                knows none
    side_inputs: what stands beside the tokens, by name: arrays [T, ...]. VALUES: int32 [T, width], NO_NUMBER for a
                token without numbers; missing if only tokens in pending buffers carry any. TYPES: int32 [T], 1 for
                a token of the second text of a pair; missing if there is none
    pending_sides: likewise beside the known next inputs in `pending`: arrays [B, ...]
    kept:       side inputs that an encode has made, by name. FEATURES: of images or parts of them, in place of the
                embeddings of tokens; their token ids are IMAGE
    images:     the images of an encode
    regions:    int32 [R, 3], sequence index, begin and end of bidirectional regions: all positions of a region see
                each other. A step computes a region to its end. None if there are none
    rotary:     int32 [T], or [axes, T] where the axes differ: rotary positions. None if they are the KV indices,
                plus each row's `rotary_offset` in a decode
    states:     None if no layer keeps a state
    scored:     None if no prompt of the step's chunks is scored
    of_tokens:  of each sequence, what is made of each of its tokens beside a vector: names of outputs. None if no
                sequence asks for any
    unpooled:   of each sequence, how many of its first positions are not pooled. None if all are
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
    following: Int32Array | None = None
    in_doubt: Int32Array | None = None
    ahead: Int32Array | None = None
    side_inputs: Mapping[str, Int32Array] = field(default_factory=dict)
    pending_sides: Mapping[str, Int32Array] = field(default_factory=dict)
    kept: Mapping[str, Sequence[KeptInput]] = field(default_factory=dict)
    images: Sequence[EncodeInput] = ()
    regions: Int32Array | None = None
    rotary: Int32Array | None = None
    states: StateUpdates | None = None
    scored: ScoredTokens | None = None
    of_tokens: Sequence[Sequence[str]] | None = None
    unpooled: Sequence[int] | None = None

    @property
    def size(self) -> int:
        return len(self.rows)

    @property
    def earliest(self) -> Int32Array:
        """int32 [B]: the first position at which each row may begin."""
        return self.starts if self.in_doubt is None else self.starts - self.in_doubt

    @property
    def certain(self) -> Int32Array:
        """int32 [B]: the number of inputs that are no drafts."""
        return np.where(self.outputs > 1, self.lengths - self.outputs + 1, self.lengths)


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
    drafts:    int32 [B, `ModelLimits.drafts`], what the runtime expects after the last valid output of row i,
               `StepBatch.ahead[i]` tokens; the others are arbitrary. None if it drafts nothing
    logprobs:  float32 [O] of the sampled tokens, or None if no row requests them
    top_ids, top_logprobs: [O, k] with k the largest requested, or None
    scored_logprobs, scored_ids, scored_top: the same of the tokens that are scored, [S] and [S,
    `ScoredTokens.top`] side_outputs: what the model made beside the tokens, by name: arrays [O, ...]. VALUES:
    int32 [O, width]; the
               numbers of other kinds than the token's are arbitrary. VECTORS: float32 [O, vector_size].
               OF_TOKENS: object [O], the weights and the vectors of each text's tokens, as in `Pooled`, or None
    """

    token_ids: Int32Array
    accepted: Int32Array
    drafts: Int32Array | None = None
    logprobs: Float32Array | None = None
    top_ids: Int32Array | None = None
    top_logprobs: Float32Array | None = None
    scored_logprobs: Float32Array | None = None
    scored_ids: Int32Array | None = None
    scored_top: Float32Array | None = None
    side_outputs: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)


class Transfer(Protocol):
    """A step's results while they are copied to the host."""

    def wait(self) -> StepOutput:
        """Wait for this step's own event (never for a stream) and return its results. Called once, by
        `commit_step`. Raises DeviceError."""
        ...


@dataclass(frozen=True, slots=True)
class Computing:
    """How a model is stored and computed, for operators. weight_format: in memory, that of the most weights first.
    kernels: "compiled" or "torch" on the CPU, else "flashinfer". instructions: of the kernels, such as "avx2" or
    "sm_90"; "" if unknown. threads: of a CPU's step."""

    weight_format: str = ""
    weight_bytes: int = 0
    kernels: str = ""
    instructions: str = ""
    threads: int = 0

    def __str__(self) -> str:
        instructions = f" ({self.instructions})" if self.instructions else ""
        threads = f", {self.threads} threads" if self.threads else ""
        size = f"{self.weight_bytes / 1e9:.2f} GB"
        return f"weights {self.weight_format}, {size}; {self.kernels} kernels{instructions}{threads}"


class HostCopy(Protocol):
    """Keys and values on their way to the host."""

    def wait(self) -> npt.NDArray[np.uint8]:
        """Wait for this copy's own event. Any thread may call this. Raises DeviceError."""
        ...

    def release(self) -> None:
        """Give back the memory that `wait` has shown, which later copies fill. Called once, by any thread."""
        ...


class KVCopies(Protocol):
    """Copies of keys and values between the pool and the host, in stream order. Slots are places of positions in
    the pool: page * page_size + offset.

    layout: what the bytes of a copy mean, beside the model's fingerprint. position_bytes: of one position, in all
    layers."""

    @property
    def layout(self) -> str: ...

    @property
    def position_bytes(self) -> int: ...

    def make_ring(self, n_blocks: int, n_positions: int) -> None:
        """Make the memory of `to_host`: for so many copies at a time, of so many positions. Called once."""
        ...

    def to_host(self, slots: npt.NDArray[np.int64]) -> HostCopy | None:
        """Copy the positions in these slots, as many as a block of the ring has, after all steps that have been
        launched. None: no block is free. Called by the engine thread."""
        ...

    def staging(self, n_bytes: int) -> Any:
        """Memory for `from_host`, which numpy sees as an array of bytes. Any thread may call this."""
        ...

    def from_host(self, slots: npt.NDArray[np.int64], staged: Any, first: int) -> None:
        """Write positions [first, first + len(slots)) of a copy into these slots, before all later steps."""
        ...


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Properties of the model and its memory that the scheduler uses.

    `n_pages` and `max_batch_size` include the reserved page 0 and row 0; texts that are computed whole take no
    other page. `windows`: the pools of groups of layers with a window, beside the pages of the others.
    `snapshots`: of layers that keep a state, with the reserved one; 0: there are none. `values`: the kinds of
    values that the model has, or None. `images`: the images that it takes, or None. `texts`: the texts that it
    makes vectors of, or None for a model that generates. `judge`: how the latter scores pairs, if its files say
    so. `pictures`, `videos`: turn these into what is encoded, or None. `processor`: turns skill calls into
    prompts, or None. `files`: which files of this machine the weights are from. `batching`: the meaning of
    settings of 0, on this device and with this memory. `computing`: for operators alone. `drafts`: how many tokens
    a step drafts at most for each of its rows; 0: the runtime drafts nothing. `goes_ahead`: whether it takes steps
    of rows in doubt, and DRAFTED."""

    model: str
    fingerprint: str
    vocab_size: int
    max_model_len: int
    n_pages: int
    page_size: int
    max_batch_size: int
    windows: Sequence[WindowPages] = ()
    snapshots: int = 0
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)
    values: ValueKinds | None = None
    images: ImageLimits | None = None
    pictures: Pictures | None = None
    videos: Videos | None = None
    processor: Processor | None = None
    texts: TextLimits | None = None
    judge: Judge | None = None
    device: str = ""
    files: str = ""
    batching: Batching = field(default_factory=Batching)
    computing: Computing = field(default_factory=Computing)
    drafts: int = 0
    goes_ahead: bool = False

    @property
    def whole_texts(self) -> bool:
        """Whether each text is computed in one step, and takes no page."""
        return self.texts is not None and self.texts.whole

    @property
    def positions_that_fit(self) -> int:
        """The most positions of a sequence, as far as pages limit them."""
        return self.max_model_len if self.whole_texts else (self.n_pages - 1) * self.page_size


Progress = Callable[[], None]
"""Called again and again by work that takes long, to show that it goes on."""


def nothing() -> None:
    """A `Progress` without effect."""


class LoadWeights(Protocol):
    """Overwrites the weights."""

    def __call__(self, progress: Progress = nothing, /) -> None: ...


class Runtime(Protocol):
    """Computes steps, in launch order, on one compute stream. Owned by the engine thread, which makes all calls,
    except where noted.

    `launch_forward` and `launch_sampling` enqueue work and return without waiting for the device. A slot's buffers
    belong to a step from `launch_forward` until its transfer has been waited for. The slots are 0 and 1; both
    accept any kind of step.

    `progress`: set by the engine. A step that takes long, such as many crops on a CPU, calls it on any thread, to
    show that the engine does not hang. `kv_copies`: None if it makes none: it has several pools, or none."""

    progress: Progress
    kv_copies: KVCopies | None

    @property
    def limits(self) -> ModelLimits: ...

    def launch_forward(self, slot_id: int, batch: StepBatch) -> None: ...

    def launch_sampling(self, slot_id: int, batch: StepBatch, mask: TokenMask | None) -> Transfer: ...

    def forget_images(self, keys: Sequence[int]) -> None:
        """Drop the features under these keys, after all steps that have been launched."""
        ...

    def encoded_images(self) -> int:
        """How many images of requests have been encoded. Called on any thread."""
        ...

    def feature_hits(self) -> int:
        """How many images of encodes had kept features. Called on any thread."""
        ...

    def expert_tokens(self) -> Sequence[Sequence[int]]:
        """For each layer with experts, how many positions each expert has computed. Called on any thread."""
        ...

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

    def prepare_reload(self, model: str) -> LoadWeights:
        """Find weights to replace the current ones. May download them. Called on any thread.

        Returns a function that overwrites the weights. It is called on the engine thread, with a drained pipeline
        and an empty prefix cache. Raises ModelError if the layout differs or tensors are missing."""
        ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...
