"""Pictures in conversations through Celery and the gateway, with a small model in Qwen3-VL's form; deaths among
them. `tests/gpu_worker/models/vision` compares it with transformers."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from petiole.contract.requests.images import handle_of
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.wire.keys import image_key
from tests.support.gateway import Gateway
from tests.support.nursery import petiole
from tests.support.seeing import as_file, drawn_film, drawn_picture, write_seeing
from tests.support.site import Site, eventually

FILES = [as_file(drawn_picture(170, 100)), as_file(drawn_picture(64, 64, seed=1))]
DATA = [base64.b64encode(one).decode() for one in FILES]
URLS = [f"data:image/png;base64,{one}" for one in DATA]
PARTS = [{"type": "image_url", "image_url": {"url": url}} for url in URLS]
QUESTION = [{"role": "user", "content": [PARTS[0], {"type": "text", "text": "Which?"}, PARTS[1]]}]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("sight")
    write_seeing(folder / "model", "qwen3-vl")
    engine = {
        "PETIOLE_ENGINE_FACTORY": "tests.support.mortal_engine:MortalEngine",
        "PETIOLE_MODEL": folder / "model",
        "PETIOLE_DEVICE": "cpu",
        "PETIOLE_DTYPE": "float32",
        "PETIOLE_MAX_MODEL_LEN": 512,
        "PETIOLE_NUM_PAGES": 2000,
        "PETIOLE_NUM_THREADS": 1,
        "PETIOLE_CHUNK_SIZE": 8,
        "PETIOLE_STREAM_INTERVAL_MS": 0,
        "PETIOLE_DEATHS": folder,
        "PETIOLE_VISIBILITY_TIMEOUT_S": 2,
        "PETIOLE_DRAIN_SECONDS": 0,
    }
    with Site(folder, **engine) as site:
        for worker in [site.start_worker(), site.start_worker()]:
            worker.ready()
        yield site


@pytest.fixture(scope="module")
def gateway(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    (folder / "files").mkdir()
    with Gateway(folder, PETIOLE_BROKER_URL=site.url, PETIOLE_GATEWAY_FILES=folder / "files") as gateway:
        yield gateway


@pytest.fixture(scope="module")
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=gateway.url, api_key="none", max_retries=0) as client:
        eventually(lambda: list(client.models.list()), "a model")
        yield client


@pytest.fixture
def name(client: openai.OpenAI) -> str:
    """The model's."""
    return next(one.id for one in client.models.list())


def send(site: Site, task: str, submission: dict[str, Any] | None = None, **options: Any) -> Any:
    return site.app.send_task(f"tasks.{task}", kwargs={"affinity": None, **options}, **(submission or {}))


def chat(site: Site, task_id: str, **more: Any) -> Any:
    options: dict[str, Any] = {"messages": QUESTION, "max_tokens": 12, "seed": 5, "ignore_eos": True, **more}
    return send(site, "chat", {"task_id": task_id}, **options)


def test_a_conversation_with_two_pictures_is_streamed_and_answered(site: Site) -> None:
    task = chat(site, "plain")
    value = site.get(task)
    assert value["usage"]["prompt_tokens"] > 19
    assert value["token_ids"] == site.tokens(task)
    assert value["text"] == "".join(delta["text"] for delta in site.log(task))
    site.redis.set(image_key(handle_of(FILES[0])), FILES[0])
    named = [{"type": "image", "image": handle_of(FILES[0])}, *QUESTION[0]["content"][1:]]
    again = chat(site, "named", messages=[{"role": "user", "content": named}])
    assert site.get(again)["token_ids"] == value["token_ids"]


@pytest.mark.parametrize("n", [1, 6])
def test_it_goes_on_where_its_worker_died(site: Site, n: int) -> None:
    """Its first picture has fewer pixels than usual, on the second worker, too."""
    image, *rest = QUESTION[0]["content"]
    messages = [{"role": "user", "content": [{**image, "max_pixels": 9000}, *rest]}]
    whole = site.get(chat(site, f"whole-{n}", messages=messages))
    doomed = chat(site, f"die-{n}-sight", messages=messages)
    again = site.get(doomed)
    site.start_worker()  # in place of the one that has died
    assert again["attempt"] == 2
    assert again["token_ids"] == site.tokens(doomed) == whole["token_ids"]
    usual = site.get(chat(site, f"usual-{n}"))["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"] < usual


