"""Every setting of Petiole, read from `PETIOLE_*` environment variables, and below them from a Django project's
settings; `petiole settings` lists them.

The engine's are declared in `contract.settings.engine`, those of `petiole serve` in `contract.settings.gateway`,
the others, for Celery and Redis, here. `settings()` reads the environment at its first call, so importing `tasks`
has no side effects. A setting that may hold a secret can also be the content of a file.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints
from urllib.parse import parse_qsl, urlsplit

from annotated_types import Le
from pydantic import ConfigDict, Field, SecretStr, ValidationError, ValidationInfo, create_model, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, SettingsConfigDict

from petiole.contract.settings.engine import SWITCHES, EngineConfig, EngineSettings
from petiole.contract.settings.gateway import GatewaySettings
from petiole.contract.settings.urls import (
    DEFAULT_MASTER,
    EMBEDDED,
    ENCODED,
    RABBITMQ,
    SENTINEL,
    TLS_FILES,
    URL_OPTIONS,
    SentinelUrl,
    is_whole,
    redacted,
    scheme,
)
from petiole.tasks.errors import InvalidSettings

PREFIX = "PETIOLE_"
LONGEST_S = 10**9  # a limit of Redis and of locks
MOST_REPLICAS = 100
STOCK_CONTROL_EXCHANGE = "celery"  # Celery's default, on which producers send `revoke`
_LOCAL_REDIS = "redis://localhost:6379/0"
_REDIS_SCHEMES = ("redis", "rediss", "redis+socket", SENTINEL, "unix", EMBEDDED)
_BROKER_SCHEMES = ("redis", "rediss", "redis+socket", SENTINEL, *RABBITMQ, EMBEDDED)
_UNSHARED_BACKENDS = {"disabled", "cache+memory", "rpc"}
IN_FILES = ("broker_url", "redis_url", "result_backend", "sentinel_password", "gateway_keys")
"""The settings that may hold a secret. `PETIOLE_BROKER_URL_FILE` names a file with the value, and so on."""

IGNORED_URLS = {
    "CELERY_BROKER_URL": "PETIOLE_BROKER_URL",  # `celery -b` and BROKER_URL become this variable
    "CELERY_BROKER_READ_URL": "PETIOLE_BROKER_URL",
    "CELERY_BROKER_WRITE_URL": "PETIOLE_BROKER_URL",
    "CELERY_RESULT_BACKEND": "PETIOLE_RESULT_BACKEND",
}

logger = logging.getLogger(__name__)


def _declared(name: str, *limits: Any, **other: Any) -> Any:
    """The field of `EngineConfig`, for a pydantic model: with further limits, or another default."""
    hint, one = _HINTS[name], EngineConfig.__dataclass_fields__[name]
    narrower: Any = Annotated[hint, *limits] if limits else hint
    told = {"default": one.default, "description": one.metadata["meaning"]} | other
    return FieldInfo.from_annotated_attribute(narrower, Field(**told))


_HINTS = get_type_hints(EngineConfig, include_extras=True)
if TYPE_CHECKING:
    _EngineSettings = EngineSettings
else:
    _of_engine = {one.name: _declared(one.name) for one in fields(EngineSettings)}
    _EngineSettings = create_model(
        "_EngineSettings",
        __config__=ConfigDict(defer_build=True, protected_namespaces=()),
        **{name: (one.annotation, one) for name, one in _of_engine.items()},
    )


def parse_weights(text: str) -> dict[str, float]:
    """`acme=2,initech=0.5` as a dictionary."""
    weights: dict[str, float] = {}
    for part in _parts(text):
        match = re.fullmatch(r"([A-Za-z0-9_-]{1,64})=([0-9]+(?:\.[0-9]+)?)", part)
        if match is None or not 0.001 <= float(match[2]) <= 1000:
            raise ValueError("must be NAME=WEIGHT,...; letters, digits, - and _; weights from 0.001 to 1000")
        weights[match[1]] = float(match[2])
    return weights


def parse_adapters(text: str) -> dict[str, str]:
    """`sql=org/sql-lora,legal=/adapters/legal` as a dictionary."""
    adapters: dict[str, str] = {}
    for part in _parts(text):
        name, _, where = (side.strip() for side in part.partition("="))
        if not name or not where:
            raise ValueError("must be NAME=FOLDER or NAME=HUB_ID, ...")
        adapters[name] = where
    return adapters


def parse_places(text: str) -> tuple[str, ...]:
    """`/models/adapters,acme` as a tuple."""
    places = tuple(filter(None, (part.rstrip("/") for part in _parts(text))))
    known = re.compile(r"/.*|[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)
    if any(not known.fullmatch(place) or ".." in place.split("/") for place in places):
        raise ValueError("must be folders from / on, or beginnings of hub ids such as acme or acme/sql-lora")
    return places


def parse_roots(text: str) -> tuple[str, ...]:
    """`/data/rows,s3://rows` as a tuple."""
    roots = tuple(_parts(text))
    for root in roots:
        if not (root.startswith("/") or "://" in root) or ".." in root.split("/"):
            raise ValueError("must be folders from / on, or URLs such as s3://rows, without ..")
        if "::" in root or root.partition("://")[0].lower() in ("file", "local"):
            raise ValueError("must name a folder by its path, and no file within a file")
    return roots


def _parts(text: str) -> Iterator[str]:
    return filter(None, (part.strip() for part in text.split(",")))


_LISTS: dict[str, Callable[[str], object]] = {
    "tenant_weights": parse_weights,
    "served_adapters": parse_adapters,
    "lora_files": parse_places,
    "batch_files": parse_roots,
}
"""Settings that are lists, and what reads each. It raises ValueError."""


class Settings(_EngineSettings, GatewaySettings, BaseSettings):  # type: ignore[misc] # not all bases are frozen
    """The settings of one process. URLs may contain passwords: use `redacted` to display them."""

    model_config = SettingsConfigDict(
        defer_build=True,
        enable_decoding=False,
        env_prefix=PREFIX,
        extra="ignore",
        frozen=True,
        protected_namespaces=(),
    )

    broker_url: str = Field(
        default=_LOCAL_REDIS,
        description="redis://, rediss://, sentinel://, amqp://, or embedded://, a Redis that Petiole starts",
    )
    redis_url: str = Field(default="", description="Redis of streams and fleet view; empty: the broker's")
    result_backend: str = Field(default="", description="Celery's result backend; empty: the Redis of the streams")
    sentinel_master: str = Field(
        default=DEFAULT_MASTER, min_length=1, description="sentinel://: the name of the master"
    )
    sentinel_password: SecretStr = Field(
        default=SecretStr(""), description="sentinel://: the sentinels' own; the master's is in the URL"
    )
    queue: str = Field(default="petiole", min_length=1, description="the Celery queue of generation tasks")
    control_exchange: str = Field(
        default=STOCK_CONTROL_EXCHANGE,
        pattern="^[A-Za-z0-9_-]{1,64}$",
        description="exchange of operators' control commands; unless it is celery, producers may only cancel",
    )
    served_names: str = Field(
        default="",
        description="names under which producers ask for the model, such as chat,qwen3; empty: from PETIOLE_MODEL",
    )
    served_adapters: str = Field(
        default="",
        description="LoRA adapters that producers ask for as for a model: NAME=FOLDER or NAME=HUB_ID, with commas",
    )
    lora_files: str = Field(
        default="",
        description="folders and beginnings of hub ids whose adapters requests may name, such as /adapters,acme",
    )
    linked_queue: str = Field(
        default="celery",
        min_length=1,
        description="queue of your own app, for linked tasks that Petiole's workers do not know",
    )
    result_expires_s: int = Field(default=86_400, ge=1, le=LONGEST_S, description="seconds that results are kept")
    result_max_bytes: int = Field(
        default=64 * 2**20,
        ge=1024,
        le=500 * 2**20,
        description="largest result, as JSON; a larger one fails its task",
    )
    stream_ttl_s: int = Field(
        default=3_600, ge=1, le=LONGEST_S, description="seconds that a stream stays readable after its last delta"
    )
    stream_interval_ms: float = _declared("stream_interval_ms", default=25.0)
    stream_connections: int = Field(
        default=16, ge=2, le=10_000, description="connections of one event loop that read streams"
    )
    confirm_replicas: int = Field(
        default=0,
        ge=0,
        le=MOST_REPLICAS,
        description="replicas of the broker's Redis that must have a submission; 0: none",
    )
    confirm_timeout_s: float = Field(default=1.0, gt=0, le=60, description="how long a submission waits for them")
    visibility_timeout_s: float = Field(
        default=15.0,
        ge=0.1,
        le=LONGEST_S,
        description="a worker that is silent for this many seconds loses its tasks",
    )
    image_max_bytes: int = _declared("image_max_bytes", Le(96 * 2**20))
    image_ttl_s: int = Field(
        default=3_600, ge=1, le=LONGEST_S, description="seconds that put_image keeps an image after its last use"
    )
    drain_seconds: float = Field(
        default=20.0, ge=0, description="warm shutdown: seconds to finish before tasks are handed back"
    )
    tenant_weights: str = Field(
        default="", description="shares of tenants' queues on Redis, such as acme=2,initech=0.5; empty: one queue"
    )
    usage_days: int = Field(
        default=7, ge=0, le=400, description="days for which each task of a tenant is in the ledger; 0: sums alone"
    )
    affinity_wait_ms: int = Field(
        default=200,
        ge=0,
        le=60_000,
        description="how long a task is left to the worker that has its prefix; 0: off",
    )
    max_attempts: int = Field(default=3, ge=1, description="workers that one task may kill before it is given up")
    batch_files: str = Field(
        default="",
        description="folders and URLs of which workers open files, such as /data/rows,s3://rows",
    )
    trace_content: bool = Field(
        default=False, description="whether traces have prompts and answers; they never have otherwise"
    )
    heartbeat_file: str = Field(
        default="", description="file that a worker touches while its engine makes progress; empty: none"
    )
    engine: Literal["petiole", "vllm"] = Field(
        default="petiole", description="a worker's engine: petiole or [vllm](engines.md)"
    )
    engine_factory: str = Field(default="", description="another, as module:callable")

    @field_validator("broker_url")
    @classmethod
    def _broker_is_served(cls, url: str) -> str:
        return _with_options(_must_be_one_of(_BROKER_SCHEMES, url))

    @field_validator("redis_url")
    @classmethod
    def _streams_are_in_a_redis(cls, url: str) -> str:
        return url and _with_options(_must_be_one_of(_REDIS_SCHEMES, url))

    @field_validator("result_backend")
    @classmethod
    def _results_reach_who_asks(cls, url: str) -> str:
        if not shared(url):
            raise ValueError("must keep results where other processes find them")
        return _checked(url)

    @field_validator(*_LISTS)
    @classmethod
    def _lists_can_be_read(cls, value: str, field: ValidationInfo) -> str:
        _LISTS[str(field.field_name)](value)
        return value

    @property
    def batch_roots(self) -> tuple[str, ...]:
        """Folders and URLs below which a worker opens files of batches."""
        shared = self.gateway_files
        own = () if not shared else (shared if "://" in shared else os.path.abspath(shared),)
        return *parse_roots(self.batch_files), *own

    @property
    def adapter_places(self) -> tuple[str, ...]:
        """Folders and beginnings of hub ids whose adapters requests may name."""
        return *parse_places(self.lora_files), *self.adapters.values()

    @property
    def adapters(self) -> dict[str, str]:
        """By name, the folders or hub ids of the adapters that producers ask for as for a model."""
        return parse_adapters(self.served_adapters)

    @property
    def weights(self) -> dict[str, float]:
        """Tenants and their weights. Empty on RabbitMQ, where the broker decides the order of queues."""
        return {} if scheme(self.broker_url) in RABBITMQ else parse_weights(self.tenant_weights)

    def engine_options(self) -> dict[str, Any]:
        """The keyword arguments of `EngineConfig`."""
        given = {name: getattr(self, name) for name in _HINTS if name in Settings.model_fields}
        return given | {"max_waiting": sys.maxsize}  # Celery's prefetch bounds the tasks that a worker holds

    @property
    def streams_url(self) -> str:
        """URL of the Redis for streams, state and fleet view."""
        if self.redis_url:
            return self.redis_url
        return self.broker_url if scheme(self.broker_url) in _REDIS_SCHEMES else _LOCAL_REDIS

    @property
    def results_url(self) -> str:
        return self.result_backend or self.streams_url


@cache
def settings() -> Settings:
    """The settings of this process, read once; `settings.cache_clear()` makes the next call read them again."""
    try:
        return Settings(**_from_django() | _from_files())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        limit = re.sub("^(Input|String) should", "must", first["msg"].removeprefix("Value error, "))
        raise invalid(str(first["loc"][0]), limit, first["input"]) from None


def _of_django() -> dict[str, Any]:
    """What a Django project's settings have under `PETIOLE_*`. Empty unless this process has loaded Django."""
    conf = sys.modules.get("django.conf")
    if conf is None or not (conf.settings.configured or os.environ.get("DJANGO_SETTINGS_MODULE")):
        return {}
    return {name: getattr(conf.settings, name) for name in dir(conf.settings) if name.startswith(PREFIX)}


