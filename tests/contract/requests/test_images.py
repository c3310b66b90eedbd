"""Images in requests: their forms in a message, and what all forms of one image have in common."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest

from petiole.contract.requests import images
from petiole.contract.requests.generation import ChatRequest, in_json
from petiole.contract.requests.image_tasks import CaptionRequest, DetectRequest, PointRequest, QueryRequest
from petiole.contract.requests.images import View
from petiole.contract.requests.validation import validate
from petiole.contract.tasks import TASKS
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.submission.options import affinity_key, parse

DATA = b"\x89PNG of some kind"
TEXT = base64.b64encode(DATA).decode()
FORMS: dict[str, Any] = {
    "bytes": DATA,
    "bytearray": bytearray(DATA),
    "base64": TEXT,
    "data URL": f"data:image/png;base64,{TEXT}",
    "handle": images.handle_of(DATA),
}


@pytest.mark.parametrize("image", FORMS.values(), ids=FORMS)
def test_all_forms_of_an_image_go_into_a_message_and_have_one_affinity(image: Any) -> None:
    options = in_json({"image": image, "question": "What?"})
    json.dumps(options)
    request = validate(QueryRequest, options)
    expected = affinity_key(validate(QueryRequest, {"image": TEXT, "question": "Another?"}))
    assert affinity_key(request) == expected
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What?"}]
    chat = validate(ChatRequest, in_json({"messages": [{"role": "user", "content": parts}]}))
    assert affinity_key(chat) == expected
    assert affinity_key(validate(PointRequest, {"image": TEXT, "object": "a", "salt": "b"})) != expected


SPELLINGS: dict[str, Callable[[str], str]] = {
    "standard": lambda text: text,
    "lines": lambda text: in_lines(text, "\n"),
    "lines of DOS": lambda text: in_lines(text, "\r\n"),
    "a trailing newline": lambda text: text + "\n",
    "white space around": lambda text: f" \t{text}\r\n ",
    "a data URL": lambda text: f"data:image/png;base64,{text}",
    "DATA": lambda text: f"DATA:image/png;base64,{text}",
    "BASE64": lambda text: f"Data:IMAGE/PNG;BASE64,{text}",
    "a space behind the comma": lambda text: f"data:image/png;base64, {text}",
    "spaces around base64": lambda text: f"data:image/png; base64 ,{text}",
    "a parameter": lambda text: f"data:image/png;charset=utf-8;base64,{text}",
    "no type": lambda text: f"data:;base64,{text}",
    "a newline before data": lambda text: f"\ndata:image/png;base64,{text}\n",
    "a data URL in lines": lambda text: f"data:image/png;base64,\n{in_lines(text, chr(10))}",
    "a percent-encoded data URL": lambda text: f"data:image/png;base64,{quote(in_lines(text, chr(10)), safe='')}",
}


def in_lines(text: str, end: str) -> str:
    return "".join(text[at : at + 76] + end for at in range(0, len(text), 76))


@pytest.mark.parametrize("spell", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("n", [1, 2, 3, 256, 257, 258])
@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode], ids=["standard", "of URLs"])
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "unpadded"])
def test_base64_is_read_however_it_is_spelt(
    spell: Callable[[str], str], n: int, encode: Callable[[bytes], bytes], padded: bool
) -> None:
    """Both alphabets; with one, two and no characters of padding, which may be missing."""
    data = (b"\xfb\xff\xfe" + bytes(range(256)))[:n]
    text = encode(data).decode()
    image = spell(text if padded else text.rstrip("="))
    assert images.check("image", image) == image
    assert images.data_of("image", image) == data
    assert images.identity("image", image) == images.handle_of(data)


@pytest.mark.parametrize(
    "image",
    [
        "https://a.org/b",
        "abcde",
        "ab c d e",
        "ab=c",
        "=",
        "ab====",
        "petiole-image:xyz",
        "data:image/png,abc",
        3,
        ["a"],
        {},
        "ä" * 4,
        "\ud800",
    ],
)
@pytest.mark.parametrize("kind", [CaptionRequest, QueryRequest, PointRequest, DetectRequest])
def test_what_can_be_no_image_is_refused_by_name(kind: Any, image: Any) -> None:
    more = {QueryRequest: {"question": "a"}, PointRequest: {"object": "a"}, DetectRequest: {"object": "a"}}
    with pytest.raises(InvalidRequest) as caught:
        validate(kind, {"image": image, **more.get(kind, {})})
    assert caught.value.field == "image"


def test_an_image_part_of_a_conversation_becomes_a_bare_part_and_an_image() -> None:
    parts = [{"type": "image_url", "image_url": {"url": TEXT}}, {"type": "text", "text": "What?"}]
    request = validate(ChatRequest, {"messages": [{"role": "user", "content": parts}]})
    assert request.images() == [TEXT]
    assert request.subject()["messages"][0]["content"] == [{"type": "image"}, parts[1]]
    for bad in ({"type": "image"}, {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}):
        with pytest.raises(InvalidRequest) as caught:
            validate(ChatRequest, {"messages": [{"role": "user", "content": [bad]}]})
        assert caught.value.field == "messages[0].content[0]"


def test_the_text_of_a_conversation_is_limited_without_its_images() -> None:
    long = base64.b64encode(b"x" * 4_000_000).decode()
    parts = [{"type": "image", "image": long}, {"type": "text", "text": "What?"}]
    validate(ChatRequest, {"messages": [{"role": "user", "content": parts}]})


@pytest.mark.parametrize(
    ("task", "options", "expected"),
    [
        ("tasks.query", {"question": "Is it true? "}, {"question": "Is it true? a cat"}),
        ("tasks.query", {}, {"question": "a cat"}),
        ("tasks.point", {}, {"object": "a cat"}),
        ("tasks.detect", {}, {"object": "a cat"}),
    ],
)
def test_a_link_of_a_chain_gets_the_text_before_it(task: str, options: Any, expected: dict[str, str]) -> None:
    request = parse(task, [{"text": "a cat", "caption": "a cat"}], {"image": TEXT, **options})
    assert {name: getattr(request, name) for name in expected} == expected


def test_a_caption_takes_no_text() -> None:
    with pytest.raises(InvalidRequest, match="args"):
        parse("tasks.caption", ["a cat"], {"image": TEXT})


def test_each_skill_has_a_task() -> None:
    assert {task.name for task in TASKS.values()} - {"embed", "rerank", "score", "classify"} == {
        *("generate", "chat"),
        *("query", "caption", "point", "detect"),
    }


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "aGk=", "detail": "low", "max_pixels": 5000}},
        {"type": "image", "image": "aGk=", "detail": "low", "max_pixels": 5000},
        {"type": "image", "image": {"url": "aGk=", "detail": "low", "max_pixels": 5000}},
        {"type": "image", "image": {"url": b"hi", "detail": "low", "max_pixels": 5000}},
        {"type": "image", "image": b"hi", "detail": "low", "max_pixels": 5000},
        {"type": "input_image", "image_url": "aGk=", "detail": "low", "max_pixels": 5000},
        {"type": "image", "image": {"url": "aGk=", "detail": ""}, "detail": "low", "max_pixels": 5000},
    ],
)
def test_a_part_says_how_closely_its_image_is_seen(part: dict[str, Any]) -> None:
    usual = {"type": "image", "image": b"hi", "detail": "", "min_pixels": None}
    messages = [{"role": "user", "content": [part, usual, {"type": "text", "text": "What?"}]}]
    request = validate(ChatRequest, in_json({"messages": messages}))
    assert request.image_views() == [View("low", max_pixels=5000), View()]


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"detail": "most"}, "detail", "auto, low, high, got most"),
        ({"min_pixels": 0}, "min_pixels", "from 1 to 2147483648, got 0"),
        ({"max_pixels": 2**31 + 1}, "max_pixels", "from 1 to 2147483648, got 2147483649"),
        ({"max_pixels": True}, "max_pixels", "got True"),
        ({"max_pixels": 1e6}, "max_pixels", "got 1000000.0"),
        ({"min_pixels": 5, "max_pixels": 4}, "min_pixels", "at most 4, the max_pixels, got 5"),
    ],
)
def test_a_view_that_cannot_be_is_refused_by_field(given: dict[str, Any], field: str, said: str) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": b"hi", **given}]}]
    with pytest.raises(InvalidRequest, match=said) as caught:
        validate(ChatRequest, in_json({"messages": messages}))
    assert caught.value.field == f"messages[0].content[0].{field}"
