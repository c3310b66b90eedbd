"""Mixtures with quantised experts, and with routers that send positions where no trained router does."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.harness.driver import Driver
from petiole.gpu_worker.models.weights.description import formats_of
from petiole.gpu_worker.models.weights.quantized import CodedLinear
from tests.gpu_worker.models.test_logits import ALL, reference, relative_error, table, tokens
from tests.gpu_worker.models.weights.test_experts import dequantised, mxfp4_as_released, rewritten
from tests.gpu_worker.models.weights.test_quantization import requantised
from tests.gpu_worker.runtime.cpu.test_batch_invariance import prompts, trace
from tests.support.quantised import FORMATS
from tests.support.trials import rest

Tensors = dict[str, Tensor]
Written = Callable[[str], tuple[Path, Any]]

LINEAR = re.compile(r".*(self_attn\.[qkvo]_proj|(gate|up|down)_proj|\bw[123])\.weight")
"""All linear layers but routers and heads."""
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def model_of(like: Any, folder: Path) -> Any:
    """The model of transformers in a folder."""
    found = type(like).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return found.eval()


def check(runtime: Any, model: Any) -> None:
    """A chunk, the rest of a prompt and a decode have the logits of the model of transformers."""
    driver = Driver(runtime)
    sequence = driver.sequence(tokens(40), ALL)
    driver.prefill([sequence], [33])
    for step in (driver.prefill, driver.decode):
        got = table(step([sequence]))
        ids = sequence.prompt + sequence.output[:-1]
        assert relative_error(got, reference(model, ids)[-1:]) < 1e-4


def same_bits(runtime: Any) -> None:
    """Each sequence alone, all together, and in chunks."""
    driver, asked = Driver(runtime), prompts((1, 2, 7, 33, 150))
    alone = [trace(driver, [driver.sequence(prompt, ALL)], steps=2)[0] for prompt in asked]
    assert trace(driver, [driver.sequence(prompt, ALL) for prompt in asked], steps=2) == alone
    assert [trace(driver, [driver.sequence(prompt, ALL)], 5, steps=2)[0] for prompt in asked] == alone


@pytest.fixture
def compiled(cpu_path: str, caplog: pytest.LogCaptureFixture) -> Callable[[], bool]:
    """Whether compiled code has computed all; it must, where there is a compiler."""
    caplog.set_level(logging.INFO, "petiole")

    def found() -> bool:
        assert ("compiled code computes all" in caplog.text) == (cpu_path == "native")
        return cpu_path == "native"

    return found


@pytest.mark.parametrize("name", ["ct w4 groups, zeros", "ct nvfp4", "gptq 4 v1", "awq", "ct int8", "fp8 blocks"])
@pytest.mark.parametrize("family", rest(["qwen3-moe", "mixtral"]))
def test_experts_of_every_kind_of_format_compute_what_transformers_does(
    family: str, name: str, checkpoint: Written, open_runtime: Any, compiled: Any, tmp_path: Path
) -> None:
    plain, like = checkpoint(family)
    values: Tensors = {}

    def change(tensors: Tensors) -> Tensors:
        found = {}
        for key, tensor in tensors.items():
            if LINEAR.fullmatch(key):
                packed, values[key] = FORMATS[name][0](tensor)
                found |= {key.removesuffix(".weight") + suffix: one for suffix, one in packed.items()}
            else:
                found[key] = values[key] = tensor
        return found

    packed = rewritten(plain, tmp_path / "packed", change, quantization_config=FORMATS[name][1])
    model = model_of(like, rewritten(plain, tmp_path / "values", lambda _: values))
    runtime = open_runtime(packed)
    experts = runtime._decoder.layers[0].experts
    assert type(experts.gate_up.whole) is type(experts.down.whole) is CodedLinear
    check(runtime, model)
    if compiled():
        same_bits(runtime)


def test_gpt_oss_as_it_is_released_computes_what_transformers_does(
    checkpoint: Written, open_runtime: Any, compiled: Any, tmp_path: Path
) -> None:
    plain, like = checkpoint("gpt-oss")
    packed = rewritten(plain, tmp_path / "packed", mxfp4_as_released, quantization_config=MXFP4)
    runtime = open_runtime(packed)
    assert formats_of(runtime._decoder) == "mxfp4, float32", "experts have most of the weights"
    check(runtime, model_of(like, rewritten(plain, tmp_path / "values", dequantised)))
    if compiled():
        same_bits(runtime)


def in_four_bits(tensors: Tensors) -> Tensors:
    """The weights that `weight_quantization=int4` computes with. gpt-oss stores its experts by inputs."""

    def of(name: str, tensor: Tensor) -> Tensor:
        if LINEAR.fullmatch(name):
            return requantised(tensor)
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return torch.stack([requantised(expert.t().contiguous()).t() for expert in tensor])
        return tensor

    return {name: of(name, tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("family", rest(["qwen3-moe", "gpt-oss", "mixtral", "glm4-moe"], 2))
def test_experts_in_four_bits_compute_with_the_weights_that_the_codes_stand_for(
    family: str, checkpoint: Written, open_runtime: Any, compiled: Any, tmp_path: Path
) -> None:
    plain, like = checkpoint(family)
    model = model_of(like, rewritten(plain, tmp_path / "values", in_four_bits))
    runtime = open_runtime(plain, weight_quantization="int4")
    assert compiled() is not None
    check(runtime, model)


# ------------------------------------------------------------ routes


def all_tie(tensors: Tensors) -> Tensors:
    return {name: one.zero_() if ".router." in name else one for name, one in tensors.items()}


def pairs_tie(tensors: Tensors) -> Tensors:
    """Every second expert has the router's weights of the one before it."""
    routers = (one for name, one in tensors.items() if ".router." in name)
    for one in routers:
        one[1::2] = one[::2]
    return tensors