def _from_django() -> dict[str, Any]:
    """The values of the settings that the environment does not name."""
    theirs = {
        name: value for name, value in _of_django().items() if not {name, f"{name}_FILE"} & os.environ.keys()
    }
    names = {PREFIX + name.upper(): name for name in Settings.model_fields}
    return {names[name]: value for name, value in theirs.items() if name in names}


def _from_files() -> dict[str, Any]:
    """The values of the settings whose files are named. Docker and Kubernetes give secrets in this way."""
    found = {}
    for name in IN_FILES:
        if not (path := os.environ.get(f"{PREFIX}{name.upper()}_FILE")):
            continue
        if os.environ.get(f"{PREFIX}{name.upper()}"):
            raise invalid(f"{name}_file", f"must not be set beside {PREFIX}{name.upper()}", path)
        try:
            found[name] = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "it is not UTF-8"
            raise invalid(f"{name}_file", f"must be a file that can be read ({why})", path) from None
        if not found[name]:
            raise invalid(f"{name}_file", "must be a file that is not empty", path)
    return found


def invalid(setting: str, limit: str, value: object) -> InvalidSettings:
    shown = redacted(value) if isinstance(value, str) else value
    return InvalidSettings(f"{PREFIX}{setting.upper()}: {limit}, got {shown!r}")


