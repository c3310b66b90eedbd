"""`truncate`: a prompt that is too long is cut where its request says so, and its output has room."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.contract.limits import Truncate
from petiole.gpu_worker import EngineConfig, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.preparation.prompts import PromptReader
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.gpu_worker.text import Tokenizer
from petiole.gpu_worker.text.tokenizer import cut
from tests.gpu_worker.text.test_chat import CHATML
from tests.support import tokenizers as samples
from tests.support.toy_engine import MAX_MODEL_LEN, request, toy_engine

CONTEXT, OUTPUT = 120, 20
ROOM = CONTEXT - OUTPUT
LIMITS = ModelLimits("m", "f", 500, CONTEXT, n_pages=1000, page_size=1, max_batch_size=2)
WHERE: list[Truncate] = ["start", "middle", "end"]


def tokens(made: Tokenizer, **given: Any) -> list[int]:
    sampling = SamplingParams(max_tokens=given.pop("max_tokens", OUTPUT))
    subjects = PromptReader(EngineConfig(), LIMITS, made, frozenset())
    return subjects.of(Request(sampling=sampling, **given)).prompt.ids


def chat_of(*messages: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in messages]


@pytest.fixture
def chatml() -> Tokenizer:
    return Tokenizer(samples.byte_level(), chat_templates={"default": CHATML})


def test_where_a_list_of_tokens_is_cut() -> None:
    assert [cut([*range(9)], 4, where) for where in WHERE] == [[5, 6, 7, 8], [0, 1, 7, 8], [0, 1, 2, 3]]
    assert [cut([*range(9)], most, "middle") for most in (0, 1, 9, 10)] == [[], [0], [*range(9)], [*range(9)]]


@pytest.mark.parametrize("where", WHERE)
def test_a_prompt_that_leaves_no_room_for_its_output_is_cut(where: Truncate) -> None:
    long, short = [1 + k % 40 for k in range(MAX_MODEL_LEN + 5)], [1] * (MAX_MODEL_LEN - 12)
    with toy_engine() as engine:
        for prompt in (long, short):
            found = engine.submit(request(prompt, max_tokens=12, truncate=where, ignore_eos=True)).result(30)
            same = engine.submit(request(cut(prompt, MAX_MODEL_LEN - 12, where), ignore_eos=True)).result(30)
            assert (found.usage.prompt_tokens, len(found.token_ids)) == (MAX_MODEL_LEN - 12, 12)
            assert found.token_ids == same.token_ids


@pytest.mark.parametrize("where", WHERE)
def test_a_prompt_is_cut_to_fewer_tokens_than_there_is_room_for(where: Truncate) -> None:
    long = [1 + k % 40 for k in range(MAX_MODEL_LEN - 20)]
    with toy_engine() as engine:
        for most in (1, 7, MAX_MODEL_LEN, 10**9):
            asked = request(long, max_tokens=12, truncate=where, truncate_to=most, ignore_eos=True)
            found = engine.submit(asked).result(30)
            kept = cut(long, min(most, MAX_MODEL_LEN - 12), where)
            same = engine.submit(request(kept, max_tokens=12, ignore_eos=True)).result(30)
            assert (found.usage.prompt_tokens, found.token_ids) == (len(kept), same.token_ids)
        for wrong in (0, True, "5"):
            with pytest.raises(InvalidRequest, match=r"^truncate_to: must be an integer of at least 1"):
                engine.submit(request(long, truncate=where, truncate_to=wrong)).result(30)


@pytest.mark.parametrize("where", WHERE)
def test_the_special_tokens_at_the_ends_of_a_text_stay(where: Truncate) -> None:
    made = Tokenizer(samples.sentencepiece())
    text = " ".join(f"hello world {k}" for k in range(100))
    whole = made.encode(text)
    assert tokens(made, prompt=text, truncate=where) == [whole[0], *cut(whole[1:], ROOM - 1, where)]
    assert tokens(made, prompt="hello", truncate=where) == made.encode("hello")


@pytest.mark.parametrize("where", WHERE)
def test_of_a_conversation_the_longest_texts_are_cut_and_the_template_stays(
    chatml: Tokenizer, where: Truncate
) -> None:
    words = " ".join(f"w{k}" for k in range(150))
    messages = chat_of(("system", "be brief"), ("user", words), ("assistant", words[:60]), ("user", "why, hello?"))
    found = tokens(chatml, messages=messages, truncate=where)
    assert ROOM - 8 <= len(found) <= ROOM
    text = chatml.decode(found, skip_special_tokens=False)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("why, hello?<|im_end|>\n<|im_start|>assistant\n")
    assert text.count("<|im_start|>") == 5
    kept = text.split("<|im_start|>user\n")[1].partition("<|im_end|>")[0]
    assert (kept[:5] == words[:5], kept[-5:] == words[-5:]) == (where != "start", where != "end")


def test_texts_in_parts_and_letters_of_many_bytes(chatml: Tokenizer) -> None:
    parts = [{"type": "text", "text": "😀日本" * 60}, {"type": "text", "text": "briefly"}]
    found = tokens(chatml, messages=chat_of(("user", parts)), truncate="middle")
    assert len(found) <= ROOM
    assert "日本\nbriefly<|im_end|>" in (text := chatml.decode(found, skip_special_tokens=False))
    assert "\ufffd" not in text


def test_rest_leaves_room_for_an_output(chatml: Tokenizer) -> None:
    assert len(tokens(chatml, prompt="hello " * 300, truncate="end", max_tokens="rest")) == CONTEXT // 2


@pytest.mark.parametrize("where", WHERE)
def test_a_conversation_of_which_nothing_would_be_left_is_not_cut(chatml: Tokenizer, where: Truncate) -> None:
    """Although the template alone has room."""

    def many(n: int, text: str) -> list[dict[str, Any]]:
        return chat_of(*[("user", text)] * n)

    n = max(n for n in range(1, CONTEXT) if len(chatml.apply_chat_template(many(n, ""))) <= ROOM)
    assert len(tokens(chatml, messages=many(n, "a"), truncate=where)) > ROOM
    some = [*many(n - 1, "a"), *chat_of(("user", "a " * CONTEXT))][-max(1, n // 2) :]
    assert len(tokens(chatml, messages=some, truncate=where)) <= ROOM


def test_a_conversation_is_cut_to_the_tokens_that_are_asked_for_or_refused(chatml: Tokenizer) -> None:
    told = chat_of(("user", "hello world " * 9))
    template = len(chatml.apply_chat_template(chat_of(("user", ""))))
    for most in (template + 1, template + 5, 10**9):
        assert len(tokens(chatml, messages=told, truncate="start", truncate_to=most)) <= most
    with pytest.raises(InvalidRequest, match=r"^truncate_to: must leave room for the chat template, .*, got 3$"):
        tokens(chatml, messages=told, truncate="start", truncate_to=3)


def test_what_cannot_be_cut_is_refused(chatml: Tokenizer) -> None:
    many = chat_of(*[("user", "a")] * 60)
    with toy_engine() as engine:
        refused = engine.submit(request(truncate="left"))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="truncate: must be one of start, middle, end, got left"):
            refused.result(30)
    assert len(tokens(chatml, messages=many, truncate="end")) >= CONTEXT  # `Preparer` refuses it, as any other
