"""The worker with the model that ships with the project: real text through queue, stream and result backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.reports import WorkerReport, workers
from tests.e2e.test_named_faults import status
from tests.support.site import Site, eventually

ENGINE = {
    "PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine",
    "PETIOLE_DEVICE": "cpu",
    "PETIOLE_DTYPE": "float32",
}
GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("real")
    with Site(folder, PETIOLE_VISIBILITY_TIMEOUT_S=2, PETIOLE_DRAIN_SECONDS=0, **ENGINE) as site:
        for worker in [site.start_worker(), site.start_worker()]:
            worker.ready()
        yield site


def text_of(site: Site, result: Any) -> str:
    return "".join(delta["text"] for delta in site.log(result))


def test_the_result_is_what_was_streamed(site: Site) -> None:
    result = site.generate("Count from 1 to 5.", max_tokens=24, **GREEDY)
    value = site.get(result)
    assert value["token_ids"] == site.tokens(result)
    assert value["text"] == text_of(site, result)
    assert (value["finish_reason"], value["stop_reason"]) == ("length", "max_tokens")
    assert value["usage"]["completion_tokens"] == 24
    assert value["usage"]["prompt_tokens"] > 0
    assert 0 <= value["timing"]["queue_ms"] <= value["timing"]["ttft_ms"] <= value["timing"]["total_ms"]


def test_a_conversation_is_answered(site: Site) -> None:
    messages = [{"role": "user", "content": "What is 2 plus 3?"}]
    value = site.get(site.app.send_task("tasks.chat", kwargs={"messages": messages, "max_tokens": 16}))
    assert value["token_ids"]


def test_token_ids_as_prompt(site: Site) -> None:
    assert len(site.get(site.generate([20, 21, 22], max_tokens=3, **GREEDY))["token_ids"]) == 3


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}], ids=str)
def test_sixty_four_tasks_at_once_give_what_each_gives_alone(site: Site, options: dict[str, Any]) -> None:
    prompts = [f"Count from {i} to {i + 9}." for i in range(64)]
    at_once = [site.generate(prompt, max_tokens=12, ignore_eos=True, **options) for prompt in prompts]
    together = [site.get(result, 60)["token_ids"] for result in at_once]
    for i in range(0, 64, 9):
        assert (
            site.get(site.generate(prompts[i], max_tokens=12, ignore_eos=True, **options))["token_ids"]
            == together[i]
        )


def test_a_stop_string_ends_the_text_before_it(site: Site) -> None:
    whole = site.get(site.generate("Count from 1 to 9.", max_tokens=40, **GREEDY))["text"]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 2]
    result = site.generate("Count from 1 to 9.", max_tokens=40, stop=stop, **GREEDY)
    value = site.get(result)
    assert value["text"] == whole[: whole.index(stop)] == text_of(site, result)
    assert (value["finish_reason"], value["stop_reason"]) == ("stop", stop)


def test_what_the_model_cannot_hold_is_refused_with_numbers(site: Site) -> None:
    with pytest.raises(InvalidRequest) as caught:
        site.get(site.generate([20] * 100_000, max_tokens=5))
    assert "100000" in str(caught.value)
    with pytest.raises(InvalidRequest) as caught:
        site.get(site.generate("hello", max_tokens=10**7))
    assert caught.value.field == "max_tokens"


def test_a_constraint_is_kept(site: Site) -> None:
    value = site.get(site.generate("Yes or no?", max_tokens=20, choice=["yes", "no"]))
    assert value["text"] in {"yes", "no"}


def test_schemas_that_need_a_large_stack_end_no_worker(site: Site) -> None:
    """Of 5,000 properties each. What may be left out is refused, and what is required is served."""
    before = {worker.process.pid for worker in site.workers}
    keys = {f"p{k}": {"type": "string"} for k in range(5_000)}
    schema = {"type": "object", "properties": keys}
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            site.get(site.generate("Some JSON.", max_tokens=5, json_schema=schema))
        assert caught.value.field == "json_schema"
        assert site.get(site.generate("Yes or no?", max_tokens=20, choice=["yes", "no"]))["text"]
    required = {**schema, "required": [*keys]}
    assert "{" in site.get(site.generate("Some JSON.", max_tokens=5, json_schema=required))["text"]
    assert {worker.process.pid for worker in site.workers if worker.process.poll() is None} == before


def test_log_probabilities_come_with_their_tokens(site: Site) -> None:
    result = site.generate("Count from 1 to 5.", max_tokens=5, logprobs=2, **GREEDY)
    value = site.get(result)
    assert [entry["token_id"] for entry in value["logprobs"]] == value["token_ids"]
    assert sum(len(delta["logprobs"]) for delta in site.log(result) if delta["token_ids"]) == 5


INTERRUPTED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.2, "seed": 3},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    "min_tokens": {"temperature": 1.2, "seed": 6, "min_tokens": 712, "ignore_eos": False},
}
ENDS = {509, 511}


def test_killed_workers_text_goes_on_as_if_nothing_had_happened(site: Site) -> None:
    """Same tokens, and each in the stream once: greedy, sampled, with penalties over what came before, with an end
    not before so many tokens."""

    def submit() -> dict[str, Any]:
        return {
            name: site.generate(
                "Count from 1 to 500.",
                max_tokens=1200,
                submission={"task_id": name},
                **{"ignore_eos": True, **options},
            )
            for name, options in INTERRUPTED.items()
        }

    interrupted = submit()
    for result in interrupted.values():
        site.streaming(result, 40)
    for worker in site.workers:
        worker.kill()
    for worker in [site.start_worker(), site.start_worker()]:
        worker.ready()
    values = {name: site.get(result, 90) for name, result in interrupted.items()}
    for name, result in interrupted.items():
        assert values[name]["attempt"] == 2
        assert values[name]["token_ids"] == site.tokens(result)
        assert values[name]["text"] == text_of(site, result)
        site.redis.delete(*site.redis.keys(f"petiole:{{{name}}}:*"))
        result.forget()
    assert not ENDS & set(values["min_tokens"]["token_ids"][:712])
    assert values["min_tokens"]["stop_reason"] == "eos"
    for name, result in submit().items():
        undisturbed = site.get(result, 90)
        assert undisturbed["token_ids"] == values[name]["token_ids"]
        assert undisturbed["text"] == values[name]["text"]


def test_a_burst_of_urgent_tasks_takes_the_slots_of_those_that_can_wait(tmp_path: Path) -> None:
    with Site(tmp_path, **ENGINE) as site:
        worker = site.worker(PETIOLE_MAX_NUM_SEQS=6)
        flood = [site.generate(f"f{i}", max_tokens=1200, submission={"priority": 9}, **GREEDY) for i in range(10)]
        site.streaming(flood[5])
        urgent = [site.generate(f"u{i}", max_tokens=600, **GREEDY) for i in range(6)]
        for result in [*urgent, *flood]:
            site.get(result)
        lines = worker.output.splitlines()
        ids = [str(result.id) for result in urgent]
        received, succeeded = (
            [number for number, line in enumerate(lines) for name in ids if f"{name}] {what}" in line]
            for what in ("received", "succeeded")
        )
        assert len(received) == len(succeeded) == 6
        assert max(received) < min(succeeded)


def test_all_pages_are_free_or_cached_in_the_end(site: Site) -> None:
    def at_rest() -> bool:
        stats = site.app.control.inspect(timeout=5, limit=1).stats() or {}
        engines = [worker["pool"]["engine"] for worker in stats.values()]
        return bool(engines) and all(
            engine["running"] == engine["waiting"] == engine["pages_private"] == 0 for engine in engines
        )

    eventually(at_rest, "no page is held by a request")


def test_an_operator_sees_how_the_model_is_computed(site: Site) -> None:
    """In the log and in the reports, from which status and metrics are made."""

    def running() -> list[WorkerReport]:
        return [worker for worker in workers(site.redis) if not worker.lost]

    eventually(lambda: len(running()) == 2, "both report, and those that were killed are lost")
    for worker in running():
        assert worker.weight_format == "float32"
        assert worker.weight_bytes > 2**20
        assert worker.kernels in ("compiled", "torch")
        assert worker.threads > 0
        size = f"{worker.weight_bytes / 1e9:.2f} GB"
        row = next(line for line in status(site).splitlines() if "float32" in line and worker.worker in line)
        assert row.split()[1:5] == ["float32", *size.split(), worker.kernels]
        assert f"weights float32, {size}; {worker.kernels} kernels" in site.workers[0].output


def test_a_model_that_cannot_be_served_ends_the_worker_with_one_line(site: Site) -> None:
    unknown = site.folder / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text("{}")
    truncated(site.folder / "truncated")
    folders = [site.folder / name for name in ("missing", "unknown", "truncated")]
    for worker in [site.start_worker(PETIOLE_MODEL=str(folder)) for folder in folders]:
        assert worker.ended(60) != 0
        assert len([line for line in worker.output.splitlines() if "cannot be served" in line]) == 1
        assert "Traceback" not in worker.output


def truncated(folder: Path) -> None:
    import shutil

    from petiole.gpu_worker import models

    tiny = Path(models.__file__).parent / "petiole_tiny"
    shutil.copytree(tiny, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def test_a_text_thread_that_fails_ends_its_worker_and_another_goes_on(own_site: Site) -> None:
    site, options = own_site, {"max_tokens": 40, "seed": 5, "ignore_eos": True}
    site.environment.update(ENGINE)
    broken = site.worker(PETIOLE_ENGINE_FACTORY="tests.support.failing_text:FailingText")
    results = [site.generate("Count from 1 to 9.", **options) for _ in range(3)]
    assert broken.ended() == 70
    assert "the text thread has failed" in broken.output
    site.worker()
    tokens = [site.get(result)["token_ids"] for result in results]
    assert tokens == [site.tokens(result) for result in results] == [tokens[0]] * 3
