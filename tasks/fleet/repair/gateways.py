"""What gateways say of themselves over HTTP, at `/ready`: it needs no key, and no Redis."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from petiole.tasks.settings import settings

ANSWER_S = 5.0


class Gateway(NamedTuple):
    """`away`: why it does not serve; empty if it does. `denied`: what its Redis user may not do."""

    url: str
    away: str = ""
    denied: Sequence[str] = ()


def look(urls: Iterable[str]) -> Iterator[Gateway]:
    """The gateways at these URLs; without any, that of this machine, if there is one."""
    named = [url.rstrip("/").removesuffix("/v1") for url in urls]
    for url in named or [f"http://127.0.0.1:{settings().gateway_port}"]:
        found = _ask(url)
        if named or not found.away:
            yield found


def _ask(url: str) -> Gateway:
    try:
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=ANSWER_S) as answer:
                said = json.load(answer)
        except urllib.error.HTTPError as error:
            said = json.load(error)
        away = "" if said["status"] == "ok" else f"Redis does not answer it ({said['reason']})"
        return Gateway(url, away, [str(one) for one in said.get("may_not", ())])
    except (OSError, http.client.HTTPException) as error:
        return Gateway(url, str(error) or type(error).__name__)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Gateway(url, "what answers there is no gateway")
