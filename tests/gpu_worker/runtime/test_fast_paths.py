"""Fast paths refuse every decoder that is not exactly one that they know, and the plain path computes it.

Each decoder below differs from the known one in one thing. Compiled code on a CPU, and captured steps and fused
products on CUDA (over FlashInfer's interface in torch), either refuse it or compute what torch computes.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models import fast_paths
from petiole.gpu_worker.models.decoder import Decoder
from petiole.gpu_worker.models.moondream.decoder import MoondreamDecoder
from petiole.gpu_worker.models.moondream.values import value_kinds
from petiole.gpu_worker.models.moondream.vision_encoder import VisionEncoder
from petiole.gpu_worker.models.parts.layer import LayerWeights
from petiole.gpu_worker.models.parts.pooling import Pooler
from petiole.gpu_worker.models.plan import (
    Attention,
    DeltaNet,
    DistanceBias,
    Experts,
    FeedForward,
    Growth,
    Latent,
    Layer,
    Mamba2,
    ModelPlan,
    Norm,
    PerLayerInput,
    Pooling,
    Recurrent,
    Rotary,
    Router,
    ShortConvolution,
)
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.request.prepared_images import ImageLimits
from petiole.gpu_worker.runtime.cpu.executor import CpuExecutor
from petiole.gpu_worker.runtime.cpu.native.build import load_library
from petiole.gpu_worker.runtime.cpu.native.encoder import native_encoder
from petiole.gpu_worker.runtime.cpu.native.forward import native_decoder
from petiole.gpu_worker.runtime.cpu.native.supported import PARTS, VALUES
from petiole.gpu_worker.runtime.cuda import graphs, supported
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import FlashInferKernels
from petiole.gpu_worker.runtime.cuda.executor import CudaExecutor, require_flashinfer
from petiole.gpu_worker.runtime.device.cpu import CpuDevice
from petiole.gpu_worker.runtime.interface import NO_UPDATES, PENDING, StepBatch
from petiole.gpu_worker.runtime.memory.kv import KVCache, new_kv_cache
from petiole.gpu_worker.runtime.platforms import Executor
from petiole.gpu_worker.runtime.step.inputs import lay_out
from petiole.gpu_worker.runtime.step.pending import PendingInputs
from tests.gpu_worker.runtime.cpu.test_native_encoder import random_encoder
from tests.gpu_worker.runtime.cpu.test_native_parallel import (
    VOCAB as MOONDREAM_VOCAB,
    random_decoder as random_moondream,
)
from tests.gpu_worker.runtime.cpu.test_native_plans import decoder_of as decoder_with
from tests.gpu_worker.runtime.cpu.test_native_states import decoder_of
from tests.support import fake_flashinfer
from tests.support.other_decoders import (
    CPU,
    FUSED_ONLY,
    KNOWN,
    MAX_LENGTH,
    PLAN,
    PLANS,
    UNKNOWN,
    UNREAD,
    Rounded,
    Variant,
    known_decoder,
    planned,
    weights,
)
from tests.support.plans import each_mixer

# ------------------------------------------------------------ comparing

N, STEPS = 9, 4


def new_cache(plan: ModelPlan = PLAN) -> KVCache:
    cache = new_kv_cache(
        plan, n_pages=128, page_size=1, rows=3, max_model_len=MAX_LENGTH, dtype=torch.float32, device=CPU
    )
    cache.table[1:] = 1 + torch.arange(2 * MAX_LENGTH, dtype=torch.int32).view(2, -1)
    return cache


def int32(*numbers: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(numbers, np.int32)


def logits_of(executor: Executor, *, axes: bool = False) -> Tensor:
    """A prefill of two rows, of which one has an image's rotary positions if `axes`; then decodes of both."""
    rows, token_ids = int32(1, 2), (np.arange(2 * N) * 7 % PLAN.vocab_size).astype(np.int32)
    rotary = None
    if axes:
        rotary = np.tile(np.arange(N, dtype=np.int32), (3, 2))
        rotary[1, 3:7], rotary[2, 3:7] = 3, (3, 4, 4, 5)
    batch = StepBatch(
        "prefill", rows, int32(0, 0), int32(N, N), token_ids, int32(1, 1), int32(PENDING, PENDING), (), NO_UPDATES,
        rotary=rotary,
    )  # fmt: skip
    with torch.inference_mode():
        found = [executor.forward(0, lay_out(batch, int32(0, 0))).logits().float().clone()]
        for step in range(STEPS):
            batch = StepBatch(
                "decode", rows, int32(N + step, N + step), int32(1, 1), int32(step + 3, step + 4), int32(1, 1),
                int32(PENDING, PENDING), (), NO_UPDATES,
            )  # fmt: skip
            inputs = replace(lay_out(batch, int32(0, 0)), pending_inputs=np.empty(0, np.int64))
            found.append(executor.forward(step % 2, inputs).logits().float().clone())
    return torch.cat(found)


