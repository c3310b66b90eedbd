"""completions, tokenize and detokenize with openai-python, through a real gateway, Redis and worker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest
from pydantic import ValidationError

from petiole.gateway.openai.completions import TextCompletion
from petiole.gpu_worker.text.tokenizer_files import load_tokenizer
from tests.support.gateway import Gateway
from tests.support.site import REPOSITORY

PROMPT = "Count from 1 to 5."
ASKED: dict[str, Any] = {"model": "petiole-tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def http(gateway: Gateway) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=gateway.root, timeout=60) as http:
        yield http


def tokens_of(http: httpx2.Client, prompt: str) -> list[int]:
    answer = http.post("/tokenize", json={"model": "petiole-tiny", "prompt": prompt})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["tokens"]
    return found


def test_a_whole_answer_and_its_stream_are_the_same(client: openai.OpenAI, http: httpx2.Client) -> None:
    for more in (
        {},
        {"echo": True},
        {"logprobs": 2},
        {"echo": True, "logprobs": 2, "prompt": [PROMPT, "The sea"]},
        {"n": 2, "temperature": 1, "seed": 5},
    ):
        asked = {**ASKED, **more}
        whole = client.completions.create(**asked)
        assert whole.id.startswith("cmpl-")
        assert whole.usage is not None
        chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        for choice in whole.choices:
            of = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
            assert "".join(piece.text for piece in of) == choice.text
            assert [piece.finish_reason for piece in of if piece.finish_reason] == [choice.finish_reason]
            if choice.logprobs is not None:
                for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                    parts = [getattr(piece.logprobs, name) or () for piece in of if piece.logprobs]
                    assert [one for part in parts for one in part] == getattr(choice.logprobs, name)
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert http.get(f"/v1/completions/{whole.id}").json()["choices"][0]["text"] == whole.choices[0].text


def test_offsets_are_those_of_the_text(client: openai.OpenAI) -> None:
    [choice] = client.completions.create(**ASKED, logprobs=0).choices
    assert choice.logprobs is not None
    offsets, tokens = choice.logprobs.text_offset or [], choice.logprobs.tokens or []
    assert len(offsets) == len(tokens) > 5
    for offset, token in zip(offsets, tokens, strict=True):
        assert choice.text[offset : offset + len(token)] in (token, "")


def test_the_tokens_of_a_prompt_as_evaluation_harnesses_ask_for_them(
    client: openai.OpenAI, http: httpx2.Client
) -> None:
    ids = tokens_of(http, PROMPT)
    asked: dict[str, Any] = {**ASKED, "logprobs": 1, "echo": True, "seed": 1234}
    answer = client.completions.create(**{**asked, "prompt": [PROMPT, ids], "max_tokens": 1})
    for choice in answer.choices:
        found = choice.logprobs
        assert found is not None
        logprobs, top = found.token_logprobs or [], found.top_logprobs or []
        assert len(logprobs) == len(top) == len(found.tokens or []) == len(ids) + 1
        assert logprobs[0] is None
        assert "".join((found.tokens or [])[:-1]) == PROMPT
        for logprob, likeliest in zip(logprobs[1:], top[1:], strict=True):
            assert logprob in likeliest.values()
            assert logprob <= max(likeliest.values()) <= 0
        assert logprobs[-1] == max(top[-1].values()), "the output is greedy"
        assert choice.text.startswith(PROMPT)
        offsets = found.text_offset or []
        assert offsets == sorted(offsets)
        assert offsets[-1] == len(PROMPT) < len(choice.text)
    alone = client.completions.create(**{**asked, "max_tokens": 0})
    [choice], first = alone.choices, answer.choices[0].logprobs
    assert choice.logprobs is not None
    assert first is not None
    assert (choice.text, choice.finish_reason) == (PROMPT, "length")
    assert choice.logprobs.token_logprobs == (first.token_logprobs or [])[:-1]
    assert alone.usage is not None
    assert alone.usage.completion_tokens == 0


def test_prompt_logprobs_are_those_of_vllm(client: openai.OpenAI, http: httpx2.Client) -> None:
    ids = tokens_of(http, PROMPT)
    answer = client.completions.create(**{**ASKED, "prompt": ids}, extra_body={"prompt_logprobs": 2})
    found = answer.choices[0].model_extra["prompt_logprobs"]  # type: ignore[index]
    assert found[0] is None
    for token, entries in zip(ids[1:], found[1:], strict=True):
        assert 2 <= len(entries) <= 3
        assert str(token) in entries
        assert sorted(entry["rank"] for entry in entries.values() if entry["rank"]) == [1, 2]
        assert all(entry["decoded_token"] for entry in entries.values())
    chat = client.chat.completions.create(
        model="petiole-tiny",
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=1,
        extra_body={"prompt_logprobs": 0},
    )
    assert chat.usage is not None
    shown = chat.model_extra["prompt_logprobs"]  # type: ignore[index]
    assert [entry and len(entry) for entry in shown] == [None] + [1] * (chat.usage.prompt_tokens - 1)


def test_prompts_in_all_their_forms(client: openai.OpenAI, http: httpx2.Client) -> None:
    ids, other = tokens_of(http, PROMPT), tokens_of(http, "The sea")
    same = [client.completions.create(**{**ASKED, "prompt": prompt}) for prompt in (PROMPT, [PROMPT], ids, [ids])]
    assert len({answer.choices[0].text for answer in same}) == 1
    several = client.completions.create(**{**ASKED, "prompt": [ids, other]}, n=2, echo=True)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert all(choice.text.startswith(PROMPT) for choice in several.choices[:2])
    assert all(choice.text.startswith("The sea") for choice in several.choices[2:])
    assert several.usage is not None
    assert several.usage.prompt_tokens == len(ids) + len(other)
    shown = client.completions.create(
        **{**ASKED, "prompt": [PROMPT, "The sea"]}, extra_body={"return_token_ids": True}
    )
    assert [choice.model_extra["prompt_token_ids"] for choice in shown.choices] == [ids, other]  # type: ignore[index]
    default = client.completions.create(model="petiole-tiny", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert default.usage is not None
    assert default.usage.completion_tokens == 16


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": 7}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"suffix": "x", "echo": True}, "echo"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": ["x"] * 200, "n": 2}, "n"),
        ({"prompt": "x " * 9000}, "prompt"),
    ],
)
def test_what_is_refused_is_named(http: httpx2.Client, more: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/completions", json={**ASKED, **more})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_tokens_of_texts_and_conversations(http: httpx2.Client, client: openai.OpenAI) -> None:
    ids = tokens_of(http, PROMPT)
    asked = {"model": "petiole-tiny", "prompt": PROMPT, "return_token_strs": True}
    counted = http.post("/v1/tokenize", json=asked).json()
    tokenizer = load_tokenizer(REPOSITORY / "gpu_worker" / "models" / "petiole_tiny")
    written = [tokenizer.entry(token) for token in ids]
    assert (counted["count"], counted["tokens"], counted["token_strs"]) == (len(ids), ids, written)
    back = http.post("/detokenize", json={"model": "petiole-tiny", "tokens": ids})
    assert back.json() == {"prompt": PROMPT}
    messages: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
    rendered = http.post("/tokenize", json={"model": "petiole-tiny", "messages": messages}).json()
    answer = client.chat.completions.create(model="petiole-tiny", messages=messages, max_tokens=1)
    assert answer.usage is not None
    assert rendered["count"] == answer.usage.prompt_tokens
    ended = {"model": "petiole-tiny", "messages": messages, "add_generation_prompt": False}
    without = http.post("/tokenize", json=ended).json()["tokens"]
    assert rendered["tokens"][: len(without)] == without != rendered["tokens"]
    bare = http.post("/tokenize", json={"model": "petiole-tiny", "prompt": PROMPT, "add_special_tokens": False})
    assert bare.json()["tokens"] == ids, "the tokenizer adds none"
    for body, param in (
        ({"prompt": "x", "messages": messages}, "prompt"),
        ({"tokens": [-1]}, "tokens[0][0]"),
        ({"tokens": [2**30]}, "tokens[0]"),
    ):
        path = "/detokenize" if "tokens" in body else "/tokenize"
        refused = http.post(path, json={"model": "petiole-tiny", **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_each_chunk_has_the_usage_by_now(http: httpx2.Client, path: str) -> None:
    body = {"model": "petiole-tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    text = http.post(f"/v1/{path}", json=body).text
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    used = [json.loads(line)["usage"] for line in lines]
    assert all(one["total_tokens"] == one["prompt_tokens"] + one["completion_tokens"] for one in used)
    made = [one["completion_tokens"] for one in used]
    assert made == sorted(made)
    assert made[-1] == made[-2] == 8
    assert used[-2]["prompt_tokens"] == used[-1]["prompt_tokens"] > 0


def test_the_prompts_ids_come_first_and_as_they_were_cut(client: openai.OpenAI) -> None:
    ids = [*range(40, 48)]
    for side, left in (("right", ids[:4]), ("left", ids[-4:])):
        more = {"return_token_ids": True, "truncate_prompt_tokens": 4, "truncation_side": side}
        chunks = [*client.completions.create(**{**ASKED, "prompt": ids}, stream=True, extra_body=more)]
        shown = [chunk.choices[0].model_dump().get("prompt_token_ids") for chunk in chunks]
        assert shown == [left, *[None] * (len(chunks) - 1)]


def test_a_prompt_that_is_too_long_is_cut_as_by_vllm(client: openai.OpenAI) -> None:
    long, cut = {**ASKED, "prompt": "The sea. " * 4000}, {"truncate_prompt_tokens": -1}
    with pytest.raises(openai.BadRequestError, match="must have at most"):
        client.completions.create(**long)
    answer = client.completions.create(**long, extra_body=cut)
    told = [{"role": "user", "content": long["prompt"]}]
    chat = client.chat.completions.create(model="petiole-tiny", messages=told, max_tokens=1, extra_body=cut)  # type: ignore[call-overload]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2048 - ASKED["max_tokens"]
    assert 2000 < chat.usage.prompt_tokens < 2048
    for side, text in ((None, "five."), ("right", "One")):
        body = {
            "truncate_prompt_tokens": 5,
            "return_token_ids": True,
            **({"truncation_side": side} if side else {}),
        }
        short = client.completions.create(**ASKED | {"prompt": "One, two, three, four, five."}, extra_body=body)
        assert short.usage is not None
        assert short.usage.prompt_tokens == 5
        ids = short.choices[0].prompt_token_ids  # type: ignore[attr-defined]
        told = client.post("/detokenize", body={"model": "petiole-tiny", "tokens": ids}, cast_to=object)
        assert text in told["prompt"]  # type: ignore[index]
    for wrong in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -2}, {**cut, "echo": True}):
        with pytest.raises(openai.BadRequestError, match="truncate_prompt_tokens"):
            client.completions.create(**ASKED, extra_body=wrong)


def test_a_prompt_of_token_ids_has_no_special_tokens_to_leave_out() -> None:
    TextCompletion.model_validate({"model": "m", "prompt": [[1, 2], [3]], "add_special_tokens": False})
    with pytest.raises(ValidationError, match="add_special_tokens: must be true"):
        TextCompletion.model_validate({"model": "m", "prompt": [[1, 2], "x"], "add_special_tokens": False})


def test_sagemakers_path_is_any_of_the_interfaces(http: httpx2.Client) -> None:
    told = {"model": "petiole-tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
    for body, kind in ((told, "chat.completion"), ({**ASKED, "stream": False}, "text_completion")):
        answer = http.post("/invocations", json=body)
        assert (answer.status_code, answer.json()["object"]) == (200, kind), answer.text
    with http.stream("POST", "/invocations", json={**ASKED, "stream": True}) as streamed:
        assert [*streamed.iter_lines()][-2:] == ["data: [DONE]", ""]
    for wrong, told_of in (({"model": "petiole-tiny"}, "messages, prompt"), ({**ASKED, "n": 0}, "n: must be")):
        refused = http.post("/invocations", json=wrong)
        assert refused.status_code == 400
        assert told_of in refused.json()["error"]["message"]
    classes = http.post("/invocations", json={"model": "petiole-tiny", "input": "x"})
    assert "has no classes" in classes.json()["error"]["message"]
    assert "model: is required" in http.post("/invocations", json={"input": "x"}).json()["error"]["message"]


def test_what_a_tokenizer_is(http: httpx2.Client) -> None:
    known = http.get("/tokenizer_info").json()
    assert known == http.get("/tokenizer_info", params={"model": "petiole-tiny"}).json()
    counted = http.post("/tokenize", json={"model": "petiole-tiny", "prompt": PROMPT}).json()
    assert known["model_max_length"] == counted["max_model_len"]
    assert known["tokenizer_class"]
    assert {"content": "<|im_end|>", "special": True} in known["added_tokens_decoder"].values()
    assert http.get("/tokenizer_info", params={"model": "x"}).status_code == 404
