"""A Redis server of one's own."""

from __future__ import annotations


def socket_path() -> str:
    raise RuntimeError("no embedded Redis")
