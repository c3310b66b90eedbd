"""Options of chat templates and of special tokens, through a worker whose model's template has options."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.gpu_worker import models
from petiole.gpu_worker.text import load_tokenizer
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.wire.keys import stream_keys
from tests.support.site import Site

TINY = Path(models.__file__).parent / "petiole_tiny"
TEMPLATE = """\
{%- if level == 'none' %}{{ raise_exception('no such level') }}{% endif %}
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
QUESTION = {"role": "user", "content": "Count from 1 to 9."}
ASKED = "<|im_start|>user\nCount from 1 to 9.<|im_end|>\n<|im_start|>assistant\n"
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("text")
    model = Path(shutil.copytree(TINY, folder / "model"))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with Site(
        folder,
        PETIOLE_MODEL=model,
        PETIOLE_VISIBILITY_TIMEOUT_S=2,
        PETIOLE_ENGINE_FACTORY="petiole.gpu_worker.engine:Engine",
        PETIOLE_DEVICE="cpu",
        PETIOLE_DTYPE="float32",
    ) as site:
        site.worker()
        yield site


def chat(site: Site, *messages: dict[str, str], **options: Any) -> Any:
    kwargs = {"messages": list(messages), **GREEDY, **options}
    return site.get(site.app.send_task("tasks.chat", kwargs=kwargs))


def continuation(site: Site, prompt: str) -> Any:
    return site.get(site.generate(prompt, **GREEDY))


def test_variables_reach_the_chat_template(site: Site) -> None:
    answer = chat(site, QUESTION, chat_template_kwargs={"enable_thinking": False})
    same = continuation(site, ASKED + "<think>\n\n</think>\n\n")
    assert answer["token_ids"] == same["token_ids"]
    assert answer["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]
    assert chat(site, QUESTION)["usage"]["prompt_tokens"] < same["usage"]["prompt_tokens"]


def test_the_assistants_message_is_continued(site: Site) -> None:
    begun = {"role": "assistant", "content": "1, 2,"}
    answer, same = chat(site, QUESTION, begun, continue_final_message=True), continuation(site, ASKED + "1, 2,")
    assert answer["token_ids"] == same["token_ids"]
    assert answer["usage"]["prompt_tokens"] == same["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"level": "none"}}, "messages"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
def test_what_a_template_cannot_do_fails_the_task(site: Site, options: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(site, QUESTION, **options)
    assert caught.value.field == field


def test_the_stop_string_is_in_stream_and_result_if_asked_for(site: Site) -> None:
    whole = continuation(site, "Count from 1 to 9.")["text"]
    stop = whole[4:7]
    result = site.generate("Count from 1 to 9.", **GREEDY, stop=stop, include_stop=True)
    text = site.get(result)["text"]
    assert text == "".join(delta["text"] for delta in site.log(result)) == whole[: whole.index(stop) + len(stop)]


def first_of_its_kind(text: str, at: int) -> str:
    """The shortest text that begins at `at`, contains a special token and occurs nowhere before."""
    return next(
        text[at:end]
        for end in range(at + 1, len(text))
        if "<|im_start|>" in text[at:end] and text.index(text[at:end]) == at
    )


def test_a_killed_workers_text_goes_on_with_its_special_tokens(site: Site) -> None:
    """And ends with a stop string that contains one, found in tokens of the second worker."""
    tokenizer = load_tokenizer(TINY)
    options = {
        "max_tokens": 1800,
        "temperature": 100,
        "seed": 3,
        "allowed_token_ids": [*tokenizer.special_token_ids, *tokenizer.encode("a b c")],
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    whole = site.get(site.generate("hello", **options))
    assert whole["text"] == tokenizer.decode(whole["token_ids"], skip_special_tokens=False)
    at = len(whole["text"]) * 9 // 10
    stop = first_of_its_kind(whole["text"], at)
    result = site.generate("hello", stop=stop, **options)
    site.streaming(result, 40)
    for worker in site.workers:
        worker.kill()
    site.worker()
    value = site.get(result)
    assert (value["attempt"], value["stop_reason"]) == (2, stop)
    assert value["text"] == "".join(delta["text"] for delta in site.log(result)) == whole["text"][:at]
    assert value["token_ids"] == site.tokens(result) == whole["token_ids"][: len(value["token_ids"])]


def test_log_probabilities_have_texts_and_bytes_where_asked(site: Site) -> None:
    task = site.generate("Count from 1 to 9.", **GREEDY, logprobs=2, logprob_texts=True)
    result = site.get(task)
    log = map(json.loads, site.redis.lrange(stream_keys(task.id).log, 0, -1))
    streamed = [entry for delta in log for entry in delta.get("logprobs") or ()]
    assert streamed == result["logprobs"]
    assert [len(entry[kind]) for entry in streamed for kind in ("texts", "bytes")] == [3] * 24
    assert bytes(byte for entry in streamed for byte in entry["bytes"][0]).decode() == result["text"]
