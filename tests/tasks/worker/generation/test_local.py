"""Eager tasks run the engine here."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from petiole.gpu_worker.exceptions import InvalidRequest as InvalidEngine
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.settings import Settings, settings
from petiole.tasks.submission.definitions import generate
from petiole.tasks.worker.generation import local
from petiole.tasks.worker.generation.engines import make_engine
from petiole.tasks.worker.reports import inspection


@pytest.fixture(autouse=True)
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PETIOLE_ENGINE_FACTORY", "tests.support.fake_engine:FakeEngine")
    settings.cache_clear()
    monkeypatch.setattr(local, "_engines", [])
    yield
    for engine in local._engines:
        engine.shutdown(drain=False)
    settings.cache_clear()


def test_apply_generates_in_this_process() -> None:
    from tests.support.fake_engine import expected

    result = generate.apply(kwargs={"prompt": "hello", "max_tokens": 3, "seed": 1})
    assert result.get()["token_ids"] == expected("hello", 1, 3)


@pytest.mark.parametrize("factory", ["gpu_worker", "gpu_worker:nothing", "gpu_worker:__name__"])
def test_an_engine_that_is_not_there_is_refused_by_name(factory: str) -> None:
    with pytest.raises(InvalidEngine, match="engine_factory: must be module:callable"):
        make_engine(Settings(engine_factory=factory))


def test_bad_options_fail_as_in_a_worker() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens"):
        generate.apply(kwargs={"prompt": "hello", "max_tokens": 0}).get()
    with pytest.raises(InvalidRequest, match="at most"):
        generate.apply(kwargs={"prompt": "hello", "max_tokens": 10**6}).get()


def test_a_trace_shows_what_host_and_device_did(tmp_path: Path) -> None:
    inspection.trace(str(tmp_path / "steps.json"), requests=2, tokens=3)
    spans = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    names = {span["name"].split()[0] for span in spans}
    assert {"plan", "launch", "prefill", "decode", "copy", "commit"} <= names
    histories = [span["args"]["history"] for span in spans if span["name"].endswith(" ended")]
    assert len(histories) == 2
    assert all("schedule_prefill@" in history and "apply_decode@" in history for history in histories)


def test_an_eager_skill_sees_its_image(monkeypatch: pytest.MonkeyPatch) -> None:
    from petiole.tasks.submission.definitions import detect
    from tests.support.pictures import MODEL, file

    monkeypatch.setenv("PETIOLE_ENGINE_FACTORY", "petiole.gpu_worker.engine:Engine")
    monkeypatch.setenv("PETIOLE_MODEL", MODEL)
    monkeypatch.setenv("PETIOLE_NUM_PAGES", "1000")
    settings.cache_clear()
    value = detect.apply(kwargs={"image": file(), "object": "shape"}).get()
    assert value["usage"]["prompt_tokens"] > 82
    assert isinstance(value["objects"], list)
    with pytest.raises(InvalidRequest, match="image: must be a JPEG, PNG or WebP"):
        detect.apply(kwargs={"image": b"no image", "object": "shape"}).get()


def test_an_eager_count_counts_as_a_generation_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts, and a conversation with a picture: each position of the picture counts."""
    from petiole.tasks.submission.definitions import chat, count
    from tests.support.pictures import MODEL, file

    monkeypatch.setenv("PETIOLE_ENGINE_FACTORY", "petiole.gpu_worker.engine:Engine")
    monkeypatch.setenv("PETIOLE_MODEL", MODEL)
    monkeypatch.setenv("PETIOLE_NUM_PAGES", "1000")
    settings.cache_clear()
    found = count.apply(kwargs={"texts": "hello", "with_ids": True}).get()
    again = count.apply(kwargs={"token_ids": found["token_ids"]}).get()
    assert (again["texts"], again["counts"]) == (["hello"], found["counts"])
    picture = base64.b64encode(file()).decode()
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "How many?"}]
    messages = [{"role": "user", "content": content}]
    seen = count.apply(kwargs={"messages": messages, "with_ids": True, "with_tokens": True}).get()
    used = chat.apply(kwargs={"messages": messages, "max_tokens": 1}).get()["usage"]["prompt_tokens"]
    assert seen["counts"] == [used] == [len(seen["token_ids"][0])]
    assert seen["token_ids"][0].count(-1) == seen["tokens"][0].count("") == 81
    content[0]["image"] = base64.b64encode(b"no picture").decode()
    with pytest.raises(InvalidRequest, match=r"^messages\[0\]\.content\[0\]: must be a JPEG, PNG or WebP"):
        count.apply(kwargs={"messages": messages}).get()
    with pytest.raises(InvalidRequest, match=r"^texts: exactly one of"):
        count.apply(kwargs={}).get()
