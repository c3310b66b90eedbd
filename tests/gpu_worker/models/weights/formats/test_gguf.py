"""GGUF files: blocks against loops and against the library of the format, whole models against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.gguf.blocks import CODES, in_blocks, values_of
from petiole.gpu_worker.models.weights.coded import CodedLinear
from petiole.gpu_worker.models.weights.linear import DenseLinear
from tests.gpu_worker.models.weights.formats.test_damaged import said
from tests.gpu_worker.models.weights.test_quantised_models import Quantised, check
from tests.support import gguf
from tests.support.families import build_model

KINDS = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 320}
"""Blocks of the K types have 256 inputs."""


def blocks_of(rows: list[bytes]) -> torch.Tensor:
    return torch.stack([torch.frombuffer(bytearray(row), dtype=torch.uint8) for row in rows])


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_what_loops_pack(kind: str) -> None:
    draw = random.Random(kind)
    rows = [gguf.row_of(kind, [draw.gauss(0, 1) for _ in range(512)]) for _ in range(5)]
    expected = torch.tensor([values for _, values in rows], dtype=torch.float64)
    found = values_of(blocks_of([packed for packed, _ in rows]), kind)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert ((expected - expected.mean()).abs().mean() > 0.5).all()


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_what_the_library_makes_of_them(kind: str) -> None:
    """Recorded by `record.py`. Only Q4_K differs, by a rounding of its zero."""
    recorded = load_file(Path(__file__).parent / "gguf.blocks")
    found, expected = values_of(recorded[f"{kind}.blocks"], kind), recorded[f"{kind}.values"]
    error = 2.0**-22 * float(expected.abs().max()) if kind == "Q4_K" else 0.0
    torch.testing.assert_close(found, expected, rtol=0, atol=error)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q6_K"])
def test_numbers_are_exact(kind: str) -> None:
    """A product of a float16, a scale of eight bits and a code is one rounding of float32."""
    draw = random.Random(kind)
    raw = blocks_of([gguf.random_row(kind, draw, 2) for _ in range(20)])
    codes = CODES[kind](in_blocks(raw, kind))
    zero = 8.0 if kind == "Q4_0" else 0.0
    scales = codes.scales.double().repeat_interleave(codes.codes.shape[1] // codes.scales.shape[1], 1)
    exact = (codes.codes.double() - zero) * scales
    assert torch.equal(values_of(raw, kind), exact.float())


def test_a_group_of_q4_k_without_a_scale_is_its_minimum() -> None:
    runs = [0.5] * 32 + [-0.25] * 32 + [0.0] * 192
    packed, values = gguf.row_of("Q4_K", runs)
    block = bytearray(packed)
    block[4] = block[5] = 0  # the scales of the first two groups
    found = values_of(blocks_of([bytes(block)]), "Q4_K")[0]
    minimum = min(values[32:64])
    assert found[:32].tolist() == [0.0] * 32
    torch.testing.assert_close(found[32:64], torch.full((32,), minimum), rtol=1e-6, atol=0)


def made(path: Path, family: str, kind: str, kind_of: dict[str, str] | None = None, **changes: Any) -> Quantised:
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
    assert type(runtime._decoder.layers[0].mixer.qkv) is CodedLinear  # of eight bits
    assert type(runtime._decoder.head) is CodedLinear
    assert set(runtime.limits.computing.weight_format.split(", ")) >= {
        "int4 g32 with zeros",
        "int8 g16 with zeros",
    }


def test_a_folder_with_one_such_file_is_that_file(open_runtime: Any, tmp_path: Path) -> None:
    found = made(tmp_path / "m.gguf", "qwen3", "Q8_0")
    check(open_runtime, Quantised(tmp_path, found.model))
    (tmp_path / "n.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"has m\.gguf, n\.gguf: PETIOLE_MODEL must name one"):
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
        ({"general.architecture": "mamba"}, "must be llama, qwen2, qwen3, gemma3, got 'mamba'"),
        ({"general.architecture": "clip"}, "got 'clip'"),
        ({"qwen2.expert_count": 8}, "qwen2.expert_count must be 0, got 8"),
        ({"split.count": 3}, "is one of 3 files: join them"),
        ({"qwen2.block_count": "two"}, "qwen2.block_count must be a whole number"),
        ({"qwen2.block_count": 2}, "has no tensor model.layers.1."),
        ({"qwen2.embedding_length": 32}, "must have shape"),
        ({"qwen2.rope.dimension_count": 8}, "qwen2.rope.dimension_count must be 16"),
        ({"qwen2.rope.scaling.type": "longer"}, "must be none, linear or yarn, got 'longer'"),
        ({"qwen2.attention.head_count": [4, 4]}, "head_count must be a whole number"),
        ({"general.alignment": 0}, "alignment must be from 1"),
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
        ({"blk.0.attn_q.weight": ("Q5_K", (64, 64), b"")}, "must be of type F32, .* got Q5_K; take the file in"),
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
    with pytest.raises(ModelError, match=r"^tensor model.layers.0.mlp.down_proj.weight must have finite scales"):
        open_runtime(path)


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