def pending() -> PendingInputs:
    return PendingInputs(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int32))


def on_cpu(decoder: Any) -> CpuExecutor:
    return CpuExecutor(decoder, new_cache(decoder.plan), None, pending())


def by_torch(variant: Variant, monkeypatch: pytest.MonkeyPatch, *, axes: bool = False) -> Tensor:
    with monkeypatch.context() as patch:
        patch.setenv("PETIOLE_NATIVE", "off")
        return logits_of(on_cpu(variant(known_decoder())), axes=axes)


def near(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).abs().max() <= 1e-3 * wanted.abs().max())


@pytest.fixture
def refusals(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records if "know" in record.getMessage()]


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> None:
    if load_library() is None:
        pytest.skip("no C compiler")
    monkeypatch.setenv("PETIOLE_NATIVE", "on")


class Captures:
    """Counts what is captured."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, work: Callable[[], None], *, kept: bool = True) -> Callable[[], object]:
        self.n += 1
        return work


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CudaExecutor]:
    fake_flashinfer.install(monkeypatch)
    monkeypatch.setattr(graphs, "MARGIN", -math.inf)  # fused products wherever they are offered

    def get(variant: Variant, captures: Captures) -> CudaExecutor:
        config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, chunk_size=16, graph_batch_sizes=(2,))
        device, decoder = CpuDevice(), variant(known_decoder(FlashInferKernels))
        stream = device.new_stream("compute")
        return CudaExecutor(decoder, new_cache(decoder.plan), None, pending(), config, device, stream, captures)

    return get


# ------------------------------------------------------------ the decoder of Llama


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", [*KNOWN, *FUSED_ONLY])
def test_compiled_code_computes_what_it_knows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = (KNOWN | FUSED_ONLY)[name]
    executor = on_cpu(variant(known_decoder()))
    assert executor._native is not None
    assert near(logits_of(executor), by_torch(variant, monkeypatch))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", PLANS)
def test_compiled_code_computes_every_plan(
    name: str, monkeypatch: pytest.MonkeyPatch, refusals: Callable[[], list[str]]
) -> None:
    executor = on_cpu(PLANS[name](known_decoder()))
    assert executor._native is not None
    assert not refusals()
    assert near(logits_of(executor), by_torch(PLANS[name], monkeypatch))


@pytest.mark.parametrize("name", PLANS)
def test_cuda_computes_a_plan_or_refuses_it(
    name: str, on_cuda: Callable[..., CudaExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = PLANS[name](known_decoder())
    if any(fast_paths.unknown_value(mixer, supported.ATTENTION) for mixer in decoder.plan.mixers):
        with pytest.raises(ModelError, match="CUDA does not compute"):
            require_flashinfer(decoder.plan)
        return
    require_flashinfer(decoder.plan)
    assert near(logits_of(on_cuda(PLANS[name], Captures())), by_torch(PLANS[name], monkeypatch))


@pytest.mark.parametrize("name", PLANS)
def test_the_plans_are_other_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not near(by_torch(PLANS[name], monkeypatch), by_torch(KNOWN["as it is"], monkeypatch))


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", UNKNOWN)
def test_compiled_code_refuses_the_rest_and_says_so_once(
    name: str, monkeypatch: pytest.MonkeyPatch, refusals: Callable[[], list[str]]
) -> None:
    executor = on_cpu(UNKNOWN[name](known_decoder()))
    assert executor._native is None
    said = refusals()
    assert len(said) == 1
    assert said[0].startswith("torch alone computes on this CPU, which is slower: compiled code does not know ")
    axes = name == "three axes"
    assert torch.equal(logits_of(executor, axes=axes), by_torch(UNKNOWN[name], monkeypatch, axes=axes))


@pytest.mark.parametrize("name", KNOWN)
def test_captured_steps_compute_what_they_know(
    name: str, on_cuda: Callable[..., CudaExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = Captures()
    executor = on_cuda(KNOWN[name], captures)
    assert captures.n > 0
    assert executor.fused == {2: True}
    assert near(logits_of(executor), by_torch(KNOWN[name], monkeypatch))


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_else_is_captured_or_fused_and_that_is_said_once(
    name: str,
    on_cuda: Callable[..., CudaExecutor],
    monkeypatch: pytest.MonkeyPatch,
    refusals: Callable[[], list[str]],
) -> None:
    captures = Captures()
    executor = on_cuda(UNKNOWN[name], captures)
    assert captures.n == 0
    assert executor.fused == {}
    said = refusals()
    assert len(said) == 1
    assert said[0].startswith("no steps are captured as CUDA graphs, which is slower: ")
    axes = name == "three axes"
    assert near(logits_of(executor, axes=axes), by_torch(UNKNOWN[name], monkeypatch, axes=axes))


def test_int8_is_not_fused(on_cuda: Callable[..., CudaExecutor], monkeypatch: pytest.MonkeyPatch) -> None:
    variant = FUSED_ONLY["weights in int8"]
    executor = on_cuda(variant, Captures())
    assert executor.fused == {}
    assert near(logits_of(executor), by_torch(variant, monkeypatch))


@pytest.mark.parametrize("name", [name for name in UNKNOWN if name not in UNREAD])
def test_the_variants_are_other_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a fast path that took one for the known decoder would be found out."""
    axes = name == "three axes"
    assert not near(by_torch(UNKNOWN[name], monkeypatch, axes=axes), by_torch(KNOWN["as it is"], monkeypatch))


