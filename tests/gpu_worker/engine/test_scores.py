"""Scores of pairs and classes of texts: what transformers says of them, whatever they were batched with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given, strategies as st

from petiole.gpu_worker import (
    Embedding,
    Engine,
    EngineConfig,
    HandedBack,
    InvalidRequest,
    ModelError,
    Request,
    Scoring,
)
from petiole.gpu_worker.models.families.registry import find_model, model_of
from petiole.gpu_worker.preparation.pairs import JUDGE, shortened
from tests.support.pictures import MODEL
from tests.support.text_models import (
    BERT,
    CLASSIFIERS,
    RANKING_TEMPLATE,
    write_classifier,
    write_encoder,
    write_judge,
)

PAIRS = [("who", "the doorman"), ("what is behind it", "a" * 40), ("x", "y"), ("a door", "it is open, or closed")]
ENCODERS = (*(name for name in CLASSIFIERS if name != "qwen3"),)

Made = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    known: dict[Any, tuple[Path, Any]] = {}

    def get(write: Callable[..., Any], *arguments: Any) -> tuple[Path, Any]:
        key = write, arguments
        if key not in known:
            folder = tmp_path_factory.mktemp("scores")
            known[key] = folder, write(folder, *arguments)
        return known[key]

    return get


@pytest.fixture(scope="module")
def judge(made: Made) -> Iterator[Engine]:
    with open_engine(made(write_judge)[0], debug=True) as engine:
        yield engine


def open_engine(folder: Path, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(folder), device="cpu", max_num_seqs=4, **settings))


def scores(engine: Engine, texts: Any, **asked: Any) -> list[tuple[float, ...]]:
    result = engine.generate([Request(texts=texts, scoring=Scoring(**asked))])[0]
    assert result.scores is not None
    assert len(result.scores) == len(texts) == len(result.token_ids)
    return list(result.scores)


def logits(folder: Path, model: Any, *texts: str, most: int | None = None) -> torch.Tensor:
    """What transformers makes of a text or of a pair."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if most is not None:
        tokenizer.enable_truncation(most)
    encoded = tokenizer.encode(*texts)
    types = (
        {"token_type_ids": torch.tensor([encoded.type_ids])}
        if getattr(model.config, "type_vocab_size", 0) > 1
        else {}
    )
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([encoded.ids]), **types).logits[0]
    return found


@pytest.mark.parametrize("name", ENCODERS)
def test_the_score_of_a_pair_is_that_of_transformers(name: str, made: Made) -> None:
    folder, model = made(write_classifier, name)
    with open_engine(folder, debug=True) as engine:
        found = scores(engine, PAIRS * 3)
        for pair, (score,) in zip(PAIRS * 3, found, strict=True):
            assert score == pytest.approx(torch.sigmoid(logits(folder, model, *pair)).item(), abs=1e-5)
        assert [scores(engine, [pair])[0] for pair in PAIRS] == found[: len(PAIRS)]


