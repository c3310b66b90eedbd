"""gpt-oss through Celery: what a real worker makes of harmony's channels and end tokens. The model is small, but
laid out as it is released, and says what a test wants to hear."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from petiole.tasks.fleet import models
from tests.e2e.test_tools import NOW, same
from tests.support.reciting import CHOSEN, EXPERTS, reciting
from tests.support.site import Site, eventually

THINKS = [
    *("<|channel|>", "analysis", "<|message|>", "h", "m", "<|end|>", "<|start|>", "assistant"),
    *("<|channel|>", "final", "<|message|>", "4", "2", "<|return|>"),
]
CALLS = [
    "<|channel|>",
    "commentary",
    " to=functions.now ",
    "<|constrain|>",
    "json",
    "<|message|>",
    "{}",
    "<|call|>",
]


@pytest.fixture(scope="module", params=[THINKS, CALLS], ids=["thinks", "calls"])
def says(request: pytest.FixtureRequest) -> list[str]:
    """The tokens that the model says."""
    found: list[str] = request.param
    return found


@pytest.fixture(scope="module")
def site(says: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    engine = {
        "PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine",
        "PETIOLE_MODEL": reciting(folder / "gpt-oss", says),
        "PETIOLE_DEVICE": "cpu",
    }
    with Site(folder, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0, **engine) as site:
        site.worker()
        yield site


def test_channels_become_parts_and_the_turn_ends_at_its_end_token(site: Site, says: list[str]) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 60, "temperature": 0}
    asked |= {"tools": [NOW]} if says is CALLS else {}
    read = same(site, site.app.send_task("tasks.chat", kwargs=asked))
    assert read.finish_reason == "stop"
    assert read.usage.completion_tokens in (len(says), len(says) - 1), "with its end token or without"
    calls = [(one.name, json.loads(one.arguments)) for one in read.tool_calls or ()]
    if says is CALLS:
        assert (read.content or "", calls) == ("", [("now", {})])
        return
    assert read.reasoning is not None
    assert (read.reasoning.text, read.content, calls) == ("hm", "42", [])
    assert (read.usage.reasoning_tokens or 0) > 0


def test_the_facts_and_figures_of_the_model(site: Site) -> None:
    [known] = eventually(lambda: models.models(site.redis), "the worker has said what it serves")
    assert (known.tools, known.reasoning, known.tool_format) == (True, True, "harmony")
    inspect = site.app.control.inspect(timeout=10, limit=1)
    [stats] = eventually(inspect.stats, "a worker's figures").values()
    counted: Any = stats["pool"]["expert_tokens"]
    assert [len(layer) for layer in counted] == [EXPERTS] * 2
    assert counted[0] != [0] * EXPERTS
    assert sum(counted[0]) % CHOSEN == 0
