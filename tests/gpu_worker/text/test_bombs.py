"""A model's folder is a stranger's: files that would take all memory, or never end, are refused in one line."""

from __future__ import annotations

import base64
import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from petiole.gpu_worker import models
from petiole.gpu_worker.exceptions import InvalidRequest, ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_BYTES, MAX_JSON, read_json
from petiole.gpu_worker.models.checkpoint.gguf.header import read_header
from petiole.gpu_worker.models.checkpoint.safetensors import Checkpoint, SafetensorsFile
from petiole.gpu_worker.text import Tokenizer, load_tokenizer
from petiole.gpu_worker.text.chat import ChatTemplate
from petiole.gpu_worker.text.control_tokens import ControlTokens
from petiole.gpu_worker.text.tokenizer_files import check_tokenizer
from tests.support import tokenizers as samples
from tests.support.gguf import write

TINY = Path(models.__file__).parent / "petiole_tiny"


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def in_turn(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: steps}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def strip(start: int, stop: int) -> dict[str, Any]:
    return {"type": "Strip", "content": " ", "start": start, "stop": stop}


def of_tokens(*tokens: str) -> dict[str, Any]:
    return {"type": "BPE", "vocab": {token: k for k, token in enumerate(tokens)}, "merges": []}


def added(n: int, content: str = "<x{}>") -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": 512 + i, "content": content.format(i), "special": True, **flags} for i in range(n)]


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
REPEATED = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}] * 100_000,
    "pair": [{"Sequence": {"id": one, "type_id": 0}} for one in "AB"],
    "special_tokens": {},
}
MAP = base64.b64encode(struct.pack("<I", 4) + bytes(4) + b"a" * 65 + b"\0").decode()

BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "six chained replacements": (
        {"normalizer": in_turn("normalizers", *[replace("a", "a" * 1000)] * 6)},
        "normalizer must make at most 64 letters of one, got 1000",
    ),
    "thirty that double": (
        {"normalizer": in_turn("normalizers", *[replace("a", "aa")] * 30)},
        "normalizer must make at most 64 letters of one, got 128",
    ),
    "nested sequences": (
        {"normalizer": in_turn("normalizers", *[in_turn("normalizers", replace("a", "a" * 9))] * 2)},
        "normalizer must make at most 64 letters of one, got 81",
    ),
    "replacements of nothing": (
        {"normalizer": in_turn("normalizers", *[replace("(?=.)", "a", "Regex")] * 7)},
        "normalizer must make at most 64 letters of one, got 128",
    ),
    "a beginning of megabytes": (
        {"normalizer": {"type": "Prepend", "prepend": "a" * 10_000_000}},
        "Prepend.prepend must have at most 64 letters, got 10000000",
    ),
    "a map to long texts": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": MAP}},
        "normalizer must make at most 64 letters of one, got 65",
    ),
    "bytes of bytes": (
        {"pre_tokenizer": in_turn("pretokenizers", *[BYTES] * 20)},
        "pre_tokenizer must make at most 64 letters of one, got 256",
    ),
    "a decoder that doubles": (
        {"decoder": in_turn("decoders", *[replace("a", "aa")] * 30)},
        "decoder must make at most 64 letters of one, got 128",
    ),
    "many added tokens": ({"added_tokens": added(100_001)}, "added_tokens must be at most 100000, got 100001"),
    "a long added token": (
        {"added_tokens": added(1, "a" * 1025)},
        "added_tokens must have tokens of at most 1024 letters, got 1025",
    ),
    "a long token": (
        {"model": {"type": "BPE", "vocab": {"a" * 1025: 0}, "merges": []}},
        "model.vocab must have tokens of at most 1024 letters, got 1025",
    ),
    "a long prefix": (
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "continuing_subword_prefix": "#" * 65}},
        "model.continuing_subword_prefix must have at most 64 letters, got 65",
    ),
    "words without end": (
        {"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 10**9}},
        "model.max_input_chars_per_word must be at most 1000, got 1000000000",
    ),
    "a decoder that an empty token ends": (
        {"model": of_tokens("a", ""), "decoder": strip(0, 1)},
        "decoder must decode each token, and no token, got index out of bounds",
    ),
    "a decoder that a space ends": (
        {"model": of_tokens("a", " "), "decoder": strip(1, 1)},
        "decoder must decode each token, and no token, got slice index starts at 1",
    ),
    "a decoder that no token ends": (
        {"decoder": in_turn("decoders", {"type": "Fuse"}, strip(0, 1))},
        "decoder must decode each token, and no token, got index out of bounds",
    ),
    "a pattern that tries everything": ({"pre_tokenizer": split("(x+x+)+y")}, "must encode short texts"),
    "a text many times over": ({"post_processor": REPEATED}, "at most 64064 tokens of 1000 letters|it took more"),
}


@pytest.mark.parametrize(("changes", "message"), BOMBS.values(), ids=BOMBS.keys())
def test_a_tokenizer_that_makes_too_much_of_a_text_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    given = json.loads((TINY / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**given, **changes}))
    with pytest.raises(ModelError, match=re.escape(str(tmp_path / "tokenizer.json")) + f".*({message})") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "make", [samples.byte_level, samples.sentencepiece, samples.metaspace, samples.word_piece]
)
def test_usual_tokenizers_may_be_loaded(tmp_path: Path, make: Callable[[], tokenizers.Tokenizer]) -> None:
    check_tokenizer(samples.save(tmp_path, make()) / "tokenizer.json")