@pytest.mark.parametrize("name", [*CLASSIFIERS])
def test_a_classifiers_own_layers_are_not_left_out(
    name: str, made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    folder, _ = made(write_classifier, name, 3)
    with caplog.at_level("INFO", "petiole"), open_engine(folder):
        pass
    assert "without" not in caplog.text


@pytest.mark.parametrize("name", ENCODERS)
def test_the_classes_of_a_text_are_those_of_transformers(name: str, made: Made) -> None:
    folder, model = made(write_classifier, name, 3)
    with open_engine(folder) as engine:
        texts = [text for pair in PAIRS for text in pair]
        for text, found in zip(texts, scores(engine, texts, classes=True), strict=True):
            expected = torch.softmax(logits(folder, model, text), 0)
            assert np.allclose(found, expected, atol=1e-5)
            assert sum(found) == pytest.approx(1, abs=1e-6)
        for pair, found in zip(PAIRS, scores(engine, PAIRS, classes=True), strict=True):
            assert np.allclose(found, torch.softmax(logits(folder, model, *pair), 0), atol=1e-5)
        result = engine.generate([Request(texts=texts, scoring=Scoring(classes=True))])[0]
        assert result.answer is not None
        assert result.answer["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
        assert result.best is None


def test_a_decoder_with_a_head_is_asked_about_a_pair(made: Made) -> None:
    folder, model = made(lambda folder: write_classifier(folder, "qwen3", 1, max_position_embeddings=1024))
    with open_engine(folder, debug=True) as engine:
        for pair, (score,) in zip(PAIRS, scores(engine, PAIRS), strict=True):
            with torch.no_grad():
                found = model(torch.tensor([question(engine, pair)])).logits[0]
            assert score == pytest.approx(torch.sigmoid(found).item(), abs=1e-5)


def question(engine: Engine, pair: tuple[str, str], instruction: str | None = None) -> list[int]:
    about = instruction or "Given a web search query, retrieve relevant passages that answer the query"
    asked = f"<Instruct>: {about}\n<Query>: {pair[0]}\n<Document>: {pair[1]}"
    assert engine.tokenizer is not None
    return engine.tokenizer.encode(f"<s>system: {JUDGE}</s><s>user: {asked}</s><s>", add_special_tokens=False)


@pytest.mark.parametrize("instruction", [None, "Find what is behind the door."])
def test_a_model_that_generates_says_yes_or_no(judge: Engine, made: Made, instruction: str | None) -> None:
    """As Qwen3-Reranker: the share of "yes" against "no"."""
    model = made(write_judge)[1]
    for pair, (score,) in zip(PAIRS, scores(judge, PAIRS, instruction=instruction), strict=True):
        with torch.no_grad():
            last = model(torch.tensor([question(judge, pair, instruction)])).logits[0, -1]
        assert score == pytest.approx(torch.sigmoid(last[260] - last[261]).item(), abs=1e-5)


def test_documents_of_one_query_share_its_beginning(judge: Engine) -> None:
    query = "which of all the doors of this house is the one that is open"
    pairs = [(query, f"{k}: a door") for k in range(8)]
    result = judge.generate([Request(texts=pairs, scoring=Scoring(), salt="a tenant")])[0]
    shared = len(question(judge, (query, "")))
    assert result.usage.cached_prompt_tokens >= 7 * (shared - 20)


def test_a_judge_generates_too(judge: Engine) -> None:
    handles = [judge.submit(Request(prompt="ab")), judge.submit(Request(texts=PAIRS, scoring=Scoring()))]
    first, second = (handle.result(60) for handle in handles)
    assert first.token_ids
    assert first.scores is None
    assert len(second.scores or ()) == len(PAIRS)


def test_a_template_of_rerankers_is_given_query_and_document(made: Made) -> None:
    folder, model = made(write_judge, RANKING_TEMPLATE)
    with open_engine(folder) as engine:
        assert engine.tokenizer is not None
        for pair, (score,) in zip(PAIRS, scores(engine, PAIRS), strict=True):
            ids = engine.tokenizer.encode(f"<s>{pair[0]}</s>\n{pair[1]}</s>", add_special_tokens=False)
            with torch.no_grad():
                last = model(torch.tensor([ids])).logits[0, -1]
            assert score == pytest.approx(torch.sigmoid(last[260] - last[261]).item(), abs=1e-5)


@pytest.mark.parametrize("pair", [("a" * 10, "b" * 99), ("a" * 99, "b" * 10), ("a" * 80, "b" * 81), ("a", "b")])
def test_a_pair_that_is_too_long_is_cut_where_asked(pair: tuple[str, str], made: Made) -> None:
    folder, model = made(write_classifier, "bert")
    with open_engine(folder) as engine:
        found = scores(engine, [pair], truncate=True)[0][0]
        assert found == pytest.approx(torch.sigmoid(logits(folder, model, *pair, most=66)).item(), abs=1e-5)


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 60))
def test_both_texts_are_cut_as_the_library_cuts_them(one: int, two: int, most: int) -> None:
    sizes = shortened((one, two), most)
    if one + two > most:
        assert sum(sizes) == most
    assert min(sizes) >= min(one, two, most // 2)


def test_a_document_that_is_too_long_loses_its_end(judge: Engine) -> None:
    """What is left of it fits behind the question."""
    found = judge.generate([Request(texts=[("who", "d" * 2000)], scoring=Scoring(truncate=True))])[0]
    assert 900 < found.token_ids[0] <= judge.limits.max_model_len - 1


def test_scores_are_found_where_an_attempt_has_ended(judge: Engine) -> None:
    pairs = PAIRS * 8
    whole = scores(judge, pairs)
    handle = judge.submit(Request(texts=pairs, scoring=Scoring()), on_delta=lambda handle, _: handle.hand_back())
    with pytest.raises(HandedBack):
        handle.result(60)
    deltas = handle._deltas
    counts = [count for delta in deltas for count in delta.token_ids]
    before = [score for delta in deltas for score in delta.scores or ()]
    assert 0 < len(before) == len(counts) < len(pairs)
    rest = judge.generate([Request(texts=pairs, scoring=Scoring(), resume_token_ids=counts)])[0]
    assert np.allclose([*before, *(rest.scores or ())], whole, atol=1e-5)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("classifier", {"texts": PAIRS, "scoring": Scoring()}, r"num_labels: must be 1 for a score of a pair.*got 3"),
    ("classifier", {"texts": ["a"], "embedding": Embedding()}, "texts: the model .* by 3 labels.*got vectors"),
    ("classifier", {"prompt": "a"}, "prompt: the model .* by 3 labels, and nothing else.*got a prompt"),
    ("scorer", {"texts": ["a"], "scoring": Scoring()}, r"texts\[0\]: must be a pair of texts, got one text"),
    ("scorer", {"texts": [("a", "")], "scoring": Scoring()}, r"texts\[0\]\[1\]: must not be empty"),
    (
        "scorer",
        {"texts": [("a", "b" * 90)], "scoring": Scoring(field="pairs")},
        r"pairs\[0\]: must have at most 66",
    ),
    ("scorer", {"texts": PAIRS, "scoring": Scoring(instruction="a")}, "instruction: must not be given"),
    ("scorer", {"texts": PAIRS * 3000, "scoring": Scoring()}, "texts: must be at most 10000, whose scores fit"),
    ("embedder", {"texts": PAIRS, "scoring": Scoring()}, "texts: the model .* makes vectors of texts.*got scores"),
    ("embedder", {"texts": ["a"], "scoring": Scoring(classes=True)}, "texts: the model .*got classes"),
    ("judge", {"texts": ["a"], "scoring": Scoring(classes=True)}, "texts: the model .* has no classes.*classify"),
    ("judge", {"texts": ["a"], "embedding": Embedding()}, "texts: the model .* makes no vectors.*got vectors"),
    (
        "judge",
        {"texts": [("a", "b", "c")], "scoring": Scoring()},
        r"texts\[0\]: must be a pair of texts, got 3 texts",
    ),
    (
        "judge",
        {"texts": [("a", "b" * 2000)], "scoring": Scoring(field="documents")},
        r"documents\[0\]: must have at",
    ),
    ("judge", {"texts": PAIRS, "scoring": Scoring(instruction="a" * 9000)}, "instruction: must have at most 8192"),
]


