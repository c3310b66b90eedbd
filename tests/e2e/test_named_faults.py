"""Each fault is brought about in a real fleet, and the metrics say which it was."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from petiole.tasks.errors import ModelChanged
from tests.support.client import client
from tests.support.nursery import petiole
from tests.support.scraping import Figures, exporting
from tests.support.site import Site, eventually

pytestmark = pytest.mark.e2e

EX_SOFTWARE = 70


def status(site: Site) -> str:
    return petiole("status", "--once", **site.environment).stdout


@pytest.mark.parametrize(
    ("setting", "bad", "good"), [("maxmemory", "1", "0"), ("min-replicas-to-write", "1", "0")]
)
def test_a_redis_that_is_full_or_without_replicas_is_named(
    own_site: Site, setting: str, bad: str, good: str
) -> None:
    worker = own_site.worker()
    with exporting(own_site) as scrape:
        own_site.redis.config_set(setting, bad)
        eventually(lambda: scrape()["petiole_worker_up", ""] == 0, "it cannot report")
        figures = scrape()
        assert worker.alive()
        assert figures["petiole_redis_up", ""] == 1
        assert figures["petiole_redis_writable", "broker"] == figures["petiole_redis_writable", "streams"] == 0
        assert "takes no writes" in status(own_site)
        own_site.redis.config_set(setting, good)
        assert scrape()["petiole_redis_writable", "streams"] == 1
        eventually(lambda: scrape()["petiole_worker_up", ""] == 1, "it reports again")


def test_a_lease_that_is_not_renewed_alarms_before_the_worker_is_lost(own_site: Site) -> None:
    worker = own_site.worker()
    with exporting(own_site) as scrape:
        eventually(lambda: ("petiole_worker_up", "") in scrape(), "it reports")
        worker.signal(signal.SIGSTOP)
        seen: list[tuple[float, float]] = []

        def lost() -> bool:
            figures = scrape()
            seen.append((figures["petiole_worker_up", ""], figures["petiole_lease_age_seconds", ""]))
            return not seen[-1][0]

        eventually(lost, "it is lost")
        assert max(age for up, age in seen if up) > 4
        worker.signal(signal.SIGCONT)


def test_a_crash_loop_is_named_whether_the_model_was_loaded_or_not(own_site: Site) -> None:
    """Three processes have one name after the other: it is killed, it cannot load its model, it runs."""
    own_site.worker().kill()
    own_site.workers.clear()
    failing = own_site.start_worker(PETIOLE_ENGINE_FACTORY="no.module:here")
    assert failing.ended() == EX_SOFTWARE
    own_site.workers.clear()
    with exporting(own_site) as scrape:
        figures = scrape()
        assert figures["petiole_worker_starts_total", ""] == 2
        assert figures["petiole_worker_last_exit", "killed"] == 1
        own_site.start_worker()
        eventually(lambda: scrape()["petiole_worker_starts_total", ""] == 3, "it starts again")
        assert scrape()["petiole_worker_last_exit", str(EX_SOFTWARE)] == 1
        assert f"3 ({EX_SOFTWARE})" in status(own_site)


def test_stuck_completions_are_named(own_site: Site) -> None:
    own_site.worker(PETIOLE_RESULT_BACKEND="redis://127.0.0.1:1/0")
    own_site.generate("stuck", max_tokens=2, submission={"task_id": "stuck"})
    with exporting(own_site) as scrape:
        figures = eventually(
            lambda: (now := scrape()).get(("petiole_num_pending_completions", "")) == 1 and now, "it is pending"
        )
        assert figures["petiole_num_held_messages", ""] == 1
        first = figures["petiole_oldest_task_seconds", ""]
        eventually(lambda: scrape()["petiole_oldest_task_seconds", ""] > first, "it grows older")


def owns_tasks_and_counts(site: Site) -> None:
    """Its death is one death."""
    eventually(lambda: site.redis.scard("petiole:owners") == 3, "it owns tasks, and counts of two queues")


def test_a_death_a_redelivery_and_what_was_resumed_are_counted(own_site: Site) -> None:
    first = own_site.worker(PETIOLE_FAKE_STEP_MS=20)
    result = own_site.generate("long", max_tokens=200, seed=1)
    own_site.streaming(result, 5)
    owns_tasks_and_counts(own_site)
    first.kill()
    own_site.worker()
    own_site.get(result)
    with exporting(own_site) as scrape:
        names = ("deaths", "redeliveries", "resumed_attempts")

        def counts() -> list[float]:
            figures = scrape()
            return [figures.get((f"petiole_{name}_total", ""), 0) for name in names]

        own_site.redis.hdel("petiole:workers", first.node)
        eventually(lambda: counts() == [1, 1, 1], "one of each")


def test_a_worker_that_is_stopped_for_too_long_has_lost_its_lease(own_site: Site) -> None:
    """The other worker, which goes on with its task, counts a death."""
    stopped = own_site.worker(PETIOLE_FAKE_STEP_MS=20)
    result = own_site.generate("long", max_tokens=200, seed=1)
    own_site.streaming(result, 5)
    owns_tasks_and_counts(own_site)
    other = own_site.worker()
    stopped.signal(signal.SIGSTOP)
    own_site.get(result)
    with exporting(own_site) as scrape:
        eventually(lambda: scrape().get(("petiole_deaths_total", "")) == 1, "the other one reports it")
        other.stop()
        stopped.signal(signal.SIGCONT)
        eventually(lambda: scrape().get(("petiole_lost_leases_total", "")) == 1, "this one, too")
    assert stopped.alive()


def test_a_refused_message_and_a_servers_fault_are_told_from_a_callers(own_site: Site) -> None:
    first = own_site.worker()
    changed = own_site.generate("mine", max_tokens=2000)
    own_site.streaming(changed, 5)
    first.stop()
    own_site.worker(PETIOLE_MODEL="another")
    with pytest.raises(ModelChanged):
        own_site.get(changed)
    own_site.redis.lpush("petiole", b"garbage")
    with exporting(own_site) as scrape:
        eventually(lambda: scrape().get(("petiole_quarantined_total", "")) == 1, "the refused message")
        figures = scrape()
        assert (figures["petiole_failures_total", "server"], figures["petiole_failures_total", "caller"]) == (1, 0)


# ------------------------------------------------------------ of the engine, by a real one with little room

PLACES, PAGES = 2, 2048
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Site, Callable[[], Figures]]]:
    """A site whose engine has two places and room for 2,047 tokens, and its metrics."""
    settings = {
        "PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine",
        "PETIOLE_DEVICE": "cpu",
        "PETIOLE_DTYPE": "float32",
        "PETIOLE_MAX_NUM_SEQS": PLACES,
        "PETIOLE_NUM_PAGES": PAGES,
    }
    folder: Path = tmp_path_factory.mktemp("tight")
    with Site(folder, PETIOLE_DRAIN_SECONDS=0, **settings) as site:
        site.worker()
        with exporting(site) as scrape:
            eventually(lambda: ("petiole_steps_total", "") in scrape(), "it reports")
            yield site, scrape


def grown(scrape: Callable[[], Figures], name: str, before: Figures) -> float:
    """What the counter has grown by, as soon as it has."""
    key = (f"petiole_{name}_total", "")
    return float(eventually(lambda: scrape()[key] - before[key], f"{name} grows"))


def test_each_token_takes_a_step(tight: tuple[Site, Callable[[], Figures]]) -> None:
    """Steps that stand still while tasks run: the engine hangs."""
    site, scrape = tight
    before = scrape()
    site.get(site.generate([20, 21], max_tokens=16, **GREEDY))
    key = ("petiole_steps_total", "")
    eventually(lambda: scrape()[key] - before[key] >= 16, "all its steps are reported")


def test_a_token_behind_the_end_is_a_zombies(tight: tuple[Site, Callable[[], Figures]]) -> None:
    """The step behind it was launched before the end was known."""
    site, scrape = tight
    prompt = [20, 21, 22]
    tokens = site.get(site.generate(prompt, max_tokens=8, **GREEDY))["token_ids"]
    before = scrape()
    stop = {"stop_token_ids": [tokens[4]]}
    assert site.get(site.generate(prompt, max_tokens=60, **stop, **GREEDY))["finish_reason"] == "stop"
    assert grown(scrape, "zombie_outputs", before) == 1


def test_prompts_that_do_not_fit_into_the_prefix_cache_together_evict_each_other(
    tight: tuple[Site, Callable[[], Figures]],
) -> None:
    site, scrape = tight
    before = scrape()
    for first in (100, 200, 300):
        site.get(site.generate([first + i % 70 for i in range(1000)], max_tokens=2, **GREEDY))
    assert grown(scrape, "evicted_pages", before) > 0


def test_an_urgent_task_preempts_one_that_can_wait(tight: tuple[Site, Callable[[], Figures]]) -> None:
    site, scrape = tight
    before = scrape()
    later = {"submission": {"priority": 9}}
    patient = [site.generate([30 + i], max_tokens=900, seed=i, **later, **GREEDY) for i in range(PLACES)]
    for task in patient:
        site.streaming(task)
    site.get(site.generate([40], max_tokens=2, **GREEDY))
    assert grown(scrape, "num_preemptions", before) == 1
    assert [site.get(task)["usage"]["completion_tokens"] for task in patient] == [900] * PLACES


def test_a_worker_that_takes_from_no_queue_is_not_ready(own_site: Site) -> None:
    worker = own_site.worker()
    control = own_site.app.control
    with exporting(own_site) as scrape:
        eventually(lambda: scrape().get(("petiole_worker_ready", "")) == 1, "it is ready")
        control.cancel_consumer("petiole", reply=True)
        eventually(lambda: scrape()["petiole_worker_ready", ""] == 0, "it is silenced")
        assert scrape()["petiole_worker_up", ""] == 1
        assert "silenced" in status(own_site)
        assert "takes from no queue any longer, until `add_consumer` names one" in worker.output
        control.add_consumer("petiole", reply=True)
        eventually(lambda: scrape()["petiole_worker_ready", ""] == 1, "it is ready again")
        assert scrape()["petiole_memory_bytes", ""] > 2**20


def test_a_rate_limit_of_an_engines_task_is_refused(own_site: Site) -> None:
    worker = own_site.worker()
    ((reply,),) = [
        answer.values() for answer in own_site.app.control.rate_limit("tasks.generate", "1/h", reply=True)
    ]
    says = "rate_limit: task_name must be a task of the application's own"
    assert says in reply["error"]
    assert f"a control command was refused: {says}" in worker.output
    assert "Traceback" not in worker.output
    assert own_site.get(own_site.generate("hello", max_tokens=2))
    assert own_site.get(own_site.generate("hello", max_tokens=2))


def test_a_chord_whose_body_will_not_run_is_named(own_site: Site) -> None:
    worker = own_site.worker()
    code = """
from celery import Celery, chord
stock = Celery(broker=celery_app.conf.broker_url, backend=celery_app.conf.result_backend, set_as_current=True)
good, bad, body = (
    stock.signature("tasks.generate", kwargs={"prompt": "x", "max_tokens": n}, queue="petiole") for n in (2, 0, 2)
)
result = chord([good, bad], app=stock)(body)
try:
    result.get(timeout=60)
except Exception as error:
    print(json.dumps([result.id, type(error).__name__]))
"""
    body, _ = client(own_site, code)
    with exporting(own_site) as scrape:
        eventually(lambda: scrape().get(("petiole_failed_chords_total", "")) == 1, "it is counted")
    assert f"the body of a chord will not run: tasks.generate, task {body}: ChordError" in worker.output
