"""Fused products with codes against float64: on CUDA, or in Triton's interpreter on a CPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from petiole.gpu_worker.models.checkpoint.codes import E2M1, SIGNED, UNSIGNED
from petiole.gpu_worker.models.parts.kernels import TorchKernels
from petiole.gpu_worker.models.parts.norms import NormWeights
from petiole.gpu_worker.models.plan import FeedForward, Norm
from petiole.gpu_worker.models.weights.linear import Fp8Linear, quantize_fp8
from petiole.gpu_worker.models.weights.quantized import TILE, Coded, CodeLayout, KernelLinear
from petiole.gpu_worker.runtime.cuda.attention.flashinfer import FlashInferKernels
from petiole.gpu_worker.runtime.cuda.fused.linear import coded, codes, decode, split_k
from tests.gpu.test_fused import DEVICE, some, triton  # skips this module where Triton does not run
from tests.gpu.test_grouped import DTYPE, close
from tests.support.coded import random_weight
from tests.support.tensor_cores import one_order

DRAW = torch.Generator().manual_seed(0)
FORMS = {
    "int4": CodeLayout(0, 0, 32, SIGNED, scales=torch.float16, multiplier=True),
    "gptq": CodeLayout(0, 0, 128, UNSIGNED, scales=torch.float16, zeros=torch.uint8),
    "groups of 64": CodeLayout(0, 0, 64, E2M1, scales=torch.float32),
    "groups of 256": CodeLayout(0, 0, 256, SIGNED, scales=torch.float16),
    "groups of 16, zeros": CodeLayout(0, 0, 16, UNSIGNED, scales=torch.bfloat16, zeros=torch.uint8),
    "nvfp4": CodeLayout(0, 0, 16, E2M1, scales=torch.float8_e4m3fn, multiplier=True),
    "mxfp4": CodeLayout(0, 0, 32, E2M1, scales=torch.float8_e8m0fnu),
    "channels": CodeLayout(0, 0, 0, SIGNED, scales=torch.bfloat16),
    "channels, zeros": CodeLayout(0, 0, 0, UNSIGNED, scales=torch.float16, zeros=torch.uint8),
    "int8": CodeLayout(0, 0, 0, codes=torch.int8),
    "fp8": CodeLayout(0, 0, 0, codes=torch.float8_e4m3fn),
    "fp8 blocks": CodeLayout(0, 0, 128, codes=torch.float8_e4m3fn),
}


def form(name: str, outputs: int, inputs: int) -> CodeLayout:
    found = FORMS[name]
    return replace(found, outputs=outputs, inputs=inputs, group=found.group or inputs)


def weight(name: str, outputs: int, inputs: int) -> Coded:
    """Whose products with normal rows are about 1."""
    draw = torch.Generator().manual_seed(outputs + inputs)
    found = random_weight(form(name, outputs, inputs), draw)
    found.scales.copy_(found.scales.float().clamp(2.0**-9).to(found.scales.dtype))
    size = inputs**0.5 * found.values().std().item()
    found.scales.copy_((found.scales.float() / size).to(found.scales.dtype))
    found = found.put_in_runs(in_tiles=True) if found.form.table else found
    parts = (found.codes, found.scales, found.zeros, found.multiplier)
    return Coded(found.form, *(None if part is None else part.to(DEVICE) for part in parts))


def linear(name: str, outputs: int, inputs: int, biased: bool = False) -> KernelLinear:
    return KernelLinear(weight(name, outputs, inputs), normal(outputs) if biased else None)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, DTYPE)


def exact(x: torch.Tensor, linear: KernelLinear) -> torch.Tensor:
    """float64."""
    y = x.double() @ linear.weight.values().double().t()
    return y if linear.bias is None else y + linear.bias.double()


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.double() * (x.double().square().mean(1, keepdim=True) + 1e-5).rsqrt() * weight.double()


def read_by_products(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`normed`, as the products read it: rounded before the factor of a row."""
    return normed(x, weight) / (wide := x.double() * weight.double()) * wide.to(DTYPE).double()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel does not write is no number."""
    empty = torch.empty

    def filled(*shape, **options):
        found = empty(*shape, **options)
        return found.fill_(torch.nan) if found.is_floating_point() else found

    monkeypatch.setattr(torch, "empty", filled)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("rows", "inputs"), some([(3, 768), (1, 512), (16, 1280)], short=1), ids=str)
def test_products_are_those_of_the_weights(name, rows, inputs):
    """Also where the last tiles are not those of whole slices."""
    one = linear(name, 32, inputs, biased=rows > 1)
    assert coded.weight_of(one) is not None
    x = normal(rows, inputs)
    close(decode.product(x, one), exact(x, one))


@pytest.mark.parametrize("name", some(["int4", "nvfp4", "fp8", "gptq"], short=2))
@pytest.mark.parametrize("rows", some([11, 2], short=1))
def test_a_layer_is_four_products(name, rows):
    hidden, inner = 128, 256
    norms = [normal(hidden) / 4 + 1 for _ in range(2)]
    value = normal(rows, hidden)
    up, down = linear(name, 2 * inner, hidden), linear(name, hidden, inner, biased=True)
    residual = decode.begin(value.clone(), (norms[0], 1e-5))
    inside = decode.product(residual, up, gated=True)
    gate, factor = exact(read_by_products(value, norms[0]), up).chunk(2, -1)
    close(inside, gate * gate.sigmoid() * factor)
    after = decode.added(inside, down, residual, (norms[1], 1e-5))
    assert after.value is residual.value
    close(after.value, value.double() + exact(inside, down))
    close(decode.product(after, up), exact(read_by_products(after.value, norms[1]), up))


@pytest.mark.parametrize("name", some(["int4", "gptq", "fp8", "nvfp4", "int8", "channels, zeros"], short=3))
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(17, 64, 2176), (50, 96, 1024)], ids=str)
def test_many_rows_share_out_the_inputs(name, rows, outputs, inputs):
    one = linear(name, outputs, inputs, biased=True)
    assert coded.shares_for(coded.block_for(rows, outputs), one.weight.form) > 1
    x = normal(rows, inputs)
    close(coded.multiply(x, one.weight, one.bias), exact(x, one))


@pytest.mark.parametrize("name", some(["int4", "fp8", "gptq"], short=1))
def test_many_rows_in_shares(name):
    """The products of a layer of 17 rows and more, with the norms between them."""
    hidden, inner, rows = 128, 256, 21
    norm, value = normal(hidden) / 4 + 1, normal(rows, hidden)
    behind = split_k.FusedNorm(Norm(eps=1e-5), NormWeights(norm))
    blocks = split_k.blocks_for(value.device)
    up, down = linear(name, 2 * inner, hidden), linear(name, hidden, inner, biased=True)
    residual = value.clone()
    y, _ = split_k.add_norm(residual, None, behind)
    inside = split_k.product(y, up, blocks, FeedForward(inner))
    gate, factor = exact(normed(value, norm), up).chunk(2, -1)
    close(inside, gate * gate.sigmoid() * factor)
    after, _ = split_k.add_norm(residual, split_k.shares([(inside, down)], blocks), behind)
    close(residual, value.double() + exact(inside, down))
    close(after, normed(residual, norm))


@pytest.mark.parametrize("name", some(["mxfp4", "fp8"], short=1))
def test_widest_products(name, monkeypatch):
    """Blocks of 64 and 128 outputs."""
    monkeypatch.setattr(coded, "BLOCKS", dict.fromkeys(coded.BLOCKS, coded.BLOCKS["wide"]))
    one = linear(name, 128, 512)
    for rows in (3, 12, 33):
        x = normal(rows, 512)
        close(coded.multiply(x, one.weight, None), exact(x, one))


@pytest.mark.parametrize("name", some([*FORMS], short=6))
def test_a_row_has_the_same_bits_beside_others(name, monkeypatch):
    """Alone, and in a block of other sizes; and among many rows, whose sums have another order."""
    one_order(monkeypatch)
    one, x = linear(name, 32, 1152), normal(64, 1152)
    few, many = decode.product(x[:16], one), coded.multiply(x, one.weight, None)
    for rows in (slice(1), slice(2), slice(9), slice(13, 14)):
        assert torch.equal(decode.product(x[rows], one), few[rows]), rows
    for rows in (slice(17), slice(40), slice(40, 60)):
        assert torch.equal(coded.multiply(x[rows], one.weight, None), many[rows]), rows


def test_eight_bit_floats_of_rows_that_are_rounded_elsewhere():
    """Their codes lie in memory as torch's product of eight bits reads them."""
    plain = normal(48, 512) / 512**0.5
    values, scales = quantize_fp8(plain)
    one = Fp8Linear(values, scales[None, :], TorchKernels().quantize_rows, normal(48))
    found = coded.weight_of(one)
    assert found is not None
    assert found[0].codes.data_ptr() == values.data_ptr()
    x = normal(5, 512)
    close(decode.product(x, one), x.double() @ found[0].values().double().t() + one.bias.double())


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.table])
def test_codes_in_tiles_stand_for_the_same_numbers(name):
    found = random_weight(form(name, 24, 3 * TILE), torch.Generator().manual_seed(3))
    values = found.values()
    moved = found.put_in_runs(in_tiles=True)
    assert moved.codes.data_ptr() == found.codes.data_ptr()
    assert torch.equal(moved.values(), values)
    assert torch.equal(moved.rows(8, 16).values(), values[8:16])


