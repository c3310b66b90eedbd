"""What BGE-M3 makes of each token beside a vector: FlagEmbedding's formulas, whatever a text was batched with;
views; what a result holds; refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from petiole.contract.results.vectors import MOST_BYTES, SparseVectors, TokenVectors, Vectors, how_many_fit
from petiole.gpu_worker import Embedding, Engine, EngineConfig, InvalidRequest, ModelError, Request, SamplingParams
from petiole.gpu_worker.exceptions import EngineError
from petiole.gpu_worker.models.families.registry import find_model
from petiole.gpu_worker.request.pooling import Pooled, TextLimits
from tests.support.text_models import PROMPTS, cosine, write_encoder, write_m3

ALL = ("dense", "sparse", "colbert")
TEXTS = ["hello, hello", "a" * 40, "the key is under the mat", "x", "ü", "what is behind it"]

M3 = tuple[Path, Any, dict[str, torch.nn.Linear]]


@pytest.fixture(scope="module")
def m3(tmp_path_factory: pytest.TempPathFactory) -> M3:
    folder = tmp_path_factory.mktemp("m3")
    return folder, *write_m3(folder)


@pytest.fixture(scope="module")
def engine(m3: M3) -> Iterator[Engine]:
    with open_engine(m3[0], debug=True) as engine:
        yield engine


def open_engine(folder: Path, **settings: Any) -> Engine:
    return Engine(EngineConfig(model=str(folder), device="cpu", max_num_seqs=4, **settings))


def embedded(engine: Engine, texts: list[str], **asked: Any) -> dict[str, Any]:
    """As a task's result has it."""
    result = engine.generate([Request(texts=texts, embedding=Embedding(**asked))])[0]
    made = {name: getattr(result, name) for name in ("vectors", "sparse", "colbert")}
    return {name: list(one) for name, one in made.items() if one is not None} | dict(result.answer or {})


class Flag:
    """FlagEmbedding's formulas, naively."""

    def __init__(self, m3: M3) -> None:
        folder, self.model, self.products = m3
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def hidden(self, text: str) -> tuple[list[int], torch.Tensor]:
        ids = self.tokenizer.encode(text).ids
        with torch.no_grad():
            return ids, self.model(torch.tensor([ids])).last_hidden_state[0]

    def dense(self, text: str) -> torch.Tensor:
        return torch.nn.functional.normalize(self.hidden(text)[1][0], dim=-1)

    def sparse(self, text: str) -> dict[int, float]:
        ids, hidden = self.hidden(text)
        with torch.no_grad():
            weights = torch.relu(self.products["sparse_linear"](hidden)).squeeze(-1).tolist()
        found: dict[int, float] = {}
        for token, weight in zip(ids, weights, strict=True):
            if token >= 4 and weight > 0:  # the tokens below are special
                found[token] = max(weight, found.get(token, 0.0))
        return found

    def colbert(self, text: str) -> torch.Tensor:
        with torch.no_grad():
            found = self.products["colbert_linear"](self.hidden(text)[1][1:])
        return torch.nn.functional.normalize(found, dim=-1)


def test_a_text_as_a_prompt_gives_the_same(engine: Engine) -> None:
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    [alone] = engine.generate([Request(prompt=TEXTS[0], embedding=Embedding(outputs=ALL), sampling=sampling)])
    assert {"vectors": list(alone.vectors or ()), "sparse": list(alone.sparse or ())}.items() <= (
        embedded(engine, TEXTS[:1], outputs=ALL).items()
    )


