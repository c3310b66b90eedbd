"""Compiled code reads blocks of GGUF files bit by bit as torch does, into each form that may hold them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.gguf.block_types import TYPES
from petiole.gpu_worker.models.checkpoint.gguf.blocks import CODINGS, in_blocks
from petiole.gpu_worker.models.weights.formats.gguf import FORMATS, layout
from petiole.gpu_worker.models.weights.quantized import Coded, common_form
from petiole.gpu_worker.models.weights.source import QuantisedLayer
from petiole.gpu_worker.runtime.cpu.native.products.gguf_blocks import NativeBlocks
from tests.gpu_worker.models.weights.formats.test_gguf import Blocks

COMPILED = NativeBlocks()
pytestmark = pytest.mark.skipif(not COMPILED.knows("Q8_0"), reason="nothing can be compiled here")

FACTORS = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "MXFP4": (),
}
"""The types that compiled code knows, with the bytes where their float16 begin."""
OUTPUTS, INPUTS = 37, 512


def raw_of(kind: str) -> torch.Tensor:
    """Rows of all bytes that there are, with finite factors."""
    made = torch.Generator().manual_seed(sum(map(ord, kind)))
    shape = OUTPUTS, INPUTS // TYPES[kind].values * TYPES[kind].n_bytes
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=made)
    blocks = in_blocks(raw, kind)
    for at in FACTORS[kind]:
        blocks[..., at + 1] &= 0xBF
    if kind == "MXFP4":
        blocks[..., 0] = blocks[..., 0].clamp(max=254)
    return raw


def new(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(tuple(shape), 3.0).to(dtype)


def layer_of(kind: str, raw: torch.Tensor, *, compiled: bool) -> QuantisedLayer:
    beside = Blocks(kind, raw, COMPILED if compiled else None).beside
    return QuantisedLayer(FORMATS[kind], FORMATS[kind].form(beside), beside)


def by_torch(kind: str, raw: torch.Tensor) -> Coded:
    layer = layer_of(kind, raw, compiled=False)
    whole = layer.form.empty(new)
    layer.read(whole)
    return whole


def same_bits(one: Coded, other: Coded) -> bool:
    pairs = zip(one.tensors, other.tensors, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def test_these_types_are_known() -> None:
    assert {kind for kind in CODINGS if COMPILED.knows(kind)} == set(FACTORS)


@pytest.mark.parametrize("kind", FACTORS)
def test_codes_and_scales_are_those_of_torch(kind: str) -> None:
    raw = raw_of(kind)
    layer = layer_of(kind, raw, compiled=True)
    found = layer.form.empty(new)
    assert layer.read(found) == raw.numel()
    assert same_bits(found, by_torch(kind, raw))


@pytest.mark.parametrize("kind", FACTORS)
def test_a_form_that_holds_two_types_is_filled_as_torch_fills_it(kind: str) -> None:
    raw = raw_of(kind)
    layer, own = layer_of(kind, raw, compiled=True), by_torch(kind, raw)
    filled = set()
    for other in CODINGS:
        form = common_form([own.form, layout(other, OUTPUTS, INPUTS)])
        if form is not None and layer.fills(form):
            found, expected = form.empty(new), form.empty(new)
            layer.read(found)
            own.put_into(expected)
            assert same_bits(found, expected), other
            filled.add(other)
    assert kind in filled
    assert {"Q4_K": "Q6_K", "Q6_K": "Q4_K", "Q5_0": "Q8_0"}.get(kind, kind) in filled


@pytest.mark.parametrize("kind", [kind for kind in FACTORS if FACTORS[kind]])
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E01])
def test_one_factor_that_is_no_number_is_found(kind: str, bits: int) -> None:
    for at in FACTORS[kind]:
        raw = raw_of(kind)
        assert COMPILED.finite(kind, raw)
        in_blocks(raw, kind)[OUTPUTS - 1, -1, at : at + 2] = torch.tensor([bits & 255, bits >> 8])
        check_refused(kind, raw)


def test_a_power_of_two_that_is_no_number_is_found() -> None:
    raw = raw_of("MXFP4")
    raw[3, 17] = 255
    check_refused("MXFP4", raw)


def check_refused(kind: str, raw: torch.Tensor) -> None:
    assert not COMPILED.finite(kind, raw)
    for compiled in (True, False):
        layer = layer_of(kind, raw, compiled=compiled)
        with pytest.raises(ModelError, match="must have finite scales, got inf or NaN"):
            layer.read(layer.form.empty(new))


def test_without_compiled_code_torch_reads_and_widens_nothing() -> None:
    raw = raw_of("Q4_K")
    layer = layer_of("Q4_K", raw, compiled=False)
    wider = common_form([layer.form, layout("Q6_K", OUTPUTS, INPUTS)])
    assert wider is not None
    assert not layer.fills(wider)
