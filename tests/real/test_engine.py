"""Real models through the engine, beside what llama.cpp and transformers answered: tokens, perplexity, greedy
answers up to the first near-tie, objects by schema, stops, vectors."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from petiole.gpu_worker import Constraint, Embedding, Engine, EngineConfig, Request, SamplingParams
from tests.real.models import HERE, MODELS, fetched, wanted
from tests.real.record import windows

pytestmark = pytest.mark.real

NEAR_TIE = 0.5
"""Nats between the two likeliest tokens, below which rounding may choose the other."""
TEXT = (HERE / "text.txt").read_text()
LONG = (HERE / "long_text.txt").read_text()
TEXTS = json.loads((HERE / "texts.json").read_text())
REFERENCES: dict[str, Any] = json.loads((HERE / "references.json").read_text())
LANGUAGE = [name for name in wanted() if name != "minilm"]
CHATS = [name for name in LANGUAGE if MODELS[name].chats]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer"},
        "city": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}


class Opened:
    """One engine at a time: the next model closes the last one's."""

    def __init__(self) -> None:
        self._stack, self._name = ExitStack(), ""

    def engine(self, name: str) -> Engine:
        if self._name != name:
            self.close()
            length = 0 if name == "minilm" else 2048
            config = EngineConfig(model=str(fetched(name)), device="cpu", max_num_seqs=8, max_model_len=length)
            self._engine, self._name = self._stack.enter_context(Engine(config)), name
        return self._engine

    def close(self) -> None:
        self._name = ""
        self._stack.close()


@pytest.fixture(scope="module")
def opened() -> Iterator[Opened]:
    found = Opened()
    yield found
    found.close()


def asked(sampling: dict[str, Any], **options: Any) -> Request:
    return Request(sampling=SamplingParams(temperature=0, **sampling), **options)


def said(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("name", [name for name in LANGUAGE if name in REFERENCES])
class TestLanguage:
    def test_tokens_are_those_of_llama_cpp(self, name: str, opened: Opened) -> None:
        engine = opened.engine(name)
        for text, tokens in zip(TEXTS["hard"], REFERENCES[name]["tokens"], strict=True):
            if text and "\u0301" not in text:  # llama.cpp does not compose letters
                assert engine.tokens_of(Request(prompt=text)) == tokens, text

    def test_nats_per_token(self, name: str, opened: Opened) -> None:
        """Float32's within 0.005, llama.cpp's, which rounds its inputs, within 0.015 nats."""
        result = (
            opened.engine(name).submit(asked({"max_tokens": 1, "prompt_logprobs": 0}, prompt=TEXT)).result(1800)
        )
        assert result.prompt_logprobs is not None
        found = [-one.logprob for one in result.prompt_logprobs[1:] if one is not None]
        for whose, (total, n) in REFERENCES[name]["nats"].items():
            assert abs(sum(found[:n]) / n - total / n) <= (0.005 if whose == "float32" else 0.015), whose

    def test_perplexity_over_8000_tokens(self, name: str, opened: Opened) -> None:
        """Within 0.5 % of float32's, and 1.5 % of llama.cpp's, which rounds its inputs."""
        engine = opened.engine(name)
        whole = engine.tokens_of(Request(prompt=LONG))
        plain = engine.tokens_of(Request(prompt=LONG, add_special_tokens=False))
        asked_for = [
            engine.submit(asked({"max_tokens": 1, "prompt_logprobs": 0}, prompt=tokens))
            for tokens in windows(list(plain), list(whole[: len(whole) - len(plain)]))
        ]
        found = [one.logprob for handle in asked_for for one in (handle.result(1800).prompt_logprobs or ())[1:]]
        for whose, (total, n) in REFERENCES[name].get("long", {}).items():
            assert n == len(found)
            ratio = math.exp(-sum(found) / n - total / n)
            assert abs(ratio - 1) <= (0.005 if whose == "float32" else 0.015), (whose, ratio)

    def test_greedy_answers_are_those_of_llama_cpp_up_to_a_near_tie(self, name: str, opened: Opened) -> None:
        engine, references = opened.engine(name), REFERENCES[name]["greedy"]
        n = len(references[0][0])
        asked_for = [engine.submit(asked({"max_tokens": n}, prompt=prompt)) for prompt in TEXTS["prompts"]]
        for prompt, handle, (ids, margins) in zip(TEXTS["prompts"], asked_for, references, strict=False):
            found = handle.result(1800).token_ids
            first = next((i for i, (a, b) in enumerate(zip(found, ids, strict=False)) if a != b), None)
            assert first is None or margins[first] <= NEAR_TIE, (prompt, first, margins[first])


@pytest.mark.parametrize("name", CHATS)
class TestChats:
    def test_objects_by_schema_are_valid_and_right(self, name: str, opened: Opened) -> None:
        engine, constraint = opened.engine(name), Constraint("json_schema", PERSON)
        question = "Extract name, age and city as JSON: {name} is {age} and lives in {city}."
        handles = [
            engine.submit(asked({"max_tokens": 60}, messages=said(question.format(**one)), constraint=constraint))
            for one in TEXTS["people"]
        ]
        found = [json.loads(handle.result(1800).text) for handle in handles]
        right = sum(one == wanted for one, wanted in zip(found, TEXTS["people"], strict=True))
        assert right >= MODELS[name].right

    def test_it_answers_and_stops(self, name: str, opened: Opened) -> None:
        question = "What is the capital of France? Answer with one word."
        result = opened.engine(name).submit(asked({"max_tokens": 64}, messages=said(question))).result(1800)
        assert (result.finish_reason, "Paris" in result.text) == ("stop", True)


@pytest.mark.skipif("minilm" not in wanted(), reason="not wanted")
def test_vectors_are_those_of_transformers(opened: Opened) -> None:
    import torch

    transformers = pytest.importorskip("transformers")
    folder = fetched("minilm")
    texts = [one.strip() for one in re.split(r"(?<=\.)\s", TEXT) if one.strip()][:40]
    texts += [text for text in TEXTS["hard"] if text.strip()][:10]
    vectors = opened.engine("minilm").submit(Request(texts=texts, embedding=Embedding())).result(600).vectors
    found = [np.frombuffer(base64.b64decode(one), "f4") for one in vectors or ()]
    tokenizer, model = (
        kind.from_pretrained(folder) for kind in (transformers.AutoTokenizer, transformers.AutoModel)
    )
    with torch.no_grad():
        for text, mine in zip(texts, found, strict=True):
            theirs = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
            cosine = float(mine @ theirs / np.linalg.norm(mine) / np.linalg.norm(theirs))
            assert cosine >= 0.9999, text