def test_layers_of_other_forms_are_computed_elsewhere():
    runs = random_weight(form("int4", 48, 512), torch.Generator().manual_seed(0)).put_in_runs()
    for other in (
        KernelLinear(runs),
        linear("fp8", 40, 512),
        KernelLinear(weight("int8", 48, 64)),
    ):
        assert coded.weight_of(other) is None


@pytest.mark.parametrize("kernels", ["off", "codes"])
def test_codes_lie_in_tiles_where_their_kernels_are_tried(kernels, monkeypatch):
    """In the memory that was read: a weight is nowhere twice. Products of few rows and of many are the same."""
    monkeypatch.setenv("PETIOLE_UNTIMED", kernels)
    found = random_weight(form("int4", 48, 512), torch.Generator().manual_seed(0))
    memory, values = [part.data_ptr() for part in found.tensors], found.values()
    taken = FlashInferKernels().take(found)
    assert taken is not None
    weight, multiply = taken
    assert weight.form.in_tiles == (kernels == "codes")
    assert [part.data_ptr() for part in weight.tensors] == memory
    there = [part.to(DEVICE) for part in (weight.codes, weight.scales, weight.multiplier)]
    weight = Coded(weight.form, there[0], there[1], None, there[2])
    for rows in (1, 20, 70):
        x = normal(rows, 512)
        close(multiply(x, weight, None), x.double() @ values.double().t().to(DEVICE))


