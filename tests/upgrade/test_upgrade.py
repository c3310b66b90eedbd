"""The fleet is upgraded, or rolled back, a worker at a time: two versions work on the same tasks.

`recorded/VERSION.json` is what VERSION leaves in Redis when its fleet dies in the middle of its work.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import redis
from celery.result import AsyncResult

from petiole import gpu_worker
from petiole.contract.results.task_result import FinishReason
from petiole.gpu_worker.models.checkpoint.identity import fingerprint
from petiole.gpu_worker.request import Request, SamplingParams
from petiole.gpu_worker.runtime.step.noise import noise_keys
from petiole.gpu_worker.text.assembler import TextAssembler
from petiole.gpu_worker.text.tokenizer_files import load_tokenizer
from petiole.tasks.app.configuration import configuration
from petiole.tasks.servers import connections
from petiole.tasks.settings import Settings, settings
from petiole.tasks.wire.keys import AFFINITY_HEADER
from petiole.tasks.worker import scripts
from petiole.tasks.worker.generation.engine_requests import seed_of
from tests.support.fake_engine import expected, token
from tests.support.reader import Reader
from tests.support.site import PATIENCE_S, Site, eventually
from tests.upgrade.recording import CHAT, LENGTH, OPTIONS, QUEUES, Recording, load, record, recording_site
from tests.upgrade.shapes import messages, paths

PREVIOUS = sorted((Path(__file__).parent / "recorded").glob("*.json"))
MODEL = Path(gpu_worker.__file__).parent / "models" / "petiole_tiny"
LENGTHS = {
    **dict.fromkeys(("running", "linked", "handed", "later", "header 1", "header 2"), LENGTH),
    **dict.fromkeys(("finished", "ended", "link of ended", "link of linked", "body"), 3),
    "batch": 5,
}
NOISE = [[1293516399, -1492722385], [-1172856820, 857211988], [580197931, 1621103020]]
TEXT_TOKENS = [427, 220, 127, 97, 160, 116, 255, 172, 253, 246, 222, 11, 220, 18, 259, 19, 259, 21, 265, 19, 259]
TEXTS = ["Hi", " ", "", "ä", "", "", "中", "", "", "", "😀", ",", " ", "3", ", ", "", "", "4, 6", ". ", "", ""]
"""Of these tokens, one after the other, before the stop string "4, 5"."""

RESUMED = ("running", "linked", "handed", "header 1", "header 2", "chat", "cancelled")


@pytest.fixture(scope="module", params=PREVIOUS, ids=lambda path: path.stem)
def left(request: pytest.FixtureRequest) -> Recording:
    recording: Recording = json.loads(request.param.read_text())
    return recording


@pytest.fixture(scope="module")
def current(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """What this version leaves."""
    with recording_site(tmp_path_factory.mktemp("current")) as site:
        return record(site)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=2) as site:
        monkeypatch.setenv("PETIOLE_BROKER_URL", site.url)
        settings.cache_clear()
        connections._streams.cache_clear()
        yield site
    settings.cache_clear()
    connections._streams.cache_clear()


# ------------------------------------------------------------ upgrade: this version goes on


@pytest.mark.e2e
def test_this_version_goes_on_from_what_the_previous_one_left(site: Site, left: Recording) -> None:
    load(site.redis, left)
    before = {name: site.log(name) for name in RESUMED}
    readers = [Reader(site, name, 0.0) for name in ("running", "finished", "queued")]
    worker = site.worker("-Q", ",".join(QUEUES))
    eventually(lambda: site.unfinished(*QUEUES[1:]) == 0, "all work is done")
    for name, length in LENGTHS.items():
        result = AsyncResult(name, app=site.app)
        assert result.state == "SUCCESS", f"{name}: {result.state} {result.result!r}\n{worker.output[-3000:]}"
        written = site.tokens(name)
        assert result.result["token_ids"] == written, name
        if name != "body":  # its prompt is what the header's tasks have written
            assert written == expected(name, 1, length), name
    assert site.tokens("chat") == chat_tokens(LENGTH)
    assert len(site.get(AsyncResult("queued", app=site.app))["token_ids"]) == OPTIONS["max_tokens"]
    assert AsyncResult("cancelled", app=site.app).state == "REVOKED"
    assert site.log("cancelled")[-1]["finish_reason"] == "cancelled"
    assert AsyncResult("failed", app=site.app).state == "FAILURE"
    for name, deltas in before.items():
        assert deltas, name
        assert site.log(name)[: len(deltas)] == deltas, f"{name} was begun anew"
        assert site.log(name)[-1]["attempt"] == 2, name
    assert {name for name in RESUMED if deaths(site, name) == 0} == {"handed"}
    for reader in readers:
        reader.join(PATIENCE_S)
        assert (reader.error, reader.tokens) == (None, site.tokens(reader.task_id)), reader.task_id
    assert site.redis.llen("petiole:quarantine") == 1, "the recorded one, and no message of the previous version"
    assert "Traceback" not in worker.output


def chat_tokens(length: int) -> list[int]:
    request = Request(messages=CHAT["messages"], sampling=SamplingParams(seed=CHAT["seed"]))
    return [token(request, index) for index in range(length)]


def deaths(site: Site, name: str) -> int:
    return int(site.state(name).get("deaths", 0))


# ------------------------------------------------------------ rollback: the previous version goes on


@pytest.mark.e2e
def test_this_version_leaves_all_that_the_previous_one_reads(left: Recording, current: Recording) -> None:
    missing = sorted(paths(left) - paths(current))
    assert not missing, "\n".join(["no longer written, or otherwise:", *missing])


@pytest.mark.e2e
def test_messages_have_no_option_that_the_previous_version_would_refuse(
    left: Recording, current: Recording
) -> None:
    """A worker refuses options that it does not know: a producer sends what its caller has given, and no more."""
    before, now = messages(left), messages(current)
    for name, message in before.items():
        args, options, embedded = message["body"]
        sent_args, sent_options, sent_embedded = now[name]["body"]
        newly_given = OPTIONS.keys() - options.keys()
        assert sent_args == args, name
        assert {one: value for one, value in sent_options.items() if one not in newly_given} == options, name
        assert sent_embedded.keys() >= embedded.keys(), name
        assert now[name]["headers"]["task"] == message["headers"]["task"], name
        home = message["headers"].get(AFFINITY_HEADER)
        assert home in (None, now[name]["headers"].get(AFFINITY_HEADER)), f"{name} would leave its home"


def test_a_reader_of_the_previous_version_knows_every_finish_reason() -> None:
    assert {*get_args(FinishReason)} == {"stop", "length", "cancelled", "deadline", "error"}


def test_rabbitmq_has_the_queues_that_the_previous_version_declared() -> None:
    """It refuses a worker or producer that declares them in another way."""
    declared = configuration(Settings(broker_url="amqp://localhost", redis_url="redis://localhost"))
    kinds = {name: value for name, value in declared.items() if name.startswith("task_default_")}
    assert kinds == {
        "task_default_queue": "petiole",
        "task_default_queue_type": "quorum",
        "task_default_exchange_type": "topic",
    }


# ------------------------------------------------------------ installed over a version that runs


def test_scripts_are_those_of_the_code_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would not fit its arguments, if they were read after another version was installed in its place."""
    client = redis.Redis()
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("read when it is needed"))
    for name in scripts.SOURCES:
        scripts.load(client, name)


# ------------------------------------------------------------ either way: the same tokens, the same text


def test_a_task_without_a_seed_has_the_one_that_it_had() -> None:
    assert seed_of("golden") == 1184129254920828453


def test_the_noise_of_a_seed_is_what_it_was() -> None:
    seeds = np.array([0, 7, 2**63 + 1], np.uint64)
    assert noise_keys(seeds, np.array([0, 1, 100_000])).tolist() == NOISE


def test_a_model_is_the_one_that_it_was() -> None:
    """Another fingerprint ends all tasks that have begun with `ModelChanged`. New weights have a new one."""
    assert fingerprint(MODEL) == "7c2cf7aa14a59c2d"


def test_the_same_tokens_have_the_same_text_and_hold_back_the_same() -> None:
    """A worker that resumes a task delivers the text after what its tokens so far have given, by its own rules."""
    stream = TextAssembler(load_tokenizer(MODEL), ("4, 5",))
    assert [stream.push([each]).text for each in TEXT_TOKENS] == TEXTS
