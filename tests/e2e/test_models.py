"""A task finds its workers by the name of their model, also while there are none, and after a reload."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks import InvalidRequest
from petiole.tasks.app.application import make_app
from petiole.tasks.commands import cli
from petiole.tasks.fleet import models, reports
from petiole.tasks.servers import connections
from petiole.tasks.settings import settings
from petiole.tasks.submission.task import GenerationTask
from tests.support.site import Site, eventually


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0) as site:
        monkeypatch.setenv("PETIOLE_BROKER_URL", site.url)
        monkeypatch.setattr(models, "directory", models.Directory())
        monkeypatch.setattr(models, "KNOWN_FOR_S", 0.0)
        monkeypatch.setattr(models, "UNKNOWN_FOR_S", 0.0)
        settings.cache_clear()
        yield site
        settings.cache_clear()


@pytest.fixture
def generate(site: Site) -> Any:
    """A producer of this site."""
    app = make_app()
    app.set_current = lambda: None  # type: ignore[method-assign]

    @app.task(name="tasks.generate", base=GenerationTask, bind=True, shared=False)  # type: ignore[untyped-decorator]
    def generate(self: GenerationTask, **_: object) -> None: ...

    return generate


def known() -> list[str]:
    return [name for model in models.models(connections.streams()) if model.live for name in model.names]


def test_a_name_finds_workers_and_the_queue_of_a_fleet_that_is_scaled_to_zero(
    site: Site, generate: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    big = site.start_worker(
        "-Q", "big", PETIOLE_MODEL="/models/big-8b/", PETIOLE_SERVED_ADAPTERS="sql=org/sql-lora"
    )
    small = site.start_worker(PETIOLE_SERVED_NAMES="chat, small")
    big.ready(), small.ready()
    eventually(lambda: {"big-8b", "chat"} <= {*known()}, "both have said what they serve")

    result = generate.delay(prompt="hello", max_tokens=3, model="big-8b")
    assert (result.submitted_to, len(result.get(timeout=60)["token_ids"])) == ("big", 3)
    assert generate.delay(prompt="hello", max_tokens=3, model="small").submitted_to == "petiole"
    with_adapter = generate.delay(prompt="hello", max_tokens=3, model="sql")
    with_adapter.get(timeout=60)
    assert with_adapter.submitted_to == "big"
    eventually(
        lambda: any(model.loaded_adapters == ["org/sql-lora"] for model in models.models()), "it is known as used"
    )
    with pytest.raises(
        InvalidRequest, match=r"^model: must be a model: /models/big-8b/, big-8b, chat, small, sql"
    ):
        generate.delay(prompt="hello", model="gpt")
    with pytest.raises(InvalidRequest, match=r"^adapter: must not be given: model sql is an adapter itself"):
        generate.delay(prompt="hello", model="sql", adapter="org/other")
    asked = asyncio.run(generate.adelay(prompt="hello", max_tokens=3, model="big-8b"))
    assert asked.submitted_to == "big"
    signature = generate.s(prompt="hello", max_tokens=3).set(model="big-8b")
    chained = (signature | generate.s(max_tokens=2).set(model="small")).apply_async()
    assert (chained.parent.submitted_to, len(chained.get(timeout=60)["token_ids"])) == ("big", 2)

    assert big.stop() == small.stop() == 0
    late = generate.delay(prompt="hello", max_tokens=3, model="big-8b")
    assert late.submitted_to == "big"
    capsys.readouterr()
    assert cli.main(["models", "--json"]) == 0
    shown = {model["names"][0]: model for model in json.loads(capsys.readouterr().out)}
    assert (shown["chat"]["queues"], shown["big-8b"]["adapters"]) == (["petiole"], {"sql": "org/sql-lora"})
    assert cli.main(["models"]) == 0
    assert "big-8b, /models/big-8b/" in capsys.readouterr().out
    site.worker("-Q", "big", PETIOLE_MODEL="/models/big-8b/")
    assert len(late.get(timeout=60)["token_ids"]) == 3


def test_a_reload_changes_what_the_queue_answers_to(site: Site, generate: Any) -> None:
    worker = site.worker("-Q", "q", PETIOLE_MODEL="models/one")
    eventually(lambda: "one" in known(), "the first")
    since = models.models()[0].since
    site.app.control.broadcast("reload_engine", arguments={"model": "models/two"}, reply=True, timeout=30, limit=1)
    eventually(lambda: "two" in known(), "the second")
    assert generate.delay(prompt="hello", max_tokens=1, model="two").submitted_to == "q"
    with pytest.raises(InvalidRequest, match=r"^model: must be a model: models/two, two, got one$"):
        generate.delay(prompt="hello", max_tokens=1, model="one")
    assert next(model for model in models.models() if "two" in model.names).since > since
    worker.signal(signal.SIGTERM)


def test_two_models_on_one_queue_have_common_names_and_their_own(site: Site, generate: Any) -> None:
    for name in ("one", "two"):
        site.start_worker(PETIOLE_MODEL=f"a/{name}", PETIOLE_SERVED_NAMES=f"{name},chat")
    eventually(lambda: {"one", "two"} <= {*known()}, "both live")
    for name, queue in (("one", "petiole.model.one"), ("two", "petiole.model.two"), ("chat", "petiole")):
        result = generate.delay(prompt="hello", max_tokens=3, model=name)
        assert (result.submitted_to, len(result.get(timeout=60)["token_ids"])) == (queue, 3)


def test_a_reload_changes_the_queue_of_the_model_alone(site: Site, generate: Any) -> None:
    """So the other worker of the old model is asked for it, and nobody else."""
    reloaded = site.worker(PETIOLE_MODEL="models/one")
    site.worker(PETIOLE_MODEL="models/one", PETIOLE_SERVED_NAMES="one, first")
    eventually(lambda: "first" in known(), "both live")
    arguments = {"model": "models/two"}
    site.app.control.broadcast("reload_engine", arguments, destination=[reloaded.node], reply=True, timeout=30)
    own = {"one": "petiole.model.one", "two": "petiole.model.two"}
    eventually(
        lambda: (
            {queue for model in models.models() if model.live for queue in model.own_queues} >= {*own.values()}
        ),
        "each has a queue of its own",
    )
    for name, queue in own.items():
        results = [generate.delay(prompt="hello", max_tokens=3, model=name) for _ in range(4)]
        assert {(result.submitted_to, len(result.get(timeout=60)["token_ids"])) for result in results} == {
            (queue, 3)
        }
        assert [one.worker for one in reports.workers() if queue in one.queues] == [
            one.worker for one in reports.workers() if (one.worker == reloaded.node) == (name == "two")
        ]
