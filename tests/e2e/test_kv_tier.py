"""Workers of one machine with a KV tier: a conversation goes on where it was, whoever dies."""

from __future__ import annotations

import signal
from pathlib import Path

from petiole.gpu_worker.runtime.memory.kv_tier import CHUNK
from petiole.tasks.fleet.reports import workers
from tests.e2e.test_real_engine import ENGINE, GREEDY
from tests.support.site import Site, eventually

PROMPT = [20 + i * i % 200 for i in range(1500)]


def test_a_killed_workers_conversations_are_warm_in_the_next_one(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with Site(tmp_path, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_KV_TIER=folder, **ENGINE) as site:
        first = site.worker()
        asked = site.generate(PROMPT, max_tokens=400, **GREEDY)
        site.streaming(asked, 20)
        eventually(
            lambda: len(list(folder.rglob("*.kv"))) >= len(PROMPT) // CHUNK, "the prompt's chunks are saved"
        )
        first.signal(signal.SIGKILL)
        site.worker()
        value = site.get(asked)
        assert value["attempt"] >= 2
        assert value["token_ids"] == site.tokens(asked)
        [report] = eventually(lambda: [one for one in workers(site.redis) if one.kv_tier_restored_tokens])
        assert report.prompt_tokens <= 400 + len(PROMPT) - report.kv_tier_restored_tokens
        turn = [*PROMPT, *value["token_ids"], 30, 31]
        usage = site.get(site.generate(turn, max_tokens=4, **GREEDY))["usage"]
        assert usage["cached_prompt_tokens"] >= 1500
