"""Skills through Celery with the small vision model: form, streams, handles, deaths; not if answers are right."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.contract.requests import images
from petiole.contract.results.task_result import GenerationResult
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.wire.keys import image_key
from tests.support.pictures import MODEL, file
from tests.support.site import REPOSITORY, Site
from tests.support.trials import rest

ENGINE = {
    "PETIOLE_ENGINE_FACTORY": "tests.support.mortal_engine:MortalEngine",
    "PETIOLE_MODEL": MODEL,
    "PETIOLE_DEVICE": "cpu",
    "PETIOLE_DTYPE": "float32",
    "PETIOLE_NUM_PAGES": "4000",
    "PETIOLE_NUM_THREADS": "1",
    "PETIOLE_STREAM_INTERVAL_MS": "0",
}
PICTURE = base64.b64encode(file(3)).decode()
BOMB = file(3, "JPEG", progressive=True)
BOMB = BOMB[:-2] + BOMB[BOMB.rindex(b"\xff\xda") : -2] * 1000
"""A thousand scans."""
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "query": ("query", {"question": "Is there a circle?"}),
    "reasoning": ("query", {"question": "How many?", "reasoning": True, "max_tokens": 30, "temperature": 0.9}),
    "caption": ("caption", {"length": "long"}),
    "point": ("point", {"object": "shape", "max_objects": 6}),
    "detect": ("detect", {"object": "shape", "max_objects": 6}),
}
FIELDS = {
    "query": {"answer"},
    "reasoning": {"answer", "reasoning"},
    "caption": {"caption"},
    "point": {"points"},
    "detect": {"objects"},
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("vision")
    more = {"PETIOLE_DEATHS": folder, "PETIOLE_VISIBILITY_TIMEOUT_S": 2, "PETIOLE_DRAIN_SECONDS": 0}
    with Site(folder, **ENGINE, **more) as site:
        for worker in [site.start_worker(), site.start_worker()]:
            worker.ready()
        yield site


def send(site: Site, name: str, submission: dict[str, Any] | None = None, **more: Any) -> Any:
    task, options = CALLS[name]
    kwargs = {"image": PICTURE, "affinity": None, **options, **more}
    return site.app.send_task(f"tasks.{task}", kwargs=kwargs, **(submission or {}))


def answer(value: dict[str, Any]) -> dict[str, Any]:
    return {name: value[name] for name in ("answer", "reasoning", "caption", "points", "objects") if name in value}


@pytest.mark.parametrize("name", CALLS)
def test_a_skill_answers_as_it_has_streamed(site: Site, name: str) -> None:
    task = send(site, name, {"task_id": f"plain-{name}"})
    value = site.get(task)
    log = site.log(task)
    assert set(answer(value)) == FIELDS[name]
    assert value["token_ids"] == site.tokens(task)
    assert value["text"] == "".join(delta["text"] for delta in log)
    items = [item for delta in log for item in delta.get("items") or () if item is not None]
    assert items == value.get("points", value.get("objects", []))
    assert GenerationResult.model_validate(value).usage.prompt_tokens > 82


DEATHS = [("query", 1), ("reasoning", 7), ("caption", 3), ("point", 1), ("detect", 2)]


@pytest.mark.parametrize(("name", "n"), rest(DEATHS))
def test_it_goes_on_bin_for_bin_where_its_worker_died(site: Site, name: str, n: int) -> None:
    """Behind `n` tokens: between x and y of a point, between y and the size of a box. The seed is given, so that
    each run draws the same. `tests/gpu_worker/engine/test_skills.py` interrupts at every token."""
    more = {} if name in ("point", "detect") else {"seed": 11}
    whole = send(site, name, {"task_id": f"whole-{name}"}, **more)
    value = site.get(whole)
    doomed = send(site, name, {"task_id": f"die-{n}-{name}"}, **more)
    again = site.get(doomed)
    site.start_worker()  # in place of the one that has died
    assert again["attempt"] == 2
    assert answer(again) == answer(value)
    assert again["token_ids"] == site.tokens(doomed) == value["token_ids"]
    assert together(site, doomed, "bins") == together(site, whole, "bins")
    assert together(site, doomed, "items") == together(site, whole, "items")


def together(site: Site, task: Any, field: str) -> list[Any]:
    found: list[Any] = []
    for delta in site.log(task):
        found += delta.get(field) or [None] * len(delta["token_ids"])
    return found


APPLICATION = """
import asyncio, json, sys
from petiole import caption, chat, detect, point, put_image, query, InvalidRequest

photo = open(sys.argv[1], "rb").read()
handle = put_image(photo)
assert handle == put_image(photo)
given = query.delay(image=photo, question="Is there a circle?", temperature=0).get(timeout=60)
named = query.delay(image=handle, question="Is there a circle?", temperature=0).get(timeout=60)
url = "data:image/png;base64," + __import__("base64").b64encode(photo).decode()
urled = query.delay(image=url, question="Is there a circle?", temperature=0).get(timeout=60)
assert given["answer"] == named["answer"] == urled["answer"], (given, named, urled)
assert named["usage"]["cached_prompt_tokens"] > 82, "a cached image"
parts = [{"type": "image", "image": photo}, {"type": "text", "text": "Is there a circle?"}]
talked = chat.delay(messages=[{"role": "user", "content": parts}], temperature=0).get(timeout=60)
assert talked["answer"] == given["answer"]
with detect.stream(image=handle, object="shape") as deltas:
    boxes = [box for delta in deltas for box in delta.objects]
    assert boxes == deltas.result.get()["objects"]

