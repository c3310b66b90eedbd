"""What versions share about images and skills: handles, keys, options, and what a log has beside text."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from celery.result import AsyncResult

from petiole.contract.requests import images
from petiole.contract.results.task_result import GenerationResult, StreamDelta
from petiole.gpu_worker.models.checkpoint.identity import fingerprint
from petiole.tasks.submission.options import affinity_key, parse
from petiole.tasks.wire.keys import AFFINITY_HEADER, image_key
from petiole.tasks.wire.record.codec import LoggedOutput
from tests.support.site import Site, eventually
from tests.upgrade import pictures
from tests.upgrade.recording import Recording, load
from tests.upgrade.shapes import messages, paths

FINGERPRINT = "a8b603ba116d4a0b"
IMAGE_HANDLE = "petiole-image:038f4d5eb9937c01139fab9e8841498c"
DATA = b"some image"
HANDLE = "petiole-image:db16f7898bb435e0a14504cc903a7805"
OPTIONS = {
    "tasks.query": {"image": HANDLE, "question": "What?", "reasoning": True, "max_tokens": 9, "temperature": 0.5},
    "tasks.caption": {"image": HANDLE, "length": "short", "top_p": 0.3, "seed": 7},
    "tasks.point": {"image": HANDLE, "object": "car", "max_objects": 3},
    "tasks.detect": {
        "image": HANDLE,
        "object": "car",
        "salt": "a",
        "deadline_s": 9.0,
        "cancel_on_disconnect": False,
    },
}
LOG = [
    b'{"task_id":"a","attempt":1,"index":0,"token_ids":[5,5],"text":"","finish_reason":null,'
    b'"values":[[0.5],[0.25]],"bins":[[512],[256]]}',
    b'{"task_id":"a","attempt":1,"index":2,"token_ids":[6,5],"text":"","finish_reason":null,'
    b'"values":[[0.1,0.2],[0.75]],"bins":[[686,788],[768]],'
    b'"items":[{"x_min":0.45,"y_min":0.15,"x_max":0.55,"y_max":0.35},null]}',
]


def test_a_handle_names_an_image_for_all_versions() -> None:
    assert images.handle_of(DATA) == HANDLE
    assert image_key(HANDLE) == "petiole:image:db16f7898bb435e0a14504cc903a7805"


def test_options_of_skills_are_read() -> None:
    for task, options in OPTIONS.items():
        request = parse(task, [], options)
        assert {name: getattr(request, name) for name in options} == options
        assert affinity_key(request) is not None


def test_an_image_in_a_message_is_base64() -> None:
    options = {"image": base64.b64encode(DATA).decode(), "question": "What?"}
    assert affinity_key(parse("tasks.query", [], options)) == affinity_key(
        parse("tasks.query", [], {**options, "image": HANDLE})
    )


def test_a_log_with_and_without_items_is_resumed_bin_for_bin() -> None:
    written = LoggedOutput.of(LOG)
    assert written.token_ids == [5, 5, 6, 5]
    assert [list(bins or ()) for bins in written.entries("bins")] == [[512], [256], [686, 788], [768]]
    deltas = [StreamDelta.model_validate_json(entry) for entry in LOG]
    assert [delta.objects for delta in deltas] == [[], [json.loads(LOG[1])["items"][0]]]


# ------------------------------------------------------------ a fleet that dies in the middle of pictures

PREVIOUS = sorted((Path(__file__).parent / "recorded" / "pictures").glob("*.json"))
ANSWERS = {"query": "answer", "caption": "caption", "point": "points", "detect": "objects"}
ENGINE = "petiole.gpu_worker.engine:Engine"


@pytest.fixture(scope="module", params=PREVIOUS, ids=lambda path: path.stem)
def left(request: pytest.FixtureRequest) -> Recording:
    recording: Recording = json.loads(request.param.read_text())
    return recording


@pytest.mark.e2e
@pytest.mark.slow
def test_this_version_goes_on_bin_for_bin(left: Recording, tmp_path: Path) -> None:
    """Tasks in the middle, and queued ones. What was finished is read as this version would have written it."""
    with pictures.seeing_site(tmp_path, PETIOLE_ENGINE_FACTORY=ENGINE, PETIOLE_VISIBILITY_TIMEOUT_S=2) as site:
        load(site.redis, left)
        before = {name: site.log(f"fall-{name}") for name in pictures.CALLS}
        worker = site.worker()
        pictures.send(site, "whole")
        eventually(lambda: site.unfinished() == 0, "all work is done")
        for name, deltas in before.items():
            values = {one: result_of(site, f"{one}-{name}") for one in ("fall", "queued", "whole", "finished")}
            assert len([token for delta in deltas for token in delta["token_ids"]]) >= 3, name
            assert site.log(f"fall-{name}")[: len(deltas)] == deltas, f"{name} was begun anew"
            assert values["fall"]["attempt"] == 2
            for one in ("fall", "queued"):
                assert values[one]["token_ids"] == values["whole"]["token_ids"], (one, name)
                assert values[one][ANSWERS[name]] == values["whole"][ANSWERS[name]], (one, name)
                assert together(site, f"{one}-{name}", "bins") == together(site, f"whole-{name}", "bins")
                assert together(site, f"{one}-{name}", "items") == together(site, f"whole-{name}", "items")
            first = values["finished"]["token_ids"]
            assert first[:4] == values["whole"]["token_ids"][:4], name
        assert "Traceback" not in worker.output


def result_of(site: Site, task_id: str) -> dict[str, Any]:
    """A task's result, which its log agrees with."""
    result = AsyncResult(task_id, app=site.app)
    assert result.state == "SUCCESS", f"{task_id}: {result.state} {result.result!r}"
    value: dict[str, Any] = GenerationResult.model_validate(result.result).model_dump()
    deltas = [StreamDelta.model_validate(delta) for delta in site.log(task_id)]
    assert [token for delta in deltas for token in delta.token_ids] == list(value["token_ids"])
    found = [item for delta in deltas for item in (*delta.points, *delta.objects)]
    name = task_id.rpartition("-")[2]
    assert found == (value[ANSWERS[name]] if name in ("point", "detect") else [])
    return value


