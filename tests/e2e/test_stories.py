"""`petiole task` and `petiole replay`, on a real fleet."""

from __future__ import annotations

import json
import time

import pytest

from petiole.contract.requests.count import queue_of
from petiole.tasks.errors import InvalidRequest, describe
from petiole.tasks.wire.keys import QUARANTINE_KEY, stream_keys, usage_keys
from tests.support import nursery
from tests.support.fake_engine import expected
from tests.support.site import Site, eventually

LONG = 2_000


def petiole(site: Site, *arguments: str) -> tuple[int, str]:
    """A command's exit status and output."""
    ran = nursery.petiole(*arguments, **site.environment)
    return ran.returncode, ran.stdout + ran.stderr


def test_the_story_of_a_task_whose_worker_was_killed(own_site: Site) -> None:
    site = own_site
    assert petiole(site, "task", "nobodys") == (
        1,
        "petiole: nobodys is not known: it waits, is forgotten, or never was\n",
    )
    for worker in [site.start_worker(), site.start_worker()]:
        worker.ready()
    result = site.generate("survivor", max_tokens=LONG, seed=3)
    site.streaming(result, 50)
    killed = site.holder()
    killed.kill()
    assert site.get(result)["token_ids"] == expected("survivor", 3, LONG)
    status, shown = petiole(site, "task", result.id, "--json")
    told = json.loads(shown)
    assert (status, told["state"], told["finish_reason"], told["tokens"]) == (0, "SUCCESS", "length", LONG)
    [one, other] = told["attempts"]
    assert (one["worker"], one["end"]) == (killed.node, "its worker died")
    assert other["end"] == "length"
    assert one["began_at"] < other["began_at"]
    _, shown = petiole(site, "task", result.id)
    assert "its worker died" in shown


def test_a_message_that_was_put_aside_is_sent_again(own_site: Site) -> None:
    """By workers that could not read it, say: those of an older version."""
    site = own_site
    result = site.generate("late", max_tokens=3, seed=3)
    [message] = site.redis.lrange(site.queues[0], 0, -1)
    site.redis.delete(site.queues[0])
    refusal = describe(InvalidRequest("message", "must be y", "x"))
    put_aside(site, result.id, message.decode(), reason="headers.x: must be y", error=refusal)
    put_aside(site, None, "cut")
    site.redis.lpush(QUARANTINE_KEY, "no JSON")
    error = {
        "exc_type": "InvalidRequest",
        "exc_module": "tasks.errors",
        "exc_message": ["message", "must be y", "x"],
    }
    failed = {"task_id": result.id, "status": "FAILURE", "result": error, "traceback": None, "children": []}
    site.redis.set(f"celery-task-meta-{result.id}", json.dumps(failed))
    status, shown = petiole(site, "replay")
    assert status == 0
    assert result.id in shown
    assert "headers.x: must be y" in shown
    assert petiole(site, "replay", result.id) == (0, f"{result.id}: sent again to petiole\n")
    assert petiole(site, "replay", result.id) == (1, f"{result.id}: was not put aside, or is forgotten\n")
    status, shown = petiole(site, "replay", "--all")
    assert (status, "must be kept whole" in shown) == (1, True)
    site.worker()
    assert site.get(site.app.AsyncResult(result.id))["token_ids"] == expected("late", 3, 3)


@pytest.mark.parametrize("headers", [{"retries": "many"}, {"expires": 5}])
def test_a_message_that_is_refused_again_is_put_aside_again(own_site: Site, headers: dict[str, object]) -> None:
    site = own_site
    site.worker()
    refused = site.generate("bad", max_tokens=3, submission={"headers": headers})
    with pytest.raises(InvalidRequest):
        site.get(refused)
    [first] = entries(site)
    assert petiole(site, "replay", refused.id)[0] == 0
    [second] = eventually(lambda: [one for one in entries(site) if one["at"] > first["at"]], "refused again")
    assert second["task_id"] == refused.id
    assert "headers" in petiole(site, "task", refused.id)[1]


def test_a_count_that_was_refused_is_sent_again_to_its_own_queue(own_site: Site) -> None:
    site = own_site
    site.worker()
    queue = queue_of(site.queues[0])
    refused = site.app.send_task(
        "tasks.count", kwargs={"texts": ["one two"]}, queue=queue, headers={"retries": "many"}
    )
    with pytest.raises(InvalidRequest):
        site.get(refused)
    [first] = entries(site)
    assert (first["queue"], first["task_id"]) == (queue, refused.id)
    mended = json.loads(first["message"])
    del mended["headers"]["retries"]
    site.redis.lset(QUARANTINE_KEY, 0, json.dumps({**first, "message": json.dumps(mended)}))
    assert petiole(site, "replay", refused.id) == (0, f"{refused.id}: sent again to {queue}\n")
    assert site.get(site.app.AsyncResult(refused.id))["counts"] == [2]
    assert entries(site) == []


