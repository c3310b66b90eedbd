"""Adapters in an engine go by the content of their files; what is wrong with one ends its own request."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from petiole.gpu_worker import AdapterError, Engine, EngineConfig, Request, SamplingParams
from petiole.gpu_worker.exceptions import AdapterChanged
from petiole.gpu_worker.models.adapters import store
from petiole.gpu_worker.models.adapters.files import is_below
from petiole.gpu_worker.models.adapters.lora import AdaptedModel, read_adapter
from petiole.gpu_worker.models.adapters.store import AdapterStore
from petiole.gpu_worker.models.checkpoint.safetensors import SafetensorsFile
from petiole.gpu_worker.models.families.registry import find_model
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from tests.support.mutated import mutated, read_by, with_header, with_json
from tests.support.trials import examples

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [5, 17, 200, 33, 91, 14, 77]


@pytest.fixture
def open_engine(checkpoint: Any) -> Iterator[Callable[..., Engine]]:
    """open_engine(**settings) -> a running engine over qwen3, which takes token ids."""
    opened: list[Engine] = []

    def get(**settings: Any) -> Engine:
        folder = str(checkpoint("qwen3")[0])
        config = EngineConfig(
            model=folder, device="cpu", dtype="float32", debug=True, **{"lora_slots": 1, **settings}
        )
        opened.append(Engine(config, runtime=ModelRuntime(config)).start())
        return opened[-1]

    yield get
    for engine in opened:
        engine.shutdown(drain=False)


def write_adapter(folder: Path, seed: int, **settings: Any) -> Path:
    """A PEFT adapter of rank 4 on the attention of every layer."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(3):
        at = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        weights[f"{at}.lora_A.weight"] = torch.randn(4, 128, generator=generator)
        weights[f"{at}.lora_B.weight"] = torch.randn(64, 4, generator=generator)
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4, **settings}))
    return folder


def ask(engine: Engine, adapter: Path | None) -> tuple[int, ...]:
    name = None if adapter is None else str(adapter)
    handle = engine.submit(Request(prompt=PROMPT, adapter=name, sampling=GREEDY))
    return handle.result(timeout=10).token_ids


def test_files_that_have_changed_are_another_adapter(open_engine: Any, tmp_path: Path) -> None:
    engine = open_engine()
    other = ask(engine, write_adapter(tmp_path / "other", seed=2))
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    before = ask(engine, adapter)
    write_adapter(adapter, seed=2)
    assert before != other
    assert ask(engine, adapter) == other, "neither its slot nor its cached KV is used again"


def test_one_content_has_one_slot_and_one_cache_under_all_its_names(open_engine: Any, tmp_path: Path) -> None:
    engine = open_engine()
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    answer = ask(engine, adapter)
    shutil.copytree(adapter, tmp_path / "copy")
    assert ask(engine, tmp_path / "copy") == answer
    assert engine.stats()["prefix_hit_tokens"] == len(PROMPT) - 1


def test_a_request_that_waited_gets_the_adapter_that_it_came_with_or_an_error(
    open_engine: Any, tmp_path: Path
) -> None:
    engine = open_engine()
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    before = ask(engine, adapter)
    engine.pause()
    waiting = engine.submit(Request(prompt=PROMPT, adapter=str(adapter), sampling=SamplingParams(temperature=0)))
    while not engine.stats()["waiting"]:
        engine._call(lambda: None)
    write_adapter(adapter, seed=2)
    engine.resume()
    assert waiting.result(timeout=60).token_ids[: len(before)] == before

    key = engine.runtime.adapter_key(str(adapter))
    for seed in range(3, 8):  # more than are kept on the host
        engine.runtime.adapter_key(str(write_adapter(tmp_path / "adapter", seed=seed)))
    with pytest.raises(AdapterError, match="have changed"):
        engine.runtime.load_adapter(key, 1)


def test_a_request_goes_on_with_the_adapter_that_it_began_with_or_not_at_all(
    open_engine: Any, tmp_path: Path
) -> None:
    engine = open_engine()
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first = engine.submit(Request(prompt=PROMPT, adapter=str(adapter), sampling=sampling))
    tokens = first.result(timeout=10).token_ids
    rest = Request(
        prompt=PROMPT,
        adapter=str(adapter),
        sampling=sampling,
        resume_token_ids=tokens[:3],
        resume_adapter_key=first.adapter_key,
    )
    assert engine.submit(rest).result(timeout=10).token_ids == tokens
    write_adapter(adapter, seed=2)
    with pytest.raises(AdapterChanged, match="3 tokens were generated with adapter"):
        engine.submit(rest).result(timeout=10)