def test_skills_are_answered(site: Site) -> None:
    asked = site.get(send(site, "query", image=DATA[0], question="What?", max_tokens=5, temperature=0))
    assert asked["answer"] == asked["text"]
    described = site.get(send(site, "caption", image=DATA[0], length="short", max_tokens=5))
    assert described["caption"] == described["text"]
    found = site.get(send(site, "detect", image=DATA[0], object="cat", max_objects=2))["objects"]
    assert len(found) <= 2
    assert all(0 <= share <= 1 for box in found for share in box.values())
    for task, options, field in (
        ("detect", {"image": DATA[0], "object": "cat " * 900}, "object"),
        ("query", {"image": base64.b64encode(FILES[0][:99]).decode(), "question": "a"}, "image"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            send(site, task, **options).get(timeout=60)
        assert caught.value.field == field


def test_clients_of_both_interfaces_send_pictures(client: openai.OpenAI, gateway: Gateway, name: str) -> None:
    first = client.chat.completions.create(model=name, messages=QUESTION, max_tokens=6, temperature=0)  # type: ignore[call-overload]
    source = [{"type": "base64", "media_type": "image/png", "data": one} for one in DATA]
    blocks = [
        {"type": "image", "source": source[0]},
        {"type": "text", "text": "Which?"},
        {"type": "image", "source": source[1]},
    ]
    claude = anthropic.Anthropic(base_url=gateway.root, api_key="none")
    second = claude.messages.create(
        model=name,
        messages=[{"role": "user", "content": blocks}],  # type: ignore[typeddict-item]
        max_tokens=6,
        extra_body={"temperature": 0},
    )
    assert second.content[0].text == first.choices[0].message.content  # type: ignore[union-attr]
    assert second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0) == first.usage.prompt_tokens


FRAMES = [base64.b64encode(as_file(drawn_picture(96, 64, seed=k))).decode() for k in range(5)]


def test_clients_send_videos(site: Site, client: openai.OpenAI, name: str) -> None:
    """As frames and as a file. What is bad is refused by its field."""
    film = base64.b64encode(drawn_film(frames=20, rate=4)).decode()
    said: dict[str, Any] = {"type": "text", "text": "What?"}

    def answered(part: dict[str, Any], **more: Any) -> Any:
        messages: Any = [{"role": "user", "content": [part, said]}]
        return client.chat.completions.create(model=name, messages=messages, max_tokens=4, temperature=0, **more)

    frames: dict[str, Any] = {
        "type": "video",
        "video": [f"data:image/png;base64,{one}" for one in FRAMES],
        "fps": 2,
    }
    joined = {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{','.join(FRAMES)}"}}
    first, second = answered(frames), answered(joined)
    assert first.choices[0].message.content == second.choices[0].message.content
    own = [{"type": "video", "video": FRAMES}, said]
    task = send(site, "chat", messages=[{"role": "user", "content": own}], max_tokens=4, temperature=0)
    assert site.get(task)["usage"]["prompt_tokens"] == first.usage.prompt_tokens
    url = f"data:video/mp4;base64,{film}"
    usual, few = (
        answered({"type": "video_url", "video_url": {"url": url, "fps": fps}}).usage.prompt_tokens
        for fps in (2, 1)
    )
    assert few < usual
    for part, field in (
        ({**frames, "fps": 0}, "messages[0].content[0].fps"),
        ({**frames, "video": frames["video"][:1]}, "messages[0].content[0].video"),
        ({"type": "video_url", "video_url": {"url": url[: len(url) // 8 * 4]}}, "messages[0].content[0]"),
        (
            {"type": "video_url", "video_url": {"url": "https://a.example/b.mp4"}},
            "messages[0].content[0].video_url.url",
        ),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            answered(part)
        assert caught.value.param == field


def test_a_video_goes_on_where_its_worker_died(site: Site) -> None:
    messages = [
        {"role": "user", "content": [{"type": "video", "video": FRAMES, "fps": 1}, {"type": "text", "text": "?"}]}
    ]
    whole = site.get(chat(site, "whole-film", messages=messages))
    doomed = chat(site, "die-5-film", messages=messages)
    again = site.get(doomed)
    site.start_worker()  # in place of the one that has died
    assert again["attempt"] == 2
    assert again["token_ids"] == site.tokens(doomed) == whole["token_ids"]


def test_a_request_says_how_many_pixels_its_pictures_have(client: openai.OpenAI, name: str) -> None:
    asked: dict[str, Any] = {"model": name, "messages": QUESTION, "max_tokens": 2}
    usual = client.chat.completions.create(**asked)
    few = client.chat.completions.create(**asked, extra_body={"mm_processor_kwargs": {"max_pixels": 4096}})
    assert few.usage.prompt_tokens < usual.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="at least 1024, the pixels of a token, got 9"):
        client.chat.completions.create(**asked, extra_body={"mm_processor_kwargs": {"max_pixels": 9}})


@pytest.mark.parametrize(
    ("part", "asked"),
    [
        ({}, {}),
        ({"detail": "low"}, {}),
        ({"max_pixels": 9000}, {}),
        ({}, {"mm_processor_kwargs": {"max_pixels": 4096}}),
    ],
)
def test_a_count_is_that_of_the_prompt(
    client: openai.OpenAI, gateway: Gateway, name: str, part: dict[str, Any], asked: dict[str, Any]
) -> None:
    large = base64.b64encode(as_file(drawn_picture(560, 520))).decode()  # more than low detail has
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{large}", **part}}
    messages: Any = [{"role": "user", "content": [image]}]
    answer = client.chat.completions.create(model=name, messages=messages, max_tokens=1, extra_body=asked)
    body = {"model": name, "messages": messages, **asked}
    counted = httpx2.post(f"{gateway.root}/tokenize", json=body, timeout=60).json()
    assert counted["count"] == answer.usage.prompt_tokens  # type: ignore[union-attr]
    assert (counted["count"] > 280) == (not part and not asked)


def test_a_response_and_the_turn_behind_it_see_the_pictures(client: openai.OpenAI, name: str) -> None:
    content = [
        {"type": "input_image", "image_url": URLS[0], "detail": "auto"},
        {"type": "input_text", "text": "Which?"},
        {"type": "input_image", "image_url": URLS[1], "detail": "low"},
    ]
    asked: dict[str, Any] = {"model": name, "max_output_tokens": 6, "temperature": 0}
    first = client.responses.create(input=[{"type": "message", "role": "user", "content": content}], **asked)  # type: ignore[list-item,misc]
    as_chat = client.chat.completions.create(model=name, messages=QUESTION, max_tokens=6, temperature=0)  # type: ignore[call-overload]
    assert first.output_text == as_chat.choices[0].message.content
    assert first.usage.input_tokens == as_chat.usage.prompt_tokens
    second = client.responses.create(previous_response_id=first.id, input="And now?", **asked)
    assert second.usage.input_tokens > first.usage.input_tokens + 6
    told: Any = [{"role": "user", "content": content}]
    *_, last = client.responses.create(input=told, stream=True, **asked)
    assert last.response.output_text == first.output_text


def test_rows_of_a_batch_have_pictures(site: Site, tmp_path: Path) -> None:
    site.redis.set(image_key(handle_of(FILES[0])), FILES[0])
    known, asked = handle_of(FILES[0]), {"max_tokens": 6, "temperature": 0}
    rows = [
        {"task": "chat", "messages": QUESTION, **asked},
        {"task": "chat", "messages": [{"role": "user", "content": [{"type": "image", "image": known}]}], **asked},
        {"task": "query", "image": DATA[0], "question": "What?", **asked},
        {"task": "query", "image": "https://example.org/a.png", "question": "What?", **asked},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = petiole("batch", f"{tmp_path}/in.jsonl", "-o", f"{tmp_path}/out.jsonl", **site.environment)
    assert done.returncode == 1, done.stderr
    two, one, answer, refused = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert two["text"] == site.get(send(site, "chat", messages=QUESTION, **asked))["text"]
    assert two["usage"]["prompt_tokens"] > one["usage"]["prompt_tokens"] > 15
    assert answer["answer"] == answer["text"]
    assert refused["error"]["message"].startswith("image: must be the bytes of a file")


def test_rows_of_a_batch_over_http_have_pictures(client: openai.OpenAI, name: str) -> None:
    body: dict[str, Any] = {"model": name, "messages": QUESTION, "max_tokens": 6, "temperature": 0}
    elsewhere = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/a"}}]}
    ]
    url = "/v1/chat/completions"
    lines = [
        {"custom_id": k, "method": "POST", "url": url, "body": row}
        for k, row in {"seen": body, "refused": {**body, "messages": elsewhere}}.items()
    ]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    begun = client.batches.create(input_file_id=file.id, endpoint=url, completion_window="24h")

    def done() -> openai.types.Batch | None:
        now = client.batches.retrieve(begun.id)
        return now if now.status in ("completed", "failed") else None

    ended = eventually(done, "the batch has ended")
    assert ended.output_file_id is not None, ended
    assert ended.error_file_id is not None, ended
    seen, refused = (
        json.loads(client.files.content(one).text) for one in (ended.output_file_id, ended.error_file_id)
    )
    expected = client.chat.completions.create(**body)
    assert seen["response"]["body"]["choices"][0]["message"]["content"] == expected.choices[0].message.content
    assert seen["response"]["body"]["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert "data URLs" in json.dumps(refused)