@pytest.fixture(scope="module")
def models(made: Made, judge: Engine) -> Iterator[Callable[[str], Engine]]:
    written: dict[str, Callable[[], Path]] = {
        "classifier": lambda: made(write_classifier, "bert", 3)[0],
        "scorer": lambda: made(write_classifier, "bert")[0],
        "embedder": lambda: made(write_encoder, "bert-mean")[0],
    }
    engines: dict[str, Engine] = {"judge": judge}

    def get(name: str) -> Engine:
        if name not in engines:
            engines[name] = open_engine(written[name]()).start()
        return engines[name]

    yield get
    for name in written.keys() & engines.keys():
        engines[name].shutdown()


@pytest.mark.parametrize(("model", "fields", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_a_model_does_not_do_is_refused_by_name(
    model: str, fields: dict[str, Any], message: str, models: Callable[[str], Engine]
) -> None:
    engine = models(model)
    steps = engine.stats()["steps"]
    with pytest.raises(InvalidRequest, match=message):
        engine.generate([Request(**fields)])
    assert engine.stats()["steps"] == steps, "before anything is computed"


def test_a_model_without_yes_and_no_is_refused() -> None:
    with (
        open_engine(Path(MODEL)) as engine,
        pytest.raises(InvalidRequest, match="texts"),
    ):
        engine.generate([Request(texts=PAIRS, scoring=Scoring())])


@pytest.mark.parametrize(
    ("raw", "scale"),
    [
        ({}, "softmax"),
        ({"id2label": {"0": "a"}}, "sigmoid"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
    ],
)
def test_the_files_say_what_makes_scores_of_numbers(raw: dict[str, Any], scale: str) -> None:
    pooling = model_of({"architectures": ["BertForSequenceClassification"], **BERT, **raw}).plan.pooling
    assert pooling is not None
    assert pooling.scale == scale


def test_another_activation_is_refused() -> None:
    raw = {"sentence_transformers": {"activation_fn": "torch.nn.ReLU"}}
    with pytest.raises(ModelError, match="activation_fn must be Identity or Sigmoid"):
        model_of({"architectures": ["BertForSequenceClassification"], **BERT, **raw})


# ------------------------------------------------------------ a model that generates, with LogitScore beside it


def write_logit_score(folder: Path, tokens: dict[str, Any], **told: Any) -> Any:
    """As sentence-transformers stores a reranker that generates."""
    model = write_judge(folder)
    base = "sentence_transformers"
    listed = [
        {"idx": 0, "name": "0", "path": "", "type": f"{base}.base.modules.transformer.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_LogitScore",
            "type": f"{base}.cross_encoder.modules.logit_score.LogitScore",
        },
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_LogitScore").mkdir()
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps(tokens))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {}, **told}))
    return model


