"""URLs with passwords of any characters: taken apart in one way, or refused without showing a part of them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import pytest
from hypothesis import given, strategies as st
from kombu.utils.url import parse_url
from pydantic import ValidationError

from petiole.contract.settings.urls import ENCODED, RABBITMQ, URL_OPTIONS, is_whole, redacted
from petiole.tasks.errors import InvalidSettings
from petiole.tasks.settings import Settings, settings
from tests.support import nursery
from tests.support.site import REPOSITORY

WORD = "Zq7xK"
SPECIAL = "/#?@[]:;%&=+ \\'\"ü"
URLS = {
    "redis": "redis://{user}:{password}@{host}:{port}/{db}",
    "rediss": "rediss://{user}:{password}@{host}:{port}/{db}?ssl_cert_reqs=none",
    "socket": "redis+socket://{user}:{password}@/run/r.sock?virtual_host={db}",
    "sentinel": "sentinel://{user}:{password}@{host}:{port};sentinel://{user}:{password}@{host}:{port}/{db}",
    "sentinel without a scheme": "sentinel://{user}:{password}@{host};{user}:{password}@{host}/{db}",
    "amqp": "amqp://{user}:{password}@{host}:{port}/vhost",
    "several": "amqp://{user}:{password}@{host}:{port};amqp://{user}:{password}@{host}",
    "database": "db+postgresql://{user}:{password}@{host}:{port}/{db}",
    "option": "redis://{host}:{port}/{db}?password={password}",
    "no user": "redis://{password}@{host}:{port}/{db}",
    "azure": "azureblockblob://DefaultEndpointsProtocol=https;AccountName=a;AccountKey={password}",
}

passwords = st.lists(st.text(SPECIAL, max_size=3), min_size=1, max_size=4).map(
    lambda between: WORD + WORD.join(between) + WORD
)
places = st.fixed_dictionaries(
    {
        "user": st.sampled_from(["", "webapp"]),
        "host": st.sampled_from(["localhost", "redis.example.com", "10.0.0.1", "[::1]"]),
        "port": st.integers(1, 65535),
        "db": st.integers(0, 15),
    }
)


@given(st.sampled_from([*URLS.values()]), passwords, places)
def test_no_part_of_a_password_is_shown(form: str, password: str, place: dict[str, object]) -> None:
    if form == URLS["no user"]:
        password = password.replace(":", "")  # what precedes it is a user's name
    url = form.format(password=password, **place)
    assert WORD not in redacted(url)
    assert WORD not in redacted(redacted(url))
    for field in ("broker_url", "redis_url", "result_backend"):
        if said := refusal(field, url):
            assert WORD not in said
            assert "\n" not in said
            assert said.startswith(f"PETIOLE_{field.upper()}: ")


def refusal(field: str, url: str) -> str:
    """What a process says of this setting; empty if it takes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(f"PETIOLE_{field.upper()}", url)
        settings.cache_clear()
        try:
            settings()
        except InvalidSettings as error:
            return str(error)
        finally:
            settings.cache_clear()
    return ""


@given(st.sampled_from(["redis", "rediss", "amqp", "database"]), passwords, places)
def test_what_is_accepted_has_one_meaning(kind: str, password: str, place: dict[str, object]) -> None:
    url = URLS[kind].format(password=password, **place)
    if is_whole(url):
        assert unquote(urlsplit(url).password or "") == unquote(password)
        assert parse_url(url)["password"] == unquote(password)
        assert urlsplit(url).port == place["port"]


@given(st.sampled_from([*URLS.values()]), passwords, places)
def test_a_password_that_is_percent_encoded_is_accepted(
    form: str, password: str, place: dict[str, object]
) -> None:
    url = form.format(password=quote(password, safe=""), **place)
    assert is_whole(url)


@pytest.mark.parametrize("field", ["broker_url", "redis_url", "result_backend"])
def test_a_database_has_a_number(field: str) -> None:
    for path in ("", "/", "/0", "//", "/15?ssl_cert_reqs=none"):
        Settings(**{field: f"rediss://localhost:6379{path}"})
    for path in ("/x", "/0/1", "/-1"):
        with pytest.raises(ValidationError, match="must name a database by its number"):
            Settings(**{field: f"redis://localhost:6379{path}"})


