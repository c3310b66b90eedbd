"""Moondream 2 in the published layout, with a narrow shape that the reference implementation can run.

`recorded_moondream.json` holds numbers of this code, which `confirm_moondream.py` compared with the reference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.harness.checkpoints.decoders import write_tokenizer
from bench.harness.driver import Driver
from petiole.gpu_worker import Engine, EngineConfig, Request, SamplingParams
from petiole.gpu_worker.constraints import PositionalConstraint
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.families.registry import find_model
from petiole.gpu_worker.models.loading import LoadOptions, load_model
from petiole.gpu_worker.models.moondream.config import parse_moondream_config
from petiole.gpu_worker.models.moondream.decoder import MoondreamDecoder
from petiole.gpu_worker.models.weights.linear import DenseLinear, quantize_int8
from petiole.gpu_worker.request.prepared_images import ImagePlace, PreparedImage
from petiole.gpu_worker.runtime.interface import VALUES, StepBatch
from petiole.gpu_worker.runtime.platforms import Executor
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from petiole.gpu_worker.runtime.step.inputs import StepStates
from tests.gpu_worker.models.test_logits import relative_error
from tests.gpu_worker.models.weights.test_quantization import requantised
from tests.support.moondream import (
    KINDS,
    NARROW,
    PROMPT,
    Forced,
    exact_crops,
    prepared,
    weights,
    write_adapter_of_moondream,
    write_model,
)

RECORD = Path(__file__).with_name("recorded_moondream.json")


def open_decoder(folder: Path) -> MoondreamDecoder:
    options = LoadOptions(torch.device("cpu"), torch.float32, 2049)
    found = load_model(folder, find_model(folder), options)
    assert isinstance(found, MoondreamDecoder)
    return found


@dataclass
class Answer:
    bins: list[tuple[int, ...]]
    hidden: torch.Tensor
    logits: torch.Tensor
    cached: int


class Listening:
    """An executor that keeps the hidden states and logits of every output."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.encode = executor, executor.encode
        self.heard: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, *args: Any) -> StepStates:
        states = self.executor.forward(*args)
        make = states.sides[VALUES]
        assert isinstance(make, partial), "what makes numbers from the hidden states"
        if len(hidden := make.args[-1]):
            self.heard.append((hidden[-1].clone(), states.logits()[-1].clone()))
        return states

    def encode(self, *args: Any) -> Sequence[torch.Tensor]:
        return self.executor.encode(*args)


def open_engine(folder: Path, **config: Any) -> Engine:
    settings = {
        "chunk_size": 1024,
        "max_num_seqs": 2,
        "num_pages": 3000,
        "num_threads": 1,
        "page_size": 1,
        **config,
    }
    full = EngineConfig(model=str(folder), device="cpu", dtype="float32", **settings)
    return Engine(full, runtime=ModelRuntime(full))


def asked(image: PreparedImage | None, prompt: list[int] = PROMPT, **more: Any) -> Request:
    constraint = PositionalConstraint(Forced(), [0], 512)
    sampling = SamplingParams(max_tokens=20, temperature=0.0)
    head: list[Any] = [0] if image is None else [0, ImagePlace(0)]
    images = [] if image is None else [image]
    return Request(prompt=[*head, *prompt], images=images, sampling=sampling, constraint=constraint, **more)


def answer(folder: Path, image: PreparedImage | None, **config: Any) -> Answer:
    """Through the engine, with the kinds of tokens forced."""
    with open_engine(folder, **config) as engine:
        runtime: Any = engine.runtime
        runtime._executor = listening = Listening(runtime._executor)
        bins: list[tuple[int, ...]] = []
        handle = engine.submit(asked(image), on_delta=lambda _, delta: bins.extend(delta.bins or ()))
        result = handle.result(timeout=300)
        assert list(result.token_ids) == KINDS
    hidden, logits = zip(*listening.heard[: 1 + len(KINDS)], strict=True)
    return Answer(bins, torch.stack(hidden), torch.stack(logits), result.usage.cached_prompt_tokens)


def digest(folder: Path) -> dict[str, Any]:
    """What is recorded: with exact crops and without an image, bins and some of every tensor's numbers."""
    image = prepared(exact_crops(), (1, 2))
    with torch.no_grad():
        embeddings = open_decoder(folder).encode([(torch.from_numpy(image.pixels), image.tiling)])[0][0]
    found: dict[str, Any] = {"embeddings": sampled(embeddings)}
    for name, one in (("image", answer(folder, image)), ("text", answer(folder, None))):
        found[name] = {"bins": one.bins, "hidden": sampled(one.hidden), "logits": sampled(one.logits)}
    return found