def misspelt() -> list[str]:
    """A warning for each variable of the environment, or of Django's settings, that begins with `PETIOLE_` and is
    not a setting."""
    known = [name.upper() for name in (*Settings.model_fields, *(f"{name}_file" for name in IN_FILES))]
    switches = {PREFIX + name.upper() for name in SWITCHES}
    lines = []
    for variable in sorted((os.environ.keys() | _of_django().keys()) - switches):
        name = variable.removeprefix(PREFIX)
        if name != variable and name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            lines.append(
                f"{variable} is not a setting" + (f"; did you mean {PREFIX}{nearest[0]}?" if nearest else "")
            )
    return lines


def ignored_urls(*, unless_set: bool = False) -> list[str]:
    """A warning for each of Celery's own URL variables that is set. These may be meant for another app of the
    process: with `unless_set`, there is a warning only if Petiole's own variable is missing."""
    return [
        f"{theirs} is ignored, in the environment and on the command line: use {ours}"
        for theirs, ours in IGNORED_URLS.items()
        if theirs in os.environ and not (unless_set and os.environ.keys() & {ours, f"{ours}_FILE"})
    ]


@cache
def warn_a_producer() -> None:
    """Log, once, the variables of a producer's environment that have no effect. A worker logs its own later."""
    for line in [*misspelt(), *ignored_urls(unless_set=True)]:
        logger.warning("%s", line)


