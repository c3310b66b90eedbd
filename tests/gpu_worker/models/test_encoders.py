"""Encoders: the vectors of transformers, the same bits in any batch, and what their files may say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.harness.driver import Driver
from petiole.contract.results.vectors import Vectors
from petiole.contract.settings.engine import BATCHING
from petiole.gpu_worker import Embedding, Engine, EngineConfig, InvalidRequest, ModelError, Request
from petiole.gpu_worker.models.families.registry import find_model, model_of
from petiole.gpu_worker.models.loading import LoadOptions, load_model
from petiole.gpu_worker.models.parts.attention import bias_table, vector_places
from petiole.gpu_worker.models.plan import Disentangled, DistanceBias
from petiole.gpu_worker.runtime.interface import VECTORS
from petiole.gpu_worker.runtime.memory.kv import new_kv_cache
from petiole.gpu_worker.runtime.memory.room import page_bytes, pool_bytes
from tests.support.families import FAMILIES, SHAPE, drawn
from tests.support.text_models import (
    BERT,
    ENCODERS,
    GEMMA,
    MODERN,
    cosine,
    reference,
    transformers,
    write_encoder,
    write_modules,
)

LENGTHS = (1, 7, 40, 62, 2, 33)


def tokens(n: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(n).integers(4, 260, n).tolist()
    return drawn


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def get(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, write_encoder(folder, name)
        return made[name]

    return get


def made(driver: Driver, *lengths: int) -> np.ndarray:
    """The vectors of texts of these lengths, in one step."""
    sequences = [driver.sequence(tokens(n)) for n in lengths]
    found = driver.prefill(sequences).side_outputs[VECTORS].copy()
    for sequence in sequences:
        driver.finish(sequence)
    return found


@pytest.mark.parametrize("name", ENCODERS)
def test_the_vectors_are_those_of_transformers(
    name: str, encoder: Callable[[str], tuple[Path, Any]], open_runtime: Callable[..., Any]
) -> None:
    folder, model = encoder(name)
    found = made(Driver(open_runtime(folder)), *LENGTHS)
    for n, vector in zip(LENGTHS, found, strict=True):
        expected = reference(model, tokens(n), ENCODERS[name][2])
        assert cosine(vector, expected) > 0.9999999
        assert np.allclose(vector, expected, rtol=1e-4, atol=1e-4)


def test_a_decoder_whose_layers_read_the_keys_of_others_is_pooled(
    tmp_path: Path, open_runtime: Callable[..., Any]
) -> None:
    """Of two sizes of heads, with windows and per-layer inputs: Gemma 4 with a mean over all positions."""
    config = transformers.Gemma4TextConfig(**SHAPE | FAMILIES["gemma4-per-layer"][1])
    config._attn_implementation = "eager"
    model = drawn(transformers.Gemma4TextModel(config), "gemma4")
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["Gemma4ForCausalLM"]}))
    write_modules(tmp_path, "mean")
    found = made(Driver(open_runtime(tmp_path)), *LENGTHS)
    for n, vector in zip(LENGTHS, found, strict=True):
        assert cosine(vector, reference(model, tokens(n), "mean")) > 0.9999999


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ENCODERS)
def test_a_text_has_the_same_bits_alone_and_in_a_batch(
    name: str, dtype: str, encoder: Callable[[str], tuple[Path, Any]], open_runtime: Callable[..., Any]
) -> None:
    driver = Driver(open_runtime(encoder(name)[0], dtype=dtype))
    alone = [made(driver, n)[0].tobytes() for n in LENGTHS]
    assert [one.tobytes() for one in made(driver, *LENGTHS)] == alone
    assert [one.tobytes() for one in made(driver, *reversed(LENGTHS))] == alone[::-1]


@pytest.mark.parametrize("name", ["bert-mean", "modernbert"])
def test_an_engine_embeds_texts_whole(name: str, encoder: Callable[[str], tuple[Path, Any]]) -> None:
    """Steps hold the longest text, whatever the other settings say; nothing is left in the cache."""
    folder, model = encoder(name)
    texts = ["a" * n for n in (3, 40, 60)] * 6
    config = EngineConfig(model=str(folder), device="cpu", max_num_seqs=4, debug=True)
    with Engine(config) as engine:
        result = engine.generate([Request(texts=texts, embedding=Embedding())])[0]
        assert result.vectors is not None
        for text, vector in zip(texts, Vectors(result.vectors, 64), strict=True):
            ids = [1, *(text.encode()[0] - ord("!") + 4 for _ in text), 2]
            assert cosine(vector, reference(model, ids, ENCODERS[name][2])) > 0.99999
        stats, limits = engine.stats(), engine.limits
        assert stats["pages_total"] == stats["pages_free"] == 0, "texts take no pages"
        assert limits.texts is not None
        with pytest.raises(
            InvalidRequest, match=rf"texts\[0\]: must have at most {limits.texts.max_tokens} tokens"
        ):
            engine.generate([Request(texts=["a" * 300], embedding=Embedding())])


def test_steps_that_cannot_hold_a_text_are_refused(encoder: Callable[[str], tuple[Path, Any]]) -> None:
    with pytest.raises(
        ValueError, match="chunk_size: must be at least 66, or 0: this model computes each text in"
    ):
        Engine(EngineConfig(model=str(encoder("bert-mean")[0]), device="cpu", chunk_size=30))


def test_pages_for_texts_that_take_none_are_ignored(
    encoder: Callable[[str], tuple[Path, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Workers of several models may have their settings from one environment."""
    caplog.set_level("INFO")
    with Engine(EngineConfig(model=str(encoder("bert-mean")[0]), device="cpu", num_pages=9)) as engine:
        assert engine.runtime.limits.n_pages == 1
        assert engine.config.num_pages == 0
        [found] = engine.generate([Request(texts=["a" * 30], embedding=Embedding())])
    assert found.finish_reason == "stop"
    assert "num_pages=9 is ignored" in caplog.text


