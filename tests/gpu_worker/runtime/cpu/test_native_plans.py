"""Random plans in compiled code: what torch computes; and the same bits alone, in a batch and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from petiole.gpu_worker.models.decoder import Decoder, Forward
from petiole.gpu_worker.models.loading import LoadOptions, Model, read_decoder
from petiole.gpu_worker.models.plan import (
    Attention,
    FeedForward,
    Growth,
    Latent,
    Layer,
    ModelPlan,
    Norm,
    PerLayerInput,
    Rotary,
)
from petiole.gpu_worker.models.weights.names import LLAMA
from petiole.gpu_worker.runtime.cpu.attention import PagedAttention
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.forward import NativeDecoder, native_decoder
from petiole.gpu_worker.runtime.cpu.native.supported import support
from petiole.gpu_worker.runtime.memory.kv import KVCache
from tests.gpu_worker.runtime.cpu.test_native_attention import CPU, MAX_LENGTH, scattered_cache, step
from tests.support.families import EVERY_FAMILY
from tests.support.plans import Drawn
from tests.support.trials import examples

pytestmark = pytest.mark.skipif(load_library() is None, reason="no C compiler")

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
VOCAB = 37
BOTH = st.booleans()
ACTIVATIONS = st.sampled_from(["silu", "gelu", "gelu_tanh", "relu2"])
NORMS = st.builds(
    Norm,
    kind=st.sampled_from(["rms", "layer"]),
    eps=st.sampled_from([1e-6, 1e-2]),
    weight=BOTH,
    bias=BOTH,
    offset=st.sampled_from([0.0, 1.0]),
)
MAYBE = st.none() | NORMS
CLAMPS = st.sampled_from([0.0, 0.5])
LENGTHS = st.lists(st.sampled_from([1, 127, 128, 129, 257]) | st.integers(1, 300), min_size=1, max_size=3)


@st.composite
def rotaries(draw: Any, head_dim: int) -> Rotary:
    dims = draw(st.sampled_from([2, head_dim // 2, head_dim]))
    theta, kind = draw(st.sampled_from([100.0, 10_000.0])), draw(st.sampled_from(["default", "proportional"]))
    return Rotary(dims, theta, kind, fraction=0.25)


@st.composite
def mixers(draw: Any, before: Sequence[Attention], mask: str) -> Attention:
    own = [i for i, one in enumerate(before) if one.keys_of is None]
    keys_of = draw(st.none() | st.sampled_from(own)) if own else None
    if keys_of is None:
        kv_heads, head_dim = draw(st.integers(1, 3)), draw(st.sampled_from([16, 48, 64, 128, 256, 272, 512]))
    else:
        kv_heads, head_dim = before[keys_of].kv_heads, before[keys_of].head_dim
    output_gate = draw(BOTH)
    return Attention(
        heads=kv_heads * draw(st.sampled_from([1, 2, 4, 9])),
        kv_heads=kv_heads,
        head_dim=head_dim,
        scale=draw(st.sampled_from([1.0, head_dim**-0.5])),
        rotary=draw(st.none() | rotaries(head_dim)),
        window=draw(st.sampled_from([0, 0, 1, 5, 127, 128, 129])),
        mask=mask,
        q_norm=draw(MAYBE),
        k_norm=draw(MAYBE),
        v_norm=draw(MAYBE),
        norm_whole=not output_gate and draw(BOTH),
        qkv_bias=draw(BOTH),
        out_bias=draw(BOTH),
        softcap=draw(st.sampled_from([0.0, 3.0])),
        sinks=draw(BOTH),
        output_gate=output_gate,
        keys_of=keys_of,
        values_are_keys=keys_of is None and draw(BOTH),
        query_growth=draw(st.none() | st.builds(Growth, st.just(0.3), st.sampled_from([1, 50]))),
    )  # fmt: skip


@st.composite
def layers_of(draw: Any, before: Sequence[Layer], mask: str) -> Layer:
    post_norm = draw(BOTH)
    return Layer(
        mixer=draw(mixers([layer.mixer for layer in before], mask)),
        feed_forward=FeedForward(
            draw(st.sampled_from([18, 64, 130])), draw(ACTIVATIONS), draw(BOTH), draw(BOTH), draw(CLAMPS)
        ),
        mixer_norm=draw(NORMS),
        mixer_out_norm=draw(MAYBE),
        feed_forward_norm=draw(MAYBE),
        feed_forward_out_norm=draw(MAYBE),
        parallel=not post_norm and draw(BOTH),
        post_norm=post_norm,
        residual=draw(st.sampled_from([1.0, 0.3])),
        scalar=draw(BOTH),
    )


@st.composite
def plans(draw: Any, masks: Sequence[str] = ("causal", "prefix", "bidirectional")) -> ModelPlan:
    mask = draw(st.sampled_from(masks))
    layers: list[Layer] = []
    for _ in range(draw(st.integers(1, 4))):
        layers.append(draw(layers_of(layers, mask)))
    per_layer = st.builds(
        PerLayerInput, st.sampled_from([2, 34]), st.just(VOCAB), NORMS, NORMS, ACTIVATIONS, st.just(2.0),
        st.just(0.7), st.just(0.5),
    )  # fmt: skip
    return ModelPlan(
        "test",
        VOCAB,
        draw(st.sampled_from([34, 64])),
        tuple(layers),
        draw(MAYBE),
        MAX_LENGTH,
        tied_head=draw(BOTH),
        head_bias=draw(BOTH),
        embedding_factor=draw(st.sampled_from([1.0, 3.3])),
        embedding_norm=draw(MAYBE),
        learned_positions=draw(st.sampled_from([0, MAX_LENGTH])),
        token_types=draw(st.sampled_from([0, 2])),
        logits_factor=draw(st.sampled_from([1.0, 0.4])),
        logits_softcap=draw(st.sampled_from([0.0, 2.0])),
        per_layer=draw(st.none() | per_layer),
    )


@st.composite
def latents(draw: Any, mask: str) -> Attention:
    turning, rank = draw(st.sampled_from([(16, 48), (8, 24), (64, 512), (6, 10), (64, 960)]))
    own, value = draw(st.sampled_from([2, 16, 48])), draw(st.sampled_from([2, 20, 64]))
    return Attention(
        heads=draw(st.sampled_from([1, 3, 16])),
        kv_heads=1,
        head_dim=turning + rank,
        scale=(own + turning) ** -0.5,
        rotary=Rotary(turning, neighbours=draw(BOTH)),
        window=draw(st.sampled_from([0, 0, 5, 129])),
        mask=mask,
        out_bias=draw(BOTH),
        softcap=draw(st.sampled_from([0.0, 3.0])),
        latent=Latent(rank, own, value, draw(st.sampled_from([0, 2, 40, 100])), Norm()),
    )


@st.composite
def plans_with_latents(draw: Any) -> ModelPlan:
    mask, norm = draw(st.sampled_from(["causal", "prefix", "bidirectional"])), Norm()
    usual = Attention(4, 2, 64, 0.125, Rotary(64), mask=mask)
    mixers = draw(st.lists(latents(mask) | st.just(usual), min_size=1, max_size=3))
    layers = (Layer(mixer, FeedForward(64), norm, feed_forward_norm=norm) for mixer in mixers)
    return ModelPlan("test", VOCAB, 64, tuple(layers), norm, MAX_LENGTH, tied_head=draw(BOTH))


def decoder_of(plan: ModelPlan, dtype: torch.dtype) -> Decoder:
    return read_decoder(Drawn(), Model({}, plan, LLAMA, read_decoder), LoadOptions(CPU, dtype, MAX_LENGTH))


def opened(plan: ModelPlan, cache: KVCache, dtype: torch.dtype) -> NativeDecoder:
    native = native_decoder(decoder_of(plan, dtype), cache)
    assert native is not None
    return native


class Steps:
    """Chunks of some rows: [start, start + n) of each. Every row has a region that sees itself, in a plan with
    prefixes."""

    def __init__(
        self, plan: ModelPlan, rows: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
    ) -> None:
        self.rows, self.starts, self.lengths = rows, starts, lengths
        self.token_ids, self.positions, self.at = step(rows, starts, lengths)
        self.token_ids = self.token_ids % VOCAB
        self.limits = None
        if plan.layers[0].mixer.mask == "prefix":
            ends = torch.arange(1, MAX_LENGTH + 1)
            ends[3:9] = 9
            ends = [torch.clamp(ends[s : s + n], max=s + n) for s, n in zip(starts, lengths, strict=True)]
            self.limits = torch.cat(ends)


def by_torch(decoder: Decoder, cache: KVCache, step: Steps) -> Tensor:
    attention = PagedAttention(
        cache=cache,
        plan=decoder.plan.mixers,
        rows=torch.tensor(step.rows),
        starts=np.array(step.starts, np.int32),
        lengths=np.array(step.lengths, np.int32),
        slots=[cache.slots(step.at, step.positions)],
        limits=step.limits,
    )
    hidden = decoder.embed(step.token_ids)
    return decoder.head_output(decoder.forward(hidden, Forward(step.positions, attention, None, step.token_ids)))


def by_native(native: NativeDecoder, step: Steps, outputs: Tensor | None = None) -> Tensor:
    outputs = torch.arange(len(step.at)) if outputs is None else outputs
    return native.forward(0, step.token_ids, step.positions, step.at, outputs, limits=step.limits).clone()


def steps(plan: ModelPlan, lengths: Sequence[int]) -> list[Steps]:
    """Prompts, and a decode of all rows where rows grow."""
    rows = range(len(lengths))
    prompts = Steps(plan, rows, [0] * len(lengths), lengths)
    if plan.layers[0].mixer.mask == "bidirectional":
        return [prompts]
    return [prompts, Steps(plan, rows, lengths, [1] * len(lengths))]


@settings(max_examples=examples(60))
@given(plan=plans(), page_size=st.sampled_from([1, 16]), lengths=LENGTHS)
def test_it_computes_what_torch_computes(plan: ModelPlan, page_size: int, lengths: list[int]) -> None:
    """As near to float64 as torch is in float32, but for a factor: some plans magnify what is rounded."""
    kinds = (torch.float32, torch.float32, torch.float64)
    cache, single, double = (scattered_cache(plan, page_size, 3, dtype) for dtype in kinds)
    for pool in (*single.keys, *single.values, *double.keys, *double.values):
        pool.zero_()  # torch multiplies what it hides by 0
    native = opened(plan, cache, torch.float32)
    for one in steps(plan, lengths):
        wanted = by_torch(decoder_of(plan, torch.float64), double, one).float()
        rounded = by_torch(decoder_of(plan, torch.float32), single, one)
        found = by_native(native, one)
        most = max(2e-4 * float(wanted.abs().max()), 4 * float((rounded - wanted).abs().max()))
        torch.testing.assert_close(found, wanted, rtol=0, atol=most)


@DTYPES
@settings(max_examples=examples(60))
@given(plan=plans(), page_size=st.sampled_from([1, 16]), lengths=LENGTHS, data=st.data())
def test_outputs_get_the_same_bits_whatever_else_is_wanted(
    dtype: torch.dtype, plan: ModelPlan, page_size: int, lengths: list[int], data: st.DataObject
) -> None:
    cache = scattered_cache(plan, page_size, 3, dtype)
    native, (prompts, *_) = opened(plan, cache, dtype), steps(plan, lengths)
    everything = by_native(native, prompts)
    kept = [pool.clone() for pool in (*cache.keys, *cache.values)]
    some = data.draw(st.lists(st.integers(0, len(everything) - 1), unique=True, max_size=9).map(sorted), "outputs")
    for pool in (*cache.keys, *cache.values):
        pool.fill_(torch.nan)
    outputs = torch.tensor(some, dtype=torch.int64)
    assert torch.equal(by_native(native, prompts, outputs), everything[outputs])
    for now, before in zip((*cache.keys, *cache.values), kept, strict=True):
        torch.testing.assert_close(now, before, rtol=0, atol=0, equal_nan=True)


@DTYPES
@settings(max_examples=examples(60))
@given(plan=plans(), page_size=st.sampled_from([1, 16]), lengths=LENGTHS, chunk=st.sampled_from([1, 5, 64]))
def test_a_prompt_gets_the_same_bits_alone_in_a_batch_and_in_chunks(
    dtype: torch.dtype, plan: ModelPlan, page_size: int, lengths: list[int], chunk: int
) -> None:
    native = opened(plan, scattered_cache(plan, page_size, 3, dtype), dtype)
    together = [by_native(native, one) for one in steps(plan, lengths)]
    assert all(logits.isfinite().all() for logits in together)
    in_chunks = plan.layers[0].mixer.mask == "causal"  # a region is computed in one step
    pieces = [
        Steps(plan, [row], [start], [min(chunk if in_chunks else length, length - start)])
        for row, length in enumerate(lengths)
        for start in range(0, length, chunk if in_chunks else length)
    ]
    assert torch.equal(torch.cat([by_native(native, one) for one in pieces]), together[0])
    if len(together) > 1:
        decodes = [Steps(plan, [row], [length], [1]) for row, length in enumerate(lengths)]
        assert torch.equal(torch.cat([by_native(native, one) for one in decodes]), together[1])


@settings(max_examples=examples(40))
@given(plan=plans_with_latents(), page_size=st.sampled_from([1, 16]), lengths=LENGTHS)
def test_latents_are_what_torch_computes(plan: ModelPlan, page_size: int, lengths: list[int]) -> None:
    inner: Any = test_it_computes_what_torch_computes
    inner.hypothesis.inner_test(plan, page_size, lengths)


@DTYPES
@settings(max_examples=examples(40))
@given(
    plan=plans_with_latents(),
    page_size=st.sampled_from([1, 16]),
    lengths=LENGTHS,
    chunk=st.sampled_from([1, 5, 64]),
    data=st.data(),
)
def test_latents_have_the_same_bits_in_any_batch_and_for_any_outputs(
    dtype: torch.dtype, plan: ModelPlan, page_size: int, lengths: list[int], chunk: int, data: st.DataObject
) -> None:
    alone: Any = test_a_prompt_gets_the_same_bits_alone_in_a_batch_and_in_chunks
    alone.hypothesis.inner_test(dtype, plan, page_size, lengths, chunk)
    some: Any = test_outputs_get_the_same_bits_whatever_else_is_wanted
    some.hypothesis.inner_test(dtype, plan, page_size, lengths, data)


def changed(plan: ModelPlan, i: int, **changes: Any) -> ModelPlan:
    layers = list(plan.layers)
    layers[i] = replace(layers[i], **changes)
    return replace(plan, layers=tuple(layers))


REFUSED: dict[str, Callable[[ModelPlan], ModelPlan]] = {
    "heads of 24 numbers (layer 0 of 2)": lambda plan: changed(
        plan, 0, mixer=replace(plan.layers[0].mixer, head_dim=24)
    ),
    "heads of 1040 numbers (layer 0 of 2)": lambda plan: changed(
        plan, 0, mixer=replace(plan.layers[0].mixer, head_dim=1040)
    ),
    "the keys of layer 0 (layer 1 of 2)": lambda plan: changed(
        plan, 1, mixer=replace(plan.layers[1].mixer, keys_of=0, kv_heads=1)
    ),
    "a norm over all heads that have gates (layer 0 of 2)": lambda plan: changed(
        plan, 0, mixer=replace(plan.layers[0].mixer, norm_whole=True, output_gate=True)
    ),
    "a mixer alone that is not plain (layer 0 of 2)": lambda plan: changed(
        plan, 0, feed_forward=None, residual=0.5
    ),
    "a parallel layer whose norms stand after the addition (layer 1 of 2)": lambda plan: changed(
        plan, 1, parallel=True, post_norm=True
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_does_not_compute_is_refused_by_name(what: str, caplog: pytest.LogCaptureFixture) -> None:
    norm = Norm()
    layer = Layer(Attention(4, 2, 64, 0.125, q_norm=norm), FeedForward(64), norm, feed_forward_norm=norm)
    plan = REFUSED[what](ModelPlan("test", VOCAB, 64, (layer, layer), norm, MAX_LENGTH))
    cache = scattered_cache(plan, 1, 1, torch.float32)
    assert native_decoder(decoder_of(plan, torch.float32), cache) is None
    assert [record.getMessage().partition("does not know ")[2] for record in caplog.records] == [what]


def test_the_answer_is_by_layer_and_the_log_names_each_reason_once(caplog: pytest.LogCaptureFixture) -> None:
    norm = Norm()
    layer = Layer(Attention(4, 2, 64, 0.125), FeedForward(64), norm, feed_forward_norm=norm)
    narrow = replace(layer, mixer=replace(layer.mixer, head_dim=24))
    odd = replace(layer, feed_forward=FeedForward(63))
    plan = ModelPlan("test", VOCAB, 64, (narrow, narrow, layer, narrow, odd, layer), norm, MAX_LENGTH)
    decoder = decoder_of(plan, torch.float32)
    heads, inner = "heads of 24 numbers", "a feed-forward of 63 numbers"
    assert support(decoder).layers == (heads, heads, None, heads, inner, None)
    assert native_decoder(decoder, scattered_cache(plan, 1, 1, torch.float32)) is None
    wanted = f"{heads} (layers 0-1, 3 of 6), {inner} (layer 4 of 6)"
    assert [record.getMessage().partition("does not know ")[2] for record in caplog.records] == [wanted]


@pytest.mark.parametrize("family", sorted(EVERY_FAMILY))
def test_every_family_runs_compiled(
    family: str, checkpoint: Any, open_runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tests/gpu_worker/models/test_logits.py` compares with transformers."""
    monkeypatch.setenv("PETIOLE_NATIVE", "on")
    assert open_runtime(checkpoint(family)[0])._executor._native is not None
