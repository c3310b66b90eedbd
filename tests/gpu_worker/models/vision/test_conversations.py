"""Pictures where a chat template, a prompt or a skill places them, and what is refused by field."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.contract.requests.images import View
from petiole.gpu_worker import Constraint, Engine, EngineConfig, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.request.prepared_images import IMAGE
from petiole.gpu_worker.request.skills import SkillCall
from tests.support.seeing import PAD, PIXELS, TOKENS, as_file, drawn_picture, pixels_of_transformers

FILES = [as_file(drawn_picture(170, 100)), as_file(drawn_picture(64, 64, seed=1))]
POSITIONS = [15, 4]
PICTURE = {"type": "image"}
Talk = list[dict[str, Any]]


@pytest.fixture(scope="module")
def engine(folders: Callable[[str], tuple[Path, Any]]) -> Iterator[Engine]:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
    with Engine(EngineConfig(model=str(folders("qwen3-vl")[0]), **settings)) as engine:
        yield engine


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def asked(n: int = 4, images: Any = FILES, **more: Any) -> Request:
    return Request(images=images, sampling=SamplingParams(temperature=0.0, max_tokens=n), **more)


def runs_of(ids: list[int]) -> list[int]:
    """The lengths of the pictures among tokens, each between the marks of its place."""
    start, end = TOKENS["<|vision_start|>"], TOKENS["<|vision_end|>"]
    found, at = [], 0
    while start in ids[at:]:
        at = ids.index(start, at) + 1
        stop = ids.index(end, at)
        assert set(ids[at:stop]) == {IMAGE}
        found.append(stop - at)
    return found


@pytest.mark.parametrize(
    ("messages", "order"),
    [
        ([user(PICTURE, said("What?"), PICTURE)], [0, 1]),
        ([user(said("a"), PICTURE), {"role": "assistant", "content": "b"}, user(PICTURE, said("c"))], [0, 1]),
        ([{"role": "system", "content": [PICTURE]}, user(PICTURE, said("c"))], [0, 1]),
    ],
)
def test_pictures_stand_where_the_template_puts_them(engine: Engine, messages: Talk, order: list[int]) -> None:
    request = asked(messages=messages)
    assert runs_of(engine.tokens_of(request)) == [POSITIONS[k] for k in order]
    assert engine.generate([request])[0].usage.completion_tokens


def test_low_detail_is_few_tokens(folders: Callable[[str], tuple[Path, Any]]) -> None:
    file = as_file(drawn_picture(900, 700))
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 1024}
    with Engine(EngineConfig(model=str(folders("qwen3-vl")[0]), **settings)) as engine:
        talk = [user(PICTURE, PICTURE, said("a"))]
        request = asked(messages=talk, images=[file, file], image_views=[View("low"), View()])
        low, whole = runs_of(engine.tokens_of(request))
        assert low <= 256 < whole
        with pytest.raises(InvalidRequest, match="must be as many as images, 2, got 1"):
            engine.generate([asked(messages=talk, images=[file, file], image_views=[View("low")])])


@pytest.mark.parametrize(
    ("view", "pixels"),
    [
        (View(max_pixels=9000), (1024, 9000)),
        (View(min_pixels=40_000), (40_000, PIXELS["longest_edge"])),
        (View(min_pixels=30_000, max_pixels=50_000), (30_000, 50_000)),
    ],
)
def test_a_request_says_how_many_pixels_a_picture_has(engine: Engine, view: View, pixels: tuple[int, int]) -> None:
    size = dict(zip(("shortest_edge", "longest_edge"), pixels, strict=True))
    grids = pixels_of_transformers(size=size)(images=[drawn_picture(170, 100)], return_tensors="np")
    (expected,) = grids["image_grid_thw"].prod(-1) // 4
    request = asked(messages=[user(PICTURE, said("a"), PICTURE)], images=FILES[:1] * 2, image_views=[view, View()])
    assert runs_of(engine.tokens_of(request)) == [expected, POSITIONS[0]]
    assert expected != POSITIONS[0]
    assert engine.generate([request])[0].usage.completion_tokens


@pytest.mark.parametrize(
    ("view", "field", "text"),
    [
        (View(max_pixels=1000), "max_pixels", "at least 1024, the pixels of a token, got 1000"),
        (View(min_pixels=2**20 + 1), "min_pixels", "at most 1048576, the most pixels of this picture here"),
        (View("low", min_pixels=300_000), "min_pixels", "at most 262144, .* got 300000"),
        (View(min_pixels=9, max_pixels=8), "min_pixels", "at most 8, the max_pixels, got 9"),
        (View("most"), "detail", "one of auto, low, high, got most"),
    ],
)
def test_a_view_that_the_model_cannot_take_is_refused_by_its_part(
    engine: Engine, view: View, field: str, text: str
) -> None:
    messages = [user(said("a"), PICTURE, PICTURE)]
    with pytest.raises(InvalidRequest, match=text) as caught:
        engine.generate([asked(messages=messages, image_views=[View(), view])])
    assert caught.value.field == f"messages[0].content[2].{field}"


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_pictures_of_one_size_keep_it(folders: Callable[[str], tuple[Path, Any]], name: str) -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
    with Engine(EngineConfig(model=str(folders(name)[0]), **settings)) as engine:
        request = asked(messages=[user(PICTURE)], images=FILES[:1], image_views=[View(max_pixels=9000)])
        with pytest.raises(InvalidRequest, match="this model sets it itself, got 9000") as caught:
            engine.generate([request])
        assert caught.value.field == "messages[0].content[0].max_pixels"


@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_marker_in_what_somebody_says_is_text(engine: Engine, role: str) -> None:
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    ids = engine.tokens_of(asked(messages=[{"role": role, "content": text}, user(PICTURE, PICTURE, said(text))]))
    assert len(runs_of(ids)) == 2
    assert PAD not in ids


@pytest.mark.parametrize(
    ("request_", "field", "said_"),
    [
        (asked(messages=[user(PICTURE, said("a"))]), "images", "type image, 1, got 2"),
        (asked(messages=[user(PICTURE, PICTURE, PICTURE)]), "images", "type image, 3, got 2"),
        (
            asked(messages=[{"role": "system", "content": "<|image_pad|>"}, user(PICTURE, PICTURE)]),
            "messages",
            "got 3",
        ),
        (asked(prompt="a <|image_pad|> b"), "prompt", "as images, 2, got 1"),
        (asked(prompt=[5, PAD, 6, PAD, PAD]), "prompt", "as images, 2, got 3"),
        (asked(prompt="a <|image_pad|> b", images=[]), "prompt", "as images, 0, got 1"),
        (
            asked(prompt="a <|image_pad|> b", images=FILES[:1], truncate="end"),
            "truncate",
            "images in a prompt, got",
        ),
        (asked(prompt=[5, PAD, *[6] * 600], images=FILES[:1], truncate="start"), "truncate", "images in a prompt"),
        (
            asked(messages=[user({"type": "video"}, said("a"))], images=[]),
            "images",
            "type image, 1, got 0",
        ),
        (
            asked(messages=[user({"type": "video"}, said("a"))], images=FILES[:1]),
            "messages[0].content[0]",
            "must be an MP4, MOV, WebM or MKV file",
        ),
        (
            asked(messages=[user({"type": "video", "frames": 0}, said("a"))], images=[]),
            "messages[0].content[0].frames",
            "number of the request's images, got 0",
        ),
        (asked(prompt=[PAD], images=[as_file(drawn_picture(1000, 4))]), "images[0]", "200 times"),
        (asked(prompt=[PAD], images=[FILES[0][:200]]), "images[0]", "can be read"),
        (
            asked(messages=[user(*[PICTURE] * 40)], images=[FILES[0]] * 40),
            "messages",
            "at most 255 tokens with its",
        ),
        (asked(skill=SkillCall("segment", {}), images=FILES[:1]), "skill", "query, caption, point, detect"),
        (asked(skill=SkillCall("point", {"object": "cat"})), "image", "one image, got 2"),
        (asked(skill=SkillCall("detect", {"object": ""}), images=FILES[:1]), "object", "not empty"),
        (
            asked(skill=SkillCall("detect", {"object": "a", "max_objects": 1001}), images=FILES[:1]),
            "max_objects",
            "from 1 to 1000, got 1001",
        ),
        (
            asked(
                skill=SkillCall("detect", {"object": "a"}),
                images=FILES[:1],
                constraint=Constraint("regex", "a"),
            ),
            "constraint",
            "of its own",
        ),
        (asked(skill=SkillCall("caption", {})), "image", "one image, got 2"),
        (asked(skill=SkillCall("caption", {"length": "epic"}), images=FILES[:1]), "length", "short, normal, long"),
        (asked(skill=SkillCall("query", {"question": " "})), "question", "not empty"),
        (asked(skill=SkillCall("query", {"question": "a" * 5000})), "question", "at most 255 tokens"),
        (asked(skill=SkillCall("query", {"question": "a\ud800"})), "question", "."),
        (
            asked(skill=SkillCall("point", {"object": "a" * 5000}), images=FILES[:1]),
            "object",
            "at most 255 tokens",
        ),
        (asked(skill=SkillCall("query", {"question": "a", "reasoning": True})), "reasoning", "false"),
    ],
)
def test_what_does_not_fit_is_refused_by_field(engine: Engine, request_: Request, field: str, said_: str) -> None:
    with pytest.raises(InvalidRequest, match=said_) as caught:
        engine.generate([request_])
    assert caught.value.field == field


@pytest.mark.parametrize(("name", "kind"), [("point", "points"), ("detect", "objects")])
def test_things_are_found_by_a_schema(engine: Engine, name: str, kind: str) -> None:
    """An untrained model finds something: at most as many things as are asked for, each once in the stream."""
    call = SkillCall(name, {"object": "a cat", "max_objects": 2})
    request = asked(skill=call, images=FILES[:1])
    deltas: list[Any] = []
    result = engine.submit(request, on_delta=lambda _, delta: deltas.append(delta)).result(timeout=60)
    assert result.answer is not None
    found = result.answer[kind]
    assert len(found) <= 2
    assert all(0 <= share <= 1 for one in found for share in one.values())
    streamed = [item for delta in deltas for item in delta.items or () if item]
    assert streamed == found
    assert result.text == ""
    for n in range(0, len(result.token_ids), 5):
        again = engine.generate([asked(skill=call, images=FILES[:1], resume_token_ids=result.token_ids[:n])])[0]
        assert again.answer == result.answer


def test_boxes_in_pixels_of_the_resized_picture(folders: Callable[[str], tuple[Path, Any]]) -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
    with Engine(EngineConfig(model=str(folders("qwen2.5-vl")[0]), **settings)) as engine:
        reader = engine._intake.preparer
        subject = reader._subject(asked(skill=SkillCall("detect", {"object": "cat"}), images=FILES[:1]))
        assert subject.reading.whole == (160, 96)


def test_a_family_without_boxes_has_two_skills(folders: Callable[[str], tuple[Path, Any]]) -> None:
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
    with Engine(EngineConfig(model=str(folders("gemma3")[0]), **settings)) as engine:
        assert engine.generate([asked(skill=SkillCall("caption"), images=FILES[:1])])[0].answer
        with pytest.raises(InvalidRequest, match="must be one that this model has: query, caption, got"):
            engine.generate([asked(skill=SkillCall("point", {"object": "cat"}), images=FILES[:1])])


@pytest.mark.parametrize("name", ["query", "caption"])
def test_a_skill_is_a_conversation_of_one_turn(engine: Engine, name: str) -> None:
    options = {"query": {"question": "Describe this image."}, "caption": {}}[name]
    skill = engine.generate([asked(skill=SkillCall(name, options), images=FILES[:1])])[0]
    talk = engine.generate([asked(messages=[user(PICTURE, said("Describe this image."))], images=FILES[:1])])[0]
    assert skill.token_ids == talk.token_ids
    assert skill.answer == {{"query": "answer", "caption": "caption"}[name]: talk.text}


def test_an_answer_ends_before_a_stop_string(engine: Engine) -> None:
    caption = SkillCall("caption", {})
    text = engine.generate([asked(12, skill=caption, images=FILES[:1])])[0].text
    sampling = SamplingParams(temperature=0.0, max_tokens=12, stop=[text[4:6]])
    found = engine.generate([Request(skill=caption, images=FILES[:1], sampling=sampling)])[0]
    assert found.answer == {"caption": found.text} == {"caption": text[: text.index(text[4:6])]}


def test_a_skill_asks_for_no_thought(folders: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    folder = shutil.copytree(folders("qwen3-vl")[0], tmp_path / "model")
    described = json.loads((folder / "tokenizer_config.json").read_text())
    described["chat_template"] += "{{ '<think>' if enable_thinking | default(true) else '<think></think>' }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
    talk = [user(PICTURE, said("Describe this image."))]
    with Engine(EngineConfig(model=str(folder), **settings)) as engine:
        ids = engine.tokens_of(asked(skill=SkillCall("caption", {}), images=FILES[:1]))
        plain = asked(messages=talk, images=FILES[:1], chat_template_kwargs={"enable_thinking": False})
        assert ids == engine.tokens_of(plain) != engine.tokens_of(asked(messages=talk, images=FILES[:1]))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("query", {"question": "Why?<think>"}),
        ("caption", {}),
        ("point", {"object": "a"}),
        ("detect", {"object": "a"}),
    ],
)
def test_a_thought_that_the_template_begins_ends_before_the_answer(
    name: str, options: dict[str, str], folders: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Such a template heeds no variable. Conversations go on to think."""
    folder = shutil.copytree(folders("qwen3-vl")[0], tmp_path / "model")
    described = json.loads((folder / "tokenizer_config.json").read_text())
    described["chat_template"] += "{{ '<think>\\n' }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
    with Engine(EngineConfig(model=str(folder), **settings)) as engine:
        skill = asked(skill=SkillCall(name, options), images=FILES[:1])
        end = engine.text_of([one for one in engine.tokens_of(skill) if one != IMAGE], skip_special_tokens=False)
        assert end.endswith("assistant\n<think>\n\n</think>\n\n")
        assert end.count("</think>") == 1
        talk = engine.tokens_of(asked(messages=[user(said("Why?"))], images=[]))
        assert engine.text_of(talk, skip_special_tokens=False).endswith("assistant\n<think>\n")


