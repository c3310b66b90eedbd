"""A task says how long its stream and its result are kept, within the limits of the settings."""

from __future__ import annotations

import pytest

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.wire.keys import stream_keys
from tests.support.site import Site, Worker, eventually


def kept(site: Site, task_id: str) -> tuple[int, int, int]:
    """The TTLs of log, state and result, in seconds."""
    keys = stream_keys(task_id)
    log, state, result = (site.redis.ttl(key) for key in (keys.log, keys.state, f"celery-task-meta-{task_id}"))
    return log, state, result


def test_streams_and_results_are_kept_as_long_as_their_tasks_say(site: Site, worker: Worker) -> None:
    own = [
        site.generate(f"own {k}", max_tokens=3, seed=k, stream_ttl_s=100 + k, result_expires_s=500 + k)
        for k in range(20)
    ]
    plain = site.generate("plain", max_tokens=3, seed=1)
    linked = site.generate(
        "linked",
        max_tokens=3,
        result_expires_s=300,
        submission={"link": site.signature(max_tokens=2, stream_ttl_s=70).set(task_id="the-link")},
    )
    revoked = site.generate("revoked", max_tokens=4000, stream_ttl_s=90, result_expires_s=400)
    site.streaming(revoked)
    log, state, result = kept(site, revoked.id)
    assert log > 3000, "while it runs, the settings count"
    site.app.control.revoke(revoked.id, terminate=True)
    for task in (*own, plain, linked):
        site.get(task)
    for k, task in enumerate(own):
        log, state, result = kept(site, task.id)
        assert 60 < min(log, state) <= max(log, state) <= 100 + k
        assert 400 < result <= 500 + k
    log, state, result = kept(site, plain.id)
    assert 3000 < min(log, state) <= max(log, state) <= 3600
    assert 80_000 < result <= 86_400
    assert 200 < kept(site, linked.id)[2] <= 300
    eventually(lambda: 0 < kept(site, "the-link")[0] <= 70, "the link, too")
    eventually(lambda: 200 < kept(site, revoked.id)[2] <= 400, "a failure is kept as long as a result")
    assert 0 < kept(site, revoked.id)[0] <= 90


@pytest.mark.parametrize(
    ("option", "limit"),
    [
        ({"stream_ttl_s": 3601}, "stream_ttl_s: must be at most PETIOLE_STREAM_TTL_S, 3600, got 3601"),
        (
            {"result_expires_s": 86_500},
            "result_expires_s: must be at most PETIOLE_RESULT_EXPIRES_S, 86400, got 86500",
        ),
        ({"stream_ttl_s": 59}, "stream_ttl_s: must be at least 60, got 59"),
    ],
)
def test_no_task_is_kept_longer_than_the_settings_allow(
    site: Site, worker: Worker, option: dict[str, int], limit: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        site.get(site.generate("x", **option))
    assert str(refused.value) == limit
