"""The page with models that see and that call tools: two of those that ship, each on a worker of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from petiole.tasks.fleet import models
from tests.gateway.conftest import REAL
from tests.gateway.page.test_browser import PATIENCE_MS, say, tune
from tests.support.gateway import Gateway
from tests.support.pictures import file
from tests.support.seeing import write_seeing
from tests.support.site import Site, eventually

pytestmark = pytest.mark.e2e

TOOLS, VISION, DRAWN = "petiole-tiny-tools", "petiole-tiny-vision", "drawn-eyes"
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 40}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def skilled(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """After `browser`: without one, no worker starts."""
    folder = tmp_path_factory.mktemp("skilled")
    write_seeing(folder / DRAWN, "qwen3-vl")
    with Site(folder, **REAL, PETIOLE_DTYPE="float32") as site:
        workers = [
            site.start_worker(PETIOLE_MODEL=TOOLS),
            site.start_worker("-Q", "pictures", PETIOLE_MODEL=VISION),
            site.start_worker("-Q", "drawn", PETIOLE_MODEL=folder / DRAWN, PETIOLE_SERVED_NAMES=DRAWN),
        ]
        for worker in workers:
            worker.ready()
        eventually(lambda: len(models.models(site.redis)) == 3, "the workers have said what they serve")
        with Gateway(folder, PETIOLE_BROKER_URL=site.url) as gateway:
            yield gateway


@pytest.fixture
def page(browser: Any, skilled: Gateway) -> Iterator[Any]:
    context = browser.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    page.goto(f"{skilled.root}/")
    page.locator(f"#model option[value='{VISION}']").wait_for(state="attached")
    yield page
    context.close()


def test_a_tool_that_a_model_calls_is_shown_and_answered_by_a_person(page: Any, skilled: Gateway) -> None:
    page.locator("#model").select_option(TOOLS)
    assert page.get_by_label("Add a picture").is_hidden(), "the model sees nothing"
    tune(page, temperature="0", tools=json.dumps([WEATHER]))
    page.get_by_label("Message", exact=True).last.fill("How warm is it in Rome?")
    page.keyboard.press("Enter")
    call = page.locator(".answer .call")
    result = call.get_by_label("Result of weather")
    result.wait_for()
    assert call.locator(".name").inner_text() == "weather"
    assert json.loads(call.locator("pre").inner_text()) == {"city": "Rome"}
    result.fill('{"celsius": 20}')
    result.press("Enter")
    answer = page.locator(".answer").nth(1)
    answer.locator(".facts").wait_for()
    assert answer.locator(".words").inner_text().strip() == "It is 20 degrees in Rome."
    page.reload()
    answer.locator(".facts").wait_for()
    assert json.loads(call.locator("pre").inner_text()) == {"city": "Rome"}
    assert call.locator("form").count() == 0
    assert call.locator(".note").inner_text() == 'Result: {"celsius": 20}'


def test_a_picture_is_sent_and_its_question_answered(page: Any, skilled: Gateway) -> None:
    page.locator("#model").select_option(VISION)
    attach = page.get_by_label("Add a picture")
    attach.wait_for()
    tune(page, temperature="0", max_output_tokens="20")
    pictures = [{"name": f"{n}.png", "mimeType": "image/png", "buffer": file(n, size=(2000, 900))} for n in (1, 2)]
    page.locator("#file").set_input_files(pictures)
    page.get_by_label("Remove this picture").nth(1).click()
    page.get_by_label("Remove this picture").nth(1).wait_for(state="detached")
    answer = say(page, "What is in this picture?")
    answer.locator(".facts").wait_for()
    shown = answer.locator(".words").inner_text().strip()
    assert page.locator(".said img").count() == 1
    assert page.locator("#pictures img").count() == 0
    talk = page.evaluate("Object.entries(localStorage).find(([key]) => key.startsWith('petiole.talk.'))[1]")
    name = json.loads(talk)["turns"][0]["answer"]["id"]
    found = httpx2.get(f"{skilled.url}/responses/{name}").json()
    assert found["model"] == VISION
    assert found["output"][0]["content"][0]["text"].strip() == shown
    [told] = httpx2.get(f"{skilled.url}/responses/{name}/input_items").json()["data"]
    image, text = told["content"]
    assert (image["type"], text["text"]) == ("input_image", "What is in this picture?")
    assert image["image_url"].startswith("data:image/png;base64,")
    answer.get_by_role("button", name="As curl").click()
    assert "…cut" in page.locator("#curl-ask").inner_text(), "no picture as text"
    page.keyboard.press("Escape")
    page.reload()
    answer.locator(".facts").wait_for()
    assert page.locator(".said img").evaluate("image => image.naturalWidth") > 0, "its thumbnail is kept"
    assert answer.get_by_role("button", name="Again").count() == 0, "the picture itself is not"


def test_several_pictures_are_sent_in_several_turns(page: Any, skilled: Gateway) -> None:
    """To a model in Qwen3-VL's form."""
    page.locator("#model").select_option(DRAWN)
    page.get_by_label("Add a picture").wait_for()
    tune(page, temperature="0", max_output_tokens="5")
    pictures = [{"name": f"{n}.png", "mimeType": "image/png", "buffer": file(n)} for n in range(3)]
    sizes = []
    for given, question in ((pictures[:2], "Which?"), (pictures[2:], "And now?")):
        page.locator("#file").set_input_files(given)
        page.locator("#pictures img").nth(len(given) - 1).wait_for()
        say(page, question).locator(".facts").wait_for()
        talk = page.evaluate("Object.entries(localStorage).find(([key]) => key.startsWith('petiole.talk.'))[1]")
        found = httpx2.get(f"{skilled.url}/responses/{json.loads(talk)['turns'][-1]['answer']['id']}").json()
        assert (found["model"], found["status"]) == (DRAWN, "incomplete")
        sizes.append(found["usage"]["input_tokens"])
    first = httpx2.get(f"{skilled.url}/responses/{found['previous_response_id']}/input_items").json()["data"]
    assert [part["type"] for part in first[0]["content"]] == ["input_image", "input_image", "input_text"]
    assert page.locator(".said img").count() == 3
    assert sizes[1] > sizes[0] + 12, "the second turn sees the third picture, too"
