"""The skills of the small vision model, through the engine: their form, not whether the answers are right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from petiole.gpu_worker import Delta, Engine, EngineConfig, InvalidRequest, Request, Result, SamplingParams
from petiole.gpu_worker.preparation import images as pictures
from petiole.gpu_worker.request.skills import SkillCall
from petiole.gpu_worker.runtime.device.tracing import Tracer
from tests.support.pictures import MODEL, file

CALLS: dict[str, SkillCall] = {
    "query": SkillCall("query", {"question": "What color is the circle?"}),
    "reasoning": SkillCall("query", {"question": "How many shapes are there?", "reasoning": True}),
    "caption": SkillCall("caption", {"length": "long"}),
    "point": SkillCall("point", {"object": "shape", "max_objects": 5}),
    "detect": SkillCall("detect", {"object": "shape", "max_objects": 4}),
}
MOST = {"point": 11, "detect": 13}


def machine(**more: Any) -> EngineConfig:
    settings = {"num_pages": 2000, "max_num_seqs": 8, "num_threads": 1, "debug": True, **more}
    return EngineConfig(model=MODEL, device="cpu", dtype="float32", **settings)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(machine()) as engine:
        yield engine


def asked(name: str, *images: bytes, n: int = 24, seed: int = 7, temperature: float = 0.0, **more: Any) -> Request:
    sampling = SamplingParams(max_tokens=MOST.get(name, n), temperature=temperature, seed=seed)
    return Request(skill=CALLS[name], images=images or (file(),), sampling=sampling, **more)


def run(engine: Engine, request: Request) -> tuple[list[Delta], Result]:
    deltas: list[Delta] = []
    handle = engine.submit(request, on_delta=lambda _, delta: deltas.append(delta))
    return deltas, handle.result(timeout=60)


def items(deltas: list[Delta]) -> list[Any]:
    return [item for delta in deltas for item in delta.items or () if item is not None]


@pytest.mark.parametrize(("name", "key"), [("query", "answer"), ("caption", "caption")])
def test_a_text_is_the_answer_and_is_streamed(engine: Engine, name: str, key: str) -> None:
    deltas, result = run(engine, asked(name))
    assert result.answer == {key: result.text}
    assert "".join(delta.text for delta in deltas) == result.text
    assert 3 not in result.token_ids


@pytest.mark.parametrize("object_", ["shape", "circle", "square"])
def test_points_come_one_by_one(engine: Engine, object_: str) -> None:
    call = SkillCall("point", {"object": object_})
    deltas, result = run(engine, replace(asked("point"), skill=call))
    assert result.answer == {"points": items(deltas)}
    assert result.text == ""
    assert all(0 <= point[axis] <= 1 for point in items(deltas) for axis in ("x", "y"))
    assert len(result.token_ids) == 2 * len(items(deltas)) + 1


def test_boxes_lie_inside_the_picture(engine: Engine) -> None:
    for seed in range(4):
        deltas, result = run(engine, asked("detect", file(seed)))
        assert result.answer == {"objects": items(deltas)}
        for box in items(deltas):
            assert 0 <= box["x_min"] <= box["x_max"] <= 1
            assert 0 <= box["y_min"] <= box["y_max"] <= 1


def test_no_more_objects_are_found_than_asked_for(engine: Engine) -> None:
    forced = replace(asked("point").sampling, banned_token_ids=[0], max_tokens=50)  # it would never end
    _, result = run(engine, replace(asked("point"), sampling=forced, skill=CALLS["point"]))
    assert result.answer is not None
    assert len(result.answer["points"]) == 5


def test_reasoning_is_a_text_with_its_points_then_the_answer(engine: Engine) -> None:
    _, result = run(engine, asked("reasoning", n=40, temperature=1.0))
    assert result.answer is not None
    reasoning = result.answer["reasoning"]
    ids = list(result.token_ids)
    assert 6 not in ids[: ids.index(3) if 3 in ids else None]
    assert 3 not in ids[ids.index(3) + 1 if 3 in ids else len(ids) :]
    for span in reasoning["grounding"]:
        assert 0 <= span["start_idx"] <= span["end_idx"] <= len(reasoning["text"])
        assert all(len(point) == 2 for point in span["points"])


def test_a_query_needs_no_image(engine: Engine) -> None:
    _, result = run(engine, replace(asked("query"), images=()))
    assert result.answer == {"answer": result.text}


@pytest.mark.parametrize("name", CALLS)
def test_an_attempt_continues_at_any_token(engine: Engine, name: str) -> None:
    request = asked(name, temperature=0.8 if name in ("query", "caption", "reasoning") else 0.0)
    deltas, whole = run(engine, request)
    bins = [one for delta in deltas for one in delta.bins or ()]
    for n in range(1, len(whole.token_ids)):
        again = replace(request, resume_token_ids=whole.token_ids[:n], resume_bins=bins[:n])
        rest, result = run(engine, again)
        assert result.token_ids == whole.token_ids
        assert result.answer == whole.answer
        assert bins[:n] + [one for delta in rest for one in delta.bins or ()] == bins
        known = sum(item is not None for d in deltas for item in (d.items or ())) - len(items(rest))
        assert items(deltas)[known:] == items(rest)


def test_pipelined_equals_blocking_for_text_and_images_at_once() -> None:
    def requests() -> list[Request]:
        text = Request(prompt="A picture of", sampling=SamplingParams(max_tokens=20, temperature=0.0))
        asks = [asked(name, file(k % 3), seed=k, temperature=0.6) for k, name in enumerate([*CALLS] * 3)]
        return [*asks, text, *asks[:3]]

    outcomes = []
    for config in ({"pipeline": "on"}, {"pipeline": "off"}, {"prefix_cache": "off", "prefill_policy": "drain"}):
        with Engine(machine(**config)) as engine:
            outcomes.append([(r.token_ids, r.answer) for r in engine.generate(requests())])
    assert outcomes[0] == outcomes[1] == outcomes[2]


class Watched:
    """How often a file was decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded, whole = 0, pictures.decoded

        def counted(data: bytes, field: str) -> Any:
            self.decoded += 1
            return whole(data, field)

        monkeypatch.setattr(pictures, "decoded", counted)


