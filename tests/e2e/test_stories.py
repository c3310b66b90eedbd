"""`petiole task` and `petiole replay`, on a real fleet."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.keys import QUARANTINE_KEY
from tests.support.fake_engine import expected
from tests.support.site import REPOSITORY, Site, eventually

LONG = 2_000


def petiole(site: Site, *arguments: str) -> tuple[int, str]:
    """A command's exit status and output."""
    command = [sys.executable, "-m", "petiole.tasks.commands.cli", *arguments]
    ran = subprocess.run(
        command, cwd=REPOSITORY, env=site.environment, capture_output=True, text=True, check=False
    )
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
    entry = {"at": 1.0, "queue": "petiole", "reason": "headers.x: must be y", "task_id": result.id}
    site.redis.lpush(QUARANTINE_KEY, json.dumps({**entry, "message": message.decode()}))
    site.redis.lpush(QUARANTINE_KEY, json.dumps({**entry, "task_id": None, "message": "cut"}), "no JSON")
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


def entries(site: Site) -> list[dict[str, object]]:
    return [json.loads(entry) for entry in site.redis.lrange(QUARANTINE_KEY, 0, -1)]