def sampled(tensor: torch.Tensor) -> list[float]:
    flat = tensor.flatten()
    return [round(float(x), 5) for x in flat[:: max(1, len(flat) // 40)]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("moondream"))


def test_numbers_are_those_that_the_reference_confirmed(folder: Path, cpu_path: str) -> None:
    found, recorded = digest(folder), json.loads(RECORD.read_text())
    assert np.allclose(found["embeddings"], recorded["embeddings"], atol=1e-3)
    for name in ("image", "text"):
        assert [list(bins) for bins in found[name]["bins"]] == recorded[name]["bins"]
        assert np.allclose(found[name]["hidden"], recorded[name]["hidden"], atol=1e-3)
        assert np.allclose(found[name]["logits"], recorded[name]["logits"], atol=1e-3)
    assert found["image"]["bins"] != found["text"]["bins"], "the image matters"


def test_a_second_question_about_an_image_reuses_it(folder: Path, cpu_path: str) -> None:
    image = prepared(exact_crops(), (1, 2))
    other = [*PROMPT[:3], 90, 3]
    with open_engine(folder) as engine:
        alone = engine.generate([asked(image, other)])[0]
    with open_engine(folder) as engine:
        engine.generate([asked(image)])
        second = engine.generate([asked(image, other)])[0]
        third = engine.generate([asked(prepared(exact_crops(seed=4), (1, 2), content_hash=2), other)])[0]
        assert engine.stats()["encoded_images"] == 2
    assert second.usage.cached_prompt_tokens == 730 + 3
    assert third.usage.cached_prompt_tokens == 0
    assert second.token_ids == alone.token_ids


def test_an_answer_resumes_bin_for_bin(folder: Path, cpu_path: str) -> None:
    image = prepared(exact_crops(), (1, 2))
    with open_engine(folder) as engine:
        bins: list[tuple[int, ...]] = []
        whole = engine.submit(asked(image), on_delta=lambda _, d: bins.extend(d.bins or ())).result(timeout=300)
        for n in (1, 2, 3, 7):
            rest: list[tuple[int, ...]] = []
            again = asked(image, resume_token_ids=whole.token_ids[:n], resume_bins=bins[:n])
            result = engine.submit(again, on_delta=lambda _, d, rest=rest: rest.extend(d.bins or ())).result(60)
            assert result.token_ids == whole.token_ids
            assert rest == bins[n:]


@pytest.mark.slow
def test_values_under_an_adapter_are_those_of_merged_weights(tmp_path: Path, cpu_path: str) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    write_adapter_of_moondream(adapter, merged)
    image, found = prepared(exact_crops(), (1, 2)), []
    for folder, name in ((write_model(tmp_path), str(adapter)), (merged, None), (tmp_path, None)):
        with open_engine(folder, lora_slots=1, lora_max_rank=4) as engine:
            bins: list[tuple[int, ...]] = []
            more: dict[str, Any] = {"adapter": name}
            handle = engine.submit(asked(image, **more), on_delta=lambda _, d, to=bins: to.extend(d.bins or ()))
            handle.result(timeout=300)
            found.append(bins)
    assert found[0] == found[1] != found[2]


def test_a_release_is_recognised_by_its_family_alone() -> None:
    config = parse_moondream_config({"model_type": "moondream1", "config": {}})
    text = config.text
    assert (text.n_layers, text.hidden_size, text.mixers[0].heads, text.vocab_size) == (24, 2048, 32, 51200)
    assert (config.vision.layers, config.vision.dim, config.vision.geometry.size) == (27, 1152, 378)
    assert text.eos_token_ids == (0,)


def test_names_without_the_leading_model_are_read_too(folder: Path, tmp_path: Path) -> None:
    bare = open_decoder(write_model(tmp_path, prefix=""))
    assert torch.equal(bare.embedding, open_decoder(folder).embedding)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"text": {"dim": 130}}, "dim must be 64"),
        ({"text": {"group_size": 128}}, "quantised already"),
        ({"vision": {"crop_size": 379}}, "crop_size must be a multiple of 14, got 379"),
        ({"region": {"size_out_dim": 100}}, "size_out_dim must be 2048, got 100"),
        ({"text": {"n_layers": "many"}}, "n_layers must be a whole number from 1 to 10000, got 'many'"),
        ({"vision": {"max_crops": 10**9}}, "max_crops must be a whole number from 1 to 64, got 1000000000"),
        ({"tokenizer": {"templates": {"query": 1}}}, r"templates\.caption\.short must be a list of token ids"),
    ],
)
def test_a_configuration_that_cannot_be_served_is_refused(change: dict[str, dict[str, Any]], named: str) -> None:
    config = NARROW | {part: NARROW.get(part, {}) | values for part, values in change.items()}
    with pytest.raises(ModelError, match=named):
        parse_moondream_config({"config": config})


