"""Models that see agree with transformers: over grids, several pictures, chunks that cut them, cached prefixes and
preemptions. What would have gone wrong does go wrong where it is done wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petiole.gpu_worker import Engine, EngineConfig, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.models.families import config_keys
from petiole.gpu_worker.models.families.decoders import gemma3, gemma4
from petiole.gpu_worker.models.vision import tower_weights
from petiole.gpu_worker.models.vision.pictures import GridPictures
from petiole.gpu_worker.models.vision.tile_pictures import TilePictures
from petiole.gpu_worker.models.vision.tower import AxisTables, Tower
from petiole.gpu_worker.models.vision.writing import RowEnds, Tiles
from petiole.gpu_worker.preparation import images
from petiole.gpu_worker.request.prepared_images import ImageLayout, PreparedImage
from petiole.gpu_worker.runtime.cpu import executor
from petiole.gpu_worker.runtime.cpu.native import forward
from tests.support.seeing import PAD, SEEING, as_file, drawn_picture, reference, write_seeing
from tests.support.trials import rest

transformers = pytest.importorskip("transformers")

OpenEngine = Callable[..., tuple[Engine, Any]]
SIZES = [(170, 100), (64, 64), (90, 33), (60, 200), (33, 33), (250, 40)]
PICTURES = [drawn_picture(*size, seed=k) for k, size in enumerate(SIZES)]
FILES = [as_file(picture) for picture in PICTURES]

Parts = list[int | str]
PROMPTS: list[Parts] = [
    [7, 8, "0", 9, 10],
    ["1", 4],
    [5, "2", 30, "3", 6, 7, "0", 11],
    [5, "4", 12, 13, "4", 14, "5", 6],
    [3, 4, 5, 6],
]
"""Token ids, and numbers of pictures as text."""


def ids_of(parts: Parts) -> tuple[list[int], list[int]]:
    """Token ids with a placeholder for each picture, and which pictures."""
    ids = [PAD if isinstance(one, str) else one for one in parts]
    return ids, [int(one) for one in parts if isinstance(one, str)]


def asked(parts: Parts, n: int = 6, **more: Any) -> Request:
    ids, pictures = ids_of(parts)
    sampling = SamplingParams(temperature=0.0, max_tokens=n, logprobs=20, ignore_eos=True)
    return Request(prompt=ids, images=[FILES[k] for k in pictures], sampling=sampling, **more)


def error(model: Any, parts: Parts, result: Any) -> float:
    """Of the log-probabilities of the likeliest tokens, at each token of an output."""
    ids, pictures = ids_of(parts)
    assert PAD not in result.token_ids, "which the reference would take for a picture"
    expected = reference(model, [*ids, *result.token_ids], [PICTURES[k] for k in pictures])
    expected = expected[-len(result.token_ids) - 1 : -1]
    places = [[token for token, _ in one.top] for one in result.logprobs]
    got = np.array([[logprob for _, logprob in one.top] for one in result.logprobs])
    expected = np.take_along_axis(expected, np.array(places), axis=1)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def all_agree(engine: Engine, model: Any, prompts: list[Parts], n: int = 6) -> bool:
    results = engine.generate([asked(parts, n) for parts in prompts])
    return all(error(model, parts, result) < 1e-4 for parts, result in zip(prompts, results, strict=True))


@pytest.mark.parametrize("name", SEEING)
def test_pictures_anywhere_beside_text(name: str, open_engine: OpenEngine) -> None:
    assert all_agree(*open_engine(name), PROMPTS)


@pytest.mark.parametrize(
    "name", rest(["qwen3-vl", "qwen3.5", "qwen2.5-vl", "gemma4-per-layer", "mistral3", "smolvlm"])
)
@pytest.mark.parametrize(("chunk", "policy"), rest([(3, "pipelined"), (8, "mixed"), (7, "drain")]))
def test_chunks_may_cut_pictures(name: str, chunk: int, policy: str, open_engine: OpenEngine) -> None:
    engine, model = open_engine(name, chunk_size=chunk, prefill_policy=policy, debug=True)
    for _ in range(2):  # the second time from cached prefixes
        assert all_agree(engine, model, PROMPTS)
    assert not engine.runtime._features  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "chunk"), [("gemma3", 16), ("gemma3", 21), ("gemma4", 70)])
@pytest.mark.parametrize("policy", rest(["pipelined", "mixed", "drain"]))
def test_pictures_that_see_themselves_stay_whole(
    name: str, chunk: int, policy: str, open_engine: OpenEngine
) -> None:
    engine, model = open_engine(name, chunk_size=chunk, prefill_policy=policy, debug=True)
    for _ in range(2):
        assert all_agree(engine, model, PROMPTS)
    assert not engine.runtime._features  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("chunk_size", 15, 16), ("max_num_batched_tokens", 15, 16), ("max_model_len", 17, 18)],
)
def test_settings_too_small_for_a_picture_leave_the_tower_out(
    name: str, value: int, least: int, open_engine: OpenEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """Where its positions see each other. Text is served as ever."""
    with caplog.at_level("INFO"):
        engine, model = open_engine("gemma3", **{name: value})
    assert [one for one in caplog.messages if "refused" in one] == [
        f"pictures are refused: {name} is below {least}"
    ]
    assert all_agree(engine, model, [PROMPTS[4]])
    assert not engine.facts()["images"]
    assert engine.limits.computing.weight_bytes < open_engine("gemma3")[0].limits.computing.weight_bytes
    with pytest.raises(InvalidRequest, match="images: this model takes none, got 1"):
        engine.generate([asked(PROMPTS[1])])
    assert open_engine("gemma3", **{name: least})[0].facts()["images"]


@pytest.mark.parametrize(("cache", "page_size"), [("radix", 1), ("block", 16)])
def test_a_second_question_does_not_encode_the_picture_again(
    cache: str, page_size: int, open_engine: OpenEngine
) -> None:
    engine, model = open_engine(prefix_cache=cache, page_size=page_size)
    long: Parts = [7, 8, "0", 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23]
    assert all_agree(engine, model, [long])
    assert engine.stats()["encoded_images"] == 1
    result = engine.generate([asked([*long, 5])])[0]
    assert error(model, [*long, 5], result) < 1e-4
    assert result.usage.cached_prompt_tokens >= 32
    assert engine.stats()["encoded_images"] == 1


@pytest.mark.parametrize("budget", [2**20, 0])
def test_a_picture_behind_another_prefix_is_not_encoded_again(budget: int, open_engine: OpenEngine) -> None:
    """Its keys and values are others, and its features are kept, as far as their budget goes."""
    engine, model = open_engine(image_cache_bytes=budget)
    for first in (7, 8, 9):
        parts: Parts = [first, "0", 10, "1", 11]
        assert error(model, parts, engine.generate([asked(parts)])[0]) < 1e-4
    stats = engine.stats()
    assert (stats["encoded_images"], stats["feature_hits"]) == ((2, 4) if budget else (6, 0))


def test_another_salt_encodes_the_picture_again(open_engine: OpenEngine) -> None:
    """And the count of encoded pictures never falls."""
    engine, _ = open_engine()
    counts = []
    for salt in ("one", "other", "one", "", "other"):
        engine.generate([asked([7, "0", 10 + len(counts)], 1, salt=salt)])
        counts.append((engine.stats()["encoded_images"], engine.stats()["feature_hits"]))
    assert counts == [(1, 0), (2, 0), (2, 0), (3, 0), (3, 0)]  # with the same salt, KV is found
    engine.generate([asked([8, "0"], 1, salt="one")])
    assert (engine.stats()["encoded_images"], engine.stats()["feature_hits"]) == (3, 1)


@pytest.mark.parametrize(
    ("name", "chunk", "pages"), [("qwen3-vl", 5, 110), ("gemma3", 18, 110), ("mistral3", 5, 250)]
)
def test_preempted_and_resumed_in_pictures(name: str, chunk: int, pages: int, open_engine: OpenEngine) -> None:
    """Rows are preempted while a picture is half computed, too: what they publish ends before it."""
    engine, model = open_engine(name, num_pages=pages, prefix_cache="radix", chunk_size=chunk, debug=True)
    prompts: list[Parts] = [[7 + k, "0", 8, "3", 9 + k] for k in range(6)]
    assert all_agree(engine, model, prompts, 40)
    assert engine.stats()["preemptions"]
    assert not engine.runtime._features  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "chunk"), [("qwen3-vl", 3), ("gemma3", 16), ("mistral3", 3)])
def test_cancelled_in_a_picture(name: str, chunk: int, open_engine: OpenEngine) -> None:
    engine, model = open_engine(name, chunk_size=chunk, debug=True)
    for _ in range(5):
        handles = [engine.submit(asked(parts)) for parts in PROMPTS[:4]]
        for handle in handles:
            handle.cancel()
        for handle in handles:
            handle.result(timeout=60)
    assert all_agree(engine, model, PROMPTS)
    assert not engine.runtime._features  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3", "gemma4"])
def test_a_resumed_request_goes_on_as_before(name: str, open_engine: OpenEngine) -> None:
    engine, _ = open_engine(name, prefix_cache="off")
    whole = engine.generate([asked(PROMPTS[2])])[0].token_ids
    for n in range(1, 6):
        assert engine.generate([asked(PROMPTS[2], resume_token_ids=whole[:n])])[0].token_ids == whole


# ------------------------------------------------------------ what would have gone wrong


def _sections_in_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(config_keys, "interleaved", config_keys.in_sections)


def _no_deep_features(patch: pytest.MonkeyPatch) -> None:
    for module in (executor, forward):
        patch.setattr(module, "adding_behind", lambda parts: None)


def _row_by_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Tower, "_in_blocks", lambda self, grid: grid.flatten(0, 1))


def _of_layout(patch: pytest.MonkeyPatch, change: Callable[[ImageLayout], ImageLayout]) -> None:
    layout = GridPictures.layout
    patch.setattr(GridPictures, "layout", lambda self, *given: change(layout(self, *given)))


def _by_index(patch: pytest.MonkeyPatch) -> None:
    _of_layout(patch, lambda found: replace(found, rotary=None))


def _of_the_lying_picture(patch: pytest.MonkeyPatch) -> None:
    def change(found: ImageLayout) -> ImageLayout:
        assert found.rotary is not None
        return replace(found, rotary=found.rotary[[0, 2, 1]])

    _of_layout(patch, change)


def _ahead_in_all_layers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gemma4, "ahead_in", lambda plan, chosen: gemma3.ahead_in(plan, lambda mixer: True))


def _never_ahead(patch: pytest.MonkeyPatch) -> None:
    for module in (gemma3, gemma4):
        patch.setattr(module, "ahead_in", lambda plan, chosen: plan)


def _without_bounds(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tower_weights, "_clipped", lambda layer, i, of: layer)


def _rows_before_columns(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AxisTables, "of", lambda self, n, m: self.tables[0][:n, None] + self.tables[1][None, :m])


def _halves_as_stored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tower_weights, "_turning", lambda stack, order, of: stack)


def _ends_of_rows_swapped(patch: pytest.MonkeyPatch) -> None:
    of = RowEnds.of
    patch.setattr(RowEnds, "of", lambda self, *given: of(RowEnds(self.last, self.between), *given))


def _line_ends_apart(patch: pytest.MonkeyPatch) -> None:
    of = Tiles.of
    patch.setattr(Tiles, "of", lambda self, *given: of(replace(self, lines=(self.line,)), *given))


def _whole_picture_first(patch: pytest.MonkeyPatch) -> None:
    prepared = TilePictures.prepared

    def changed(self: TilePictures, *given: Any) -> PreparedImage:
        found = prepared(self, *given)
        return replace(found, pixels=np.roll(found.pixels, 1, axis=0))

    patch.setattr(TilePictures, "prepared", changed)


def _places_by_column(patch: pytest.MonkeyPatch) -> None:
    of = Tiles.of
    turned = lambda self: replace(self, places=tuple(zip(*self.places, strict=True)))  # noqa: E731
    patch.setattr(Tiles, "of", lambda self, *given: of(turned(self), *given))


WRONG = [
    ("qwen3-vl", _sections_in_blocks),
    ("qwen3-vl", _no_deep_features),
    ("qwen3-vl", _row_by_row),
    ("qwen3-vl", _by_index),
    ("qwen3-vl", _of_the_lying_picture),
    ("gemma3", _never_ahead),
    ("gemma3", _row_by_row),
    ("gemma4", _never_ahead),
    ("gemma4", _ahead_in_all_layers),
    ("gemma4", _rows_before_columns),
    ("gemma4", _halves_as_stored),
    ("gemma4-per-layer", _without_bounds),
    ("mistral3", _halves_as_stored),
    ("mistral3", _ends_of_rows_swapped),
    ("smolvlm", _line_ends_apart),
    ("smolvlm", _whole_picture_first),
    ("smolvlm", _places_by_column),
]


@pytest.mark.parametrize(("name", "wrong"), WRONG)
def test_wrong_variants_are_seen(
    name: str,
    wrong: Callable[[pytest.MonkeyPatch], None],
    open_engine: OpenEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong(monkeypatch)
    engine, model = open_engine(name)
    assert error(model, PROMPTS[0], engine.generate([asked(PROMPTS[0], 1)])[0]) > 1e-3


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen2.5-vl", "qwen3.5"])
@pytest.mark.parametrize("old", [False, True])
def test_the_rotation_of_a_tower_is_as_config_json_says(name: str, old: bool, tmp_path: Path) -> None:
    write_seeing(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    tower = config["vision_config"]
    tower.pop("rope_parameters", None)
    tower |= {"rope_theta": 100.0} if old else {"rope_parameters": {"rope_type": "axial", "rope_theta": 100.0}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    auto = transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(tmp_path, attn_implementation="eager").eval()
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 512}
    with Engine(EngineConfig(model=str(tmp_path), **settings)) as engine:
        assert all_agree(engine, model, PROMPTS[:2], 4)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_picture_that_exif_turns(orientation: int, open_engine: OpenEngine) -> None:
    """Its grid is that of the turned picture."""
    engine, _ = open_engine()
    exif = PICTURES[0].getexif()
    exif[0x0112] = orientation
    file = as_file(PICTURES[0], exif=exif)
    turned = as_file(images.decoded(file, "image"))
    found = [engine.generate([replace(asked([7, "0", 9]), images=[one])])[0] for one in (file, turned)]
    assert found[0].token_ids == found[1].token_ids
    assert found[0].logprobs is not None
    assert found[1].logprobs is not None
    for one, other in zip(found[0].logprobs, found[1].logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_one_file_under_two_limits_is_two_pictures(open_engine: OpenEngine) -> None:
    """They may have as many positions: a hash of the file alone would give one the keys of the other."""
    engine, _ = open_engine()
    pictures, config = engine.limits.pictures, engine.config
    assert pictures is not None
    few, many = (
        images.request_image(FILES[0], "image", pictures, replace(config, image_tokens=n)) for n in (4, 100)
    )
    assert few.n_positions <= 4 < many.n_positions
    assert few.content_hash != many.content_hash
    shapes = [ImageLayout(6, size=(96, 64)), ImageLayout(6, size=(64, 96))]
    assert shapes[0].key(5) != shapes[1].key(5)
