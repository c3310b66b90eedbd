"""A model folder that cannot be served is refused in one line that says why.

It ends a worker with status 2, which is tried for each stage of loading.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from petiole.gpu_worker import Engine, EngineConfig, ModelError, models
from tests.support.gguf import write
from tests.support.site import Site
from tests.support.trials import rest

TINY = Path(models.__file__).parent / "petiole_tiny"
NORM = "model.norm.weight"
DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000

Spoil = Callable[[Path], object]


def configured(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return spoil


def headed(change: Callable[[dict[str, Any]], object]) -> Spoil:
    def spoil(folder: Path) -> None:
        path = folder / "model.safetensors"
        raw = path.read_bytes()
        data = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:data])
        change(header)
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[data:])

    return spoil


def deep_header(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(len(DEEP).to_bytes(8, "little") + DEEP)


def not_a_number(folder: Path) -> None:
    """All bits of the last tensor are set: NaN in each floating-point type."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-64] + b"\xff" * 64)


def overlapping(header: dict[str, Any]) -> None:
    """Two norms in the same bytes."""
    header[NORM]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]


def of_gguf(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        sizes = {"block_count": 4, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64}
        of_model = sizes | {"attention.head_count": 4} | changes
        of_text = {"model": "gpt2", "pre": "qwen2", "tokens": ["a", "b", "ab"], "token_type": [1] * 3}
        metadata = {
            "general.architecture": "qwen3",
            **{f"qwen3.{key}": value for key, value in of_model.items()},
            **{f"tokenizer.ggml.{key}": value for key, value in (of_text | {"merges": ["a b"]}).items()},
        }
        (folder / "model.safetensors").unlink()
        write(folder / "model.gguf", metadata, {})

    return spoil


HOSTILE: dict[str, tuple[Spoil, str]] = {
    "a deep header": (deep_header, "nested too deep"),
    "shapes of floats": (headed(lambda header: header[NORM].update(shape=[64.5])), "shape must be"),
    "overlapping offsets": (headed(overlapping), "overlap by"),
    "vocab_size -1": (configured(vocab_size=-1), "vocab_size must be"),
    "a token id of 2^31": (configured(eos_token_id=2**31), "eos_token_id must be"),
    "10^9 layers": (configured(num_hidden_layers=10**9), "num_hidden_layers must be"),
    "weights that are no numbers": (not_a_number, "must have finite numbers"),
    "GGUF of 10^9 layers": (of_gguf(block_count=10**9), "block_count must be a whole number from 1 to 10000, got"),
    "a deep tokenizer": (lambda folder: (folder / "tokenizer.json").write_bytes(DEEP), "not a readable tokenizer"),
}
STAGES = (
    *("a deep tokenizer", "vocab_size -1", "GGUF of 10^9 layers"),
    *("a deep header", "weights that are no numbers"),
)


@pytest.fixture(scope="module")
def hostile_site(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Site(tmp_path_factory.mktemp("site")) as site:
        del site.environment["PETIOLE_ENGINE_FACTORY"]
        yield site


def hostile(kind: str, folder: Path) -> tuple[Path, str]:
    spoil, why = HOSTILE[kind]
    spoil(shutil.copytree(TINY, folder))
    return folder, why


@pytest.mark.parametrize("kind", rest(HOSTILE, 3))
def test_a_hostile_model_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    folder, why = hostile(kind, tmp_path / "model")
    with pytest.raises(ModelError, match=why) as refused:
        Engine.load(EngineConfig(model=str(folder), device="cpu"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", rest(STAGES))
def test_a_hostile_model_ends_its_worker_with_one_line(hostile_site: Site, tmp_path: Path, kind: str) -> None:
    folder, why = hostile(kind, tmp_path / "model")
    worker = hostile_site.start_worker(PETIOLE_MODEL=folder, PETIOLE_DEVICE="cpu")
    assert worker.ended(120) == 2, worker.output[-3000:]
    said = [line for line in worker.output.splitlines() if "the model cannot be served" in line]
    assert len(said) == 1
    assert why in said[0]
    assert "Traceback" not in worker.output, worker.output[-3000:]
