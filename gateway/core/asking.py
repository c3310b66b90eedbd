"""What the requests of all interfaces share: a base of their bodies, priorities, and images."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from petiole.tasks.errors import InvalidRequest, shorten
from petiole.tasks.requests import images
from petiole.tasks.settings import settings
from petiole.tasks.urls import RABBITMQ, scheme

Images = Mapping[str, str]
"""By http URL, the data URL of its image."""
NONE: Images = MappingProxyType({})


class Asked(BaseModel):
    """Base of the requests. A parameter that is null counts as absent."""

    model_config = ConfigDict(defer_build=True, extra="forbid", strict=True, allow_inf_nan=False)

    REFUSED: ClassVar[dict[str, str]] = {}
    """By a parameter that may not be given: why."""
    IGNORED: ClassVar[frozenset[str]] = frozenset()
    """The parameters that change nothing."""

    @model_validator(mode="before")
    @classmethod
    def _without_absent(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, why in cls.REFUSED.items():
            if given.get(name) not in (None, False, [], {}, ""):
                raise InvalidRequest(name, why, shorten(given[name]))
        left_out = cls.IGNORED | cls.REFUSED.keys()
        return {name: value for name, value in given.items() if value is not None and name not in left_out}


def _at_the_limit(given: int | None) -> int | None:
    if given not in (None, -1):
        raise InvalidRequest("truncate_prompt_tokens", "must be -1: a text is cut at the model's limit", given)
    return given


AtTheLimit = Annotated[int | None, AfterValidator(_at_the_limit)]
"""vLLM's `truncate_prompt_tokens`, as far as it is served."""


def given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those that say something: a record has no others. 0 says something."""
    return {
        name: value for name, value in fields.items() if value is not None and value is not False and value != {}
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
