"""GGUF files: blocks against loops and against the library of the format, whole models against transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from safetensors.torch import load_file

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.codes import SIX, of_sixes, sixes
from petiole.gpu_worker.models.checkpoint.gguf.block_types import TYPES
from petiole.gpu_worker.models.checkpoint.gguf.blocks import CODINGS, values_of
from petiole.gpu_worker.models.checkpoint.safetensors import TensorEntry
from petiole.gpu_worker.models.weights.formats.gguf import FORMATS
from petiole.gpu_worker.models.weights.formats.layer_tensors import BlockReader, LayerTensors
from petiole.gpu_worker.models.weights.formats.quantization_config import QuantizationConfig
from petiole.gpu_worker.models.weights.linear import DenseLinear
from petiole.gpu_worker.models.weights.quantized import Coded, CodedLinear, CodedTable, common_form, plain_form
from tests.gpu_worker.models.weights.formats.test_damaged import said
from tests.gpu_worker.models.weights.test_quantised_models import Quantised, check
from tests.support import gguf
from tests.support.families import build_model

RECORDED = Path(__file__).parent / "gguf.blocks"
"""By `record.py`: blocks with the least and largest factors, and the library's numbers."""
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 320}
"""Blocks of the K types have 256 inputs."""


def blocks_of(rows: list[bytes]) -> torch.Tensor:
    return torch.stack([torch.frombuffer(bytearray(row), dtype=torch.uint8) for row in rows])


@pytest.mark.parametrize("kind", gguf.WRITTEN)
def test_blocks_are_what_loops_pack(kind: str) -> None:
    draw = random.Random(kind)
    rows = [gguf.row_of(kind, [draw.gauss(0, 1) for _ in range(512)]) for _ in range(5)]
    expected = torch.tensor([values for _, values in rows], dtype=torch.float64)
    found = values_of(blocks_of([packed for packed, _ in rows]), kind)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert ((expected - expected.mean()).abs().mean() > 0.5).all()


