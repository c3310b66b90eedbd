"""Videos in conversations, as clients of vLLM and of Qwen's service write them."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.contract.requests.generation import ChatRequest
from petiole.contract.requests.images import View
from petiole.contract.requests.validation import validate
from petiole.gateway.core.foreign import spellings
from petiole.gateway.openai.conversation import messages, to_fetch
from petiole.tasks.errors import InvalidRequest

FILM, FRAME = "data:video/mp4;base64,AAAA", "data:image/jpeg;base64,AAAA"


def talk(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What?"}, *parts]}]


def taken(part: dict[str, Any], fetched: Any = None, **view: Any) -> ChatRequest:
    given = messages(talk(part), fetched or {}, spellings.view(view))
    return validate(ChatRequest, {"messages": given})


@pytest.mark.parametrize(
    ("part", "n", "view"),
    [
        ({"type": "video_url", "video_url": {"url": FILM}}, 1, View()),
        ({"type": "video_url", "video_url": FILM}, 1, View()),
        ({"type": "video_url", "video_url": {"url": FILM, "fps": 3}}, 1, View(fps=3)),
        ({"type": "video", "video": FILM, "fps": 0.5}, 1, View(fps=0.5)),
        ({"type": "video", "video": [FRAME] * 3, "max_pixels": 9000}, 3, View(max_pixels=9000)),
        ({"type": "video_url", "video_url": {"url": "data:video/jpeg;base64,AAAA,AAAA"}}, 2, View()),
    ],
)
def test_videos_are_taken(part: dict[str, Any], n: int, view: View) -> None:
    asked = taken(part)
    assert (len(asked.images()), asked.image_views()) == (n, [view] * n)


def test_what_is_said_of_all_is_said_of_each_as_far_as_it_can_be() -> None:
    more = {"fps": 4, "max_pixels": 9000}
    assert (
        taken({"type": "video", "video": [FRAME] * 2}, **more).image_views() == [View(max_pixels=9000, fps=4)] * 2
    )
    assert taken({"type": "image_url", "image_url": {"url": FRAME}}, **more).image_views() == [
        View(max_pixels=9000)
    ]


def test_frames_may_be_addresses_and_files_may_not() -> None:
    far = ["https://a.example/1.png", "https://a.example/2.png"]
    part = {"type": "video", "video": far}
    assert to_fetch(talk(part)) == [(f"messages[0].content[1].video[{k}]", url) for k, url in enumerate(far)]
    assert taken(part, dict.fromkeys(far, FRAME)).images() == [FRAME] * 2
    film = {"type": "video_url", "video_url": {"url": "https://a.example/film.mp4"}}
    assert to_fetch(talk(film)) == []


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "video_url", "video_url": {"url": "https://a.example/film.mp4"}}, ".video_url.url"),
        ({"type": "video", "video": [FRAME, "https://a.example/1.png"]}, ".video[1]"),
        ({"type": "video", "video": [FRAME, 5]}, ""),
        ({"type": "video_url"}, ""),
        ({"type": "video", "video": [FRAME] * 2, "fps": -1}, ".fps"),
        ({"type": "image_url", "image_url": {"url": FRAME, "fps": 2}}, ".image_url.fps"),
    ],
)
def test_what_cannot_be_a_video_is_refused_by_its_field(part: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        taken(part)
    assert caught.value.field == f"messages[0].content[1]{field}"