def test_an_adapter_is_read_beside_the_engine_thread(
    open_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = []

    def watched(*args: Any) -> Any:
        readers.append(threading.current_thread().name)
        return read_adapter(*args)

    monkeypatch.setattr("petiole.gpu_worker.models.adapters.store.read_adapter", watched)
    engine = open_engine()
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    assert ask(engine, adapter) == ask(engine, adapter)
    assert [name.startswith("adapter") for name in readers] == [True]


def test_a_hub_adapter_is_asked_for_once(
    open_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(adapter))
    engine = open_engine()
    assert ask(engine, Path("somebody/something")) == ask(engine, Path("somebody/something"))
    assert asked == ["somebody/something"]


@pytest.mark.parametrize("name", ["~nobody-of-this-name/adapter", "a" * 300])
def test_a_name_that_no_folder_can_have_is_the_adapters_error(name: str, open_engine: Any) -> None:
    with pytest.raises(AdapterError, match=re.escape(name)):
        ask(open_engine(), Path(name))


@pytest.mark.parametrize("damage", [Path.unlink, lambda file: os.truncate(file, 0)], ids=["removed", "truncated"])
def test_files_that_go_while_they_are_read_end_the_request_alone(
    damage: Callable[[Path], None], open_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor of a mapped file that has been truncated is no exception: it ends the process."""

    def damaged(path: Path, **options: Any) -> SafetensorsFile:
        file = SafetensorsFile(path, **options)
        damage(path)
        return file

    engine = open_engine()
    monkeypatch.setattr("petiole.gpu_worker.models.adapters.lora.SafetensorsFile", damaged)
    with pytest.raises(AdapterError, match=re.escape(str(tmp_path))):
        ask(engine, write_adapter(tmp_path / "adapter", seed=1))
    monkeypatch.undo()
    assert ask(engine, write_adapter(tmp_path / "adapter", seed=1)) != ask(engine, None)


def safetensors(header: str) -> bytes:
    return len(header).to_bytes(8, "little") + header.encode() + bytes(64)


def test_an_adapter_of_a_terabyte_is_not_read(open_engine: Any, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    os.truncate(adapter / "adapter_model.safetensors", 2**40)
    with pytest.raises(AdapterError, match=r"adapter_model.safetensors must have at most \d+ bytes, got 10995116"):
        ask(open_engine(), adapter)


@pytest.mark.parametrize("seed", range(3))
def test_an_adapter_with_changed_files_is_served_or_refused(open_engine: Any, tmp_path: Path, seed: int) -> None:
    """Nobody else's request notices."""
    engine, draw = open_engine(), random.Random(seed)
    answer = ask(engine, None)
    keys = read_by(Path(store.__file__).parent)
    for i in range(examples(60)):
        adapter = write_adapter(tmp_path / f"adapter{i}", seed=1)
        if draw.random() < 0.5:
            with_json(adapter / "adapter_config.json", lambda given: mutated(given, draw, keys))
        else:
            with_header(adapter / "adapter_model.safetensors", lambda given: mutated(given, draw))
        said = ""
        try:
            ask(engine, adapter)
        except AdapterError as error:
            said = str(error)
        assert "\n" not in said
        assert len(said) < 2000
    assert ask(engine, None) == answer


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_adapter_of_what_is_no_number_ends_its_request(value: float, open_engine: Any, tmp_path: Path) -> None:
    engine = open_engine()
    adapter = write_adapter(tmp_path / "adapter", seed=1)
    path = adapter / "adapter_model.safetensors"
    weights = load_file(path)
    weights["base_model.model.model.layers.1.self_attn.o_proj.lora_B.weight"][3, 2] = value
    save_file(weights, path)
    with pytest.raises(AdapterError, match="o_proj of layer 1 must have finite numbers, got inf or NaN"):
        ask(engine, adapter)


BROKEN: dict[str, tuple[Any, str]] = {
    "an alpha that is no number": ({"lora_alpha": math.nan}, "lora_alpha must be a number to 1e[+]30"),
    "an endless alpha": ({"lora_alpha": 10**400}, "lora_alpha must be a number to 1e[+]30$"),
    "a rank that is no number": ({"r": True}, "r must be a whole number"),
    "no rank": ({"r": None}, "r must be a whole number"),
    "a rank in words": ({"r": "four"}, "r must be a whole number"),
    "no alpha": ({"lora_alpha": None}, "lora_alpha must be a number to 1e[+]30"),
    "another kind": ({"peft_type": "IA3"}, "peft_type must be LORA$"),
    "one for other base weights": ({"init_lora_weights": "pissa_niter_4"}, "changes the base weights"),
    "one that begins at certain tokens": ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens is not"),
    "too many": ({"r": 65}, "rank must be 1 to 64"),
    "an endless rank": ({"r": 10**9}, "rank must be 1 to 64 .*, got 1000000000"),
    "patterns that are a number": ({"rank_pattern": 5}, "rank_pattern must be numbers by pattern, got 5"),
    "patterns without end": (
        {"rank_pattern": {f"layers.{i}": 4 for i in range(100_000)}},
        r"adapter_config.json must have at most 1048576 bytes, got \d+",
    ),
    "another module for every pattern": ({"rank_pattern": {"o_proj": 8}}, "rank_pattern is not supported"),
    "settings nested too deep": ({"target_modules": json.loads("[" * 200 + "]" * 200)}, "nested too deep"),
    "a shape beyond the model's": (
        safetensors(
            '{"model.layers.0.self_attn.o_proj.lora_A.weight":'
            ' {"dtype": "F32", "shape": [16, 1], "data_offsets": [0, 64]}}'
        ),
        r"lora_A.weight' must have shape \[4, 128\], got \[16, 1\]",
    ),
    "no safetensors": (b"not a header", "truncated"),
    "a header that is no object": (safetensors("[]"), "damaged header"),
    "a tensor that is not as long as its shape": (
        safetensors('{"x": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 16]}}'),
        r"16 bytes for F32 \[4, 4\]",
    ),
    "a tensor of another kind": (
        safetensors('{"secret": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'),
        "a tensor is no lora_A.weight and no lora_B.weight$",
    ),
}


@pytest.mark.parametrize(("damage", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_adapter_ends_its_request_and_nobody_elses(
    damage: Any, message: str, open_engine: Any, tmp_path: Path
) -> None:
    engine = open_engine()
    adapter = write_adapter(tmp_path / "adapter", seed=1, **(damage if isinstance(damage, dict) else {}))
    if isinstance(damage, bytes):
        (adapter / "adapter_model.safetensors").write_bytes(damage)
    answer = ask(engine, None)
    with pytest.raises(AdapterError, match=message) as caught:
        ask(engine, adapter)
    assert "\n" not in str(caught.value)
    assert str(adapter) in str(caught.value)
    assert ask(engine, None) == answer
    write_adapter(adapter, seed=2)
    assert ask(engine, adapter) != answer, "mended, it serves"


def test_adapters_that_take_long_to_download_hold_up_no_others(
    open_engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine()
    loaded = write_adapter(tmp_path / "adapter", seed=1)
    before = ask(engine, loaded)
    resolve, arrives = store.resolve_model, threading.Event()

    def download(name: str) -> Path:
        if name.startswith("far/"):
            assert arrives.wait(60)
        return resolve(str(loaded))

    monkeypatch.setattr(store, "resolve_model", download)
    far = [engine.submit(Request(prompt=PROMPT, adapter=f"far/{i}", sampling=GREEDY)) for i in range(6)]
    try:
        assert ask(engine, loaded) == before
        assert ask(engine, None) != before
        assert not any(handle.done() for handle in far)
    finally:
        arrives.set()
    assert [handle.result(timeout=30).token_ids for handle in far] == [before] * 6


def test_what_is_known_of_adapters_is_bounded(
    checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_REMEMBERED", 3)
    model = AdaptedModel(find_model(checkpoint("qwen3")[0]).plan)
    adapters = AdapterStore(model, 8, kept=2)
    names = [str(write_adapter(tmp_path / f"adapter{seed}", seed)) for seed in range(8)]
    first = adapters.key(names[0])
    for name in names[1:]:
        adapters.key(name)
        assert adapters.key(names[0]) == first, "what is in use is not forgotten"
    assert [len(known) for known in (adapters._folders, adapters._keys, adapters._names)] == [3, 3, 3]
    assert adapters.at_hand(names[0])
    assert not adapters.at_hand(names[1])
    assert adapters.key(names[1])


@pytest.mark.parametrize(
    ("name", "below"),
    [
        ("acme", True),
        ("acme/sql", True),
        ("acme2/sql", False),
        ("acme/../other/sql", False),
        ("org/one", True),
        ("org/one2", False),
        ("org", False),
        ("/proc/self", False),
        ("acme\0", False),
    ],
)
def test_which_hub_ids_requests_may_name(name: str, below: bool) -> None:
    assert is_below(name, ("acme", "org/one")) is below