class Blocks:
    """A tensor of blocks, as a checkpoint has it."""

    def __init__(self, kind: str, raw: torch.Tensor, compiled: BlockReader | None = None) -> None:
        self.raw, self.shape = raw, (len(raw), raw.shape[1] // TYPES[kind].n_bytes * TYPES[kind].values)
        self.beside = LayerTensors(self, "layer", *self.shape, QuantizationConfig("gguf"), compiled)
        self._entry = TensorEntry(kind, self.shape, 0, raw.numel())

    def __contains__(self, name: str) -> bool:
        return name == "layer.weight"

    def entry(self, name: str) -> TensorEntry:
        return self._entry

    def stored(self, name: str) -> torch.Tensor:
        return self.raw

    def done(self, name: str) -> int:
        return self.raw.numel()


def new_memory(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype)


def codes_of(kind: str, raw: torch.Tensor) -> Coded:
    """What a layer of such blocks keeps."""
    beside = Blocks(kind, raw).beside
    coded = FORMATS[kind].form(beside).empty(new_memory)
    assert FORMATS[kind].read(beside, coded) == raw.numel()
    return coded


def in_memory(kind: str, raw: torch.Tensor) -> torch.Tensor:
    return codes_of(kind, raw).values()


def check_blocks(kind: str, raw: torch.Tensor, expected: torch.Tensor) -> None:
    """In the library's bits, except for the sign of a zero."""
    assert torch.equal(values_of(raw, kind), expected)
    assert torch.equal(in_memory(kind, raw), expected)


def plain(kind: str, raw: torch.Tensor) -> torch.Tensor:
    """What a weight stands for whose form has neither steps nor offsets."""
    coded = codes_of(kind, raw)
    other = plain_form(coded.form).empty(new_memory)
    coded.put_into(other)
    return other.values()


@pytest.mark.parametrize("kind", CODINGS)
def test_without_steps_and_offsets_weights_differ_by_a_rounding_of_zeros(kind: str) -> None:
    recorded = load_file(RECORDED)
    raw, expected = recorded[f"{kind}.blocks"], recorded[f"{kind}.values"]
    found = plain(kind, raw)
    if not CODINGS[kind].offsets:
        assert torch.equal(found, expected)
        return
    step = TYPES[kind].values
    largest = expected.unflatten(1, (-1, step)).abs().amax(-1, keepdim=True)
    assert ((found - expected).abs().unflatten(1, (-1, step)) <= largest * 2.0**-21).all()


MIXED = [
    ("Q4_K", "Q6_K"),
    ("Q4_K", "Q5_K"),
    ("Q3_K", "Q4_K"),
    ("IQ4_XS", "Q6_K"),
    ("IQ2_XXS", "Q4_K"),
    ("Q4_0", "Q8_0"),
]
"""As llama.cpp mixes types among queries, keys and values."""


@pytest.mark.parametrize("kinds", MIXED, ids="-".join)
def test_types_that_one_product_computes_become_one_form_exactly(kinds: tuple[str, str]) -> None:
    recorded = load_file(RECORDED)
    raw, expected = ([recorded[f"{kind}.{what}"] for kind in kinds] for what in ("blocks", "values"))
    coded = [codes_of(kind, one) for kind, one in zip(kinds, raw, strict=True)]
    common = common_form([one.form for one in coded])
    assert common is not None
    for one, values in zip(coded, expected, strict=True):
        into = common.of(one.form.outputs).empty(new_memory)
        one.put_into(into)
        assert torch.equal(into.values(), values)


@pytest.mark.parametrize("kinds", MIXED[:4], ids="-".join)
def test_factors_of_blocks_stay_factors_in_one_form(kinds: tuple[str, str]) -> None:
    forms = [
        FORMATS[kind].form(Blocks(kind, torch.zeros(1, TYPES[kind].n_bytes, dtype=torch.uint8)).beside)
        for kind in kinds
    ]
    common = common_form(forms)
    assert common is not None
    assert common.n_bytes * 8 <= 9.25 * common.inputs


MOST = {
    "Q4_0": 1.0,
    "Q4_1": 1.0,
    "Q5_0": 1.19,
    "Q5_1": 1.17,
    "Q8_0": 1.0,
    "Q4_K": 1.04,
    "Q5_K": 1.21,
    "Q6_K": 1.01,
    "IQ4_XS": 1.02,
}


@pytest.mark.parametrize("kind", MOST)
def test_memory_is_near_the_file(kind: str) -> None:
    raw = torch.zeros(1, TYPES[kind].n_bytes * 8, dtype=torch.uint8)
    form = FORMATS[kind].form(Blocks(kind, raw).beside)
    assert form.n_bytes <= MOST[kind] * raw.numel()


@pytest.mark.parametrize("kind", CODINGS)
def test_blocks_are_what_the_library_makes_of_them(kind: str) -> None:
    recorded = load_file(RECORDED)
    raw, expected = recorded[f"{kind}.blocks"], recorded[f"{kind}.values"]
    check_blocks(kind, raw, expected)
    check_blocks(kind, raw[:1], expected[:1])


@pytest.mark.parametrize("kind", CODINGS)
def test_any_blocks_are_what_the_library_makes_of_them(kind: str) -> None:
    quants = pytest.importorskip("gguf.quants")
    from gguf import GGMLQuantizationType

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
    @given(st.binary(min_size=TYPES[kind].n_bytes, max_size=TYPES[kind].n_bytes))
    def check(block: bytes) -> None:
        raw = blocks_of([block])
        if kind == "NVFP4":
            raw[:, :4] &= 127  # scales without signs
        factors = CODINGS[kind].factors(raw[:, None])
        assume(all(bool(one.float().isfinite().all()) for one in factors))
        check_blocks(kind, raw, torch.from_numpy(quants.dequantize(raw.numpy(), GGMLQuantizationType[kind])))

    check()


def test_a_group_of_q4_k_without_a_scale_is_its_minimum() -> None:
    runs = [0.5] * 32 + [-0.25] * 32 + [0.0] * 192
    packed, values = gguf.row_of("Q4_K", runs)
    block = bytearray(packed)
    block[4] = block[5] = 0  # the scales of the first two groups
    found = values_of(blocks_of([bytes(block)]), "Q4_K")[0]
    minimum = min(values[32:64])
    assert found[:32].tolist() == [0.0] * 32
    torch.testing.assert_close(found[32:64], torch.full((32,), minimum), rtol=1e-6, atol=0)


def made(path: Path, family: str, kind: str, kind_of: gguf.KindOf | None = None, **changes: Any) -> Quantised:
    architecture = {"llama2": "llama", "llama3": "llama", "llama-biases": "llama", "qwen2-yarn": "qwen2"}.get(
        family, family
    )
    changes = (WIDE if kind.endswith("K") else {}) | changes
    model = build_model(family, **changes)
    gguf.save_model(path, model, architecture, kind_of or {}, kind)
    return Quantised(path, model)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama2", "Q4_K"),
        ("llama3", "Q8_0"),
        ("qwen2", "Q4_0"),
        ("qwen2", "F32"),
        ("qwen3", "Q6_K"),
        ("gemma3", "Q8_0"),
    ],
)
def test_logits_are_those_of_the_model_of_transformers(
    open_runtime: Any, tmp_path: Path, family: str, kind: str
) -> None:
    changes = {"gemma3": {"query_pre_attn_scalar": 32, "layer_types": None}, "qwen3": {"head_dim": 64}}.get(
        family, {}
    )
    runtime = check(open_runtime, made(tmp_path / "m.gguf", family, kind, **changes))
    layer = runtime._decoder.layers[0]
    assert type(layer.mixer.qkv) is (DenseLinear if kind == "F32" else CodedLinear)


