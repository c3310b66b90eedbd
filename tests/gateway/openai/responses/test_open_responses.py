"""The compliance suite of Open Responses against a real gateway. It needs Node, and is skipped without it."""

from __future__ import annotations

import pytest

from petiole.tasks.fleet import models
from tests.support import open_responses
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually

LEFT = {"tool-calling"}
"""What petiole-tiny does not do by itself: call a tool. `test_calls` has a model that a constraint makes call."""

PICTURES = ("image-input",)
"""What another model is asked: petiole-tiny sees nothing."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def suite() -> None:
    try:
        open_responses.folder()
    except open_responses.Missing as missing:
        pytest.skip(f"Open Responses: {missing}")


@pytest.mark.usefixtures("suite")
def test_the_suite_passes(gateway: Gateway) -> None:
    outcomes = open_responses.run(gateway.url, "petiole-tiny")
    assert len(outcomes) >= 17
    failed = {name: one.why for name, one in outcomes.items() if one.status != "passed"}
    assert failed.keys() == {*PICTURES, *LEFT}, failed


@pytest.mark.usefixtures("suite")
def test_a_model_that_sees_passes_the_rest(site: Site, gateway: Gateway) -> None:
    """It is another worker's, with a queue of its own: the model's name finds it."""
    site.worker("-Q", "pictures", PETIOLE_MODEL="petiole-tiny-vision")
    eventually(lambda: len(models.models(site.redis)) == 2, "the worker has said what it serves")
    outcomes = open_responses.run(gateway.url, "petiole-tiny-vision", PICTURES)
    assert {name: one.status for name, one in outcomes.items()} == dict.fromkeys(PICTURES, "passed")