def test_all_outputs_are_those_of_flag_embedding(engine: Engine, m3: M3) -> None:
    flag, result = Flag(m3), embedded(engine, TEXTS, outputs=ALL)
    assert (result["dimensions"], result["token_dimensions"]) == (64, 24)
    dense, sparse, colbert = Vectors.of(result), SparseVectors.of(result), TokenVectors.of(result)
    assert len(dense) == len(sparse) == len(colbert) == len(TEXTS)
    for k, text in enumerate(TEXTS):
        assert cosine(dense[k], flag.dense(text)) > 0.99999
        expected = flag.sparse(text)
        for token in sparse[k].keys() | expected.keys():
            assert sparse[k].get(token, 0.0) == pytest.approx(expected.get(token, 0.0), abs=1e-3)
        vectors = flag.colbert(text).numpy()
        assert np.allclose(colbert[k].numpy(), vectors, atol=1e-3)
        assert np.allclose(colbert[k].lists(), vectors, atol=1e-3)
    assert any(
        len(weights) < len(set(flag.hidden(text)[0])) - 2 for weights, text in zip(sparse, TEXTS, strict=True)
    )


def test_scores_of_pairs_are_those_of_flag_embedding(engine: Engine, m3: M3) -> None:
    """A search by words, and late interaction, from what a producer reads."""
    flag, result = Flag(m3), embedded(engine, TEXTS, outputs=ALL)
    sparse, colbert = SparseVectors.of(result), TokenVectors.of(result).numpy()
    one, two = flag.sparse(TEXTS[0]), flag.sparse(TEXTS[2])
    expected = sum(weight * two.get(token, 0.0) for token, weight in one.items())
    assert sum(weight * sparse[2].get(token, 0.0) for token, weight in sparse[0].items()) == pytest.approx(
        expected, abs=1e-2
    )
    late = torch.einsum("in,jn->ij", flag.colbert(TEXTS[0]), flag.colbert(TEXTS[2])).max(-1).values.mean()
    assert (colbert[0] @ colbert[2].T).max(-1).mean() == pytest.approx(late.item(), abs=1e-3)
    ids, weights = sparse.numpy()[2]
    assert dict(zip(ids.tolist(), weights.tolist(), strict=True)) == sparse[2]


@pytest.mark.parametrize("outputs", [("dense",), ("sparse",), ("colbert",), ("sparse", "dense")])
def test_a_result_has_what_was_asked_for(outputs: tuple[str, ...], engine: Engine) -> None:
    whole, some = embedded(engine, TEXTS, outputs=ALL), embedded(engine, TEXTS, outputs=outputs)
    fields = {"dense": "vectors", "sparse": "sparse", "colbert": "colbert"}
    asked = {fields[output] for output in outputs}
    assert some.keys() & set(fields.values()) == asked
    assert {name: some[name] for name in asked} == {name: whole[name] for name in asked}


def test_a_text_has_the_same_bits_alone_and_among_others(engine: Engine) -> None:
    alone = [embedded(engine, [text], outputs=ALL) for text in TEXTS]
    many = embedded(engine, TEXTS * 3, outputs=ALL)
    for name in ("sparse", "colbert"):
        assert many[name] == [one[name][0] for one in alone] * 3


def test_texts_that_want_different_outputs_share_steps(engine: Engine) -> None:
    asked = [("dense",), ALL, ("colbert",), ("sparse",)]
    alone = [embedded(engine, TEXTS, outputs=outputs) for outputs in asked]
    results = engine.generate([Request(texts=TEXTS, embedding=Embedding(outputs=outputs)) for outputs in asked])
    for one, result in zip(alone, results, strict=True):
        for name in ("vectors", "sparse", "colbert"):
            assert one.get(name) == (None if getattr(result, name) is None else list(getattr(result, name)))


def test_a_later_attempt_goes_on_at_the_next_text(engine: Engine) -> None:
    asked = Embedding(outputs=ALL)
    whole = engine.generate([Request(texts=TEXTS, embedding=asked)])[0]
    rest = engine.generate([Request(texts=TEXTS, embedding=asked, resume_token_ids=whole.token_ids[:4])])[0]
    none = engine.generate([Request(texts=TEXTS, embedding=asked, resume_token_ids=whole.token_ids)])[0]
    for name in ("vectors", "sparse", "colbert"):
        assert getattr(rest, name) == getattr(whole, name)[4:]
        assert getattr(none, name) == ()


