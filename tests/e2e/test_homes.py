"""A fleet keeps a conversation on the worker that has it in its prefix cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from petiole.contract.requests.generation import ChatRequest
from petiole.contract.requests.validation import validate
from petiole.tasks.submission.options import affinity_key as key
from tests.support.site import Site, Worker, eventually

TURNS = 6


class Conversation:
    def __init__(self, site: Site, opening: str) -> None:
        self.site, self.messages = site, [{"role": "user", "content": opening}]

    def turn(self, *, max_tokens: int = 3) -> tuple[Worker, dict[str, Any]]:
        """Ask, wait for the answer, and ask something else. Returns who answered."""
        kwargs = {"messages": self.messages, "max_tokens": max_tokens}
        affinity = key(validate(ChatRequest, kwargs))
        sent = self.site.app.send_task("tasks.chat", kwargs=kwargs, headers={"petiole-affinity": affinity})
        value = self.site.get(sent)
        self.messages += [{"role": "assistant", "content": value["text"]}, {"role": "user", "content": "go on"}]
        (who,) = eventually(lambda: [w for w in self.site.workers if f"[{sent.id}] received" in w.output])
        return who, value


@pytest.fixture
def site(own_site: Site) -> Site:
    return with_workers(own_site)


def with_workers(site: Site, **environment: Any) -> Site:
    for worker in [site.start_worker(**environment) for _ in range(3)]:
        worker.ready()
    return site


def test_each_conversation_stays_where_it_began(own_site: Site) -> None:
    site = with_workers(own_site, PETIOLE_AFFINITY_WAIT_MS=10_000)  # for the home, however busy the machine is
    conversations = [Conversation(site, f"opening {i}") for i in range(12)]
    homes = [conversation.turn()[0] for conversation in conversations]
    for _ in range(TURNS):
        assert [conversation.turn()[0] for conversation in conversations] == homes
    assert len(set(homes)) > 1


def test_a_conversation_whose_worker_ends_goes_on_elsewhere(site: Site) -> None:
    conversation = Conversation(site, "hello")
    first, _ = conversation.turn()
    first.kill()
    second, _ = conversation.turn()
    assert second is not first
    assert [conversation.turn()[0] for _ in range(TURNS)] == [second] * TURNS
    second.stop()
    third, _ = conversation.turn()
    assert third not in (first, second)


def test_a_worker_that_takes_no_more_is_not_waited_for(site: Site) -> None:
    conversation = Conversation(site, "hello")
    first, _ = conversation.turn()
    site.app.control.cancel_consumer("petiole", destination=[first.node], reply=True, timeout=10)
    assert conversation.turn()[0] is not first


def test_a_backlog_of_one_affinity_is_shared_out(site: Site) -> None:
    """What all tasks have in common sets none apart."""
    header = {"petiole-affinity": "0123456789abcdef"}
    tasks = [site.generate(f"p{i}", max_tokens=300, submission={"headers": header}) for i in range(60)]
    for task in tasks:
        site.get(task)
    took = [sum(worker.output.count(f"[{task.id}] received") for task in tasks) for worker in site.workers]
    assert min(took) > 0
    assert site.unfinished() == 0


def test_the_real_engine_finds_the_conversation(tmp_path: Path) -> None:
    engine = {"PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine", "PETIOLE_DEVICE": "cpu"}
    with Site(tmp_path, **engine) as site:
        for worker in [site.start_worker(), site.start_worker()]:
            worker.ready()
        conversation = Conversation(site, "Count from 1 to 20, please, and then backwards.")
        _, first = conversation.turn(max_tokens=16)
        for _ in range(TURNS):
            _, value = conversation.turn(max_tokens=16)
            assert value["usage"]["cached_prompt_tokens"] >= first["usage"]["prompt_tokens"] - 8
