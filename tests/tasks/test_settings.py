"""Settings come from the environment, each by one name."""

from __future__ import annotations

import os
import re
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from petiole.contract.settings.engine import SWITCHES, EngineConfig
from petiole.contract.settings.urls import redacted
from petiole.tasks.app import worker_side
from petiole.tasks.app.application import App, make_app
from petiole.tasks.app.configuration import celery_url, configuration
from petiole.tasks.errors import InvalidSettings
from petiole.tasks.servers.connections import redis_url
from petiole.tasks.settings import IGNORED_URLS, IN_FILES, PREFIX, Settings, misspelt, settings
from petiole.tasks.submission.task import GenerationTask
from tests.support import nursery


@pytest.fixture(autouse=True)
def _read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)
        monkeypatch.delenv(f"{PREFIX}{name.upper()}_FILE", raising=False)
    settings.cache_clear()


def test_a_worker_gives_its_engine_the_defaults_of_an_engine() -> None:
    """But a worker refuses nothing that it has taken, and its streams are read over a network."""
    config = EngineConfig(**Settings().engine_options())
    assert config == EngineConfig(max_waiting=sys.maxsize, stream_interval_ms=25)


def test_settings_of_the_engine_are_declared_once() -> None:
    """Declared as `EngineSettings`; a worker narrows one further."""
    narrower = {"stream_interval_ms", "image_max_bytes"}
    assert Settings.__annotations__.keys() & EngineConfig.__dataclass_fields__.keys() == narrower


@pytest.mark.parametrize(("name", "most"), [("NUM_THREADS", 1024), ("PAGE_SIZE", 2**31 - 1)])
def test_the_environment_is_under_the_limits_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, name: str, most: int
) -> None:
    monkeypatch.setenv(PREFIX + name, str(most + 1))
    with pytest.raises(InvalidSettings, match=f"{name}: must be less than or equal to {most}, got '{most + 1}'"):
        settings()


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("QUEUE", "gpu", "gpu"),
        ("MAX_NUM_SEQS", "8", 8),
        ("GRAPH_BATCH_SIZES", "1,2, 4", (1, 2, 4)),
        ("PREFIX_CACHE_MAX_PAGES", "100", 100),
        ("DRAIN_SECONDS", "0", 0.0),
    ],
)
def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: object) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    assert getattr(settings(), name.lower()) == expected


@pytest.mark.parametrize("name", IN_FILES)
def test_a_secret_is_read_from_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    hidden = name in ("sentinel_password", "gateway_keys")
    secret = "kept" if hidden else "redis://:kept@here:6379/3"
    (tmp_path / "secret").write_text(f"{secret}\n")
    monkeypatch.setenv(f"{PREFIX}{name.upper()}_FILE", str(tmp_path / "secret"))
    found = getattr(settings(), name)
    assert (found.get_secret_value() if hidden else found) == secret
    assert not misspelt()


@pytest.mark.parametrize(
    ("content", "beside", "complaint"),
    [
        (None, "", r"must be a file that can be read \(No such file or directory\)"),
        (b"\xff", "", r"must be a file that can be read \(it is not UTF-8\)"),
        (b" \n", "", "must be a file that is not empty"),
        (b"redis://:kept@here/0", "redis://:other@there/0", "must not be set beside PETIOLE_BROKER_URL"),
    ],
)
def test_a_file_that_gives_no_secret_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None, beside: str, complaint: str
) -> None:
    if content is not None:
        (tmp_path / "secret").write_bytes(content)
    monkeypatch.setenv("PETIOLE_BROKER_URL", beside)
    monkeypatch.setenv("PETIOLE_BROKER_URL_FILE", str(tmp_path / "secret"))
    with pytest.raises(InvalidSettings, match=f"^PETIOLE_BROKER_URL_FILE: {complaint}, got '{tmp_path}/secret'$"):
        settings()