def test_a_checkpoint_with_names_of_training_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path)
    save_file({"text_model.lm_head.linear.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="names of training"):
        open_decoder(tmp_path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    write_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.region.size_encoder.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"region\.size_encoder\.bias"):
        open_decoder(tmp_path)


def test_a_chunk_must_hold_an_image_and_the_default_does(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"chunk_size: must be at least 730.*got 512"):
        open_engine(folder, chunk_size=512).start()
    assert open_engine(folder, chunk_size=0).config.chunk_size == 730


@pytest.mark.slow
def test_half_precision_serves(folder: Path, cpu_path: str) -> None:
    settings: Any = {"chunk_size": 1024, "max_num_seqs": 2, "num_pages": 2000, "num_threads": 1}
    config = EngineConfig(model=str(folder), device="cpu", dtype="bfloat16", **settings)
    with Engine(config, runtime=ModelRuntime(config)) as engine:
        result = engine.generate([asked(prepared(exact_crops(), (1, 2)))])[0]
    assert list(result.token_ids) == KINDS


def test_the_narrow_shape_has_the_published_names() -> None:
    names = set(weights())
    assert {"vision.blocks.26.attn.qkv.weight", "text.wte", "region.coord_features", "text.lm_head.bias"} <= names


@pytest.mark.slow
def test_an_engine_has_encoded_and_prefilled_an_image_before_its_first_request(
    tmp_path: Path, cpu_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[tuple[str, int]] = []
    launch = ModelRuntime.launch_forward

    def noted(self: ModelRuntime, slot_id: int, batch: StepBatch) -> None:
        steps.append((batch.kind, int(batch.lengths.sum())))
        launch(self, slot_id, batch)

    monkeypatch.setattr(ModelRuntime, "launch_forward", noted)
    write_tokenizer(512, write_model(tmp_path))
    settings: Any = {"device": "cpu", "dtype": "float32", "num_threads": 1, "num_pages": 3000}
    with Engine(EngineConfig(model=str(tmp_path), **settings)) as engine:
        assert steps[-3:] == [("encode", 0), ("prefill", 730), ("decode", 1)]
        assert engine.stats()["encoded_images"] == 0
        result = engine.generate([asked(prepared(exact_crops(), (1, 2)))])[0]
    assert list(result.token_ids) == KINDS


@pytest.mark.slow
def test_an_engine_that_encodes_many_crops_is_not_taken_for_hung(folder: Path) -> None:
    """A crop of the full model takes a CPU up to a second, and half a lease is 7.5 s."""
    with open_engine(folder) as engine:
        ages, runtime = list[tuple[float, float]](), engine.runtime
        beat = runtime.progress

        def progress() -> None:
            before = engine.heartbeat_age_s()
            beat()
            ages.append((before, engine.heartbeat_age_s()))

        runtime.progress = progress
        engine.generate([asked(prepared(exact_crops((2, 3)), (2, 3)))])
    assert len(ages) >= 7, "each crop, and on a slow machine each second of one"
    assert all(after < before for before, after in ages)


# ------------------------------------------------------------ quantised while it is loaded


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_its_decoder_of_text_in_fewer_bits_computes_with_the_weights_that_the_codes_stand_for(
    quantization: str, tmp_path: Path, open_runtime: Any
) -> None:
    """And its head. What stands beside the decoder keeps its type."""

    def values(weight: torch.Tensor) -> torch.Tensor:
        if quantization == "int4":
            return requantised(weight)
        codes, scales = quantize_int8(weight)
        return codes.float() * scales[:, None]

    plain, like = tmp_path / "plain", tmp_path / "values"
    for folder in (plain, like):
        folder.mkdir()
        write_model(folder)
    stored = load_file(plain / "model.safetensors")
    linear = re.compile(r".*text\.(blocks\.\d+\.(attn|mlp)\.(qkv|proj|fc1|fc2)|lm_head)\.weight")
    changed = {name: values(one.float()) if linear.fullmatch(name) else one for name, one in stored.items()}
    assert len([name for name in stored if linear.fullmatch(name)]) % 4 == 1
    save_file(changed, str(like / "model.safetensors"))
    settings = {"weight_quantization": quantization, "head_quantization": quantization}
    found = []
    for folder, options in ((plain, settings), (like, {}), (plain, {})):
        runtime = open_runtime(folder, **options)
        assert type(runtime._decoder.vision.projection.fc1) is DenseLinear
        driver = Driver(runtime)
        sequence = driver.sequence([0, *PROMPT, 9, 8, 7], SamplingParams(temperature=0.0, logprobs=512))
        driver.prefill([sequence], [4])
        output = driver.prefill([sequence])
        found.append(output.top_logprobs[0][np.argsort(output.top_ids[0])])
    assert relative_error(found[0], found[1]) < 1e-4
    assert relative_error(found[0], found[2]) > 1e-3


def test_eight_bit_floats_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path)
    options = LoadOptions(torch.device("meta"), torch.bfloat16, 2049, quantization="fp8")
    with pytest.raises(
        ModelError, match=r"^weight_quantization: must be none, int8 or int4 for Moondream, got fp8$"
    ):
        load_model(folder, find_model(folder), options)