def test_a_dense_module_follows_the_pooling(tmp_path: Path, open_runtime: Callable[..., Any]) -> None:
    """As in EmbeddingGemma, or with tanh as in LaBSE."""
    model = write_encoder(tmp_path, "bert-mean")
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(96, 64, generator=generator) / 8, torch.randn(24, 96, generator=generator) / 8]
    bias = torch.randn(24, generator=generator)
    listed = json.loads((tmp_path / "modules.json").read_text())
    for k, (weight, activation) in enumerate(zip(weights, ("linear.Identity", "activation.Tanh"), strict=True)):
        folder = tmp_path / f"{k + 2}_Dense"
        folder.mkdir()
        sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": k == 1}
        (folder / "config.json").write_text(
            json.dumps(sizes | {"activation_function": f"torch.nn.modules.{activation}"})
        )
        save_file(
            {"linear.weight": weight} | ({"linear.bias": bias} if k else {}), str(folder / "model.safetensors")
        )
        listed.insert(k + 2, {"idx": k + 2, "path": folder.name, "type": "sentence_transformers.models.Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    runtime = open_runtime(tmp_path)
    assert runtime.limits.texts.dimensions == 24
    for n, vector in zip(LENGTHS, made(Driver(runtime), *LENGTHS), strict=True):
        pooled = torch.from_numpy(reference(model, tokens(n), "mean"))
        expected = torch.tanh(weights[1] @ (weights[0] @ pooled) + bias)
        assert cosine(vector, expected) > 0.9999999


def test_weights_in_pickles_are_refused_by_name(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert-mean")
    (tmp_path / "2_Dense").mkdir()
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 64, "out_features": 8}))
    (tmp_path / "2_Dense" / "pytorch_model.bin").write_bytes(b"")
    listed = json.loads((tmp_path / "modules.json").read_text())[:2]
    listed.append({"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"})
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(
        ModelError, match=r"pytorch_model.bin is a pickle, .* model.safetensors with .*linear.weight"
    ):
        find_model(tmp_path)


@pytest.mark.parametrize("new_names", [False, True])
@pytest.mark.parametrize(("mode", "kind"), [("mean", "mean"), ("cls", "first"), ("lasttoken", "last")])
def test_pooling_is_read_in_old_and_new_names(mode: str, kind: str, new_names: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], **BERT}))
    write_modules(tmp_path, mode, new_names=new_names, normalize=mode == "cls", max_seq_length=30)
    model = find_model(tmp_path)
    assert model.plan.pooling is not None
    assert (model.plan.pooling.kinds, model.plan.pooling.normalize) == ((kind,), mode == "cls")
    assert model.texts is not None
    assert model.texts.max_tokens == 30


