"""Videos in conversations: files and lists of frames, in the spellings of clients."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from petiole.contract.requests import images
from petiole.contract.requests.generation import ChatRequest, in_json
from petiole.contract.requests.images import View
from petiole.contract.requests.validation import validate
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.submission.options import affinity_key

FRAMES = [b"a frame", b"another", b"a third one"]
TEXTS = [base64.b64encode(frame).decode() for frame in FRAMES]


def chat(*parts: Any) -> ChatRequest:
    return validate(ChatRequest, in_json({"messages": [{"role": "user", "content": list(parts)}]}))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video", "video": FRAMES, "fps": 4},
        {"type": "video", "video": TEXTS, "fps": 4},
        {"type": "video", "video": [f"data:image/jpeg;base64,{text}" for text in TEXTS], "fps": 4},
        {"type": "video", "video": [FRAMES[0], *map(images.handle_of, FRAMES[1:])], "fps": 4},
        {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(TEXTS)}", "fps": 4}},
    ],
)
def test_a_list_of_frames_in_each_form(part: dict[str, Any]) -> None:
    request = chat({"type": "text", "text": "What?"}, part, {"type": "image", "image": FRAMES[1]})
    json.dumps(in_json({"messages": [{"role": "user", "content": [part]}]}))
    handles = [images.identity("image", one) for one in request.images()]
    assert handles == [*map(images.handle_of, FRAMES), images.handle_of(FRAMES[1])]
    assert request.image_views() == [View(fps=4)] * 3 + [View()]
    (message,) = request.subject()["messages"]
    assert message["content"] == [
        {"type": "text", "text": "What?"},
        {"type": "video", "frames": 3},
        {"type": "image"},
    ]
    assert affinity_key(request)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "video", "video": b"a film"},
        {
            "type": "video_url",
            "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(b'a film').decode()}"},
        },
        {"type": "video_url", "video_url": images.handle_of(b"a film")},
    ],
)
def test_a_file_in_each_form(part: dict[str, Any]) -> None:
    request = chat(part)
    assert [images.identity("image", one) for one in request.images()] == [images.handle_of(b"a film")]
    assert request.subject()["messages"][0]["content"] == [{"type": "video"}]
    assert request.image_views() == [View()]


@pytest.mark.parametrize(
    ("part", "field", "limit"),
    [
        ({"type": "video", "video": FRAMES[:1]}, ".video", "2 to 1024 frames, got 1"),
        ({"type": "video", "video": []}, ".video", "2 to 1024 frames, got 0"),
        ({"type": "video", "video": TEXTS * 400}, ".video", "2 to 1024 frames, got 1200"),
        ({"type": "video", "video": FRAMES * 400}, ".video", "2 to 1024 frames, got 1025"),
        ({"type": "video", "video": [TEXTS[0], 5]}, ".video[1]", "must be the bytes of a file"),
        ({"type": "video", "video": [TEXTS[0], "%"]}, ".video[1]", "must be the bytes of a file"),
        ({"type": "video", "video": 5}, "", "must be the bytes of a file"),
        ({"type": "video"}, "", "must be the bytes of a file"),
        ({"type": "video", "video": FRAMES, "fps": 0}, ".fps", "above 0, at most 240, got 0"),
        ({"type": "video", "video": FRAMES, "fps": 241}, ".fps", "above 0, at most 240, got 241"),
        ({"type": "video", "video": FRAMES, "fps": True}, ".fps", "above 0, at most 240"),
        ({"type": "video", "video": FRAMES, "fps": "2"}, ".fps", "above 0, at most 240"),
        ({"type": "video", "video": FRAMES, "fps": float("nan")}, ".fps", "above 0, at most 240"),
        ({"type": "video", "video": FRAMES, "detail": "low"}, ".detail", "it is of images"),
        ({"type": "video", "video": FRAMES, "max_pixels": 0}, ".max_pixels", "must be a number from 1"),
        ({"type": "image", "image": FRAMES[0], "fps": 2}, ".fps", "it is of videos"),
    ],
)
def test_what_cannot_be_a_video_is_refused_by_its_field(part: dict[str, Any], field: str, limit: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat({"type": "text", "text": "a"}, part)
    assert caught.value.field == f"messages[0].content[1]{field}"
    assert limit in str(caught.value)
