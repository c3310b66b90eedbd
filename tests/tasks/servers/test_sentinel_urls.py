"""How the sentinels of a Redis are named: once, for broker, streams and results."""

from __future__ import annotations

import ssl
from dataclasses import replace
from pathlib import Path

import pytest
import redis
from kombu import Connection
from kombu.utils import json

from petiole.contract.settings.urls import SentinelUrl, redacted
from petiole.tasks.app.configuration import configuration
from petiole.tasks.commands.cli import main
from petiole.tasks.errors import InvalidSettings
from petiole.tasks.servers.sentinels import SYNC, Sentinels, options_for, pool_parameters, sentinel_options
from petiole.tasks.settings import PREFIX, Settings, settings

LONE = SentinelUrl((("h1", 26379),), None, None, 0)


def with_tls(checks: str = "required", *, names: bool = True, **files: str) -> SentinelUrl:
    return replace(LONE, tls={**files, "ssl_cert_reqs": checks, "ssl_check_hostname": names})


@pytest.fixture(autouse=True)
def _read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in Settings.model_fields:
        monkeypatch.delenv(PREFIX + name.upper(), raising=False)
    settings.cache_clear()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("sentinel://h1", LONE),
        ("sentinel://h1:26379/", LONE),
        ("sentinel://h1:1/2", SentinelUrl((("h1", 1),), None, None, 2)),
        ("sentinel://h1:1;sentinel://h2:2/3", SentinelUrl((("h1", 1), ("h2", 2)), None, None, 3)),
        ("sentinel://h1:1/3;sentinel://h2:2/3", SentinelUrl((("h1", 1), ("h2", 2)), None, None, 3)),
        ("sentinel://h1;h2/3", SentinelUrl((("h1", 26379), ("h2", 26379)), None, None, 3)),
        ("sentinel://:a%40b%3B@h1;h2", SentinelUrl((("h1", 26379), ("h2", 26379)), None, "a@b;", 0)),
        ("sentinel://u:p@h1;sentinel://u:p@h2", SentinelUrl((("h1", 26379), ("h2", 26379)), "u", "p", 0)),
        ("sentinel://h1?ssl_cert_reqs=CERT_REQUIRED", with_tls()),
        ("sentinel://h1/0?ssl_cert_reqs=none&ssl_check_hostname=False", with_tls("none", names=False)),
        ("sentinel://h1?ssl_ca_certs=/a%20%3Bb", with_tls(ssl_ca_certs="/a ;b")),
        ("sentinel://[::1]:5;h2", SentinelUrl((("::1", 5), ("h2", 26379)), None, None, 0)),
    ],
)
def test_a_url_names_sentinels_and_what_the_master_wants_to_know(url: str, expected: SentinelUrl) -> None:
    assert SentinelUrl.parse(url) == SentinelUrl.parse(str(expected)) == expected