@pytest.mark.parametrize("option", ["foo=1", "password=x", "port=5", "socket_timeout=3", "db=1", "foo"])
@pytest.mark.parametrize("form", ["redis://h:1/0?{}", "rediss://h/0?{}", "redis+socket:///r.sock?{}"])
@pytest.mark.parametrize("field", ["broker_url", "redis_url"])
def test_an_option_that_nobody_knows_is_refused_by_the_name_of_the_setting(
    field: str, form: str, option: str
) -> None:
    """kombu, Celery and redis-py raise errors of their own, each for other options."""
    with pytest.raises(ValidationError, match="must have no options"):
        Settings(**{field: form.format(option)})


def test_known_options_are_accepted() -> None:
    for scheme, options in URL_OPTIONS.items():
        field = "broker_url" if scheme in RABBITMQ else "redis_url"
        Settings(**{field: f"{scheme}://h/0?{'&'.join(f'{option}=1' for option in options)}"})


@pytest.mark.parametrize("character", "/#?[")
@pytest.mark.parametrize("field", ["broker_url", "redis_url", "result_backend"])
def test_a_raw_password_is_refused_by_the_name_of_its_setting(field: str, character: str) -> None:
    with pytest.raises(ValidationError, match="percent-encoded") as caught:
        Settings(**{field: f"redis://:se{character}cret@localhost:6379/0"})
    assert ENCODED in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://localhost:6379/0",
        "redis://:p@ss@localhost:6379/0",
        "redis://:p:ss@localhost",
        "redis://",
        "redis+socket:///tmp/a folder/r.sock?virtual_host=1",
        "unix:///run/r.sock?db=1",
        "sentinel://:a@h1:1;h2:2;[::1]:3/0?ssl_ca_certs=/etc/ca.pem",
        "amqp://guest:guest@localhost:5672//",
        "amqps://u:p@h/%2F?heartbeat=5",
        "embedded://",
        "db+sqlite:///results.db",
        "mongodb://u:p@h1:27017,h2:27017/db",
        "cache+memcached://127.0.0.1:11211;127.0.0.2:11211/",
        "azureblockblob://DefaultEndpointsProtocol=https;AccountName=a;AccountKey=b/c==",
        "file:///var/results",
        "module.path:Backend",
        "",
    ],
)
def test_what_is_whole(url: str) -> None:
    assert is_whole(url)


PLACES = {
    "settings": ["petiole.tasks.commands.cli", "settings"],
    "status": ["petiole.tasks.commands.cli", "status", "--once"],
    "metrics": ["petiole.tasks.commands.cli", "metrics"],
    "cancel": ["petiole.tasks.commands.cli", "cancel", "x"],
    "worker": ["celery", "-A", "tasks", "worker"],
}
ALONE = {
    "chat": ["-m", "petiole.tasks.commands.cli", "chat"],
    "delay": ["-c", "from petiole import generate; generate.delay(prompt='x')"],
}
"""Places that read the standard input, or are no module."""


def alone(place: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *ALONE[place]],
        env={**os.environ, **environment},
        cwd=REPOSITORY,
        input="hello\n",  # for the conversation
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("place", [*PLACES, *ALONE])
def test_one_line_names_the_setting_wherever_it_is_read(place: str) -> None:
    for name in ("PETIOLE_BROKER_URL", "PETIOLE_RESULT_BACKEND"):
        told: dict[str, Any] = {name: f"redis://webapp:{WORD}/{WORD}#{WORD}@localhost:6379/0"}
        ran = nursery.run(*PLACES[place], **told) if place in PLACES else alone(place, told)
        said = ran.stdout + ran.stderr
        assert WORD not in said
        last = said.strip().splitlines()[-1]
        assert f"{name}: {ENCODED}, got 'redis://***'" in last
        assert ran.returncode == (1 if place == "delay" else 2)
        assert place == "delay" or "Traceback" not in said