async def points():
    return [one async for delta in point.astream(image=handle, object="shape") for one in delta.points]

assert asyncio.run(points()) == point.delay(image=handle, object="shape").get(timeout=60)["points"]
assert query.delay(question="Is there a circle?").get(timeout=60)["answer"] is not None
said = (caption.s(image=handle, temperature=0) | query.s(question="Is it true? ")).delay().get(timeout=60)
for wrong in ({"image": b""}, {"image": "https://example.org/a.png"}, {"image": 3}, {}):
    try:
        caption.delay(**wrong).get(timeout=60)
    except InvalidRequest as error:
        print(error.field)
"""


def test_an_application_asks_with_bytes_handles_and_urls(site: Site, tmp_path: Path) -> None:
    """It needs no imaging library: Pillow cannot be imported there."""
    (tmp_path / "photo.png").write_bytes(file(5))
    code = 'import sys; sys.modules["PIL"] = None\n' + APPLICATION
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "photo.png")],
        env={"PETIOLE_BROKER_URL": site.url, "PATH": "", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["image"] * 4


def test_what_is_bad_is_refused_by_name_and_the_worker_lives(site: Site) -> None:
    expired = images.handle_of(b"nobody has put this")
    two = [{"type": "image", "image": PICTURE}] * 2 + [{"type": "text", "text": "Is it?"}]
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("caption", {"image": base64.b64encode(b"no picture at all").decode()}, "image"),
        ("caption", {"image": base64.b64encode(file(3)[:300]).decode()}, "image"),
        ("caption", {"image": base64.b64encode(BOMB).decode()}, "image"),
        ("caption", {"image": expired}, "image"),
        ("caption", {"image": "https://example.org/a.png"}, "image"),
        ("caption", {"image": PICTURE, "length": "huge"}, "length"),
        ("detect", {"image": PICTURE, "object": "shape", "max_objects": 0}, "max_objects"),
        ("detect", {"image": PICTURE, "object": "shape" * 600}, "object"),
        ("query", {"image": PICTURE}, "question"),
        ("query", {"image": [PICTURE, PICTURE], "question": "Is it?"}, "image"),
        ("chat", {"messages": [{"role": "user", "content": two}]}, "messages[0].content"),
        ("chat", {"messages": [{"role": "system", "content": "Be brief."}]}, "messages"),
        ("generate", {"prompt": "A picture of", "adapter": "someone/adapter"}, "adapter"),
        ("chat", {"messages": [{"role": "user", "content": "Is it?"}], "adapter": "/an/adapter"}, "adapter"),
        ("query", {"image": PICTURE, "question": "Is it?", "adapter": "/an/adapter"}, "adapter"),
    ]
    sent = [site.app.send_task(f"tasks.{task}", kwargs=kwargs) for task, kwargs, _ in cases]
    for result, (task, kwargs, field) in zip(sent, cases, strict=True):
        with pytest.raises(InvalidRequest) as caught:
            site.get(result)
        assert caught.value.field == field, (task, json.dumps(kwargs)[:100], caught.value)
    assert set(answer(site.get(send(site, "point")))) == {"points"}
    assert all("Traceback" not in worker.output for worker in site.workers)


def test_a_model_of_text_has_no_skills(site: Site) -> None:
    queue = {"queue": "text"}
    text = site.start_worker(PETIOLE_MODEL="petiole-tiny", PETIOLE_QUEUE="text", PETIOLE_NUM_PAGES=600).ready()
    parts = [{"type": "image_url", "image_url": {"url": PICTURE}}, {"type": "text", "text": "Is it?"}]
    sent = [
        ("skill", send(site, "query", queue)),
        ("skill", send(site, "detect", queue)),
        (
            "messages[0].content[0]",
            site.app.send_task(
                "tasks.chat", kwargs={"messages": [{"role": "user", "content": parts}]}, queue="text"
            ),
        ),
    ]
    for field, result in sent:
        with pytest.raises(InvalidRequest) as caught:
            site.get(result)
        assert caught.value.field == field
        assert ("queue=" in str(caught.value)) == (field == "skill")
    text.stop()
    site.workers.remove(text)


def test_images_of_handles_are_kept_for_some_time_after_their_use(site: Site) -> None:
    handle = images.handle_of(file(8))
    site.redis.set(image_key(handle), file(8), ex=60)
    site.get(send(site, "query", image=handle))
    assert site.redis.ttl(image_key(handle)) > 3000


def test_a_count_sees_pictures_as_a_conversation_does(site: Site) -> None:
    """One in the message, and one by its handle. A handle of nothing is named."""
    handle = images.handle_of(file(4))
    site.redis.set(image_key(handle), file(4), ex=60)
    for picture in (PICTURE, handle):
        content = [{"type": "image", "image": picture}, {"type": "text", "text": "How many?"}]
        messages = [{"role": "user", "content": content}]
        counted = site.app.send_task("tasks.count", kwargs={"messages": messages}, queue="petiole.count")
        chat = site.app.send_task("tasks.chat", kwargs={"messages": messages, "max_tokens": 1})
        assert counted.get(timeout=60)["counts"] == [site.get(chat)["usage"]["prompt_tokens"]]
    content[0]["image"] = images.handle_of(b"nobody has put this")
    lost = site.app.send_task("tasks.count", kwargs={"messages": messages}, queue="petiole.count")
    with pytest.raises(InvalidRequest, match="image"):
        lost.get(timeout=60)
