"""What the gateway keeps in Redis, and what is there that it cannot read."""

from __future__ import annotations

import pytest

from petiole.gateway.openai.responses import store


@pytest.mark.parametrize("raw", [None, b"", b"{", b'"\xff"', b"[" * 9999])
def test_what_cannot_be_read_is_not_there(raw: bytes | None) -> None:
    assert store._decoded(raw) is None