def test_a_message_with_the_id_of_a_finished_task_takes_nothing_from_it(own_site: Site) -> None:
    """Its producer chooses the id, and says where it has sent it."""
    site = own_site
    site.worker()
    victim = site.generate("mine", max_tokens=3, seed=3)
    assert site.get(victim)["token_ids"] == expected("mine", 3, 3)
    where = {"exchange": "", "routing_key": "elsewhere"}
    properties = {"delivery_tag": "1", "delivery_info": where, "correlation_id": victim.id}
    headers = {"task": "tasks.generate", "id": victim.id, "retries": "many"}
    site.redis.lpush(site.queues[0], json.dumps({"headers": headers, "properties": properties, "body": "[]"}))
    [entry] = eventually(lambda: entries(site), "put aside")
    assert entry["queue"] == site.queues[0]
    before = everything_of(site, victim.id)
    for given in (victim.id, "--all"):
        status, shown = petiole(site, "replay", given)
        assert (status, "task: must have no other end than this refusal" in shown) == (1, True)
    assert everything_of(site, victim.id) == before
    assert not site.redis.exists("elsewhere")
    assert entries(site) == [entry]


def test_a_running_task_goes_on_if_a_message_of_its_id_is_to_be_sent(own_site: Site) -> None:
    site = own_site
    result = site.generate("busy", max_tokens=LONG, seed=3)
    [message] = site.redis.lrange(site.queues[0], 0, -1)
    site.worker()
    site.streaming(result, 20)
    put_aside(site, result.id, message.decode())
    status, shown = petiole(site, "replay", result.id)
    assert (status, "task: must not run" in shown) == (1, True), shown
    assert site.get(result)["token_ids"] == expected("busy", 3, LONG)


def test_one_that_cannot_be_sent_keeps_no_other_back(own_site: Site) -> None:
    site = own_site
    result = site.generate("late", max_tokens=3, seed=3)
    [message] = site.redis.lrange(site.queues[0], 0, -1)
    site.redis.delete(site.queues[0])
    put_aside(site, "deep", '{"a":' * 100_000)
    put_aside(site, "astray", message.decode(), queue="elsewhere")
    put_aside(site, "damaged", message.decode())
    site.redis.set(stream_keys("damaged").state, "no hash")
    for at in (1e30, float("nan"), 2.0, 2.0):  # the last two: one, whose entry was written twice
        put_aside(site, result.id, message.decode(), at=at)
    assert petiole(site, "replay")[0] == 0
    status, shown = petiole(site, "replay", "--all")
    assert (status, shown.splitlines()[-1]) == (1, "not sent again: deep, astray, damaged")
    assert f"{result.id}: sent again to petiole\n" in shown
    assert site.redis.llen(site.queues[0]) == 1
    assert {one["task_id"]: one["at"] for one in entries(site)}.keys() == {"deep", "astray", "damaged", result.id}
    assert 2.0 not in [one["at"] for one in entries(site)]
    site.worker()
    assert site.get(result)["token_ids"] == expected("late", 3, 3)


def test_a_time_that_is_none_keeps_nothing_else_back(own_site: Site) -> None:
    own_site.redis.hset(stream_keys("odd").asked, mapping={"submitted": "never", "cancel": 1})
    assert petiole(own_site, "task", "odd") == (0, "odd: PENDING\n  cancelled: True\n")


def test_the_end_of_a_long_message_is_its_tenants(own_site: Site) -> None:
    """What limits hold for it is given back, although the message is not kept whole."""
    site = own_site
    site.worker()
    headers = {"retries": "many", "tenant": "acme"}
    refused = site.generate("long " * 20_000, max_tokens=3, submission={"headers": headers})
    with pytest.raises(InvalidRequest):
        site.get(refused)
    days = [usage_keys(time.strftime("%Y-%m-%d", time.gmtime(at)))[0] for at in (time.time() - 60, time.time())]
    [told] = [entry for day in set(days) if (entry := site.redis.hget(day, refused.id))]
    assert json.loads(told)["tenant"] == "acme"


def everything_of(site: Site, task_id: str) -> list[object]:
    keys = stream_keys(task_id)
    return [
        site.redis.lrange(keys.log, 0, -1),
        site.redis.hgetall(keys.state),
        site.redis.get(f"celery-task-meta-{task_id}"),
    ]


def put_aside(site: Site, task_id: str | None, message: str, **given: object) -> None:
    entry = {"at": 1.0, "queue": "petiole", "reason": "", "task_id": task_id, "message": message, **given}
    site.redis.lpush(QUARANTINE_KEY, json.dumps(entry))


def entries(site: Site) -> list[dict[str, object]]:
    return [json.loads(entry) for entry in site.redis.lrange(QUARANTINE_KEY, 0, -1)]
