"""Random plans with mixers that keep a state, in compiled code: what torch computes; and the same bits alone, in a
batch, in chunks, on any thread count, and behind a snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from petiole.gpu_worker.models.decoder import Decoder, Forward
from petiole.gpu_worker.models.families.hybrids import granite4, lfm2, qwen_next
from petiole.gpu_worker.models.loading import LoadOptions, Model, read_decoder
from petiole.gpu_worker.models.plan import (
    Attention,
    DeltaNet,
    FeedForward,
    Layer,
    Mamba2,
    ModelPlan,
    Norm,
    Recurrent,
    Rotary,
    ShortConvolution,
)
from petiole.gpu_worker.models.weights.names import LLAMA
from petiole.gpu_worker.runtime.cpu.attention import PagedAttention
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.forward import NativeDecoder, native_decoder
from petiole.gpu_worker.runtime.interface import StateUpdates, nothing
from petiole.gpu_worker.runtime.memory.kv import KVCache
from petiole.gpu_worker.runtime.memory.states import StatePool, new_state_pool
from tests.gpu_worker.runtime.cpu.test_native_attention import CPU, MAX_LENGTH, scattered_cache, step
from tests.support.plans import Drawn

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C compiler")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
VOCAB, HIDDEN, ROWS, SNAPSHOTS = 37, 64, 3, 4
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=3)
NORM = Norm()
ATTENTION = Attention(4, 2, 32, 32**-0.5, Rotary(16), output_gate=True)


@st.composite
def nets(draw: Any, grouped: bool) -> DeltaNet:
    heads = draw(st.integers(1, 3))
    return DeltaNet(
        key_heads=heads,
        value_heads=heads * draw(st.integers(1, 3)),
        key_dim=draw(st.sampled_from([5, 16, 40, 128])),
        value_dim=draw(st.sampled_from([6, 24, 32, 40, 64, 130])),
        kernel=draw(st.sampled_from([1, 2, 4])),
        norm=Norm(eps=draw(st.sampled_from([1e-6, 1e-2]))),
        grouped=grouped,
    )


@st.composite
def scans(draw: Any) -> Mamba2:
    groups = draw(st.integers(1, 3))
    return Mamba2(
        heads=groups * draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([6, 24, 32, 40, 64, 130])),
        state=draw(st.sampled_from([5, 16, 40, 128])),
        groups=groups,
        kernel=draw(st.sampled_from([1, 2, 4])),
        norm=Norm(eps=draw(st.sampled_from([1e-6, 1e-2]))),
        convolution_bias=draw(st.booleans()),
        bias=draw(st.booleans()),
    )


SHORT = st.builds(ShortConvolution, st.just(HIDDEN), st.sampled_from([1, 3, 4]), st.booleans())


@st.composite
def plans(draw: Any) -> ModelPlan:
    """Layers with states of one kind, as one family names their weights, and maybe others that attend. The last
    may read the keys of an earlier one."""
    kinds: list[st.SearchStrategy[Recurrent]] = [nets(False), nets(True), scans(), SHORT]
    kind = kinds[draw(st.integers(0, 3))]
    drawn: list[Recurrent | Attention] = draw(st.lists(kind | st.just(ATTENTION), min_size=1, max_size=3))
    mixers = [*drawn, draw(kind)]
    if ATTENTION in mixers and draw(st.booleans()):
        mixers.append(replace(ATTENTION, keys_of=mixers.index(ATTENTION)))
    out_norm = draw(st.none() | st.just(NORM))
    feeding = Layer(ATTENTION, FeedForward(66), NORM, mixer_out_norm=out_norm, feed_forward_norm=NORM)
    kinds_of_layers = st.sampled_from([feeding, Layer(ATTENTION, None, NORM)])
    layers = tuple(replace(draw(kinds_of_layers), mixer=mixer) for mixer in mixers)
    return ModelPlan("test", VOCAB, HIDDEN, layers, NORM, MAX_LENGTH, tied_head=draw(st.booleans()))


def decoder_of(plan: ModelPlan, dtype: torch.dtype) -> Decoder:
    mixer = next(mixer for _, mixer in plan.recurrent)
    names = {ShortConvolution: lfm2.NAMES, Mamba2: granite4.NAMES}.get(type(mixer), LLAMA)
    if isinstance(mixer, DeltaNet) and mixer.grouped:
        names = qwen_next.NEXT
    return read_decoder(Drawn(), Model({}, plan, names, read_decoder), LoadOptions(CPU, dtype, MAX_LENGTH))


class Machine:
    """A decoder over pools of its own, in compiled code or in torch."""

    def __init__(
        self, plan: ModelPlan, dtype: torch.dtype, *, compiled: bool = True, rounded: bool = False
    ) -> None:
        self.cache: KVCache = scattered_cache(plan, 1, ROWS, dtype)
        if not compiled:
            for pool in (*self.cache.keys, *self.cache.values):
                pool.zero_()  # torch multiplies what it hides by 0
        states = new_state_pool(plan, rows=ROWS, snapshots=SNAPSHOTS, dtype=dtype, device=CPU, rounded=rounded)
        assert states is not None
        self.states: StatePool = states
        self.decoder = decoder_of(plan, dtype)
        self.native: NativeDecoder | None = None
        if compiled:
            self.native = native_decoder(self.decoder, self.cache, states=states.layers)
            assert self.native is not None

    def run(
        self,
        rows: Sequence[int],
        starts: Sequence[int],
        lengths: Sequence[int],
        *,
        sources: Sequence[int] = (),
        kept: Sequence[tuple[int, int, int]] = (),
        outputs: Tensor | None = None,
    ) -> Tensor:
        """Logits of all positions, or of `outputs`. Rows that start at 0 or have a source begin. kept: sequence
        index, position and snapshot of each copy."""
        begun = [i for i in range(len(rows)) if starts[i] == 0 or i < len(sources)]
        updates = StateUpdates(
            *(int32(column) for column in ([rows[i] for i in begun], [*sources] or [0] * len(begun))),
            int32([starts[i] for i in begun]),
            *(int32([one[k] for one in kept]) for k in range(3)),
        )
        token_ids, positions, at = step(rows, starts, lengths)
        token_ids %= VOCAB
        of_rows = np.array(rows, np.int64), int32(starts), int32(lengths)
        if self.native is not None:
            found = self.states.begin(*of_rows, updates)
            copies = None if found is None else torch.from_numpy(found)
            outputs = torch.arange(len(at)) if outputs is None else outputs
            return self.native.forward(0, token_ids, positions, at, outputs, copies=copies).clone()
        attention = PagedAttention(
            cache=self.cache,
            plan=self.decoder.plan.mixers,
            rows=torch.tensor(rows),
            starts=of_rows[1],
            lengths=of_rows[2],
            slots=[self.cache.slots(at, positions)],
        )
        forward = Forward(positions, attention, states=self.states.advance(*of_rows, updates, nothing))
        return self.decoder.head_output(self.decoder.forward(self.decoder.embed(token_ids), forward))


def int32(numbers: Sequence[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def prompts_and_decodes(machine: Machine, lengths: Sequence[int]) -> Tensor:
    rows, ones = range(len(lengths)), [1] * len(lengths)
    prompts = machine.run(rows, [0] * len(lengths), lengths)
    return torch.cat([prompts, *(machine.run(rows, [n + more for n in lengths], ones) for more in range(2))])


@settings(max_examples=60)
@given(plan=plans(), lengths=LENGTHS)
def test_it_computes_what_torch_computes(plan: ModelPlan, lengths: list[int]) -> None:
    wanted = prompts_and_decodes(Machine(plan, torch.float32, compiled=False), lengths)
    found = prompts_and_decodes(Machine(plan, torch.float32), lengths)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4 * float(wanted.abs().max()))


@DTYPES
@settings(max_examples=40)
@given(plan=plans(), lengths=LENGTHS, chunk=st.sampled_from([1, 2, 3, 7]), threads=st.sampled_from([1, 3]))
def test_the_same_bits_alone_in_a_batch_in_chunks_and_on_any_number_of_threads(
    dtype: torch.dtype, plan: ModelPlan, lengths: list[int], chunk: int, threads: int
) -> None:
    machine = Machine(plan, dtype)
    together = prompts_and_decodes(machine, lengths)
    assert together.isfinite().all()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(prompts_and_decodes(machine, lengths), together)
    finally:
        torch.set_num_threads(before)
    for row, length in enumerate(lengths):
        at = sum(lengths[:row])
        cut = [machine.run([row], [start], [min(chunk, length - start)]) for start in range(0, length, chunk)]
        assert torch.equal(torch.cat(cut), together[at : at + length])
        for more in range(2):
            decoded = machine.run([row], [length + more], [1])
            at = sum(lengths) + more * len(lengths) + row
            assert torch.equal(decoded, together[at : at + 1])
        again = machine.run([row], [0], [length + 2])
        assert torch.equal(again[-1:], decoded)


@DTYPES
@settings(max_examples=40)
@given(plan=plans(), lengths=LENGTHS, data=st.data())
def test_the_same_bits_behind_a_snapshot(
    dtype: torch.dtype, plan: ModelPlan, lengths: list[int], data: st.DataObject
) -> None:
    machine = Machine(plan, dtype)
    whole = machine.run(range(len(lengths)), [0] * len(lengths), lengths)
    copied = data.draw(st.lists(st.tuples(st.integers(0, len(lengths) - 1), st.integers(1, 39)), max_size=3))
    copied = [(row, position) for row, position in dict.fromkeys(copied) if position < lengths[row]]
    kept = [(row, position, i + 1) for i, (row, position) in enumerate(copied)]
    outputs = torch.tensor([sum(lengths) - 1])
    assert torch.equal(
        machine.run(range(len(lengths)), [0] * len(lengths), lengths, kept=kept, outputs=outputs), whole[outputs]
    )
    for row, position, snapshot in kept:
        found = machine.run([row], [position], [lengths[row] - position], sources=[snapshot])
        at = sum(lengths[:row])
        assert torch.equal(found, whole[at + position : at + lengths[row]])


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize(
    "net",
    [
        *(DeltaNet(2, 4, key_dim, value_dim, 4, NORM) for key_dim, value_dim in [(16, 32), (5, 96)]),
        Mamba2(heads=4, head_dim=64, state=16, groups=2, kernel=4, norm=NORM),
    ],
    ids=str,
)
def test_a_rounded_snapshot_is_off_by_at_most_half_a_step_of_each_run(compiled: bool, net: Recurrent) -> None:
    plan = ModelPlan("test", VOCAB, HIDDEN, (Layer(net, FeedForward(66), NORM, feed_forward_norm=NORM),), NORM, 99)
    exact = Machine(plan, torch.float32, compiled=compiled)
    rounded = Machine(plan, torch.float32, compiled=compiled, rounded=True)
    for machine in (exact, rounded):
        machine.run([0, 1], [0, 0], [20, 9], kept=[(0, 13, 1), (1, 8, 3)], outputs=None)
        machine.run([2], [8], [1], sources=[3])
    wanted, found = (machine.states.layers[0] for machine in (exact, rounded))
    assert wanted is not None
    assert wanted.matrices is not None
    assert found is not None
    assert found.matrices is not None
    assert found.rounded is not None
    assert len(found.matrices) == ROWS
    assert torch.equal(found.matrices[:2], wanted.matrices[:2])
    for snapshot in (1, 3):
        copy = found.rounded.read(torch.tensor([snapshot]))
        runs, read = (m.flatten().view(-1, 32) for m in (wanted.matrices[ROWS + snapshot], copy))
        step = runs.abs().amax(-1, keepdim=True) / 127
        assert ((read - runs).abs() <= 0.501 * step).all()
    assert not torch.equal(found.matrices[2], wanted.matrices[2])
    torch.testing.assert_close(found.matrices[2], wanted.matrices[2], rtol=0, atol=float(step.max()))