def test_a_model_with_codes_is_computed_where_the_kernels_are_tried(monkeypatch):
    """All four products of a layer; without the switch none is."""
    taken = KernelLinear(weight("int4", 128, 128))
    layer = SimpleNamespace(
        attention=SimpleNamespace(qkv=taken, out=taken), dense=SimpleNamespace(gate_up=taken, down=taken)
    )
    plan = SimpleNamespace(parallel=False, mixer_out_norm=None, feed_forward_out_norm=None)
    decoder = SimpleNamespace(dtype=torch.bfloat16, layers=(layer,), plan=SimpleNamespace(layers=(plan,)))
    for kernels in ("off", "codes"):
        monkeypatch.setenv("PETIOLE_UNTIMED", kernels)
        assert decode.fits(decoder) == split_k.fits(decoder) == (kernels == "codes")


def executed(ptx: str, word: int, name: str, dtype: torch.dtype) -> list[float]:
    """What a few lines of PTX leave in $0, $1 and so on, two numbers each, where the last operand is `word`."""
    numbers = {name: word}

    def of(text: str) -> int:
        return int(text, 0) if text[0].isdigit() else numbers[text]

    def pair(bits: int) -> torch.Tensor:
        return torch.tensor([bits], dtype=torch.int64).to(torch.int32).view(dtype).double()

    for line in ptx.split("times, plus; ", 1)[1].rstrip(" }").split(";")[:-1]:
        operation, rest = line.split(maxsplit=1)
        to, *given = rest.split(", ")
        values = [of(one) for one in given]
        match operation.split(".")[0]:
            case "mov":
                numbers[to] = values[0]
            case "prmt":
                every = (values[0] | values[1] << 32).to_bytes(8, "little")
                numbers[to] = int.from_bytes([every[values[2] >> 4 * i & 15] for i in range(4)], "little")
            case "and":
                numbers[to] = values[0] & values[1]
            case "shr":
                numbers[to] = values[0] >> values[1]
            case "lop3":
                assert values[3] == 0xEA
                numbers[to] = values[0] & values[1] | values[2]
            case "fma":
                a, b, c = map(pair, values[:3])
                numbers[to] = (a * b + c).to(dtype).view(torch.int32).item() & 0xFFFFFFFF
    return [*pair(numbers["$0"]).tolist(), *pair(numbers["$1"]).tolist()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_the_instructions_that_make_numbers_of_bytes_are_exact(kept, dtype, monkeypatch):
    """Carried out one by one for each code but those that are no numbers."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    kind = codes.CodedWeight.of(random_weight(form("int8" if kept == torch.int8 else "fp8", 8, 128), DRAW)).kind
    ptx = codes.assembly_of_bytes(kind, dtype)
    every = torch.arange(256, dtype=torch.uint8).view(kept)
    found = [
        executed(ptx, int.from_bytes(bytes(range(i, i + 4)), "little"), "$2", dtype) for i in range(0, 256, 4)
    ]
    wanted, numbers = every.double(), torch.tensor(found).flatten().double()
    assert torch.equal(numbers[wanted.isfinite()], wanted[wanted.isfinite()])