@pytest.mark.parametrize("encoding", ["float16", "int8", "bits"])
def test_vectors_of_tokens_are_encoded_like_others(encoding: Any, engine: Engine) -> None:
    exact = TokenVectors.of(embedded(engine, TEXTS, outputs=ALL)).numpy()
    found = TokenVectors.of(embedded(engine, TEXTS, outputs=ALL, encoding=encoding))
    for one, other in zip(exact, found.numpy(), strict=True):
        if encoding == "bits":
            assert (other == np.packbits(one > 0, axis=1)).all()
        else:
            assert np.allclose(one, other, atol={"float16": 1e-3, "int8": 5e-3}[encoding])


def test_words_of_a_prompt_count_like_those_of_the_text(engine: Engine, m3: M3) -> None:
    found = SparseVectors.of(embedded(engine, ["x"], outputs=("sparse",), prompt_name="query"))[0]
    assert found.keys() == Flag(m3).sparse(PROMPTS["query"] + "x").keys()


def test_more_than_a_result_holds_is_refused_with_the_count_that_fits() -> None:
    """Before anything is computed: the sizes follow from the numbers of tokens."""
    limits = TextLimits(1024, 8192, of_tokens={"sparse": 1, "colbert": 1024})
    tokens = [512] * 20
    each = len(range(511)) * 4096
    fits = MOST_BYTES // (-(-each // 3) * 4)
    assert how_many_fit(tokens, ["colbert"], 1024, 1024, "float32") == fits < 20
    limits.check_size(Embedding(outputs=("colbert",)), tokens[:fits])
    limits.check_size(Embedding(outputs=ALL, encoding="int8"), tokens)
    with pytest.raises(
        InvalidRequest, match=f"texts: must be at most {fits}, whose colbert vectors fit .* got 20"
    ):
        limits.check_size(Embedding(outputs=("colbert",)), tokens)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["vector", "weights", "vectors"])
def test_numbers_that_are_not_finite_are_an_error_and_no_result(where: str, bad: float) -> None:
    limits = TextLimits(3, 16, of_tokens={"sparse": 1, "colbert": 2})
    good = Pooled(np.ones(3, np.float32), np.ones(4, np.float32), np.ones((3, 2), np.float32))
    assert limits.written(good, Embedding(outputs=ALL), [0, 5, 5, 2], {0, 2}).keys() == {
        "vectors",
        "sparse",
        "colbert",
    }
    spoilt = getattr(good, where).copy()
    spoilt.reshape(-1)[1] = bad
    with pytest.raises(EngineError, match="not of finite numbers"):
        limits.written(good._replace(**{where: spoilt}), Embedding(outputs=ALL), [0, 5, 5, 2], {0, 2})


def test_an_output_that_the_model_does_not_make_is_refused(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    write_encoder(tmp_path / "plain", "xlm-roberta")
    with open_engine(tmp_path / "plain") as engine:
        with pytest.raises(InvalidRequest, match="outputs: must be dense for this model, got sparse"):
            embedded(engine, ["x"], outputs=("dense", "sparse"))
        with pytest.raises(InvalidRequest, match="outputs: must name one of dense, got none"):
            embedded(engine, ["x"], outputs=())


def test_pickles_are_not_read_and_the_refusal_names_the_files(tmp_path: Path) -> None:
    write_m3(tmp_path, pickled=True)
    with open_engine(tmp_path) as engine:
        assert embedded(engine, ["x"]).keys() >= {"vectors"}
        with pytest.raises(
            InvalidRequest, match=r"sparse_linear.pt is a pickle.* sparse_linear.safetensors with the"
        ):
            embedded(engine, ["x"], outputs=("sparse",))


def test_a_product_of_another_size_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write_encoder(tmp_path, "xlm-roberta")
    save_file({"weight": torch.zeros(2, 64)}, str(tmp_path / "sparse_linear.safetensors"))
    with pytest.raises(ModelError, match=r"weight must have shape \[1, 64\], got \[2, 64\]"):
        find_model(tmp_path)