def test_biases_and_yarn(open_runtime: Any, tmp_path: Path) -> None:
    check(open_runtime, made(tmp_path / "a.gguf", "llama-biases", "Q8_0", mlp_bias=False))
    check(open_runtime, made(tmp_path / "b.gguf", "qwen2-yarn", "F16"))


def test_types_may_differ_within_a_product_and_the_embedding_may_be_quantised(
    open_runtime: Any, tmp_path: Path
) -> None:
    """As in a file of Q4_K_M."""
    types = {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K", "lm_head": "Q8_0", "o_proj": "BF16"}
    found = made(tmp_path / "m.gguf", "llama2", "Q4_K", types, **WIDE)
    runtime = check(open_runtime, found)
    assert type(runtime._decoder.layers[0].mixer.qkv) is CodedLinear  # of six bits
    assert type(runtime._decoder.head) is CodedLinear
    assert type(runtime._decoder.embedding) is CodedTable
    assert set(runtime.limits.computing.weight_format.split(", ")) >= {
        "int4 g32 with offsets",
        "int6 g16 with offsets",
    }


@pytest.mark.parametrize("mix", gguf.MIXES)
@pytest.mark.parametrize("inputs", [64, 256])
def test_a_file_of_mixed_types_is_codes_throughout(
    open_runtime: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, mix: str, inputs: int
) -> None:
    """Rows of 64 inputs have no blocks of 256."""
    sizes = {"hidden_size": inputs, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 320}
    with caplog.at_level("INFO", "petiole"):
        found = made(tmp_path / "m.gguf", "llama2", mix, gguf.mixed(mix, 2), **sizes)
        runtime = check(open_runtime, found)
    assert "MB in memory" in caplog.text
    for layer in runtime._decoder.layers:
        linears = layer.mixer.qkv, layer.mixer.out, layer.feed_forward.gate_up, layer.feed_forward.down
        assert [type(linear) for linear in linears] == [CodedLinear] * 4
    assert type(runtime._decoder.head) is CodedLinear


def test_a_tied_head_is_the_codes_of_the_embedding(open_runtime: Any, tmp_path: Path) -> None:
    found = made(tmp_path / "m.gguf", "qwen2", "Q8_0", {"embed_tokens": "Q6_K"}, hidden_size=256)
    decoder = check(open_runtime, found)._decoder
    assert type(decoder.embedding) is CodedTable
    assert decoder.head.weight is decoder.embedding.weight


def test_a_folder_with_one_such_file_is_that_file(open_runtime: Any, tmp_path: Path) -> None:
    found = made(tmp_path / "m.gguf", "qwen3", "Q8_0")
    check(open_runtime, Quantised(tmp_path, found.model))
    (tmp_path / "n.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"has 2 models: PETIOLE_MODEL must name one .* m \(0 MB\), n \(0 MB\)"):
        open_runtime(tmp_path)


# ------------------------------------------------------------ refusals


def small(tmp_path: Path, **changes: Any) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    model = build_model("qwen2", num_hidden_layers=1)
    metadata = gguf.save_model(tmp_path / "m.gguf", model, "qwen2", {}, "F32")
    tensors = {
        gguf.name_of(name, "qwen2"): ("F32", tuple(one.shape), gguf.packed("F32", one.data)[0])
        for name, one in model.named_parameters()
    }
    return tmp_path / "m.gguf", metadata, tensors


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"general.architecture": "mamba"}, "got 'mamba'"),
        ({"general.architecture": "qwen4moe"}, "got 'qwen4moe' (the nearest is qwen3moe)"),
        ({"general.architecture": "clip"}, "must be the file of a model, got 'clip'"),
        ({"general.type": "adapter"}, "must be the file of a model, got 'adapter'"),
        ({"qwen2.expert_count": 8}, "qwen2.expert_count must be 0, got 8"),
        ({"split.count": 3}, "split.count must be 1, as the file's name says, got 3"),
        ({"qwen2.block_count": "two"}, "qwen2.block_count must be a whole number"),
        ({"qwen2.block_count": 2}, "has no tensor model.layers.1."),
        ({"qwen2.embedding_length": 32}, "must have shape"),
        ({"qwen2.rope.dimension_count": 8}, "qwen2.rope.dimension_count must be 16"),
        ({"qwen2.rope.scaling.type": "longer"}, "must be none, linear or yarn, got 'longer'"),
        ({"qwen2.attention.head_count": [4, 4]}, "head_count must be a whole number"),
        ({"qwen2.attention.head_count_kv": [2, 4]}, "head_count_kv must be a whole number from 0"),
        ({"general.alignment": 0}, "alignment must be a power of two from 1"),
    ],
)
def test_metadata_that_are_not_read_are_refused(
    open_runtime: Any, tmp_path: Path, changed: dict[str, Any], why: str
) -> None:
    path, metadata, tensors = small(tmp_path)
    gguf.write(path, metadata | changed, tensors)
    with pytest.raises(ModelError, match=r"^[^\n]*$") as raised:
        open_runtime(path)
    assert why in str(raised.value)