FILES: list[tuple[str, Any, str]] = [
    ("1_Pooling/config.json", {"pooling_mode": ["mean", "min"]}, r"pooling_mode must be of cls, .*, 'min'"),
    ("1_Pooling/config.json", {"pooling_mode_max_tokens": False}, r"pooling_mode must be of .*, got \[\]"),
    ("modules.json", [{"type": "x.Transformer", "path": ""}, {"type": "x.LSTM"}], r"modules must be .*'x.LSTM'"),
    (
        "modules.json",
        [{"type": "x.Transformer", "path": "0_Transformer"}],
        "the module Transformer must be the first",
    ),
    (
        "modules.json",
        [
            {"type": "x.Transformer", "path": ""},
            {"type": "x.Normalize"},
            {"type": "x.Pooling", "path": "1_Pooling"},
        ],
        "modules must be in the order Transformer, Pooling, Dense, Normalize, got Pooling late",
    ),
    ("modules.json", {}, "must hold a list of JSON objects"),
    (
        "config_sentence_transformers.json",
        {"default_prompt_name": "q"},
        r"default_prompt_name must be one of \(none\)",
    ),
    ("config_sentence_transformers.json", {"prompts": {"q": 3}}, "prompts must be texts by name"),
    ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length must be a whole number"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES, ids=lambda value: str(value)[:40])
def test_files_that_are_not_computed_are_refused(name: str, content: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["BertModel"], **BERT}))
    write_modules(tmp_path, "mean")
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        find_model(tmp_path)


DECODERS = {
    "Llama": (SHAPE, None, "mean"),
    "Mistral": (SHAPE | {"sliding_window": None}, "lasttoken", "lasttoken"),
    "Qwen2": (SHAPE | {"is_causal": False, "use_sliding_window": False}, "lasttoken", "lasttoken"),
}
"""By kind: its configuration, what its files say of pooling, and how it is pooled."""


@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_is_pooled_and_may_see_everything(
    kind: str, tmp_path: Path, open_runtime: Callable[..., Any]
) -> None:
    settings, told, mode = DECODERS[kind]
    config = getattr(transformers, f"{kind}Config")(**settings)
    config._attn_implementation = "eager"
    model = drawn(getattr(transformers, f"{kind}Model")(config), kind)
    model.save_pretrained(tmp_path)
    if told is not None:
        write_modules(tmp_path, told)
    found = made(Driver(open_runtime(tmp_path)), *LENGTHS)
    for n, vector in zip(LENGTHS, found, strict=True):
        assert cosine(vector, reference(model, tokens(n), mode)) > 0.9999999


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "is_causal must be true but for a model of vectors"),
        ({"architectures": ["MistralModel"], "sliding_window": 7}, "is_causal must be true for layers with a"),
    ],
)
def test_a_decoder_that_sees_everything_is_refused_where_that_is_not_computed(
    raw: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "is_causal": False, **raw}))
    with pytest.raises(ModelError, match=message):
        find_model(tmp_path)


def test_poolings_are_joined_in_their_order(tmp_path: Path, open_runtime: Callable[..., Any]) -> None:
    model = write_encoder(tmp_path, "bert-mean")
    modes = ["lasttoken", "weightedmean", "mean_sqrt_len_tokens", "mean", "max", "cls"]
    told = {"embedding_dimension": 64, "pooling_mode": modes}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(told))
    runtime = open_runtime(tmp_path)
    assert runtime.limits.texts.dimensions == 6 * 64
    for n, vector in zip(LENGTHS, made(Driver(runtime), *LENGTHS), strict=True):
        expected = np.concatenate([reference(model, tokens(n), mode) for mode in modes])
        assert np.allclose(vector, expected, rtol=1e-4, atol=1e-4)


def test_a_prompt_may_stay_out_of_the_pooling(tmp_path: Path) -> None:
    """As sentence-transformers counts its tokens: with the first special one, without the last."""
    model = write_encoder(tmp_path, "bert-mean")
    told = {"embedding_dimension": 64, "pooling_mode": "mean", "include_prompt": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(told))
    config = EngineConfig(model=str(tmp_path), device="cpu", debug=True)
    with Engine(config) as engine:
        asked = [Request(texts=["aab", "b"], embedding=Embedding(prompt_name=name)) for name in ("query", None)]
        results = engine.generate(asked)
        ids = engine.tokens_of(Request(prompt="find: aab"))
    with torch.no_grad():
        hidden = model(torch.tensor([ids])).last_hidden_state[0]
    n_prompt = len("<s>find: ".removeprefix("<s>")) + 1
    assert results[0].vectors is not None
    assert results[1].vectors is not None
    assert cosine(Vectors(results[0].vectors, 64)[0], hidden[n_prompt:].mean(0)) > 0.99999
    with torch.no_grad():
        bare = model(torch.tensor([[ids[0], *ids[-4:]]])).last_hidden_state[0]
    assert cosine(Vectors(results[1].vectors, 64)[0], bare.mean(0)) > 0.99999


