"""What the requests of all interfaces share: a base of their bodies, priorities, and images."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

import msgspec
from annotated_types import Ge, Le
from pydantic import AfterValidator, ConfigDict, ModelWrapValidatorHandler, PrivateAttr, model_validator

from petiole.contract.errors import shorten
from petiole.contract.limits import MAX_PROMPT_TOKENS
from petiole.contract.requests import images
from petiole.contract.requests.bounds import Bounded, Entries
from petiole.contract.settings.urls import RABBITMQ, scheme
from petiole.gateway.core.foreign import unknown
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.settings import invalid, settings

Images = Mapping[str, str]
"""By http URL, the data URL of its image."""
NONE: Images = MappingProxyType({})

Ids = Annotated[list[int], Entries(MAX_PROMPT_TOKENS)]
Seed = Annotated[int, Ge(-(2**63)), Le(2**63 - 1)]
"""OpenAI's limits, which leave seeds for further choices."""
Metadata = Annotated[dict[str, str], Entries(16)]
"""As many as OpenAI takes."""


def defaults() -> Mapping[str, Mapping[str, Any]]:
    """`PETIOLE_GATEWAY_DEFAULTS`: parameters by patterns of models. Of several patterns that fit, the last one
    counts. vLLM's `top_k` of -1 has become 0. Raises `InvalidSettings`."""
    return _read(settings().gateway_defaults)


@functools.lru_cache(maxsize=1)
def _read(text: str) -> dict[str, dict[str, Any]]:
    try:
        found = msgspec.json.decode(text, type=dict[str, dict[str, Any]]) if text else {}
    except (msgspec.DecodeError, UnicodeError) as error:
        raise invalid("gateway_defaults", f"must be JSON of parameters by models ({error})", text) from None
    return {
        pattern: {**given, "top_k": 0} if given.get("top_k") == -1 else given for pattern, given in found.items()
    }


def one_or_many(field: str, given: object, most: int, noun: str, *, may_be_empty: bool) -> list[str | list[int]]:
    """A text, token ids, or a list of either, as a list. `may_be_empty`: a list of ids. Raises
    `InvalidRequest`."""
    many = isinstance(given, list) and bool(given) and all(isinstance(one, str | list) for one in given)
    found: list[Any] = given if many and isinstance(given, list) else [given]
    if len(found) > most:
        raise InvalidRequest(field, f"must have at most {most} {noun}", len(found))
    for one in found:
        ids = isinstance(one, list) and (may_be_empty or bool(one)) and all(type(token) is int for token in one)
        if not isinstance(one, str) and not ids:
            raise InvalidRequest(field, "must be text, token ids, or a list of either", shorten(one))
    return found


class RequestBody(Bounded):
    """Base of the requests. A parameter that is null counts as absent. One that is unknown is ignored, or refused
    (`unknown`)."""

    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True, allow_inf_nan=False)

    REFUSED: ClassVar[dict[str, str]] = {}
    """By a parameter that may not be given: why."""
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """The parameters that change nothing."""

    DEFAULTED: ClassVar[frozenset[str]] = frozenset()
    """The parameters that `PETIOLE_GATEWAY_DEFAULTS` may give."""

    _ignored: list[str] = PrivateAttr(default_factory=list)

    @property
    def ignored(self) -> list[str]:
        """What was given and changes nothing here, although its client may think so; by name."""
        return [*self._ignored, *self.skipped()]

    def skipped(self) -> list[str]:
        """The tools that no model here can call, as names of `ignored`."""
        return []

    @classmethod
    def translated(cls, given: dict[str, Any]) -> dict[str, Any]:
        """The same with the spellings of this server in place of others. Raises `InvalidRequest`."""
        return given

    @classmethod
    def _defaults(cls, model: object) -> dict[str, Any]:
        """The parameters that a request to this model has, if it does not say them."""
        name = model[:1024] if isinstance(model, str) else ""  # it is not checked yet
        fitting = [given for pattern, given in defaults().items() if fnmatch.fnmatchcase(name, pattern)]
        return {name: value for given in fitting for name, value in given.items() if name in cls.DEFAULTED}

    @model_validator(mode="wrap")
    @classmethod
    def _known(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(given, dict):
            return handler(given)
        for name, why in cls.REFUSED.items():
            if given.get(name) not in (None, False, [], {}, ""):
                raise InvalidRequest(name, why, shorten(given[name]))
        left_out = cls.IGNORED | cls.REFUSED.keys()
        named = {name: value for name, value in given.items() if value is not None and name not in left_out}
        named = cls._defaults(named.get("model")) | cls.translated(named)
        ignored = unknown.ignored(named, cls.model_fields)
        made = handler({name: value for name, value in named.items() if name not in ignored})
        made._ignored = ignored
        return made


def _minus_one_or_more(given: int | None) -> int | None:
    if given is not None and given != -1 and given < 1:
        raise InvalidRequest("truncate_prompt_tokens", "must be at least 1, or -1: the model's limit", given)
    return given


MostPromptTokens = Annotated[int | None, AfterValidator(_minus_one_or_more)]
"""vLLM's `truncate_prompt_tokens`. -1: as many as the model takes."""


def cut_to(most: int | None) -> dict[str, int]:
    """The task's option `truncate_to` for a `truncate_prompt_tokens`."""
    return {} if most in (None, -1) else {"truncate_to": most}


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters that say something: a record has no others. 0 says something."""
    return {
        name: value
        for name, value in fields.items()
        if value is not None and value is not False and value not in ({}, [])
    }


def submission(priority: int | None) -> dict[str, Any]:
    """Options of the submission. The lower a priority, the earlier, as in vLLM and on a Redis broker."""
    if priority is None:
        return {}
    return {"priority": 9 - priority if scheme(settings().broker_url) in RABBITMQ else priority}


def image(field: str, url: str) -> str:
    """The URL of an image, if it is one that needs not be fetched. Raises `InvalidRequest`."""
    if url.lstrip()[:5].lower() != "data:" and not images.is_handle(url):
        shown = f"{url[:40]}…" if len(url) > 40 else url
        raise InvalidRequest(field, "must be a data URL, or an http URL where they are allowed", shown)
    return url