def test_a_decoder_is_tried_with_the_tokens_that_are_there(tmp_path: Path) -> None:
    given = json.loads((TINY / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**given, "decoder": strip(1, 1)}))
    check_tokenizer(tmp_path / "tokenizer.json")


def test_tokens_that_only_the_configuration_names_are_bounded_too(tmp_path: Path) -> None:
    first = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json")).get_vocab_size()
    (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    described = {str(first + i): {"content": f"<x{i}>"} for i in range(100_001)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": described}))
    with pytest.raises(ModelError, match="added_tokens_decoder must name at most 100000 tokens, got 100001"):
        load_tokenizer(tmp_path)


def test_thousands_of_control_tokens_are_found_the_longest_first() -> None:
    backend = samples.byte_level()
    texts = [*(f"<x{i}>" for i in range(10_000)), *("a" * n for n in range(1, 100)), "ab", "abc|d"]
    pattern = ControlTokens(backend, texts).pattern
    assert pattern.findall("<x17> <x17 <x9999>") == ["<x17>", "<x9999>"]
    assert pattern.findall("a" * 150) == ["a" * 99, "a" * 51]
    assert pattern.findall("abc|e abc|d") == ["ab", "abc|d"]
    assert all(pattern.fullmatch(text) for text in texts)


def test_no_token_is_longer_than_a_page() -> None:
    with pytest.raises(ModelError, match="tokens must have at most 1024 letters, got 2000"):
        Tokenizer(tokenizers.Tokenizer(tokenizers.models.WordLevel({"a" * 2000: 0}, unk_token="a")))


def test_pieces_of_gguf_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    tokens = {"tokenizer.ggml.tokens": ["a" * 2000], "tokenizer.ggml.token_type": [1]}
    write(path, {"general.architecture": "llama", "tokenizer.ggml.model": "llama", **tokens}, {})
    with pytest.raises(ModelError, match=r"tokenizer.ggml.tokens must have at most 1024 letters each, got 2000"):
        load_tokenizer(path)


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": read_json,
    "tokenizer.json": lambda path: load_tokenizer(path.parent),
    "additional_chat_templates/a.jinja": lambda path: load_tokenizer(path.parent.parent),
    "model.safetensors": lambda path: Checkpoint(path.parent),
    "model.safetensors.index.json": lambda path: Checkpoint(path.parent),
    "adapter_model.safetensors": lambda path: SafetensorsFile(path, mapped=False),
    "model.gguf": read_header,
}


@pytest.mark.parametrize("name", READERS)
def test_what_never_ends_is_no_file(tmp_path: Path, name: str) -> None:
    """A link to a device, and a pipe: reading one takes all memory, opening the other waits for ever."""
    if "jinja" in name:
        (tmp_path / name).parent.mkdir()
        (tmp_path / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    for make in (lambda path: path.symlink_to("/dev/zero"), os.mkfifo):
        make(tmp_path / name)
        with pytest.raises(ModelError, match=re.escape(name)):
            READERS[name](tmp_path / name)
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    ("name", "most"),
    [("config.json", MAX_JSON), ("tokenizer.json", MAX_BYTES), ("model.safetensors.index.json", MAX_BYTES)],
)
def test_a_file_of_text_that_is_too_large_is_not_read(tmp_path: Path, name: str, most: int) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(most + 1)
    with pytest.raises(ModelError, match=f"must have at most {most} bytes, got {most + 1}"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for i in range(10**9) %}a{% endfor %}", "at most 2 s|Range too big"),
        ("{{ 'a' * 10**10 }}", "memory"),
        ("{{ ('a' * 10**8)|length }}{{ ('a' * (2**24 + 1)) }}", "at most 16777216 characters"),
        ("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}", "recursion"),
        ("{% set x = namespace(a='a') %}{% for i in range(60) %}{% set x.a = x.a + x.a %}{% endfor %}", "memory"),
    ],
)
def test_a_template_ends_within_its_limits(source: str, message: str) -> None:
    """Either it does not compile, since constants are computed then, or it fails its request."""
    with pytest.raises((ModelError, InvalidRequest), match=message):
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "a"}])


UNREADABLE: dict[str, dict[str, Any]] = {
    "a wrong step": {"pre_tokenizer": "x"},
    "a wrong token": {"added_tokens": [{"id": "0", "content": "a"}]},
    "a number of 70 bits": {"truncation": {"max_length": 2**70}},
}


@pytest.mark.parametrize("changes", UNREADABLE.values(), ids=UNREADABLE)
def test_what_the_library_cannot_read_is_named_in_its_words(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], changes: dict[str, Any]
) -> None:
    given = json.loads((TINY / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps({**given, **changes}))
    with pytest.raises(ModelError, match="it must be a tokenizer that the library can read, got ") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
    assert "Traceback" not in capfd.readouterr().err
