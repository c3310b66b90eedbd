"""A worker's memory stays as it is, however many messages it refuses, and however large they would become.

`PETIOLE_REFUSED_MESSAGES` sets the number."""

from __future__ import annotations

import base64
import bz2
import json
import lzma
import os
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import expected
from tests.support.hostile import message, raw
from tests.support.site import Site, eventually

pytestmark = pytest.mark.e2e

MESSAGES = int(os.environ.get("PETIOLE_REFUSED_MESSAGES", 10_000))
BATCH = 500
MiB = 2**20
FLAT = 48 * MiB
"""As much may come from the allocator. A single bomb that stays whole would be more."""


def compressed() -> dict[str, bytes]:
    """Bodies of hundreds of bytes to 65 kB, which would inflate to 64 MiB, or to 300."""
    small, large = bytes(64 * MiB), bytes(300 * MiB)
    return {"bzip2": bz2.compress(large), "gzip": zlib.compress(small, 9), "lzma": lzma.compress(small)}


def hostile(number: int, bombs: dict[str, bytes]) -> bytes:
    given: dict[str, Any] = message(f"task-{number}", "hello")
    if number % 100 == 0:
        kind = (*bombs,)[number // 100 % len(bombs)]
        given["headers"]["compression"] = kind
        return raw({**given, "body": base64.b64encode(bombs[kind]).decode()})
    if number % 100 == 50:
        return raw({**given, "body": b"[" + b'{"a":1},' * 20_000 + b"1]"})
    wrong: tuple[Any, ...] = (b"[" * 20_000, b"not json", [[], [], {}], 5)
    return raw({**given, "body": wrong[number % len(wrong)]})


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_refused_messages_leave_memory_as_it_was(tmp_path: Path) -> None:
    bombs = compressed()
    assert len(bombs["bzip2"]) < 1000
    with Site(tmp_path) as site:
        worker = site.worker()
        site.get(site.generate("warm", max_tokens=3, seed=1))
        sizes = []
        for first in range(0, MESSAGES, BATCH):
            site.redis.lpush("petiole", *(hostile(number, bombs) for number in range(first, first + BATCH)))
            eventually(lambda: site.unfinished() == 0, f"what follows {first} is settled", 300)
            sizes.append(worker.memory_bytes())
        assert site.get(site.generate("alive", max_tokens=3, seed=1))["token_ids"] == expected("alive", 1, 3)
        print(json.dumps([size // MiB for size in sizes]), "MiB; at most", worker.memory_bytes("VmHWM") // MiB)
        assert max(sizes) - sizes[0] < FLAT
        assert worker.memory_bytes("VmHWM") - sizes[0] < FLAT
