"""Products with codes, and mixtures of experts, against torch: on CUDA, or in Triton's interpreter on a CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from petiole.gpu_worker.models.parts.experts import ExpertWeights, RouterWeights, mixed_experts
from petiole.gpu_worker.models.parts.kernels import TorchKernels
from petiole.gpu_worker.models.plan import Experts, FeedForward, Router
from petiole.gpu_worker.models.weights.linear import DenseLinear, Fp8Linear, Linear, quantize_fp8
from petiole.gpu_worker.models.weights.quantization import int4_form, quantise_int4
from petiole.gpu_worker.models.weights.quantized import RUN, Coded, CodedLinear, CodeLayout, KernelLinear
from petiole.gpu_worker.models.weights.stacked import StackedLinear
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import FlashInferKernels
from petiole.gpu_worker.runtime.cuda.fused import routing
from petiole.gpu_worker.runtime.cuda.fused.experts import mix_experts
from petiole.gpu_worker.runtime.cuda.fused.linear import grouped
from petiole.gpu_worker.runtime.cuda.fused.routing import choose_experts
from petiole.gpu_worker.runtime.cuda.supported import has_kernel, with_kernel
from tests.gpu.test_fused import DEVICE, some  # skips this module where Triton does not run
from tests.support.coded import FORMS, random_weight
from tests.support.tensor_cores import one_order

DTYPE, NEAR = (torch.bfloat16, 1e-2) if DEVICE == "cuda" else (torch.float16, 2e-3)
"""The interpreter multiplies no bfloat16."""


def sized(form: CodeLayout, outputs: int | None = None, inputs: int | None = None) -> CodeLayout:
    """Of other sizes, or of whole runs of four-bit codes."""
    inputs = inputs or (-(-form.inputs // RUN) * RUN if form.table else form.inputs)
    group = inputs if form.group == form.inputs else form.group
    return replace(form, outputs=outputs or form.outputs, inputs=inputs, group=group)


KNOWN = [name for name, form in FORMS.items() if has_kernel(sized(form))]


def coded(name: str, outputs: int | None = None, inputs: int | None = None) -> Coded:
    """As a kernel reads it."""
    form = sized(FORMS[name], outputs, inputs)
    weight = random_weight(form, torch.Generator().manual_seed(form.inputs))
    weight.scales.copy_(weight.scales.float().clamp(2.0**-9).to(weight.scales.dtype))  # nothing vanishes in sums
    parts = (weight.codes, weight.scales, weight.zeros, weight.multiplier)
    found = Coded(form, *(None if part is None else part.to(DEVICE) for part in parts))
    return found.put_in_runs() if form.table and has_kernel(form) else found


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, DTYPE)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    off = (found.double() - expected).norm() / expected.norm()
    assert found.isfinite().all()
    assert off < NEAR


def test_forms_without_a_kernel_are_few():
    of_gguf = {name for name, form in FORMS.items() if form.steps or form.offsets}
    assert set(FORMS) - set(KNOWN) == {"groups of 48", "a table of integers", "six bits", *of_gguf}
    parts_of_runs = {"groups of 16, zeros", "channels", "channels, zeros", "a short last group"}
    assert {name for name in KNOWN if not has_kernel(FORMS[name])} == parts_of_runs


def test_integers_of_a_table_without_a_kernel_are_held_in_eight_bits():
    held = {name: with_kernel(form) for name, form in FORMS.items()}
    assert {name for name in FORMS if held[name] != FORMS[name]} >= {"a table of integers"}
    weight = random_weight(FORMS["a table of integers"], torch.Generator().manual_seed(5))
    wider = held["a table of integers"].empty(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    weight.put_into(wider)
    assert has_kernel(wider.form)
    assert torch.equal(wider.values(), weight.values())


@pytest.mark.parametrize("name", [name for name in KNOWN if FORMS[name].table])
def test_codes_in_runs_stand_for_the_same_numbers(name):
    weight = random_weight(sized(FORMS[name]), torch.Generator().manual_seed(3))
    values = weight.values()
    moved = weight.put_in_runs()
    assert moved.codes.data_ptr() == weight.codes.data_ptr()
    assert torch.equal(moved.values(), values)


def test_codes_are_put_in_runs_while_they_are_loaded():
    """What no kernel multiplies stays as it is."""
    draw = torch.Generator().manual_seed(0)
    four, eight, odd = (
        random_weight(FORMS[name], draw) for name in ("one panel", "int8 channels", "groups of 48")
    )
    kernels = FlashInferKernels()
    taken = kernels.take(four)
    assert taken is not None
    assert taken[0].form == replace(four.form, in_runs=True)
    taken = kernels.take(eight)
    assert taken is not None
    assert taken[0] is eight
    assert kernels.take(odd) is None


@pytest.mark.parametrize("name", KNOWN)
def test_products_are_those_of_the_weights(name, monkeypatch):
    """Of one row, of several blocks of rows, and of so many that torch multiplies."""
    weight = coded(name)
    values, bias = weight.values().double(), normal(weight.form.outputs)
    monkeypatch.setattr(grouped, "MOST_ROWS", 70)
    monkeypatch.setattr(grouped, "AT_ONCE", 32 * weight.form.inputs)
    for rows in (1, 17, 71):
        x = normal(rows, weight.form.inputs)
        found = grouped.multiply(x, weight, bias)
        close(found, x.double() @ values.t() + bias.double())


@pytest.mark.parametrize("name", ["groups of 128, zeros", "nvfp4"])
def test_codes_in_tiles_are_multiplied_and_widened_as_those_in_runs(name):
    form = sized(FORMS[name], 70, 640)
    runs, tiles = coded(name, 70, 640), random_weight(form, torch.Generator().manual_seed(form.inputs))
    codes = tiles.put_in_runs(in_tiles=True).codes.to(DEVICE)
    tiles = replace(runs, form=replace(form, in_runs=True, in_tiles=True), codes=codes)
    assert torch.equal(tiles.values(), runs.values())
    x = normal(20, 640)
    assert torch.equal(grouped.multiply(x, tiles, None), grouped.multiply(x, runs, None))
    assert torch.equal(grouped.widened(tiles, DTYPE), grouped.widened(runs, DTYPE))


@pytest.mark.parametrize("name", KNOWN)
def test_weights_are_widened_to_the_nearest_numbers(name):
    weight = coded(name)
    wide = grouped.widened(weight, DTYPE).float()
    torch.testing.assert_close(wide, weight.values(), rtol=2**-8, atol=1e-7)


def test_the_inputs_of_a_narrow_product_are_shared_out():
    weight = coded("int4 as quantised here", 40, 2048)
    x, bias = normal(3, 2048), normal(40)
    close(grouped.multiply(x, weight, bias), x.double() @ weight.values().double().t() + bias.double())


def test_outputs_beyond_32_bits(monkeypatch):
    """Of fewer, the places are the same."""
    weight, x = coded("int4 as quantised here", 40, 2048), normal(3, 2048)
    found = grouped.multiply(x, weight, None)
    monkeypatch.setattr(grouped, "FAR", 0)
    assert torch.equal(grouped.multiply(x, weight, None), found)


def test_int4_in_float16():
    """Its scales alone are as large as float16 can hold."""
    weight, form = torch.randn(40, 128, generator=torch.Generator().manual_seed(0)), int4_form(40, 128)
    found = form.empty(lambda shape, dtype: torch.empty(tuple(shape), dtype=dtype))
    quantise_int4(weight, found)
    found = Coded(
        form, *(part.to(DEVICE) for part in (found.codes, found.scales)), None, found.multiplier.to(DEVICE)
    ).put_in_runs()
    x = normal(3, 128).half()
    close(grouped.multiply(x, found, None), x.double() @ found.values().double().t())
    wide = grouped.widened(found, torch.float16).float()
    torch.testing.assert_close(wide, found.values(), rtol=2e-3, atol=1e-6)


USUAL = ["int4 as quantised here", "groups of 128, zeros", "nvfp4", "fp8 blocks"]
BESIDE = (1, 2, 16, 17, 40)
"""Rows of which a row has the same bits as among `MOST_ROWS`: in one block as few, and as many."""


@pytest.mark.parametrize("name", some(sorted(KNOWN, key=USUAL.count, reverse=True), short=4))
def test_a_row_has_the_same_bits_beside_others(name, monkeypatch):
    """With shares of the inputs, too."""
    one_order(monkeypatch)
    weight = coded(name, 70, 1024)
    x, bias = normal(grouped.MOST_ROWS, 1024), normal(70)
    together = grouped.multiply(x, weight, bias)
    for rows in BESIDE:
        assert torch.equal(grouped.multiply(x[:rows], weight, bias), together[:rows]), rows
    assert torch.equal(grouped.multiply(x[-1:], weight, bias), together[-1:])


@pytest.mark.parametrize("kind", some(["int4 as quantised here", "plain", "nvfp4", "fp8"], short=2))
def test_a_row_has_the_same_bits_beside_others_that_take_other_experts(kind, monkeypatch):
    one_order(monkeypatch)
    each = FeedForward(INNER, activation="gelu", bias=True)
    (up, _), (down, _) = stacked(kind, 2 * INNER, HIDDEN), stacked(kind, HIDDEN, INNER)
    x, n = normal(grouped.MOST_ROWS, HIDDEN), torch.arange(grouped.MOST_ROWS, device=DEVICE)
    chosen = torch.stack((n % 2, n % (LAYERS - 2) + 2), 1)
    shares = torch.rand(len(x), CHOSEN, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def mixed(rows: slice) -> torch.Tensor:
        counts = torch.zeros(LAYERS, dtype=torch.int64, device=DEVICE)
        found = mix_experts(each, up, down, x[rows], chosen[rows], shares[rows], counts, TorchKernels())
        assert found is not None
        return found

    together = mixed(slice(None))
    for rows in (*(slice(n) for n in BESIDE), slice(63, 64)):
        assert torch.equal(mixed(rows), together[rows]), rows


LAYERS, CHOSEN, HIDDEN, INNER = 6, 2, 64, 96


def stacked(kind: str, outputs: int, inputs: int) -> tuple[StackedLinear, StackedLinear]:
    """A stack for the kernels, and one for torch."""
    bias = normal(LAYERS * outputs)
    ours: Linear
    if kind in FORMS:
        weight = coded(kind, LAYERS * outputs, inputs)
        scale = (inputs**0.5 * weight.values().std()).item()  # outputs of about 1
        weight.scales.copy_((weight.scales.float() / scale).to(weight.scales.dtype))
        ours, theirs = KernelLinear(weight, bias, product=grouped.multiply), CodedLinear(weight, bias)
    else:
        plain = normal(LAYERS * outputs, inputs) / inputs**0.5
        ours = theirs = DenseLinear(plain, bias)
        if kind == "fp8":
            values, scales = quantize_fp8(plain)
            ours = Fp8Linear(values, scales[None, :], TorchKernels().quantize_rows, bias)
            theirs = DenseLinear((values.float() * scales[:, None]).to(DTYPE), bias)
    return StackedLinear(ours, LAYERS, outputs), StackedLinear(theirs, LAYERS, outputs)


@pytest.mark.parametrize("kind", some(["mxfp4", "plain", "fp8", "int4 as quantised here", "nvfp4"], short=3))
@pytest.mark.parametrize("rows", [1, 5, 90, 250])
def test_experts_mix_as_in_torch(kind, rows):
    """Nobody takes the last expert, most take the first one, and some rows, as of padding, take none."""
    each = FeedForward(INNER, activation="gelu", bias=True)
    up, down = stacked(kind, 2 * INNER, HIDDEN), stacked(kind, HIDDEN, INNER)
    taken = torch.zeros(LAYERS, dtype=torch.int64, device=DEVICE)
    theirs = ExpertWeights(RouterWeights(DenseLinear(normal(LAYERS, HIDDEN))), up[1], down[1], taken)
    x, padding = normal(rows, HIDDEN), rows // 3
    second = torch.arange(rows, device=DEVICE) % (LAYERS - 2) + 1
    chosen = torch.stack((torch.zeros_like(second), second), 1)
    shares = torch.rand(rows, CHOSEN, generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    real = (x[padding:], chosen[padding:], shares[padding:])
    wanted = mixed_experts(Experts(Router(LAYERS, CHOSEN), each), theirs, *real, TorchKernels())
    chosen[:padding] = LAYERS
    counts = torch.zeros_like(taken)
    mixed = mix_experts(each, up[0], down[0], x, chosen, shares, counts, TorchKernels())
    assert mixed is not None
    close(mixed[padding:], wanted.double())
    assert not mixed[:padding].any()
    assert torch.equal(counts, taken)


def routers():
    plain = Router(64, 8)
    yield plain, {}
    yield replace(plain, normalised=True, factor=2.5), {"correction": True}
    yield replace(plain, experts=100, score="sigmoid", normalised=True), {"correction": True}
    yield replace(plain, experts=32, chosen=4, score="chosen"), {"scales": True}
    yield replace(plain, experts=512, chosen=10, normalised=True), {}


@pytest.mark.parametrize(("plan", "stored"), list(routers()))
@pytest.mark.parametrize("masked", [False, True])
def test_experts_are_chosen_as_in_torch(plan, stored, masked):
    """Scores are often equal; some positions are padding."""
    draw = torch.Generator().manual_seed(plan.experts)
    logits = torch.randn(23, plan.experts, generator=draw) * 4
    correction = torch.randn(plan.experts, generator=draw) / 8 if "correction" in stored else None
    if plan.score != "sigmoid":  # of which rounding would decide between sums that are nearly equal
        logits = logits.round() / 4
    scales = torch.rand(plan.experts, generator=draw) if "scales" in stored else None
    real = torch.rand(23, generator=draw) < 0.7 if masked else None
    given = [None if part is None else part.to(DEVICE) for part in (correction, scales, real)]
    chosen, shares = TorchKernels().choose_experts(plan, logits.double(), correction, scales, real)
    found, found_shares = choose_experts(plan, logits.to(DEVICE), *given)
    assert torch.equal(found.cpu(), chosen)
    torch.testing.assert_close(found_shares.cpu().double(), shares.double(), rtol=1e-5, atol=1e-9)


def test_logits_that_are_no_numbers_choose_as_many_experts():
    logits = torch.tensor([[torch.nan] * 6, [torch.nan, 1, torch.nan, 2, torch.nan, torch.inf]], device=DEVICE)
    found, _ = choose_experts(Router(6, 4, score="chosen"), logits, None, None, None)
    assert found.tolist() == [[0, 1, 2, 3], [0, 1, 3, 5]]


@pytest.mark.parametrize("most", [0, 2**14])
@pytest.mark.parametrize(("rows", "chosen", "layers"), [(1, 8, 128), (37, 4, 32), (70, 8, 40), (5, 1, 3)])
def test_pairs_are_sorted_by_layer(rows, chosen, layers, most, monkeypatch):
    """Some take no layer, and nobody takes the second one."""
    monkeypatch.setattr(routing, "MOST_RANKED", most)
    taken = torch.randint(0, layers + 1, (rows, chosen), generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    taken[taken == 1] = layers
    counts = torch.ones(layers, dtype=torch.int64, device=DEVICE)
    pairs = routing.sort_pairs(taken, counts)
    each = torch.bincount(taken.flatten(), minlength=layers + 1)[:layers]
    assert torch.equal(pairs.order, taken.flatten().argsort(stable=True))
    assert torch.equal(pairs.bounds.diff(), each.int())
    assert torch.equal(counts, each + 1)