@pytest.mark.parametrize("activation", ["linear.Identity", "activation.Sigmoid", None])
def test_logit_score_says_which_tokens_are_compared_and_how(activation: str | None, tmp_path: Path) -> None:
    told = {} if activation is None else {"activation_fn": f"torch.nn.modules.{activation}"}
    prompts = {"prompts": {"web": "Which door is it?"}, "default_prompt_name": "web"}
    model = write_logit_score(tmp_path, {"true_token_id": 70, "false_token_id": 90}, **told, **prompts)
    with open_engine(tmp_path, debug=True) as engine:
        for pair, (score,) in zip(PAIRS, scores(engine, PAIRS), strict=True):
            with torch.no_grad():
                found = model(torch.tensor([question(engine, pair, "Which door is it?")])).logits[0, -1]
            difference = (found[70] - found[90]).item()
            expected = difference if activation == "linear.Identity" else 1 / (1 + np.exp(-difference))
            assert score == pytest.approx(expected, abs=1e-4)
        assert scores(engine, PAIRS[:1], instruction="x") != scores(engine, PAIRS[:1])


@pytest.mark.parametrize(
    ("tokens", "told", "message"),
    [
        ({"true_token_id": 70, "false_token_id": None}, {}, r"true_token_id and false_token_id must be .* None"),
        ({"true_token_id": 70, "false_token_id": 4000}, {}, "must be below 320, got 70 and 4000"),
        ({"true_token_id": 70, "false_token_id": 90}, {"activation_fn": "torch.nn.Tanh"}, "must be Identity or"),
    ],
)
def test_a_logit_score_that_is_not_computed_is_refused(
    tokens: dict[str, Any], told: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_logit_score(tmp_path, tokens, **told)
    with pytest.raises(ModelError, match=message):
        find_model(tmp_path)