def test_a_bad_url_in_a_file_is_refused_without_its_password(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("http://user:kept@here/0")
    monkeypatch.setenv("PETIOLE_BROKER_URL_FILE", str(tmp_path / "secret"))
    with pytest.raises(InvalidSettings, match=r"^PETIOLE_BROKER_URL: must begin with") as refused:
        settings()
    assert "kept" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MAX_NUM_SEQS", "many"),
        ("PIPELINE", "maybe"),
        ("PAGE_SIZE", "0"),
        ("STREAM_TTL_S", "10000000000000000"),  # more than Redis takes
        ("RESULT_EXPIRES_S", "10000000000000000"),
        ("VISIBILITY_TIMEOUT_S", "inf"),
        ("VISIBILITY_TIMEOUT_S", "0.01"),
        ("STREAM_INTERVAL_MS", "inf"),
        ("GRAPH_BATCH_SIZES", "1,two"),
    ],
)
def test_a_bad_value_is_named(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    with pytest.raises(InvalidSettings, match=f"^{PREFIX}{name}: .*, got '{value}'$"):
        settings()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MODEL", "", r"MODEL: must have at least 1 character, got ''"),
        ("MAX_NUM_SEQS", "many", r"MAX_NUM_SEQS: must be a valid integer, .*, got 'many'"),
        ("BROKER_URL", "sqs://key:secret@", r"BROKER_URL: must begin with redis://, .*, got 'sqs://key:\*\*\*@'"),
        ("BROKER_URL", "localhost:6379", r"BROKER_URL: must begin with redis://, .*, got 'localhost:6379'"),
        ("REDIS_URL", "http://host", r"REDIS_URL: must begin with redis://, .*, got 'http://host'"),
        (
            "RESULT_BACKEND",
            "cache+memory://",
            r"RESULT_BACKEND: must keep results where other processes find them, got 'cache\+memory://'",
        ),
    ],
)
@pytest.mark.parametrize(
    "command", [["petiole.tasks.commands.cli", "settings"], ["celery", "-A", "tasks", "worker"]]
)
def test_a_wrong_setting_is_one_line_and_status_2(
    monkeypatch: pytest.MonkeyPatch, command: list[str], name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(PREFIX + name, value)
    ran = nursery.run(*command)
    assert ran.returncode == 2
    assert re.fullmatch(f"(petiole|Error): {PREFIX}{message}\n", ran.stderr)


def test_a_result_backend_that_celery_does_not_know_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_RESULT_BACKEND", "foo://host")
    with pytest.raises(InvalidSettings, match=r"^PETIOLE_RESULT_BACKEND: must be one that Celery can use here "):
        make_app().conf.result_backend  # noqa: B018


@pytest.mark.parametrize("url", ["disabled://", "disabled", "cache+memory://", "rpc://"])
def test_a_result_backend_that_keeps_results_from_others_is_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("PETIOLE_RESULT_BACKEND", url)
    with pytest.raises(InvalidSettings, match=f"^PETIOLE_RESULT_BACKEND: must keep .*, got '{re.escape(url)}'$"):
        settings()


def test_a_misspelt_setting_is_named_with_the_nearest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = {f"PETIOLE_{name.upper()}": "off" for name in SWITCHES}
    monkeypatch.setattr(os, "environ", {"PETIOLE_MAX_NUM_SEQ": "3", "PETIOLE_XYZ": "", **switches})
    assert misspelt() == [
        "PETIOLE_MAX_NUM_SEQ is not a setting; did you mean PETIOLE_MAX_NUM_SEQS?",
        "PETIOLE_XYZ is not a setting",
    ]


@pytest.mark.parametrize(
    ("given", "streams", "results"),
    [
        ({}, "redis://localhost:6379/0", "redis://localhost:6379/0"),
        ({"broker_url": "rediss://a/1"}, "rediss://a/1", "rediss://a/1"),
        ({"broker_url": "amqp://a"}, "redis://localhost:6379/0", "redis://localhost:6379/0"),
        ({"broker_url": "amqp://a", "redis_url": "redis://b"}, "redis://b", "redis://b"),
        ({"redis_url": "redis://b", "result_backend": "db+sqlite:///r"}, "redis://b", "db+sqlite:///r"),
    ],
)
def test_one_redis_serves_for_all_unless_said_otherwise(given: dict[str, str], streams: str, results: str) -> None:
    chosen = Settings(**given)  # type: ignore[arg-type]
    assert (chosen.streams_url, chosen.results_url) == (streams, results)


def test_celery_speaks_json_only_and_acknowledges_late() -> None:
    config = configuration(Settings())
    assert config["accept_content"] == config["result_accept_content"] == ["json"]
    assert config["task_serializer"] == config["result_serializer"] == "json"
    assert config["task_acks_late"] is config["task_reject_on_worker_lost"] is True
    assert (config["worker_pool"], config["worker_prefetch_multiplier"]) == (worker_side.POOL, 1)


def test_a_generation_is_acknowledged_late_whatever_the_application_says() -> None:
    """A worker that ends hands on what it has not acknowledged, and nothing else."""
    app = Celery(set_as_current=False)
    names = ("acks_late", "reject_on_worker_lost", "acks_on_failure", "acks_on_timeout")
    app.conf.update({f"task_{name}": False for name in names})

    @app.task(base=GenerationTask, shared=False)  # type: ignore[untyped-decorator]
    def task() -> None: ...

    assert all(getattr(task, name) is True for name in names)


@pytest.mark.parametrize("name", ["petiole", "petiole.large"])
def test_rabbitmq_gets_quorum_queues_with_exchanges_that_can_delay(name: str) -> None:
    queue = queues("amqp://a")[name]
    assert queue.queue_arguments == {"x-queue-type": "quorum"}
    assert (queue.exchange.name, queue.exchange.type, queue.routing_key) == (name, "topic", name)


@pytest.mark.parametrize(
    ("url", "name"), [("amqp://a", "shop"), ("redis://a", "petiole"), ("redis://a", "petiole.x")]
)
def test_other_queues_are_declared_as_any_app_declares_them(url: str, name: str) -> None:
    queue = queues(url)[name]
    assert (queue.queue_arguments, queue.exchange.type) == (None, "direct")


def queues(url: str) -> Any:
    app = App("petiole", set_as_current=False)
    app.conf.update(configuration(Settings(broker_url=url)))
    return app.amqp.queues


def test_a_socket_has_two_names() -> None:
    assert celery_url("unix:///run/r.sock?db=3") == "redis+socket:///run/r.sock?virtual_host=3"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://a:1/2", "redis://a:1/2"),
        ("redis+socket:///run/r.sock", "unix:///run/r.sock?db=0"),
        ("redis+socket:///run/r.sock?virtual_host=3", "unix:///run/r.sock?db=3"),
    ],
)
def test_celerys_url_of_a_socket(url: str, expected: str) -> None:
    assert redis_url(url) == expected


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host/0", "redis://host/0"),
        ("redis://:secret@host:1/0", "redis://:***@host:1/0"),
        ("rediss://user:p%40ss@host/0?ssl_cert_reqs=none", "rediss://user:***@host/0?ssl_cert_reqs=none"),
        ("sentinel://:a@h1:1;sentinel://:a@h2:1", "sentinel://:***@h1:1;sentinel://:***@h2:1"),
        ("redis://host/0?password=secret", "redis://host/0?password=***"),
    ],
)
def test_passwords_are_not_shown(url: str, shown: str) -> None:
    assert redacted(url) == shown


