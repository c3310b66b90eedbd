"""The KV tier: after eviction, in another process and on another engine the same tokens, with less to compute."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from petiole.cache import CacheNamespace, CacheTokens, ImageToken
from petiole.gpu_worker import Engine, EngineConfig, InvalidRequest, Request, SamplingParams
from petiole.gpu_worker.runtime.device.tracing import Tracer
from petiole.gpu_worker.runtime.interface import Computing
from petiole.gpu_worker.runtime.memory import kv_tier
from petiole.gpu_worker.runtime.memory.chunk_files import ChunkFiles, extend_chunk_keys
from petiole.gpu_worker.runtime.runtime import ModelRuntime
from tests.support.families import build_model
from tests.support.seeing import PAD, as_file, drawn_picture, write_seeing
from tests.support.toy_engine import expected, request, toy_engine

PROMPTS = [[(7 * i * i + 3 * i + k) % 40 + 2 for i in range(90)] for k in range(5)]
CHUNK = 16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """And patience, whatever the machine does: the toy computes as quickly as files are read."""
    monkeypatch.setattr(kv_tier, "CHUNK", CHUNK)
    monkeypatch.setattr(kv_tier, "LONGEST_WAIT_S", 60.0)
    monkeypatch.setattr(kv_tier.KVTier, "on_prefill", lambda *_: None)


def engine_of(folder: Path, **config: Any) -> Engine:
    machine = {"n_pages": 130, "rows": 2, "max_model_len": 120, **config.pop("machine", {})}
    return toy_engine(machine=machine, kv_tier=str(folder), debug=True, **config)


def answers(engine: Engine, prompts: list[list[int]] = PROMPTS, **more: Any) -> None:
    """Ask for each prompt, and check the answer. One after the other, so that each evicts the one before."""
    for prompt in prompts:
        asked = request(prompt, 20, ignore_eos=True, **more)
        assert engine.submit(asked).result(timeout=60).token_ids == expected(asked, 120).token_ids


def computed(engine: Engine) -> int:
    return int(engine.stats()["prompt_tokens"])


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"pipeline": "off"},
        {"prefix_cache": "block"},
        {"prefix_cache": "block", "page_size": 16, "machine": {"n_pages": 9, "page_size": 16}},
        {"reserve": "full"},
        {"prefix_cache_max_pages": 0},
        {"chunk_size": 7},
        {"speculative_tokens": 3},
        {"prefill_policy": "mixed"},
        {"prefill_policy": "drain"},
    ],
    ids=str,
)
def test_what_was_evicted_or_ended_with_its_engine_is_restored(tmp_path: Path, config: dict[str, Any]) -> None:
    with engine_of(tmp_path / "kv", **config) as engine:
        answers(engine)
        first = computed(engine)
        assert first == sum(map(len, PROMPTS))
        answers(engine)
        assert computed(engine) - first <= len(PROMPTS) * (90 % CHUNK), "what has left the cache is in the files"
    with engine_of(tmp_path / "kv", **config) as engine:
        answers(engine)
        assert computed(engine) <= len(PROMPTS) * (90 % CHUNK)
        assert engine.stats()["kv_tier_restored_tokens"] == len(PROMPTS) * (90 - 90 % CHUNK)


def test_an_answer_is_saved_with_its_prompt(tmp_path: Path) -> None:
    asked = request(PROMPTS[0][:20], 60, ignore_eos=True)
    with engine_of(tmp_path / "kv") as engine:
        said = engine.submit(asked).result(timeout=60).token_ids
    turn = [*PROMPTS[0][:20], *said, 5, 6, 7]
    with engine_of(tmp_path / "kv") as engine:
        answers(engine, [turn])
        assert computed(engine) == len(turn) - (20 + 60 - 1) // CHUNK * CHUNK


def test_a_prompt_that_is_all_in_files_computes_its_last_token(tmp_path: Path) -> None:
    prompt = PROMPTS[0][: 5 * CHUNK]
    for _ in range(2):
        with engine_of(tmp_path / "kv") as engine:
            answers(engine, [prompt])
    assert computed(engine) == 1


def test_adapters_and_salts_have_their_own(tmp_path: Path) -> None:
    with engine_of(tmp_path / "kv", lora_slots=2) as engine:
        for adapter in (None, "a", "bb"):
            answers(engine, PROMPTS[:1], adapter=adapter)
        answers(engine, PROMPTS[1:2], salt="tenant")
        assert computed(engine) == 4 * 90, "nothing is shared"
    with engine_of(tmp_path / "kv", lora_slots=2) as engine:
        for adapter in (None, "a", "bb"):
            answers(engine, PROMPTS[:1], adapter=adapter)
        assert computed(engine) == 3 * (90 % CHUNK)
        answers(engine, PROMPTS[1:2], salt="tenant")
        assert computed(engine) == 3 * (90 % CHUNK) + 90, "a tenant's own KV is in no file"
    for most in (90, 90 % CHUNK):
        with engine_of(tmp_path / "kv", kv_tier_salted=True) as engine:
            answers(engine, PROMPTS[1:2], salt="tenant")
            assert computed(engine) == most


def test_new_weights_find_nothing_of_the_old_ones(tmp_path: Path) -> None:
    with engine_of(tmp_path / "kv") as engine:
        answers(engine)
    engine = engine_of(tmp_path / "kv")
    engine.runtime.limits = engine.runtime.limits.__class__(  # type: ignore[misc]
        **{name: getattr(engine.runtime.limits, name) for name in engine.runtime.limits.__slots__}
        | {"fingerprint": "other"}
    )
    with engine:
        answers(engine)
        assert engine.stats()["kv_tier_restored_tokens"] == 0


@pytest.mark.parametrize(
    "other",
    [
        {"PETIOLE_EXACT": "on"},
        {"PETIOLE_TILES": "off"},
        {"PETIOLE_NATIVE": "off"},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_other_arithmetic_finds_nothing(
    tmp_path: Path, other: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_of(tmp_path / "kv") as engine:
        answers(engine, PROMPTS[:1])
    config = {name: value for name, value in other.items() if name.islower()}
    with monkeypatch.context() as patch:
        for name in other.keys() - config.keys():
            patch.setenv(name, other[name])
        with engine_of(tmp_path / "kv", **config) as engine:
            answers(engine, PROMPTS[:1])
            assert engine.stats()["kv_tier_restored_tokens"] == 0
    with engine_of(tmp_path / "kv") as engine:
        answers(engine, PROMPTS[:1])
        assert engine.stats()["kv_tier_restored_tokens"] == 90 - 90 % CHUNK


@pytest.mark.parametrize("other", [{"device": "cuda"}, {"computing": Computing(kernels="torch")}], ids=str)
def test_another_device_finds_nothing(tmp_path: Path, other: dict[str, Any]) -> None:
    with engine_of(tmp_path / "kv") as engine:
        answers(engine, PROMPTS[:1])
    engine = engine_of(tmp_path / "kv")
    engine.runtime.limits = replace(engine.runtime.limits, **other)  # type: ignore[misc]
    with engine:
        answers(engine, PROMPTS[:1])
        assert engine.stats()["kv_tier_restored_tokens"] == 0


def test_a_read_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(tmp_path / "kv") as engine:
        answers(engine)
    released, read = threading.Event(), ChunkFiles.read
    monkeypatch.setattr(kv_tier, "LONGEST_WAIT_S", 0.2)
    monkeypatch.setattr(ChunkFiles, "read", lambda *args: (released.wait(), read(*args))[1])
    with engine_of(tmp_path / "kv") as engine:
        answers(engine, PROMPTS[:2])
        assert engine.stats()["kv_tier_given_up"] == 1, "others do not wait behind a read that hangs"
        cancelled = engine.submit(request(PROMPTS[2], 20))
        cancelled.cancel()
        cancelled.result(timeout=60)
        released.set()
        answers(engine, PROMPTS[3:])


def test_a_disk_that_takes_nothing_costs_nothing_but_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ChunkFiles, "_write", staticmethod(full))
    with engine_of(tmp_path / "kv") as engine:
        answers(engine)
        answers(engine)
        assert int(engine.stats()["kv_tier_failed"]) > 0
        assert int(engine.stats()["kv_tier_dropped_chunks"]) > 0
    assert not list((tmp_path / "kv").rglob("*.kv"))


def test_a_disk_that_is_slow_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, write = threading.Event(), ChunkFiles.write
    monkeypatch.setattr(ChunkFiles, "write", lambda *args: (released.wait(), write(*args))[1])
    with engine_of(tmp_path / "kv", machine={"ring": 2}) as engine:
        answers(engine)
        assert int(engine.stats()["kv_tier_dropped_chunks"]) > 0
        assert engine.stats()["kv_tier_saved_chunks"] == 0
        released.set()
        answers(engine)
        assert int(engine.stats()["kv_tier_saved_chunks"]) > 2, "blocks that were given back are filled again"


def test_a_long_answer_saves_a_prompt_that_was_larger_than_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    follow = kv_tier.KVTier.follow

    def after_writing(tier: kv_tier.KVTier, *args: Any) -> None:
        written = threading.Event()
        tier._writer.put(written.set)
        written.wait()
        follow(tier, *args)

    monkeypatch.setattr(kv_tier.KVTier, "follow", after_writing)
    with engine_of(tmp_path / "kv", machine={"ring": 1}) as engine:
        answers(engine, PROMPTS[:1])
        assert engine.stats()["kv_tier_dropped_chunks"] == 0
    with engine_of(tmp_path / "kv") as engine:
        answers(engine, PROMPTS[:1])
        assert computed(engine) == 90 % CHUNK, "what the first step had no room for came with later ones"


def test_every_chunk_that_is_not_saved_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released, write = threading.Event(), ChunkFiles.write
    monkeypatch.setattr(ChunkFiles, "write", lambda *args: (released.wait(), write(*args))[1])
    with engine_of(tmp_path / "kv", machine={"ring": 2}) as engine:
        answers(engine, PROMPTS[:1])
        whole = (90 + 20 - 1) // CHUNK
        assert engine.stats()["kv_tier_dropped_chunks"] == whole - 2
        released.set()
    assert len(list(tmp_path.rglob("*.kv"))) == 2


def test_the_ring_holds_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tier, "RING_BYTES", 2 * CHUNK * 8)
    machine = {"n_pages": 32 * kv_tier.RING_SHARE * CHUNK + 1}
    for step, most, blocks in ((100, 2**30, 7), (10, 2**30, 2), (10_000, 2**30, 32), (100, 5 * CHUNK * 8, 5)):
        monkeypatch.setattr(kv_tier, "MOST_RING_BYTES", most)
        with engine_of(tmp_path / "kv", machine=machine, max_num_batched_tokens=step) as engine:
            assert engine.runtime.kv_copies.n_blocks == blocks  # type: ignore[union-attr]


def test_a_trace_has_the_reads_the_writes_and_the_restores(tmp_path: Path) -> None:
    answers(engine := engine_of(tmp_path / "kv").start())
    engine.shutdown()
    tracer = Tracer()
    with engine_of(tmp_path / "kv", tracer=tracer) as engine:
        answers(engine)
        assert int(engine.stats()["kv_tier_bytes"]) == sum(p.stat().st_size for p in tmp_path.rglob("*.kv"))
    spans = {(span["line"], span["name"]) for span in tracer.spans()}
    assert {("kv-read", "read"), ("kv-write", "write"), ("engine", "restore")} <= spans


def test_nothing_is_read_where_computing_is_quicker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(tmp_path / "kv") as engine:
        answers(engine)
    for tokens_per_s, restored in ((1e12, 0), (1e-3, 5 * (90 - 90 % CHUNK))):
        with engine_of(tmp_path / "kv") as engine:
            assert engine._tier is not None
            engine._tier._rates = kv_tier.Rates(1e6, tokens_per_s)
            answers(engine)
            assert engine.stats()["kv_tier_restored_tokens"] == restored


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    with engine_of(tmp_path / "kv") as one, engine_of(tmp_path / "kv") as other:
        threads = [threading.Thread(target=answers, args=(engine,)) for engine in (one, other) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert one.failure is other.failure is None
        files = [engine.stats() for engine in (one, other)]
        assert all(stats["kv_tier_damaged"] == stats["kv_tier_failed"] == 0 for stats in files)
    with engine_of(tmp_path / "kv") as third:
        answers(third)
        assert computed(third) == len(PROMPTS) * (90 % CHUNK), "one file of each chunk, whoever wrote it"


def of_random_weights(folder: Path, family: str) -> str:
    build_model(family).save_pretrained(folder)
    return str(folder)


MODELS = ["petiole-tiny", "petiole-tiny-vision", "deepseek-v2", "llama3", "qwen3-moe", "gemma3"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("cache", [{}, {"prefix_cache": "block", "page_size": 16}], ids=["radix", "block"])
def test_real_models_give_the_same_tokens(
    tmp_path: Path, model: str, cache: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tier, "CHUNK", 16)
    name = model if model.startswith("petiole") else of_random_weights(tmp_path / "model", model)
    said = []
    for folder in ("", str(tmp_path / "kv"), str(tmp_path / "kv")):
        config = EngineConfig(model=name, device="cpu", max_num_seqs=4, num_pages=800, kv_tier=folder, **cache)
        runtime = ModelRuntime(config)
        with Engine(config, runtime=runtime) as engine:
            longest = min(300, runtime.limits.max_model_len - 30)
            prompts = [[(5 * i * i + k) % 40 + 20 for i in range(longest)] for k in range(3)]
            sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
            results = engine.generate([Request(prompt=prompt, sampling=sampling) for prompt in prompts])
            said.append([result.token_ids for result in results])
    assert said[0] == said[1] == said[2]
    assert engine.stats()["kv_tier_restored_tokens"] == 3 * (longest // 16 * 16)


@pytest.mark.parametrize("cache", [{}, {"prefix_cache": "block", "page_size": 16}], ids=["radix", "block"])
@pytest.mark.parametrize("chunk", [16, 64, 256])
def test_chunks_that_end_inside_a_picture(
    tmp_path: Path, cache: dict[str, Any], chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tier, "CHUNK", chunk)
    write_seeing(tmp_path / "model", "qwen3-vl")
    pictures, said = [drawn_picture(800, 600), drawn_picture(600, 800, seed=0)], list[Any]()
    for folder in ("", str(tmp_path / "kv"), str(tmp_path / "kv")):
        machine: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 1024, "chunk_size": 100, **cache}
        config = EngineConfig(model=str(tmp_path / "model"), device="cpu", kv_tier=folder, **machine)
        with Engine(config) as engine:
            asked = [
                Request(
                    prompt=[7] * 40 + [PAD] + [9] * 60 + tail,
                    images=[as_file(picture)],
                    sampling=SamplingParams(max_tokens=8, temperature=0, ignore_eos=True),
                )
                for picture in pictures
                for tail in ([3, 4], [5, 6, 7])
            ]
            said.append([result.token_ids for result in engine.generate(asked)])
            restored = engine.stats().get("kv_tier_restored_tokens", 0)
    assert said[0] == said[1] == said[2]
    assert int(restored) > 0


def test_a_model_whose_kv_it_does_not_keep_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with toy_engine(machine={"snapshots": 5}, kv_tier=str(tmp_path)) as engine:
        assert engine._tier is None
    with toy_engine(prefix_cache="off", kv_tier=str(tmp_path)) as engine:
        assert engine._tier is None
    assert caplog.text.count("is ignored: it needs a prefix cache, and layers without states") == 2
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidRequest, match="kv_tier: must be a folder"):
        toy_engine(kv_tier=str(tmp_path / "file"))


def test_keys_follow_the_content_and_not_the_process() -> None:
    def keys(parts: list[Any], namespace: CacheNamespace | None = None) -> list[bytes]:
        tokens, found = CacheTokens.from_tokens(parts), list[bytes]()
        extend_chunk_keys(found, tokens, namespace or CacheNamespace(), 4, tokens.kv_length)
        return found

    a, b = ImageToken(1 << 100, 3), ImageToken(2 << 100, 3)
    texts: list[list[Any]] = [[1, a, b, 2], [1, b, a, 2], [1, a, a, 2], [1, 2, 3, 4, 5, 6, 7, 8]]
    assert len({keys(text)[-1] for text in texts}) == len(texts)
    first = keys([1, a, b, 2])
    kept = CacheTokens.from_tokens([ImageToken(9 << 90, 3)])  # takes the next serial
    assert keys([1, a, b, 2]) == first
    del kept
    assert keys([1, 2, 3, 4, 5, 6, 7, 8])[0] == keys([1, 2, 3, 4, 5, 6, 7, 9])[0]
    others = [CacheNamespace(lora_id="a"), CacheNamespace(salt="a"), CacheNamespace(image_hash=1)]
    assert len({keys([1, 2, 3, 4], namespace)[0] for namespace in [None, *others]}) == 4
    grown = keys([1, 2, 3, 4])
    tokens = CacheTokens.from_text(np.arange(1, 9))
    extend_chunk_keys(grown, tokens, CacheNamespace(), 4, 8)
    assert grown == keys([1, 2, 3, 4, 5, 6, 7, 8])
