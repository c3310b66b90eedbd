"""What versions share about images and skills: handles, keys, options, and what a log has beside text."""

from __future__ import annotations

import base64
import json

from petiole.tasks.requests import affinity, images
from petiole.tasks.requests.results import StreamDelta
from petiole.tasks.submission.parsing import parse
from petiole.tasks.worker.output.outcomes import Written

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
    assert images.key_of(HANDLE) == "petiole:image:db16f7898bb435e0a14504cc903a7805"


def test_options_of_skills_are_read() -> None:
    for task, options in OPTIONS.items():
        request = parse(task, [], options)
        assert {name: getattr(request, name) for name in options} == options
        assert affinity.key(request) is not None


def test_an_image_in_a_message_is_base64() -> None:
    options = {"image": base64.b64encode(DATA).decode(), "question": "What?"}
    assert affinity.key(parse("tasks.query", [], options)) == affinity.key(
        parse("tasks.query", [], {**options, "image": HANDLE})
    )


def test_a_log_with_and_without_items_is_resumed_bin_for_bin() -> None:
    written = Written.of(LOG)
    assert written.token_ids == [5, 5, 6, 5]
    assert [list(bins or ()) for bins in written.bins] == [[512], [256], [686, 788], [768]]
    deltas = [StreamDelta.model_validate_json(entry) for entry in LOG]
    assert [delta.objects for delta in deltas] == [[], [json.loads(LOG[1])["items"][0]]]