RECURRENT = (
    DeltaNet(1, 2, 16, 32, 4, Norm(), grouped=False),
    Mamba2(2, 32, 16, 1, 4, Norm()),
    ShortConvolution(64, 3, bias=True),
)


def with_states(mixer: Recurrent) -> Decoder:
    layer = Layer(mixer, FeedForward(66), Norm(), feed_forward_norm=Norm())
    return decoder_of(ModelPlan("test", 64, 64, (layer,), Norm(), 64), torch.float32)


def with_latents() -> Decoder:
    mixer = Attention(2, 1, 64, 0.125, Rotary(16), latent=Latent(48, 16, 16, 0, Norm()))
    layer = Layer(mixer, FeedForward(66), Norm(), feed_forward_norm=Norm())
    return decoder_with(ModelPlan("test", 64, 64, (layer,), Norm(), 64), torch.float32)


def by_distance() -> Decoder:
    return planned(lambda plan: each_mixer(plan, distances=DistanceBias()))(known_decoder())


def of_texts() -> Decoder:
    decoder, pooling = known_decoder(), Pooling(("last",))
    head = DenseLinear(torch.zeros(1, decoder.plan.hidden_size))
    plan = replace(decoder.plan, pooling=pooling)
    return replace(decoder, plan=plan, head=head, pooler=Pooler(pooling, ()))


@pytest.mark.parametrize(
    "values", [VALUES, supported.CAPTURED, supported.FUSED], ids=["compiled", "captured", "fused"]
)
def test_each_field_of_a_plan_is_refused_until_it_is_listed(values: fast_paths.Values) -> None:
    per_layer, growth = "per-layer inputs", "queries that grow"
    decoders = {PerLayerInput: PLANS[per_layer](known_decoder()), Growth: PLANS[growth](known_decoder())}
    decoders |= dict.fromkeys((Experts, Router), PLANS["experts alone"](known_decoder()))
    decoders |= {
        DistanceBias: by_distance(),
        Pooling: of_texts(),
        Latent: with_latents(),
        **{type(mixer): with_states(mixer) for mixer in RECURRENT},
    }
    for kind, listed in values.items():
        decoder = decoders.get(kind, known_decoder())
        if fast_paths.supports(decoder, values, PARTS).reason is not None:
            assert kind in decoders, "only of these some paths know nothing"
            continue
        for name in listed:
            fewer = {**values, kind: {other: rule for other, rule in listed.items() if other != name}}
            assert f"{name} of {kind.__name__}" in str(fast_paths.supports(decoder, fewer, PARTS).reason)