def _must_be_one_of(schemes: tuple[str, ...], url: str) -> str:
    if "://" not in url or scheme(url) not in schemes:
        raise ValueError(f"must begin with {', '.join(f'{known}://' for known in schemes)}")
    return _checked(url)


def _with_options(url: str) -> str:
    """The URL, if kombu and redis-py know its options: for others each raises an error of its own, when it
    connects. `SentinelUrl` has checked those of sentinels."""
    known, query = URL_OPTIONS.get(scheme(url), ()), urlsplit(url).query
    if scheme(url) != SENTINEL and any(name not in known for name, _ in parse_qsl(query, keep_blank_values=True)):
        raise ValueError(f"must have no options but {', '.join(known)}" if known else "must have no options")
    return url


def _checked(url: str) -> str:
    if scheme(url) == SENTINEL:
        tls = SentinelUrl.parse(url).tls
        for option in TLS_FILES:
            if option in tls and not os.access(str(tls[option]), os.R_OK):
                raise ValueError(f"{option} must be a file that can be read")
    if not is_whole(url):
        raise ValueError(ENCODED)
    if scheme(url) in ("redis", "rediss") and not re.fullmatch("/*[0-9]*", urlsplit(url).path):
        raise ValueError("must name a database by its number, as in redis://HOST:PORT/0")
    return url


def shared(result_backend: str) -> bool:
    """Whether all workers and producers find each other's results at this URL. An empty URL stands for another
    setting's."""
    return scheme(result_backend) not in _UNSHARED_BACKENDS
