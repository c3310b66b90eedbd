"""The tokenizer of a folder: the tokens that `transformers` gives, and one line for what is wrong."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import transformers

from petiole.gpu_worker import models
from petiole.gpu_worker.exceptions import InvalidRequest, ModelError
from petiole.gpu_worker.preparation import truncation
from petiole.gpu_worker.request.requests import check_token_ids
from petiole.gpu_worker.text import TextAssembler, Tokenizer, load_tokenizer
from tests.support import tokenizers as samples

TEXTS = ["hello world", "  naïve 日本語 😀\n", "", "the fox<|im_end|> hello </s>"]
TINY = Path(models.__file__).parent / "petiole_tiny"


def write(folder: Path, **files: Any) -> None:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("make", [samples.byte_level, samples.sentencepiece])
def test_a_prompt_becomes_the_same_tokens_as_in_transformers(tmp_path: Path, make: Any, text: str) -> None:
    samples.save(tmp_path, make())
    write(tmp_path, tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast"})
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    token_ids = ours.encode(text)
    assert token_ids == oracle(text)["input_ids"]
    assert ours.decode(token_ids) == oracle.decode(token_ids, skip_special_tokens=True)


def test_tokens_that_only_the_configuration_names_are_added(tmp_path: Path) -> None:
    backend = samples.byte_level()
    new_id = backend.get_vocab_size()
    samples.save(tmp_path, backend)
    described = {
        str(new_id): {"content": "<tool>", "special": True, "normalized": False},
        str(new_id + 1): {"content": "<note>", "special": False, "normalized": False},
    }
    write(
        tmp_path,
        tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": described},
    )
    ours = load_tokenizer(tmp_path)
    assert ours.encode("<tool><note>") == [new_id, new_id + 1]
    assert ours.decode([new_id, new_id + 1]) == "<note>"


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "an id far away": ({"tokenizer": {"model": {"vocab": {"far": 2**24 - 1}}}}, "at most 262144 unused ids"),
    "an id beyond all": ({"tokenizer": {"model": {"vocab": {"far": 2**24}}}}, "must have token ids from 0 to"),
    "an id of 32 bits": ({"tokenizer": {"model": {"vocab": {"far": 2**31}}}}, "must have token ids from 0 to"),
    "an id of 33 bits": ({"tokenizer": {"model": {"vocab": {"far": 2**32}}}}, "not a readable tokenizer"),
    "an id below 0": ({"tokenizer": {"model": {"vocab": {"far": -1}}}}, "not a readable tokenizer"),
    "a panic": ({"tokenizer": {"model": {"vocab": {"a": 5}, "merges": ["a a"]}}}, "not a readable tokenizer"),
    "half a letter": ({"tokenizer_config": {"eos_token": "\ud800"}}, r"texts must be .* got '\\ud800'"),
    "half a letter in a list": (
        {"tokenizer_config": {"additional_special_tokens": ["\ud800"]}},
        "texts must be text that UTF-8 can encode",
    ),
}


@pytest.mark.parametrize(("files", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_tokenizer_that_cannot_be_is_refused_in_one_line(
    tmp_path: Path, files: dict[str, Any], message: str
) -> None:
    for name, changes in files.items():
        given = json.loads((TINY / f"{name}.json").read_text())
        for key, value in changes.items():
            if not isinstance(value, dict):
                given[key] = value
            elif "merges" in value:
                given[key] = {"type": "BPE", **value}
            else:
                given[key]["vocab"] |= value["vocab"]
        write(tmp_path, **{name: given})
    for name in ("tokenizer.json", "config.json"):
        if not (tmp_path / name).exists():
            (tmp_path / name).write_bytes((TINY / name).read_bytes())
    with pytest.raises(ModelError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


WORDS = {"a": 0, "b": 1, "ab": 2}
LACKING: dict[str, tuple[dict[str, Any], str]] = {
    "WordLevel": ({"vocab": WORDS, "unk_token": "[UNK]"}, "model.unk_token"),
    "WordPiece": (
        {
            "vocab": WORDS,
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
        },
        "model.unk_token",
    ),
    "BPE": ({"vocab": WORDS, "merges": [["a", "b"]], "unk_token": "[UNK]"}, "model.unk_token"),
    "Unigram": ({"vocab": [["a", -1.0], ["b", -2.0]], "unk_id": None}, "model.unk_id"),
}


def write_model(folder: Path, model: dict[str, Any], **parts: Any) -> None:
    """A tokenizer.json with this model."""
    none = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    write(folder, tokenizer={"version": "1.0", "added_tokens": [], **none, **parts, "model": model}, config={})


@pytest.mark.parametrize("kind", LACKING)
def test_text_that_a_tokenizer_without_an_unknown_token_lacks_is_refused_by_its_field(
    tmp_path: Path, kind: str
) -> None:
    model, named = LACKING[kind]
    write_model(tmp_path, {"type": kind, **model})
    ours = load_tokenizer(tmp_path)
    assert ours.encode("a") == [0]
    message = re.escape(
        f"text: must be text that the model's tokenizer can encode (tokenizer.json: {named}), got "
    )
    for encode in (
        lambda: ours.encode("zz", field="text"),
        lambda: ours.encode_cut("zz", field="text", max_tokens=3),
        lambda: ours.encode_as_text("zz", field="text"),
        lambda: ours.encode("zz" * 1000, field="text", max_tokens=3),
        lambda: truncated("zz", ours),
    ):
        with pytest.raises(InvalidRequest, match=message.replace("text:", "(text|messages):", 1)):
            encode()


def truncated(text: str, tokenizer: Tokenizer) -> list[int]:
    said = [{"role": "user", "content": text}]
    return truncation.shortened(said, tokenizer, lambda _: [1, 2, 3], 2, "end")


def test_a_text_has_the_same_tokens_each_time_even_if_the_file_has_a_dropout(tmp_path: Path) -> None:
    write_model(tmp_path, {"type": "BPE", "vocab": WORDS, "merges": [["a", "b"]], "dropout": 0.5})
    ours = load_tokenizer(tmp_path)
    assert all(ours.encode("ab" * 20) == [2] * 20 for _ in range(20))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_files_that_are_nested_without_end_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    (tmp_path / name).write_bytes(b'{"a":' * 50_000 + b"1" + b"}" * 50_000)
    with pytest.raises(ModelError, match=re.escape(str(tmp_path / name))) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_token_with_a_role_is_special_even_if_the_tokenizer_file_does_not_say_so(tmp_path: Path) -> None:
    samples.save(tmp_path, samples.byte_level())
    write(tmp_path, tokenizer_config={"eos_token": {"content": "<think>"}})
    ours = load_tokenizer(tmp_path)
    assert TextAssembler(ours).push(ours.encode("hello<think>")).text == "hello"


def test_outputs_end_with_the_ids_of_both_configurations_and_the_eos_token(tmp_path: Path) -> None:
    samples.save(tmp_path, samples.byte_level())
    write(tmp_path, tokenizer_config={"eos_token": "<|im_end|>"}, config={"eos_token_id": 7})
    assert load_tokenizer(tmp_path).eos_token_ids == {7, 2}
    write(tmp_path, generation_config={"eos_token_id": [0, 2]})
    assert load_tokenizer(tmp_path).eos_token_ids == {0, 2, 7}


def test_truncation_in_the_tokenizer_file_cuts_no_prompt(tmp_path: Path) -> None:
    backend = samples.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    samples.save(tmp_path, backend)
    assert load_tokenizer(tmp_path).encode("hello " * 30) == samples.byte_level().encode("hello " * 30).ids


def test_threads_encode_the_same_at_the_same_time() -> None:
    ours = Tokenizer(samples.byte_level())
    texts = [f"{text} {k}" for k in range(50) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ours.encode, texts)) == [ours.encode(text) for text in texts]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a\udc80b", r"prompt: must be valid Unicode text, got '\\udc80' at position 1"),
        (b"bytes", "prompt: must be a string, got bytes"),
        (None, "prompt: must be a string, got NoneType"),
    ],
)
def test_what_is_no_text_is_refused_by_name(prompt: Any, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{expected}"):
        Tokenizer(samples.byte_level()).encode(prompt)


def test_a_text_of_too_many_tokens_is_refused() -> None:
    ours = Tokenizer(samples.byte_level())
    fitting = ours.encode("hello " * 20)
    assert ours.encode("hello " * 20, max_tokens=len(fitting)) == fitting
    with pytest.raises(InvalidRequest, match=rf"^prompt: must have at most 9 tokens, got {len(fitting)} tokens"):
        ours.encode("hello " * 20, max_tokens=9)


def test_megabytes_that_cannot_fit_are_refused_without_tokenizing_them() -> None:
    ours = Tokenizer(samples.byte_level())
    with pytest.raises(
        InvalidRequest, match=r"^prompt: must have at most 100 tokens, got \d+ in the first 1056 of"
    ):
        ours.encode("0123456789" * 1_000_000, max_tokens=100)


def test_long_tokens_fit_more_text(tmp_path: Path) -> None:
    backend = samples.byte_level()
    backend.add_tokens(["0123456789" * 10])
    assert len(Tokenizer(backend).encode("0123456789" * 1000, max_tokens=100)) == 100


@pytest.mark.parametrize("bad", [-1, 1000, 2.0, "3", True, None])
def test_token_ids_that_the_vocabulary_does_not_have_are_refused_by_position(bad: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt\[1\]: must be a token id from 0 to 999"):
        check_token_ids("prompt", [1, bad], 1000)


def test_good_token_ids_come_back_as_a_list() -> None:
    assert check_token_ids("prompt", (1, 2), 1000) == [1, 2]
    with pytest.raises(InvalidRequest, match=r"^prompt: must be a list of token ids, got str"):
        check_token_ids("prompt", "12", 1000)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("tokenizer.json", None, "tokenizer.json: missing"),
        ("tokenizer.json", "{}", "tokenizer.json: not a readable tokenizer"),
        ("tokenizer.json", '{"model": ', "tokenizer.json: not a readable tokenizer"),
        ("tokenizer_config.json", "{", "tokenizer_config.json cannot be read"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"x": 1}}',
            "tokenizer_config.json: added_tokens_decoder",
        ),
        ("tokenizer_config.json", '{"chat_template": [1]}', "tokenizer_config.json: chat_template"),
        ("generation_config.json", '{"eos_token_id": ["a"]}', "generation_config.json: eos_token_id"),
    ],
)
def test_a_broken_folder_is_a_model_error_of_one_line(
    tmp_path: Path, file: str, content: str | None, expected: str
) -> None:
    samples.save(tmp_path, samples.byte_level())
    (tmp_path / file).unlink(missing_ok=True)
    if content is not None:
        (tmp_path / file).write_text(content)
    with pytest.raises(ModelError) as raised:
        load_tokenizer(tmp_path)
    assert expected in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_folder_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such model folder"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.skipif(not (TINY / "tokenizer.json").is_file(), reason="the model that ships is not built yet")
def test_the_model_that_ships_talks_as_it_does_in_transformers() -> None:
    ours = load_tokenizer(TINY)
    oracle = transformers.AutoTokenizer.from_pretrained(TINY)
    messages = [{"role": "user", "content": "Count from 1 to 5."}]
    token_ids = ours.apply_chat_template(messages)
    assert token_ids == oracle.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.decode(token_ids) == oracle.decode(token_ids, skip_special_tokens=True)
    assert oracle.eos_token_id in ours.eos_token_ids
