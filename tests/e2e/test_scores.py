"""`rerank`, `score` and `classify` through Celery; embeddings, rerank and score through the gateway. Small random
models of each kind."""

from __future__ import annotations

import array
import base64
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from celery import chain, group

from petiole.contract.results.task_result import GenerationResult
from petiole.contract.results.vectors import Vectors
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet import models
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually
from tests.support.text_models import write_classifier, write_judge, write_qwen3_embedder

QUERY = "which door is open"
DOCUMENTS = [f"door {k} of {k * k}" for k in range(12)]
CONVERSATION = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
NAMES = {"embedder": "embeddings", "scorer": "scores", "classifier": "classes", "judge": "judge"}
"""By model, its queue."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folders = {name: tmp_path_factory.mktemp(name) for name in NAMES}
    write_qwen3_embedder(folders["embedder"])
    (folders["embedder"] / "chat_template.jinja").write_text(CONVERSATION)
    write_classifier(folders["scorer"], "bert", 1)
    write_classifier(folders["classifier"], "bert", 3)
    write_judge(folders["judge"])
    more: dict[str, Any] = {
        "PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine",
        "PETIOLE_DEVICE": "cpu",
        "PETIOLE_MAX_NUM_SEQS": 4,
        "PETIOLE_NUM_THREADS": 1,
    }
    with Site(tmp_path_factory.mktemp("scores"), **more) as site:
        workers = [
            site.start_worker("-Q", queue, PETIOLE_MODEL=folders[name], PETIOLE_SERVED_NAMES=name)
            for name, queue in NAMES.items()
        ]
        for worker in workers:
            worker.ready()
        eventually(lambda: len(models.models(site.redis)) == len(NAMES), "the workers have said what they serve")
        yield site


@pytest.fixture(scope="module")
def gateway(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with Gateway(tmp_path_factory.mktemp("serve"), PETIOLE_BROKER_URL=site.url) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield client


def task(site: Site, name: str, model: str, **options: Any) -> Any:
    return site.app.signature(f"tasks.{name}", kwargs=options).set(queue=NAMES[model])


@pytest.mark.parametrize("model", ["scorer", "judge"])
def test_documents_are_ranked(site: Site, model: str) -> None:
    ranked = task(site, "rerank", model, query=QUERY, documents=DOCUMENTS, top_n=5).apply_async()
    value = site.get(ranked)
    scored = site.get(task(site, "score", model, pairs=[[QUERY, one] for one in DOCUMENTS]).apply_async())
    assert value["scores"] == scored["scores"]
    flat = [score for (score,) in value["scores"]]
    assert len(flat) == len(DOCUMENTS)
    assert [one["index"] for one in value["ranking"]] == sorted(range(12), key=lambda k: -flat[k])[:5]
    assert [one["score"] for one in value["ranking"]] == sorted(flat, reverse=True)[:5]
    assert "ranking" not in scored
    result = GenerationResult.model_validate(value)
    assert result.ranking is not None
    assert result.usage.prompt_tokens == sum(value["token_ids"])
    log = [entry for delta in site.log(ranked) for entry in delta.get("scores") or ()]
    assert log == value["scores"]


def test_classes_have_labels(site: Site) -> None:
    value = site.get(task(site, "classify", "classifier", texts=["a", "b"]).apply_async())
    assert value["labels"] == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert [len(scores) for scores in value["scores"]] == [3, 3]
    assert all(sum(scores) == pytest.approx(1) for scores in value["scores"])
    one = site.get(task(site, "classify", "classifier", texts="a").apply_async())
    assert one["scores"] == value["scores"][:1]


def test_a_chain_asks_for_what_was_said(site: Site) -> None:
    first = site.app.signature("tasks.generate", kwargs={"prompt": "ab", "max_tokens": 3}).set(queue="judge")
    asked = chain(first, task(site, "rerank", "judge", query="what is ", documents=["a", "b"]))
    assert len(site.get(asked.apply_async())["ranking"]) == 2
    several = group(task(site, "score", "scorer", pairs=[["a", one]]) for one in "bc").apply_async()
    assert len([site.get(one) for one in several]) == 2


@pytest.mark.parametrize(
    ("name", "model", "options", "message"),
    [
        (
            "embed",
            "scorer",
            {"texts": ["a"]},
            r"texts: the model .* gives scores to texts, by 1 labels.*got vectors",
        ),
        ("embed", "judge", {"texts": ["a"]}, r"texts: the model .* generates, and makes no vectors.*got vectors"),
        ("rerank", "embedder", {"query": "a", "documents": ["b"]}, "documents: the model .* makes vectors"),
        ("classify", "judge", {"texts": ["a"]}, "texts: the model .* has no classes"),
        ("score", "classifier", {"pairs": [["a", "b"]]}, "num_labels: must be 1 for a score of a pair.*got 3"),
        (
            "score",
            "scorer",
            {"pairs": [["a", "b" * 90]]},
            r"pairs\[0\]: must have at most 66 tokens, got 94 tokens",
        ),
        ("rerank", "scorer", {"query": "a", "documents": ["b", ""]}, r"documents\[1\]: must not be empty"),
        ("score", "scorer", {"pairs": [["a"]]}, r"pairs\[0\]: must have two texts, got 1 texts"),
    ],
)
def test_bad_input_fails_by_name(site: Site, name: str, model: str, options: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        site.get(task(site, name, model, **options).apply_async())


# ---------------------------------------------------------------- the gateway


def test_embeddings_in_either_format(site: Site, client: openai.OpenAI, gateway: Gateway) -> None:
    texts = ["hello", "a door", "x"]
    expected = site.get(task(site, "embed", "embedder", texts=texts).apply_async())
    given = client.embeddings.create(model="embedder", input=texts)  # base64, which the client reads
    assert [one.index for one in given.data] == [0, 1, 2]
    assert given.usage.prompt_tokens == given.usage.total_tokens == sum(expected["token_ids"])
    for one, vector in zip(given.data, Vectors.of(expected), strict=True):
        assert one.embedding == pytest.approx(vector, abs=1e-7)
    as_numbers = client.embeddings.create(model="embedder", input=texts, encoding_format="float")
    assert [one.embedding for one in as_numbers.data] == Vectors.of(expected).lists()
    body = {"model": "embedder", "input": "a door", "encoding_format": "base64", "dimensions": 16}
    answer = httpx2.post(f"{gateway.url}/embeddings", json=body).json()
    short = array.array("f", base64.b64decode(answer["data"][0]["embedding"]))
    assert len(short) == 16
    assert sum(number * number for number in short) == pytest.approx(1, abs=1e-5)
    ids = client.embeddings.create(model="embedder", input=[[75, 72, 79]], encoding_format="float")
    same = client.embeddings.create(model="embedder", input="hel", encoding_format="float")
    assert len(ids.data[0].embedding) == len(same.data[0].embedding)


def test_a_conversation_is_rendered_and_its_vector_made(client: openai.OpenAI, gateway: Gateway) -> None:
    """As vLLM's own test has it."""
    told = [{"role": "user", "content": "Which door?"}, {"role": "assistant", "content": "The first."}]
    body: dict[str, Any] = {"model": "embedder", "messages": told, "encoding_format": "float"}
    rendered = "".join(f"<s>{one['role']}: {one['content']}</s>" for one in told)
    for more, text in (({}, rendered), ({"add_generation_prompt": True}, f"{rendered}<s>assistant: ")):
        answer = httpx2.post(f"{gateway.url}/embeddings", json=body | more).json()
        alone = {"model": "embedder", "input": text, "add_special_tokens": False}
        same = httpx2.post(f"{gateway.url}/embeddings", json=alone).json()
        assert answer == same
    refused = httpx2.post(f"{gateway.url}/embeddings", json=body | {"input": "x"}).json()
    assert refused["error"]["param"] == "input"


