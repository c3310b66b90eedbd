"""The compliance suite of Open Responses against a real gateway. It needs Node, and is skipped without it."""

from __future__ import annotations

import pytest

from petiole.tasks.fleet import models
from tests.support import open_responses
from tests.support.gateway import Gateway
from tests.support.site import Site, eventually

OTHERS = {"image-input": "petiole-tiny-vision", "tool-calling": "petiole-tiny-tools"}
"""What another small model is asked: petiole-tiny sees nothing, and calls no tool by itself."""

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
    assert failed.keys() == OTHERS.keys(), failed


@pytest.mark.usefixtures("suite")
@pytest.mark.parametrize("name", OTHERS)
def test_another_model_passes_the_rest(site: Site, gateway: Gateway, name: str) -> None:
    """It is another worker's, with a queue of its own: the model's name finds it."""
    model = OTHERS[name]
    site.worker("-Q", model, PETIOLE_MODEL=model)
    eventually(lambda: any(model in one.names for one in models.models(site.redis)), "the worker has said so")
    outcomes = open_responses.run(gateway.url, model, (name,))
    assert {name: one.status for name, one in outcomes.items()} == {name: "passed"}
