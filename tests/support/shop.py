"""A team's own Celery app, as it was before Petiole came: its tasks, its queue, its worker."""

import json
import os
from typing import Any

from celery import Celery
from celery.signals import worker_init

from petiole.tasks import generate

app = Celery("shop", broker=os.environ["SHOP_URL"], backend=os.environ["SHOP_URL"])
app.conf.update(json.loads(os.environ.get("SHOP_SETTINGS", "{}")))


@app.task(name="shop.fetch_article")
def fetch_article(number: int) -> str:
    return f"article {number}"


@app.task(name="shop.send_digest")
def send_digest(given: Any) -> dict[str, Any]:
    """What it was given, as the texts that it would send."""
    results = given if isinstance(given, list) else [given]
    return {"texts": [one["text"] if isinstance(one, dict) else one for one in results]}


@app.task(name="shop.note")
def note(given: Any = "", label: int = 0) -> str:
    """A text that tells what was given, and to which task."""
    results = given if isinstance(given, list) else [given]
    return f"{label}<{'+'.join(one['text'] if isinstance(one, dict) else one for one in results)}>"


@app.task(name="shop.canvases")
def canvases(every: int) -> dict[str, str]:
    """What goes wrong with canvases that a task of the shop submits."""
    from tests.support.both_apps import outcomes

    return outcomes(1, every)


@app.task(name="shop.try_again")
def try_again(failed_id: str, request: dict[str, Any], left: int) -> None:
    """As in docs/existing-app.md."""
    print(f"{left} left", flush=True)
    if left:
        generate.apply_async(kwargs=request, link_error=try_again.s(request, left - 1))


@worker_init.connect(weak=False)
def use_petioles_app_before_the_fork(**_: object) -> None:
    if os.environ.get("SHOP_SUBMITS_FIRST"):
        generate.delay(prompt="x", max_tokens=1)


@app.task(name="shop.note_error")
def note_error(task_id: str) -> None:
    """Another app's worker cannot look at its parameters: Celery then gives it the failed task's id alone."""
    print(f"noted {task_id}", flush=True)


digest = fetch_article.s(3) | generate.s(prompt="Summarize: ", max_tokens=4, seed=1) | send_digest.s()
