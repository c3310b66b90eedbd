"""A log that somebody else has written into: its task fails, and says why; no other notices."""

from __future__ import annotations

import pytest
from support.fake_engine import expected
from support.site import Site, eventually

from tasks.errors import GenerationFailed
from tasks.schemas import stream_keys

LONG = 1500
GARBAGE = '{"index": 7'


def test_a_task_whose_log_cannot_be_read_fails_when_it_is_resumed(own_site: Site) -> None:
    site = own_site
    first = site.worker()
    result = site.generate("resumed", max_tokens=LONG, seed=1)
    site.streaming(result, 5)
    first.kill()
    written = site.tokens(result)
    site.redis.rpush(stream_keys(result.id).log, GARBAGE)
    second = site.worker()
    with pytest.raises(GenerationFailed, match=f"its log cannot be read after {len(written)} tokens"):
        site.get(result, 30)
    *_, last = site.redis.lrange(stream_keys(result.id).log, 0, -1)
    assert f'"index":{len(written)},"token_ids":[],"text":"","finish_reason":"error"' in last.decode()
    eventually(lambda: site.unfinished() == 0, "it is acknowledged")
    assert second.output.count(f"[{result.id}] received") == 1


@pytest.mark.usefixtures("worker")
def test_a_log_that_is_damaged_while_it_is_written_holds_up_no_other(site: Site) -> None:
    results = [site.generate(f"r{i}", max_tokens=LONG, seed=i) for i in range(3)]
    for result in results:
        site.streaming(result)
    site.redis.rpush(stream_keys(results[1].id).log, GARBAGE)
    with pytest.raises(GenerationFailed, match=r"its log cannot be read after \d+ tokens"):
        site.get(results[1], 30)
    for i in (0, 2):
        assert site.get(results[i])["token_ids"] == expected(f"r{i}", i, LONG) == site.tokens(results[i])
    eventually(lambda: site.unfinished() == 0, "all are acknowledged")