def test_the_context_that_an_embedder_tells_is_what_it_takes(gateway: Gateway) -> None:
    listed = {one["id"]: one["context_length"] for one in httpx2.get(f"{gateway.url}/models").json()["data"]}
    prompt = {"model": "embedder", "prompt": "a"}
    most = httpx2.post(f"{gateway.url.removesuffix('/v1')}/tokenize", json=prompt).json()["max_model_len"]
    assert most == listed["embedder"]
    for n, status in ((most, 200), (most + 1, 400)):
        ids = {"model": "embedder", "input": [75] * n, "add_special_tokens": False}
        assert httpx2.post(f"{gateway.url}/embeddings", json=ids).status_code == status


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank"])
@pytest.mark.parametrize("model", ["scorer", "judge"])
def test_rerank_over_http(site: Site, gateway: Gateway, model: str, path: str) -> None:
    body = {"model": model, "query": QUERY, "documents": [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]], "top_n": 3}
    answer = httpx2.post(f"{gateway.root}{path}", json=body, timeout=60).json()
    ranking = site.get(task(site, "rerank", model, query=QUERY, documents=DOCUMENTS, top_n=3).apply_async())[
        "ranking"
    ]
    assert [one["index"] for one in answer["results"]] == [one["index"] for one in ranking]
    for found, one in zip(answer["results"], ranking, strict=True):
        assert found["relevance_score"] == pytest.approx(one["score"], abs=1e-6)
        assert found["document"] == {"text": DOCUMENTS[one["index"]]}
    assert answer["usage"]["total_tokens"] > 0
    bare = httpx2.post(f"{gateway.root}{path}", json=body | {"return_documents": False}, timeout=60).json()
    assert all("document" not in one for one in bare["results"])


def test_score_over_http(site: Site, gateway: Gateway) -> None:
    body = {"model": "scorer", "text_1": QUERY, "text_2": DOCUMENTS}
    answer = httpx2.post(f"{gateway.url}/score", json=body).json()
    value = site.get(task(site, "score", "scorer", pairs=[[QUERY, one] for one in DOCUMENTS]).apply_async())
    assert [[one["score"]] for one in answer["data"]] == value["scores"]
    assert [one["index"] for one in answer["data"]] == list(range(12))


