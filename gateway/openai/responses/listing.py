"""Lists in pages, as OpenAI's clients turn them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from petiole.gateway.core.failures import invalid

MOST, USUAL = 100, 20
_MOST_DIGITS = 9


def listed(
    items: Sequence[Mapping[str, Any]],
    query: Mapping[str, str],
    order: str = "desc",
    most: int = MOST,
    usual: int = USUAL,
) -> dict[str, Any]:
    """A page of these items, which are oldest first. `order`, `usual`: which end comes first, and how many there
    are, unless the query says so; `most` it may ask for.
    An empty page has empty ids, because OpenAI's description knows no null there. Raises `Failure`."""
    limit, order = query.get("limit", str(usual)), query.get("order", order)
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= _MOST_DIGITS and 1 <= int(limit) <= most):
        raise invalid("limit", f"limit: must be a number from 1 to {most}, got {limit[:64]!r}", "invalid_value")
    if order not in ("asc", "desc"):
        raise invalid("order", f"order: must be asc or desc, got {order[:64]!r}", "invalid_value")
    rest = list(items) if order == "asc" else list(items)[::-1]
    if after := query.get("after"):
        places = [place for place, item in enumerate(rest) if item["id"] == after]
        if not places:
            raise invalid("after", f"after: no item has the id {after[:128]!r}", "invalid_value")
        rest = rest[places[0] + 1 :]
    page = rest[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(rest) > len(page),
    }