def one_takes_all(tensors: Tensors) -> Tensors:
    for name, one in tensors.items():
        if name.endswith(".router.bias"):
            one[4] = 1e4
    return tensors


ROUTES: dict[str, tuple[Callable[[Tensors], Tensors], int, Callable[[list[int]], bool]]] = {
    "all experts tie": (all_tie, 3, lambda n: min(n[:3]) == max(n[:3]) > 0 and not any(n[3:])),
    "experts tie in pairs": (pairs_tie, 3, lambda n: all(a >= b for a, b in zip(n[::2], n[1::2], strict=True))),
    "one expert takes all": (one_takes_all, 1, lambda n: n[4] > 0 and sum(n) == n[4]),
}
"""By name: what is done to gpt-oss, how many experts a position takes, and what must be true of the positions that
each expert has computed: of equal experts the one with the lower number comes first."""


@pytest.mark.parametrize("route", rest(ROUTES, 2))
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("cpu_path", ["native"], indirect=True)
def test_a_sequence_gets_the_same_bits_wherever_a_router_sends_it(
    quantization: str, route: str, checkpoint: Written, open_runtime: Any, tmp_path: Path
) -> None:
    change, chosen, expected = ROUTES[route]
    folder = rewritten(checkpoint("gpt-oss")[0], tmp_path / "routed", change, num_experts_per_tok=chosen)
    runtime = open_runtime(folder, weight_quantization=quantization)
    same_bits(runtime)
    for counted in runtime.expert_tokens():
        assert sum(counted) > 0
        assert expected(counted), counted


@pytest.mark.parametrize("route", ROUTES)
def test_logits_are_those_of_transformers_wherever_a_router_sends_a_position(
    route: str, checkpoint: Written, open_runtime: Any, tmp_path: Path
) -> None:
    """Of equal experts transformers may take any: their weights are made equal, too."""
    change, chosen, _ = ROUTES[route]

    def alike(tensors: Tensors) -> Tensors:
        found = change(tensors)
        for name, one in found.items():
            if ".experts." in name and route == "all experts tie":
                one[:] = one[:1].clone()
            elif ".experts." in name and route == "experts tie in pairs":
                one[1::2] = one[::2]
        return found

    plain, like = checkpoint("gpt-oss")
    folder = rewritten(plain, tmp_path / "routed", alike, num_experts_per_tok=chosen)
    check(open_runtime(folder), model_of(like, folder))
