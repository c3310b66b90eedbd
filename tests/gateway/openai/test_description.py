"""Requests made at random from OpenAI's description: skipped without what `tests.support.openai_schema` needs."""

from __future__ import annotations

import pytest

from tests.support import openai_schema
from tests.support.gateway import Gateway

EXAMPLES = 8

pytestmark = pytest.mark.slow


def test_answers_have_the_form_of_openais_description(gateway: Gateway) -> None:
    try:
        run = openai_schema.run(gateway.url, "petiole-tiny", EXAMPLES)
    except openai_schema.Missing as missing:
        pytest.skip(f"OpenAI's description: {missing}")
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert f"{openai_schema.OPERATIONS} passed" in run.stdout