def test_distances_share_buckets_as_in_mpnet_and_deberta() -> None:
    from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    n = 700
    far = torch.arange(-(n - 1), n)
    table = bias_table(DistanceBias(), torch.arange(32.0)[:, None], n).table[0]
    assert torch.equal(table.long(), MPNetEncoder.relative_position_bucket(far))
    theirs = make_log_bucket_position(far, 256, 512).long()
    ours = vector_places(Disentangled(span=512, buckets=256), n, torch.device("cpu"))
    assert torch.equal(ours, (theirs + 256).clamp(0, 511))


def test_norms_of_tensorflow_are_read(tmp_path: Path, open_runtime: Callable[..., Any]) -> None:
    model = write_encoder(tmp_path, "bert-mean")
    stored = load_file(tmp_path / "model.safetensors")
    named = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, old in named.items():
        stored = {name.replace(new, old): tensor for name, tensor in stored.items()}
    save_file(stored, tmp_path / "model.safetensors")
    (vector,) = made(Driver(open_runtime(tmp_path)), 33)
    assert cosine(vector, reference(model, tokens(33), "mean")) > 0.9999999


def test_layers_that_are_stored_once_are_read_once(tmp_path: Path) -> None:
    write_encoder(tmp_path, "albert")
    model = find_model(tmp_path)
    decoder = load_model(tmp_path, model, LoadOptions(torch.device("cpu"), torch.float32, 66))
    assert model.plan.stored_layers == (0, 0, 1, 1)
    first, second, third, fourth = decoder.layers
    assert (first is second, second is third, third is fourth) == (True, False, True)


@pytest.mark.parametrize(
    ("architecture", "raw", "message"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type must be absolute"),
        ("BertModel", {"hidden_act": "mish"}, "hidden_act must be gelu"),
        ("BertModel", {"is_decoder": True}, "is_decoder must be false"),
        ("BertModel", {"pooling": "min"}, "pooling must be first, last or mean, got 'min'"),
        ("ModernBertModel", {"denses": [["a", 64, 0]]}, r"denses must have from 1 to .*, got \[64, 0\]"),
        ("XLMRobertaModel", {"max_position_embeddings": 2, "pad_token_id": 1}, "must be above 2, got 2"),
        ("BertForSequenceClassification", {"id2label": {"1": "a"}}, "id2label must name"),
        ("ModernBertForSequenceClassification", {"classifier_pooling": "max"}, "classifier_pooling must be cls"),
    ],
)
def test_a_configuration_that_is_not_computed_is_refused(
    architecture: str, raw: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        model_of({"architectures": [architecture], **BERT, **raw})


def test_old_files_of_modernbert_mean_the_same() -> None:
    raw = {"architectures": ["ModernBertModel"], **MODERN, "num_hidden_layers": 6}
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0}
    new = {
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"] * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 160_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    }
    assert model_of({**raw, **old}).plan == model_of({**raw, **new}).plan
    assert model_of({**raw, **old}).plan.windows == (0, 5, 5, 0, 5, 5)


def test_layers_share_memory_unless_another_layer_reads_it_or_their_sizes_differ() -> None:
    """Texts are at different layers at once: each thread computes its own."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    raw = GEMMA | {"num_hidden_layers": 6, "layer_types": kinds, "use_bidirectional_attention": False}
    plan = model_of({"architectures": ["Gemma3TextModel"], **raw}).plan
    changes: dict[int, dict[str, Any]] = {
        2: {"head_dim": 64},
        4: {"keys_of": 1},
        5: {"head_dim": 64, "keys_of": 2},
    }
    layers = [
        replace(one, mixer=replace(one.attention, **changes.get(i, {}))) for i, one in enumerate(plan.layers)
    ]
    plan = replace(plan, layers=tuple(layers))
    assert plan.whole_texts
    assert plan.kv_homes == {0: 0, 1: 1, 2: 2, 3: 0}
    assert plan.kept_windows == (0,) * 6, "one table of pages, so a slot is one text's in all layers"
    cpu, config = torch.device("cpu"), EngineConfig(max_model_len=64).decided(BATCHING["cpu"])
    cache = new_kv_cache(
        plan, n_pages=5, page_size=config.page_size, rows=2, max_model_len=64, dtype=torch.float32, device=cpu
    )
    for pool in (cache.keys, cache.values):
        at = [tensor.data_ptr() for tensor in pool]
        assert (at[3], at[4], at[5]) == (at[0], at[1], at[2])
        assert len(set(at)) == 3
    taken = sum(pool[0].untyped_storage().nbytes() for pool in (cache.keys, cache.values))
    assert taken == 5 * page_bytes(config, plan, 4) == pool_bytes(config, plan, 4, 5)