def test_a_cached_image_is_not_even_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(machine()) as engine:
        watched = Watched(monkeypatch)
        first = run(engine, asked("query"))[1]
        for name in CALLS:
            assert run(engine, asked(name))[1].usage.cached_prompt_tokens >= 82
        assert run(engine, asked("query"))[1].token_ids == first.token_ids
        stats = engine.stats()
    assert (watched.decoded, stats["encoded_images"], stats["image_hits"]) == (1, 1, 6)
    assert stats["encode_s"]


def test_equal_images_at_once_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine(machine()) as engine:
        watched = Watched(monkeypatch)
        engine.pause()
        handles = [engine.submit(asked(name)) for name in CALLS]
        engine.resume()
        for handle in handles:
            handle.result(timeout=60)
        assert watched.decoded == engine.stats()["encoded_images"] == 1


@pytest.mark.slow
def test_more_images_than_are_held_at_once(engine: Engine) -> None:
    alone = [run(engine, asked("point", file(seed)))[1].token_ids for seed in range(0, 40, 10)]
    handles = [engine.submit(asked("point", file(seed), priority=-seed)) for seed in range(40)]
    results = [handle.result(timeout=60) for handle in handles]
    assert [results[seed].token_ids for seed in range(0, 40, 10)] == alone


def test_a_preempted_request_has_its_image_decoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three that need 83 + 60 pages each, of which there are 260."""
    watched = Watched(monkeypatch)
    sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    requests = [replace(asked("caption", file(seed)), sampling=sampling) for seed in range(3)]
    with Engine(machine()) as engine:
        expected = [result.token_ids for result in engine.generate(requests)]
    watched.decoded = 0
    with Engine(machine(num_pages=261, prefix_cache="off")) as engine:
        assert [result.token_ids for result in engine.generate(requests)] == expected
        assert engine.stats()["preemptions"]
        assert watched.decoded > 3
        assert not engine.runtime._features  # type: ignore[attr-defined]


def test_a_shutdown_waits_for_images_that_wait_for_their_turn() -> None:
    with Engine(machine(max_num_seqs=2)) as engine:
        handles = [engine.submit(asked("point", file(seed))) for seed in range(24)]
    assert all(handle.result(timeout=0).answer is not None for handle in handles)


# ------------------------------------------------------------ conversations

PICTURE, QUESTION = {"type": "image"}, {"type": "text", "text": "What color is the circle?"}


@pytest.mark.parametrize("parts", [[PICTURE, QUESTION], [QUESTION, PICTURE]])
def test_a_conversation_of_one_turn_is_a_query(engine: Engine, parts: list[Any]) -> None:
    chat = replace(asked("query"), skill=None, messages=[{"role": "user", "content": parts}])
    assert run(engine, chat)[1].token_ids == run(engine, asked("query"))[1].token_ids


@pytest.mark.parametrize(
    ("messages", "n", "field"),
    [
        ([{"role": "user", "content": [PICTURE, PICTURE, QUESTION]}], 2, "messages[0].content"),
        ([{"role": "user", "content": [PICTURE]}], 1, "messages[0].content"),
        ([{"role": "user", "content": [PICTURE, QUESTION]}] * 2, 2, "messages"),
        ([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}], 0, "messages"),
        ([{"role": "user", "content": [PICTURE, QUESTION]}], 0, "images"),
        ([{"role": "user", "content": [QUESTION]}], 1, "images"),
        ([{"role": "user", "content": [PICTURE, {"type": "text"}]}], 1, "question"),
        ([{"role": "user", "content": None}], 0, "messages[0].content"),
    ],
)
def test_what_the_model_cannot_converse_about_is_refused(
    engine: Engine, messages: list[Any], n: int, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        run(engine, replace(asked("query"), skill=None, messages=messages, images=[file()] * n))
    assert caught.value.field == field


@pytest.mark.parametrize("kind", ["image", "image_url", "input_image"])
@pytest.mark.parametrize("images", [(), (b"x",)])
def test_a_model_of_text_refuses_images_in_every_path(kind: str, images: tuple[bytes, ...]) -> None:
    sampling = SamplingParams(max_tokens=2)
    messages = [{"role": "user", "content": [{"type": kind, kind: "x"}, QUESTION]}]
    with Engine(EngineConfig(model="petiole-tiny", device="cpu", num_pages=600)) as engine:
        for request, field in (
            (Request(messages=messages, images=images, sampling=sampling), "messages[0].content[0]"),
            (Request(prompt="a", images=(b"x",), sampling=sampling), "images"),
            (Request(skill=CALLS["query"], images=images, sampling=sampling), "skill"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                run(engine, request)
            assert caught.value.field == field


@pytest.mark.parametrize(
    ("name", "options", "images", "field"),
    [
        ("segment", {"object": "shape"}, 1, "skill"),
        ("query", {}, 1, "question"),
        ("query", {"question": " "}, 1, "question"),
        ("query", {"question": "1 " * 225}, 1, "question"),  # too long with the image only
        ("query", {"question": "a", "reasoning": 1}, 1, "reasoning"),
        ("query", {"question": "a"}, 2, "image"),
        ("caption", {"length": "huge"}, 1, "length"),
        ("caption", {"length": ["short"]}, 1, "length"),
        ("caption", {}, 0, "image"),
        ("point", {"object": "shape", "max_objects": 0}, 1, "max_objects"),
        ("point", {"object": "shape", "most": 1}, 1, "most"),
        ("point", {"object": 3}, 1, "object"),
        ("detect", {"object": "shape"}, 0, "image"),
        ("detect", {"object": "shape" * 1000}, 1, "object"),
    ],
)
def test_wrong_options_are_refused_by_name(
    engine: Engine, name: str, options: dict[str, Any], images: int, field: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        run(engine, replace(asked("query"), skill=SkillCall(name, options), images=[file()] * images))
    assert caught.value.field == field


def test_a_trace_shows_when_an_image_is_cut_and_encoded() -> None:
    tracer = Tracer()
    with Engine(machine(), tracer=tracer) as engine:
        run(engine, asked("point"))
    names = {span["name"] for span in tracer.spans()}
    assert {"cut", "encode", "prefill", "decode"} <= names


def test_an_answer_ends_before_a_stop_string(engine: Engine) -> None:
    request = asked("caption")
    whole = engine.generate([request])[0].answer["caption"]
    stop = whole[len(whole) // 2 :][:4]
    cut = replace(request, sampling=replace(request.sampling, stop=(stop,)))
    assert engine.generate([cut])[0].answer == {"caption": whole[: whole.index(stop)]}