def together(site: Site, task_id: str, field: str) -> list[Any]:
    found: list[Any] = []
    for delta in site.log(task_id):
        found += delta.get(field) or [None] * len(delta["token_ids"])
    return found


@pytest.fixture(scope="module")
def current(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """What this version leaves."""
    with pictures.seeing_site(tmp_path_factory.mktemp("current")) as site:
        return pictures.record(site)


@pytest.mark.e2e
@pytest.mark.slow
def test_this_version_leaves_all_that_the_previous_one_reads(left: Recording, current: Recording) -> None:
    missing = sorted(paths(left) - paths(current))
    assert not missing, "\n".join(["no longer written, or otherwise:", *missing])


@pytest.mark.e2e
def test_messages_about_images_have_what_the_previous_version_reads(left: Recording, current: Recording) -> None:
    before, now = messages(left), messages(current)
    assert {f"{one}-{name}" for one in ("fall", "queued") for name in pictures.CALLS} == set(before)
    for task_id, message in before.items():
        assert now[task_id]["body"] == message["body"], task_id
        assert now[task_id]["headers"]["task"] == message["headers"]["task"]
        assert now[task_id]["headers"].get(AFFINITY_HEADER) == message["headers"].get(AFFINITY_HEADER)


def test_a_model_that_sees_is_the_one_that_it_was(tmp_path: Path) -> None:
    """Its configuration and tensors decide, and the same image has the same handle."""
    assert fingerprint(pictures.write_model(tmp_path / "model")) == FINGERPRINT
    assert images.handle_of(pictures.image()) == IMAGE_HANDLE