def test_threads_that_use_the_app_first_at_the_same_time_find_the_same_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, app = [], make_app()

    def look() -> None:
        found.append(app.conf.broker_url)

    def while_it_is_configured(settings: Settings) -> dict[str, object]:
        second.start()
        second.join(0.1)  # it waits, unless it finds something else by then
        return configuration(settings)

    second = threading.Thread(target=look)
    monkeypatch.setenv("PETIOLE_BROKER_URL", "redis://ours:6379/0")
    monkeypatch.setattr("petiole.tasks.app.configuration.configuration", while_it_is_configured)
    settings.cache_clear()
    look()
    second.join()
    assert found == ["redis://ours:6379/0"] * 2
    settings.cache_clear()


def test_a_wrong_setting_is_wrong_at_every_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_BROKER_URL", "http://ours")
    settings.cache_clear()
    app = make_app()
    for _ in range(2):
        with pytest.raises(InvalidSettings, match="PETIOLE_BROKER_URL"):
            app.conf.broker_url  # noqa: B018
    settings.cache_clear()


def test_the_broker_of_an_organisations_other_apps_is_not_petioles(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in IGNORED_URLS:
        monkeypatch.setenv(name, "redis://theirs:6379/0")
    monkeypatch.setenv("PETIOLE_BROKER_URL", "redis://ours:6379/0")
    settings.cache_clear()
    app = make_app()
    with app.connection_for_read() as reading, app.connection_for_write() as writing:
        assert reading.hostname == writing.hostname == "ours"
    assert app.backend.connparams["host"] == "ours"
    settings.cache_clear()