# ------------------------------------------------------------ positions of several axes


@pytest.mark.usefixtures("native")
def test_positions_of_several_axes_never_pass_for_one_axis(on_cuda: Callable[..., CudaExecutor]) -> None:
    for executor in (on_cpu(known_decoder()), on_cuda(KNOWN["as it is"], Captures())):
        with pytest.raises(ValueError, match=r"rotary positions: must be of one axis, got \[3, 18\]"):
            logits_of(executor, axes=True)
    compiled = native_decoder(known_decoder(), new_cache())
    assert compiled is not None
    step = [torch.arange(2)] * 4
    with pytest.raises(ValueError, match="of one axis"):
        compiled.forward(0, *step, rotary=torch.zeros(3, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    "more",
    [
        {"images": ImageLimits(1, 4, 1, bidirectional=False)},
        {"value_tokens": value_kinds(5, 6, (0.0,), (1.0,))},
        {"processor": object()},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_decoder_of_text_that_takes_more_than_text_is_not_known(more: dict[str, Any]) -> None:
    assert native_decoder(replace(known_decoder(), **more), new_cache()) is None


# ------------------------------------------------------------ Moondream


def moondream_plan() -> tuple[Any, torch.dtype]:
    from petiole.gpu_worker.models.moondream.config import text_plan

    text = {
        "dim": 128,
        "n_heads": 2,
        "ff_dim": 64,
        "n_layers": 2,
        "vocab_size": MOONDREAM_VOCAB,
        "max_context": MAX_LENGTH,
    }
    return text_plan({"config": {"text": text}}), torch.float32


def encoder_config() -> Any:
    from petiole.gpu_worker.models.moondream.config import VisionConfig
    from petiole.gpu_worker.models.moondream.crops import CropGeometry

    return VisionConfig(64, 4, 2, 96, 8, CropGeometry(patch=2, grid=9, margin=1, max_crops=4))


class OtherMoondream(MoondreamDecoder):
    def head_output(self, hidden: Tensor) -> Tensor:
        return 2 * MoondreamDecoder.head_output(self, hidden)


class OtherEncoder(VisionEncoder):
    def features(self, crops: Tensor) -> Tensor:
        return 2 * VisionEncoder.features(self, crops)


def of(part: Any, kind: type, **changes: Any) -> Any:
    return kind(**{f.name: getattr(part, f.name) for f in dataclasses.fields(part)} | changes)


def first(layers: Sequence[Any], **changes: Any) -> tuple[Any, ...]:
    return (replace(layers[0], **changes), *layers[1:])


def with_out(layers: Sequence[LayerWeights], linear: Any) -> tuple[Any, ...]:
    return first(layers, mixer=replace(layers[0].mixer, out=linear))


MOONDREAM: dict[str, Callable[[MoondreamDecoder], Any]] = {
    "a subclass": lambda one: of(one, OtherMoondream),
    "another linear layer": lambda one: replace(one, layers=with_out(one.layers, Rounded(weights(128, 128)))),
}
ENCODER: dict[str, Callable[[VisionEncoder], Any]] = {
    "a subclass": lambda one: of(one, OtherEncoder),
    "another linear layer": lambda one: replace(one, layers=with_out(one.layers, Rounded(weights(64, 64)))),
}


@pytest.mark.parametrize("name", MOONDREAM)
def test_another_moondream_is_refused(name: str, refusals: Callable[[], list[str]]) -> None:
    plan, dtype = moondream_plan()
    cache = new_kv_cache(plan, n_pages=40, page_size=1, rows=2, max_model_len=32, dtype=torch.float32, device=CPU)
    assert native_decoder(MOONDREAM[name](random_moondream(plan, dtype)), cache) is None
    assert len(refusals()) == 1


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", ENCODER)
def test_another_encoder_is_refused(name: str, refusals: Callable[[], list[str]]) -> None:
    assert native_encoder(random_encoder(encoder_config(), torch.float32)) is not None
    assert native_encoder(ENCODER[name](random_encoder(encoder_config(), torch.float32))) is None
    assert len(refusals()) == 1
