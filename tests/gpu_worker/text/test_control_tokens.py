"""A control token that somebody writes out in a message is text: nobody leaves a turn from inside of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken

from petiole.gpu_worker.exceptions import InvalidRequest, ModelError
from petiole.gpu_worker.text import Tokenizer, load_tokenizer
from petiole.gpu_worker.text.control_tokens import _STEM
from tests.gpu_worker.text.test_chat import CHATML, model_folder
from tests.support import tokenizers as samples

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CONTROL = ("<|end|>", "<|im_start|>", "<|im_end|>")
LLAMA = "{{ '<s>' }}{% for m in messages %}[INST] {{ m.content }} [/INST]</s>{% endfor %}"


@pytest.fixture(scope="module")
def made() -> Tokenizer:
    return Tokenizer(samples.byte_level(), chat_templates={"default": PLAIN})


def user(content: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def control_tokens(made: Tokenizer, ids: list[int]) -> list[str]:
    return [text for token in ids if (text := made.backend.id_to_token(token)) in CONTROL]


words = st.lists(
    st.sampled_from([*CONTROL, "<think>", "two words", " ", "\n", "hello", "é", "<|", "|>"]), max_size=8
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["user", "tool"]), words.map("".join)), min_size=1, max_size=3))
def test_only_the_template_writes_control_tokens(made: Tokenizer, said: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in said]
    ids = made.apply_chat_template(messages)
    frames = ["<|im_start|>", "<|im_end|>"] * len(messages) + ["<|im_start|>"]
    assert control_tokens(made, ids) == frames
    assert made.decode(ids, skip_special_tokens=False) == made.chat_template.render(messages)


@settings(max_examples=200, deadline=None)
@given(words.map(lambda of: "".join(word for word in of if word not in CONTROL)))
def test_other_prompts_have_the_ids_that_they_always_had(made: Tokenizer, content: str) -> None:
    new, old = (made.apply_chat_template(user(content), content_is_text=one) for one in (True, False))
    assert new == old


@pytest.mark.parametrize("role", ["assistant", "system", "developer"])
def test_what_an_application_writes_keeps_its_control_tokens(made: Tokenizer, role: str) -> None:
    ids = made.apply_chat_template(user("a<|im_end|>b", role), add_generation_prompt=False)
    assert control_tokens(made, ids) == ["<|im_start|>", "<|im_end|>", "<|im_end|>"]


def test_a_token_that_frames_nothing_stays_a_token(made: Tokenizer) -> None:
    """As `<tool_call>`: a model was trained to write it, and to read it."""
    ids = made.apply_chat_template(user("<think>a<|end|>b two words <think>"))
    think, pair = (made.backend.token_to_id(text) for text in ("<think>", "two words"))
    assert ids.count(think) == 2
    assert ids.count(pair) == 1
    assert control_tokens(made, ids).count("<|end|>") == 0


def test_an_added_token_that_frames_turns_is_a_control_token() -> None:
    backend = samples.byte_level()
    backend.add_tokens([AddedToken("[USER]", normalized=False), AddedToken("[TOOL]", normalized=False)])
    template = "{% for m in messages %}[USER]{{ m.content }}{% endfor %}{% if tools %}[TOOL]{% endif %}"
    made = Tokenizer(backend, chat_templates={"default": template})
    ids = made.apply_chat_template(user("a[USER]b[TOOL]"))
    assert [ids.count(backend.token_to_id(text)) for text in ("[USER]", "[TOOL]")] == [1, 1]
    assert made.decode(ids) == "[USER]a[USER]b[TOOL]"


def test_a_checkpoint_may_name_its_control_tokens(tmp_path: Path) -> None:
    made = load_tokenizer(model_folder(tmp_path, PLAIN, chat_control_tokens=["<think>"]))
    ids = made.apply_chat_template(user("a<think>b<|im_end|>"))
    assert made.backend.token_to_id("<think>") not in ids
    assert control_tokens(made, ids).count("<|im_end|>") == 1
    with pytest.raises(ModelError, match="chat_control_tokens must be a list of texts"):
        load_tokenizer(model_folder(tmp_path, PLAIN, chat_control_tokens="<think>"))


@pytest.mark.parametrize(
    "content", ["<|im_end|>", "a <|im_end|>", "<|im_end|><|im_end|> b", "a<|end|>\n<|im_end|>é"]
)
def test_the_tokens_are_those_of_transformers_where_it_encodes_the_content_apart(
    tmp_path: Path, content: str
) -> None:
    folder = model_folder(tmp_path, CHATML)
    oracle, made = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    expected = oracle.apply_chat_template(user(content), sanitize_control_tokens=True, return_dict=False)
    ids = made.apply_chat_template(user(content), add_generation_prompt=False)
    assert made.decode(ids, skip_special_tokens=False) == oracle.decode(expected)
    assert control_tokens(made, ids) == control_tokens(made, expected)


@pytest.mark.parametrize(
    "backend", [samples.sentencepiece(), samples.byte_level()], ids=["sentencepiece", "bytes"]
)
def test_every_kind_of_tokenizer_writes_the_text(backend: tokenizers.Tokenizer) -> None:
    special = "</s>" if backend.token_to_id("</s>") is not None else "<|end|>"
    made = Tokenizer(backend, chat_templates={"default": LLAMA.replace("</s>", special)})
    ids = made.apply_chat_template(user(f"hello {special} the{special}fox"))
    assert ids.count(backend.token_to_id(special)) == 1
    assert made.decode(ids).count(special) == 2


def test_parts_and_nested_contents_are_searched(made: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a<|im_end|>"}, {"type": "text", "text": "b<|end|>"}]
    frames = ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert control_tokens(made, made.apply_chat_template(user(parts))) == frames
    assert control_tokens(made, made.apply_chat_template(user({"x": ["<|im_end|>"]}, "tool"))) == frames


def test_a_name_that_the_template_writes_is_searched() -> None:
    named = PLAIN.replace("{{ m.role }}", "{{ m.role }} {{ m.name }}")
    made = Tokenizer(samples.byte_level(), chat_templates={"default": named})
    message = {"role": "user", "name": "a<|im_end|>b", "content": "c"}
    ids = made.apply_chat_template([message])
    assert control_tokens(made, ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert made.decode(ids, skip_special_tokens=False) == made.chat_template.render([message])


@pytest.mark.parametrize("forged", [f"{_STEM}0e", f"{_STEM}xx0e", f"{_STEM}x", _STEM.lower()])
def test_a_placeholder_cannot_be_forged(made: Tokenizer, forged: str) -> None:
    content = f"{forged}<|im_end|>{forged}"
    ids = made.apply_chat_template(user(content), add_generation_prompt=False)
    assert made.decode(ids) == f"user\n{content}"


def test_a_template_that_changes_a_placeholder_is_told_so() -> None:
    made = Tokenizer(samples.byte_level(), chat_templates={"default": "{{ messages[0].content | upper }}"})
    with pytest.raises(InvalidRequest, match=r"^messages: must have no control token .*, got <\|end\|>$"):
        made.apply_chat_template(user("a<|end|>"))
    assert made.decode(made.apply_chat_template(user("abc"))) == "ABC"


def test_the_limit_counts_the_tokens_of_the_text(made: Tokenizer) -> None:
    content = "<|im_end|>" * 10
    n = len(made.apply_chat_template(user(content)))
    assert len(made.apply_chat_template(user(content), max_tokens=n)) == n
    with pytest.raises(InvalidRequest, match=f"^messages: must have at most {n - 1} tokens, got {n} tokens"):
        made.apply_chat_template(user(content), max_tokens=n - 1)


def test_a_skills_question_is_text(made: Tokenizer) -> None:
    ids = made.encode_as_text("a<|end|>b", field="question")
    assert control_tokens(made, ids) == []
    assert made.decode(ids) == "a<|end|>b"
    assert made.encode_as_text("hello world", field="question") == made.encode("hello world")
