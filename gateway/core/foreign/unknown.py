"""Parameters that this server does not know, because clients of other servers send them. Pure.

One is ignored and named, unless

    a near miss of a known name     its client has misspelt it
    a name that promises something  the answer would not be what its client relies on
    `PETIOLE_GATEWAY_UNKNOWN=refuse`

These are refused, with a hint."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from petiole.tasks.settings import settings

HEADER = "x-petiole-ignored"
"""A header of an answer: the names of the request's fields that were ignored."""

MOST = 10
"""Names in the header."""
MOST_UNKNOWN = 64
"""Parameters beyond which none is ignored."""
LONGEST = 64

_PROMISES = ("guided", "schema", "stop", "max_", "min_", "tool", "format", "logit", "safety")
_FOREIGN = frozenset({"models", "usage"})
"""Names of other servers that are like one of this server by chance."""
_ALIKE = 0.8
_HINTS = {
    "format": "use response_format",
    "ebnf": "use structured_outputs with grammar",
    "max_new_tokens": "use max_tokens",
    "max_length": "use max_tokens",
    "min_length": "use min_tokens",
    "num_predict": "use max_tokens",
    "stop_words": "use stop",
    "system": "use a message with the role system",
}
"""By a name elsewhere: what does the same here."""

_logger = logging.getLogger("petiole.gateway")
_logged: set[str] = set()
_MOST_LOGGED = 256


def hint(name: str, known: Iterable[str]) -> str:
    """Why an unknown parameter may not be ignored; empty: it may."""
    if name in _HINTS:
        return _HINTS[name]
    if len(name) > LONGEST:
        return f"its name has more than {LONGEST} characters"
    if name in _FOREIGN:
        return ""
    if near := difflib.get_close_matches(name, known, 1, _ALIKE):
        return f"did you mean {near[0]}?"
    if promise := next((word for word in _PROMISES if word in name.lower()), None):
        return f"with {promise!r} in its name it would change the answer, so it cannot be ignored"
    return ""


def kinds(where: str, given: Iterable[object], known: Collection[str]) -> list[str]:
    """The objects of other types than the known ones, by their types, such as `tools.web_search`."""
    types = [one.get("type") for one in given if isinstance(one, Mapping)]
    return list(dict.fromkeys(f"{where}.{kind}" for kind in types if isinstance(kind, str) and kind not in known))


def ignored(given: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """The parameters that are ignored."""
    if len(given.keys() - known) > MOST_UNKNOWN or settings().gateway_unknown == "refuse":
        return []
    found = [name for name in given if name not in known and not hint(name, known)]
    for name in found:
        if name not in _logged and len(_logged) < _MOST_LOGGED:
            _logged.add(name)
            _logger.info("parameter %s is unknown, and ignored (said once)", told([name]))
    return found


def told(names: Sequence[str]) -> str:
    """As the value of the header."""
    return ", ".join(re.sub(r"[^\w.\-\[\]]", "?", name[:LONGEST], flags=re.ASCII) for name in names[:MOST])