def test_a_question_about_nothing(engine: Engine) -> None:
    result = engine.generate([asked(skill=SkillCall("query", {"question": "Why?"}), images=[])])[0]
    assert result.answer == {"answer": result.text}


def test_placeholders_in_a_prompt_are_pictures(engine: Engine) -> None:
    by_text, by_ids = asked(prompt="a<|image_pad|>b<|image_pad|>"), asked(prompt=[])
    ids = [PAD if one == IMAGE else one for k, one in enumerate(engine.tokens_of(by_text))]
    assert ids.count(PAD) == sum(POSITIONS)
    places = [one for k, one in enumerate(ids) if one != PAD or ids[k - 1] != PAD]
    by_ids = asked(prompt=places)
    assert engine.tokens_of(by_ids) == engine.tokens_of(by_text)


def test_texts_beside_pictures_are_cut(engine: Engine) -> None:
    messages = [user(PICTURE, said("word " * 600), PICTURE)]
    assert len(engine.tokens_of(asked(messages=messages))) > 256
    for where in ("start", "middle", "end"):
        usage = engine.generate([asked(messages=messages, truncate=where)])[0].usage
        assert 200 < usage.prompt_tokens <= 252


def test_what_the_model_says_of_itself(engine: Engine) -> None:
    facts = engine.facts()
    assert facts["images"]
    assert facts["chat"]


def test_a_large_picture_is_made_smaller(folders: Callable[[str], tuple[Path, Any]]) -> None:
    folder = str(folders("qwen3-vl")[0])
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
    file = as_file(drawn_picture(1400, 900))
    with Engine(EngineConfig(model=folder, **settings)) as engine:
        usual = engine.limits.fingerprint
    with Engine(EngineConfig(model=folder, image_tokens=50, **settings)) as engine:
        assert engine.limits.fingerprint != usual, "a task must not go on with another prompt"
        (n,) = runs_of(engine.tokens_of(asked(messages=[user(PICTURE)], images=[file])))
        assert 30 < n <= 50
        assert engine.generate([asked(messages=[user(PICTURE)], images=[file])])[0].usage.completion_tokens
    assert PIXELS["longest_edge"] // 32**2 > 1000