@pytest.mark.parametrize(
    "url",
    [
        "sentinel://",
        "sentinel://h1;",
        "sentinel://h1:port",
        "sentinel://h1;redis://h2",
        "sentinel://h1/1;sentinel://h2/2",
        "sentinel://h1/one",
        "sentinel://h1/-1",
        "sentinel://:secret@[::1",
        "sentinel://:secret@h1;sentinel://:another@h2",
        "sentinel://u@h1",
    ],
)
@pytest.mark.parametrize("name", ["BROKER_URL", "REDIS_URL", "RESULT_BACKEND"])
def test_a_url_that_says_two_things_is_a_wrong_setting(
    monkeypatch: pytest.MonkeyPatch, name: str, url: str
) -> None:
    monkeypatch.setenv(PREFIX + name, url)
    with pytest.raises(InvalidSettings, match=f"^{PREFIX}{name}: must be sentinel://") as caught:
        settings()
    assert "secret" not in str(caught.value)
    assert "another" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        "master_name=m",
        "ssl_ca_certs",
        "ssl_ca_certs=",
        "ssl_ca_cert=/dev/null",
        "ssl_cert_reqs=yes",
        "ssl_check_hostname=maybe",
        "ssl_keyfile=/dev/null",
        "ssl_cert_reqs=none;sentinel://h2/0?ssl_cert_reqs=required",
    ],
)
def test_options_that_mean_nothing_are_a_wrong_setting(monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    monkeypatch.setenv("PETIOLE_BROKER_URL", f"sentinel://:secret@h1/0?{options}")
    with pytest.raises(InvalidSettings, match=r"^PETIOLE_BROKER_URL: must have no options but ssl_") as caught:
        settings()
    assert f"got 'sentinel://:***@h1/0?{options}'" in str(caught.value)


def test_a_file_that_is_not_there_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PETIOLE_REDIS_URL", f"sentinel://h1?ssl_ca_certs={tmp_path}/ca.pem")
    with pytest.raises(InvalidSettings, match=r"REDIS_URL: ssl_ca_certs must be a file .*, got .*/ca\.pem"):
        settings()


def test_kombu_hears_of_tls_for_the_master_and_for_the_sentinels() -> None:
    url = "sentinel://h1/0?ssl_ca_certs=/dev/null;h2"
    config = configuration(Settings(broker_url=url, redis_url="redis://a"))
    assert "sentinel_kwargs" not in config["result_backend_transport_options"]
    asked = config["broker_transport_options"]["sentinel_kwargs"]
    tls = {"ssl_ca_certs": "/dev/null", "ssl_cert_reqs": "required", "ssl_check_hostname": True}
    broker = Connection(config["broker_url"])
    for _ in range(2):
        broker.maybe_switch_next()
        assert broker.ssl == {**tls, "ssl_cert_reqs": ssl.CERT_REQUIRED}
    assert {"ssl": True, **tls}.items() <= asked.items()


def test_celery_is_told_everything_with_each_sentinel() -> None:
    """Its broker looks at the first, or at the one whose turn it is; its result backend at all."""
    config = configuration(Settings(broker_url="sentinel://u:p%2F@h1:1;sentinel://h2:2/3", sentinel_master="m"))
    url = "sentinel://u:p%2F@h1:1/3;sentinel://u:p%2F@h2:2/3"
    assert config["broker_url"] == config["result_backend"] == url
    for name in ("broker_transport_options", "result_backend_transport_options"):
        assert config[name]["master_name"] == "m"
    broker = Connection(url, transport_options=config["broker_transport_options"])
    broker.maybe_switch_next()
    assert (broker.userid, broker.password, broker.virtual_host, broker.hostname) == ("u", "p/", "3", "h2")


def test_sentinels_are_only_spoken_of_where_they_are() -> None:
    config = configuration(Settings(broker_url="redis://a", result_backend="sentinel://h1"))
    assert "master_name" not in config["broker_transport_options"]
    assert config["result_backend_transport_options"]["master_name"] == "mymaster"


def test_no_password_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PETIOLE_BROKER_URL", "sentinel://u:secret@h1;u:secret@h2/0")
    monkeypatch.setenv("PETIOLE_SENTINEL_PASSWORD", "secret")
    assert main(["settings"]) == 0
    shown = capsys.readouterr().out
    told = options_for(settings(), settings().broker_url)
    assert "sentinel://u:***@h1;u:***@h2/0" in shown
    given = pool_parameters(SentinelUrl.parse(settings().broker_url), told, SYNC)
    assert "secret" not in shown + repr(settings().sentinel_password) + repr(given["sentinels"])
    assert "secret" not in json.dumps(told) + repr(told)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sentinel://:a@h1:1;:b@h2:1/0", "sentinel://:***@h1:1;:***@h2:1/0"),
        ("sentinel://u:a@h1;u:b@h2", "sentinel://u:***@h1;u:***@h2"),
    ],
)
def test_passwords_of_hosts_without_a_scheme_are_not_shown(url: str, shown: str) -> None:
    assert redacted(url) == shown


def test_sentinels_that_do_not_answer_are_all_named() -> None:
    asked = Sentinels((("127.0.0.1", 1), ("127.0.0.1", 2)), sentinel_options("mine", "", {}))
    with pytest.raises(redis.ConnectionError, match=r"'mine' \(PETIOLE_SENTINEL_MASTER\): .*:1: .*; .*:2: "):
        asked.master()


def test_who_answered_last_is_asked_first_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each channel of a worker has sentinels of its own: one that hangs must not hold up each of them."""
    hosts, asked = (("hangs", 1), ("answers", 2)), []

    def state(_: Sentinels, host: str, port: int) -> dict[str, object]:
        asked.append(host)
        if host == "hangs":
            raise redis.TimeoutError
        return {"is_master": True, "is_sdown": False, "is_odown": False, "ip": "master", "port": port}

    monkeypatch.setattr(Sentinels, "_state", state)
    assert [Sentinels(hosts, sentinel_options("mine", "", {})).master() for _ in range(2)] == [("master", 2)] * 2
    assert asked == ["hangs", "answers", "answers"]
