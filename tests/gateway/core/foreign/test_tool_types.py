"""The types of tools and items, as whoever sends them writes them: known, named as ignored, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from petiole.gateway.anthropic import tools as anthropic
from petiole.gateway.core.foreign import unknown
from petiole.gateway.openai import conversation as chat
from petiole.gateway.openai.responses import items, tools as responses
from petiole.tasks.errors import InvalidRequest

ODD: tuple[Any, ...] = ({"a": 1}, [], ["function"], 5, True)
SENT = [*({"type": one} for one in ODD), {"type": "web\r\nx: y"}, {"type": "web"}, {"type": "web"}]


@pytest.mark.parametrize(
    ("skipped", "where"),
    [
        (chat.skipped, "tools"),
        (anthropic.skipped, "tools"),
        (responses.skipped, "tools"),
        (items.skipped, "input"),
    ],
)
def test_a_type_that_is_no_text_is_not_among_the_ignored(skipped: Any, where: str) -> None:
    assert skipped(SENT) == [f"{where}.web\r\nx: y", f"{where}.web"]
    assert unknown.told(skipped(SENT)) == f"{where}.web??x??y, {where}.web"


@pytest.mark.parametrize("kind", ODD, ids=str)
def test_it_is_refused(kind: Any) -> None:
    for module in (anthropic, responses):
        with pytest.raises(InvalidRequest, match=r"tools\[0\].type: must be text"):
            module.functions([{"type": kind}])
    assert chat.functions([{"type": kind}]) == [{"type": kind}]  # which the task refuses
