"""Keys of the broker that somebody else has written into: the worker names them, and everything else goes on."""

from __future__ import annotations

from petiole.tasks.wire.keys import stream_keys
from tests.support.fake_engine import expected
from tests.support.site import Site, eventually

LONG = 1500


def test_a_worker_whose_queue_is_no_list_serves_the_other_priorities(own_site: Site) -> None:
    site = own_site
    patient = site.generate("patient", max_tokens=3, seed=1, submission={"priority": 3})
    site.redis.set("petiole", "somebody's")
    worker = site.worker()
    assert site.get(patient)["token_ids"] == expected("patient", 1, 3)
    assert worker.output.count("key petiole is damaged: it must be a list") == 1
    site.redis.delete("petiole")
    assert site.get(site.generate("next", max_tokens=3, seed=1))["token_ids"] == expected("next", 1, 3)


def test_what_a_worker_holds_is_overwritten_and_it_goes_on(own_site: Site) -> None:
    site = own_site
    worker = site.worker()
    running = site.generate("running", max_tokens=LONG, seed=1)
    site.streaming(running)
    (held,) = site.redis.keys("petiole:unacked:*")
    site.redis.set(held, "somebody's")
    assert site.get(site.generate("next", max_tokens=3, seed=2))["token_ids"] == expected("next", 2, 3)
    assert site.get(running)["token_ids"] == expected("running", 1, LONG) == site.tokens(running)
    assert f"key {held.decode()} is damaged: it must be a hash" in worker.output
    assert worker.alive()
    other = site.worker()
    dead = site.generate("dead", max_tokens=LONG, seed=3, submission={"task_id": "dead"})
    site.streaming(dead)
    (worker if worker.output.count("[dead] received") else other).kill()
    assert site.get(dead)["token_ids"] == expected("dead", 3, LONG)


def test_a_completion_of_another_type_does_not_keep_links_from_being_sent(own_site: Site) -> None:
    site = own_site
    key = stream_keys("linked").completion
    site.redis.hset(key, "somebody's", 1)
    worker = site.worker()
    link = site.app.signature("tasks.generate", kwargs={"prompt": "next", "max_tokens": 1}, immutable=True)
    result = site.generate("first", max_tokens=3, submission={"task_id": "linked", "link": link})
    assert site.get(result)["finish_reason"] == "length"
    eventually(
        lambda: len(site.redis.keys("petiole:{*}:log")) == 2 and site.unfinished() == 0, "the link has ended"
    )
    assert f"its key {key} was of the wrong type and is overwritten" in worker.output