def test_a_model_that_makes_vectors_ranks_by_their_cosines(
    site: Site, client: openai.OpenAI, gateway: Gateway
) -> None:
    made = client.embeddings.create(model="embedder", input=[QUERY, *DOCUMENTS], encoding_format="float").data
    query, *documents = [one.embedding for one in made]
    cosines = [sum(a * b for a, b in zip(query, one, strict=True)) for one in documents]
    body = {"model": "embedder", "query": QUERY, "documents": DOCUMENTS}
    ranked = httpx2.post(f"{gateway.root}/v2/rerank", json=body).json()["results"]
    assert [one["index"] for one in ranked] == sorted(range(len(cosines)), key=lambda k: -cosines[k])
    for one in ranked:
        assert one["relevance_score"] == pytest.approx(cosines[one["index"]], abs=1e-5)
    for first in (QUERY, [QUERY] * len(DOCUMENTS)):
        body = {"model": "embedder", "text_1": first, "text_2": DOCUMENTS}
        scored = httpx2.post(f"{gateway.url}/score", json=body).json()["data"]
        assert [one["score"] for one in scored] == pytest.approx(cosines, abs=1e-5)


def test_classify_over_http(site: Site, gateway: Gateway) -> None:
    answer = httpx2.post(f"{gateway.url}/classify", json={"model": "classifier", "input": DOCUMENTS}).json()
    value = site.get(task(site, "classify", "classifier", texts=DOCUMENTS).apply_async())
    assert [one["probs"] for one in answer["data"]] == value["scores"]
    best = [value["labels"][scores.index(max(scores))] for scores in value["scores"]]
    assert [one["label"] for one in answer["data"]] == best
    assert {one["num_classes"] for one in answer["data"]} == {3}
    assert answer["usage"]["total_tokens"] == sum(value["token_ids"])


def test_classify_pairs_over_http(site: Site, gateway: Gateway) -> None:
    pairs = [[QUERY, one] for one in DOCUMENTS]
    answer = httpx2.post(f"{gateway.url}/classify", json={"model": "classifier", "input": pairs}).json()
    value = site.get(task(site, "classify", "classifier", pairs=pairs).apply_async())
    assert [one["probs"] for one in answer["data"]] == value["scores"]
    alone = site.get(task(site, "classify", "classifier", texts=DOCUMENTS).apply_async())
    assert value["scores"] != alone["scores"]


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/embeddings", {"model": "embedder", "input": ["a", ""]}, "input[1]", "must not be empty"),
        ("/embeddings", {"model": "embedder", "input": [3, "a"]}, "input", "must be text, token ids"),
        ("/embeddings", {"model": "embedder", "input": "a", "dimensions": 65}, "dimensions", "must be 1 to 64"),
        ("/embeddings", {"model": "embedder", "input": "a", "dimension": 64}, "dimension", "dimensions"),
        ("/embeddings", {"model": "scorer", "input": "a"}, "input", "gives scores to texts"),
        ("/embeddings", {"model": "nobody", "input": "a"}, "model", "nobody"),
        ("/rerank", {"model": "scorer", "query": "a", "documents": []}, "documents", "must not be empty"),
        (
            "/rerank",
            {"model": "scorer", "query": "a", "documents": [{"x": 1}]},
            "documents[0].text",
            "must be text",
        ),
        (
            "/rerank",
            {"model": "embedder", "query": "a", "documents": ["b"], "instruction": "c"},
            "instruction",
            "makes vectors",
        ),
        ("/score", {"model": "embedder", "text_1": "a", "text_2": ["b", ""]}, "text_2[1]", "must not be empty"),
        ("/score", {"model": "scorer", "text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "as many as text_2"),
        (
            "/score",
            {"model": "scorer", "text_1": "a", "text_2": "b" * 90},
            "text_2[0]",
            "must have at most 66 tokens",
        ),
        ("/classify", {"model": "classifier", "input": ["a", ""]}, "input[1]", "must not be empty"),
        ("/classify", {"model": "classifier", "input": ["a", ["b", "c"]]}, "input[1]", "must be text"),
        ("/classify", {"model": "classifier", "input": [["a", "b"], "c"]}, "input[1]", "a pair of texts"),
        ("/classify", {"model": "classifier", "input": [["a", "b"], ["c"]]}, "input[1]", "must have two texts"),
        ("/classify", {"model": "classifier", "input": [["a", ""]]}, "input[0][1]", "must not be empty"),
        ("/classify", {"model": "classifier", "input": [["a", 3]]}, "input[0][1]", "must be text"),
        ("/classify", {"model": "embedder", "input": "a"}, "input", "makes vectors"),
    ],
)
def test_bad_input_over_http_names_the_field(
    gateway: Gateway, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    answer = httpx2.post(f"{gateway.url}{path}", json=body)
    assert answer.status_code in (400, 404)
    error = answer.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