def test_tensors_that_are_not_read_are_refused(open_runtime: Any, tmp_path: Path) -> None:
    path, metadata, tensors = small(tmp_path)
    for more, why in (
        (
            {"blk.0.attn_q.weight": ("Q1_0", (64, 64), b"")},
            "must be of type F32, .* got Q1_0; take the file in Q8_0",
        ),
        (
            {"blk.0.ssm.weight": ("F32", (1,), bytes(4))},
            "tensor 'blk.0.ssm.weight' is not one of a Qwen2ForCausalLM",
        ),
        ({"token_embd.weight": ("F32", (320,), bytes(1280))}, "must have two dimensions"),
    ):
        gguf.write(path, metadata, tensors | more)
        with pytest.raises(ModelError, match=why):
            open_runtime(path)
    path.write_bytes(path.read_bytes()[:-4000])
    with pytest.raises(ModelError, match="is truncated"):
        open_runtime(path)


def test_scales_that_are_no_numbers_are_refused(open_runtime: Any, tmp_path: Path) -> None:
    path, metadata, tensors = small(tmp_path)
    raw = bytearray(gguf.packed("Q8_0", torch.randn(64, 96))[0])
    raw[:2] = b"\xff\x7f"
    gguf.write(path, metadata, tensors | {"blk.0.ffn_down.weight": ("Q8_0", (64, 96), bytes(raw))})
    with pytest.raises(ModelError, match=r"gguf: tensor .*mlp.down_proj.weight must have finite scales"):
        open_runtime(path)


def test_scales_that_are_no_numbers_are_found_before_weights_are_replaced(
    open_runtime: Any, tmp_path: Path
) -> None:
    path, metadata, tensors = small(tmp_path)
    served = open_runtime(path)
    raw = bytearray(gguf.packed("Q8_0", torch.randn(64, 96))[0])
    raw[:2] = b"\xff\x7f"
    other = tmp_path / "other.gguf"
    gguf.write(other, metadata, tensors | {"blk.0.ffn_down.weight": ("Q8_0", (64, 96), bytes(raw))})
    with pytest.raises(ModelError, match=r"gguf: tensor .*mlp.down_proj.weight must have finite scales"):
        served.prepare_reload(str(other))


def test_numbers_of_six_bits_take_three_quarters_of_a_byte() -> None:
    numbers = torch.tensor([*SIX, *reversed(SIX)], dtype=torch.int8).view(2, 64)
    packed = sixes(numbers)
    assert packed.shape == (2, 48)
    assert torch.equal(of_sixes(packed), numbers)


def test_damage_is_refused_in_a_line_or_read(tmp_path: Path) -> None:
    """Of the header: each byte may be any other, and the file may end anywhere."""
    path, _, _ = small(tmp_path)
    whole, draw = path.read_bytes(), random.Random(7)
    refused = 0
    for i in range(150):
        path = tmp_path / f"{i}.gguf"
        damaged, at = bytearray(whole), draw.randrange(1200)
        damaged[at] = draw.randrange(256)
        path.write_bytes(damaged[: draw.choice([len(whole), len(whole), draw.randrange(len(whole))])])
        message = said(path)
        path.unlink()
        assert message is None or ("\n" not in message and len(message) < 1000)
        refused += message is not None
    assert refused > 50
