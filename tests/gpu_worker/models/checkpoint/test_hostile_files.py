"""A stranger's model folder: whatever its files hold, it is served or refused in one line, in little memory."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from petiole.gpu_worker import EngineConfig, models
from petiole.gpu_worker.exceptions import MachineError, ModelError
from petiole.gpu_worker.models import checkpoint
from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.models.checkpoint.safetensors import contents
from petiole.gpu_worker.runtime.building import platform_of
from petiole.gpu_worker.runtime.device.opening import open_device
from petiole.gpu_worker.runtime.model_files import ModelReader
from petiole.gpu_worker.text import gguf_tokenizer, load_tokenizer
from tests.support import gguf
from tests.support.mutated import mutated, read_by, with_header, with_json
from tests.support.trials import examples

MODELS = Path(models.__file__).parent
TINY, EMBEDDER, SEEING = (MODELS / name for name in ("petiole_tiny", "petiole_tiny/embed", "petiole_tiny/vision"))
NORM = "model.norm.weight"


def reader() -> ModelReader:
    return ModelReader(EngineConfig(device="cpu"), None, platform_of(open_device("cpu")))


def opened(folder: Path, *, text: bool = False) -> None:
    """All that is read of a model before its weights. text: its tokenizer, too."""
    found = reader()
    found.foresee(found.find(str(folder)))
    if text:
        load_tokenizer(resolve_model(str(folder)))


def is_served_or_refused(folder: Path, *, text: bool = False) -> None:
    said = ""
    try:
        opened(folder, text=text)
    except ModelError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 1200


FILES: dict[str, tuple[Path, str]] = {
    "header": (TINY, "model.safetensors"),
    "index": (TINY, "model.safetensors.index.json"),
    "generation": (TINY, "generation_config.json"),
    "tokenizer's configuration": (TINY, "tokenizer_config.json"),
    "processor": (SEEING, "preprocessor_config.json"),
    "modules": (EMBEDDER, "modules.json"),
    "pooling": (EMBEDDER, "1_Pooling/config.json"),
    "prompts": (EMBEDDER, "config_sentence_transformers.json"),
    "longest text": (EMBEDDER, "sentence_bert_config.json"),
}
READERS = ("text", "models/checkpoint")


@pytest.mark.parametrize("kind", FILES)
def test_a_folder_with_one_changed_file(tmp_path: Path, kind: str) -> None:
    source, name = FILES[kind]
    draw = random.Random(kind)
    keys = [key for room in READERS for key in read_by(MODELS.parent / room)]
    for i in range(examples(80)):
        folder = shutil.copytree(source, tmp_path / str(i), ignore=shutil.ignore_patterns("tools", "embed"))
        if kind == "index":
            (folder / "model.safetensors").rename(folder / "one.safetensors")
            names = load_file(folder / "one.safetensors")
            (folder / name).write_text(json.dumps({"weight_map": dict.fromkeys(names, "one.safetensors")}))
        elif not (folder / name).exists():
            (folder / name).write_text("{}")
        change = with_header if kind == "header" else with_json
        change(folder / name, lambda given: mutated(given, draw, [] if kind in ("header", "index") else keys))
        is_served_or_refused(folder, text="tokenizer" in kind)
        shutil.rmtree(folder)


# ------------------------------------------------------------ GGUF


@cache
def tensors() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    stored = load_file(TINY / "model.safetensors")
    kinds = {name: "F32" if tensor.ndim < 2 else "F16" for name, tensor in stored.items() if "lm_head" not in name}
    return {
        gguf.name_of(name, "qwen3"): (kind, tuple(stored[name].shape), gguf.packed(kind, stored[name])[0])
        for name, kind in kinds.items()
    }


@cache
def metadata() -> dict[str, Any]:
    given = json.loads((TINY / "tokenizer.json").read_text())
    pieces = sorted(given["model"]["vocab"], key=given["model"]["vocab"].get)
    added = [one["content"] for one in given["added_tokens"] if one["content"] not in pieces]
    ours = {
        "block_count": 4,
        "context_length": 2048,
        "embedding_length": 256,
        "feed_forward_length": 512,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 64,
        "attention.value_length": 64,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e4,
    }
    text = {
        "model": "gpt2",
        "pre": "qwen2",
        "eos_token_id": 511,
        "tokens": [*pieces, *added],
        "token_type": [1] * len(pieces) + [3] * len(added),
        "merges": [one if isinstance(one, str) else " ".join(one) for one in given["model"]["merges"]],
    }
    return {
        "general.architecture": "qwen3",
        **{f"qwen3.{key}": value for key, value in ours.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in text.items()},
    }


class Raw(bytes):
    """A value of metadata as it stands in a file: its type, and its bytes."""


def write(path: Path, entries: dict[str, Any], table: dict[str, Any] | None = None, *counts: int) -> Path:
    """table: changes of the table of tensors: type, shape and offset by name, or None for the right
    offset. counts: what the file says of its numbers of tensors and entries."""
    stored, head, data = tensors(), bytearray(b"GGUF"), bytearray()
    head += struct.pack("<IQQ", 3, *(counts or (len(stored), len(entries))))
    for key, value in entries.items():
        head += gguf._text(key) + (value if isinstance(value, Raw) else gguf._value(value))
    for name, (kind, shape, raw) in stored.items():
        data += bytes(-len(data) % gguf.ALIGNMENT)
        number, sizes, offset = (table or {}).get(name, (gguf.NUMBERS[kind], shape, len(data)))
        head += gguf._text(name) + struct.pack(f"<I{len(sizes)}Q", len(sizes), *reversed(sizes))
        head += struct.pack("<IQ", number, len(data) if offset is None else offset)
        data += raw
    path.write_bytes(bytes(head) + bytes(-len(head) % gguf.ALIGNMENT) + bytes(data))
    return path


def array(kind: int, n: int, data: bytes = b"") -> Raw:
    return Raw(struct.pack("<IIQ", 9, kind, n) + data)


RAW = (
    *(Raw(struct.pack("<II", 4, value)) for value in (0, 1, 10**9, 2**31, 2**32 - 1)),
    *(Raw(struct.pack("<IQ", 10, value)) for value in (2**63, 2**64 - 1)),
    *(Raw(struct.pack("<If", 6, value)) for value in (float("nan"), float("inf"), -1.0, 0.0)),
    *("x", "", "a" * 100_000, True, [1, 2], ["a", "b"], [float("nan")] * 3, Raw(struct.pack("<Iq", 11, -1))),
    *(array(4, 2**40), array(8, 2**22), array(0, 2**22, bytes(2**22)), array(9, 1, array(4, 1))),
    *(Raw(struct.pack("<IQ", 8, 2**63)), Raw(struct.pack("<I", 77))),
)


def test_the_valid_file_is_served(tmp_path: Path) -> None:
    opened(write(tmp_path / "valid.gguf", metadata()), text=True)


def test_a_file_of_gguf_with_changed_metadata(tmp_path: Path) -> None:
    rooms = (Path(checkpoint.__file__).parent / "gguf", Path(gguf_tokenizer.__file__).parent)
    keys = [key for room in rooms for key in read_by(room)]
    draw = random.Random(64)
    for i in range(examples(300)):
        entries = dict(metadata())
        for _ in range(draw.choice((1, 1, 2, 3))):
            near = draw.choice(("", "tokenizer.ggml.", "qwen3.", "general."))
            key = draw.choice(list(entries)) if draw.random() < 0.5 else near + draw.choice(keys)
            entries[key] = draw.choice(RAW)
        path = write(tmp_path / f"{i}.gguf", entries)
        is_served_or_refused(path, text=True)
        path.unlink()


def test_a_file_of_gguf_with_a_changed_table_of_tensors(tmp_path: Path) -> None:
    draw, names = random.Random(65), list(tensors())
    for i in range(examples(200)):
        kind, shape, _ = tensors()[name := draw.choice(names)]
        number = draw.choice((gguf.NUMBERS[kind], 0, 2, 12, 39, 77, 2**32 - 1))
        sizes = [*shape]
        sizes[draw.randrange(len(sizes))] = draw.choice((sizes[0], 0, 1, 2**20, 2**40, 2**64 - 1))
        sizes = draw.choice((sizes, [], [1] * 5, [2**20] * 4, sizes[::-1]))
        table = {name: (number, sizes, draw.choice((0, 7, 2**20, 2**63, 2**64 - 1)))}
        is_served_or_refused(write(tmp_path / f"{i}.gguf", metadata(), table))


TOKENS = "tokenizer.ggml.tokens"
NAMED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "tensors that overlap": (
        lambda path: write(path, metadata(), {"output_norm.weight": (0, (256,), 0)}),
        r"data_offsets of .* overlap by \d+ bytes",
    ),
    "an offset past the end": (
        lambda path: write(path, metadata(), {"output_norm.weight": (0, (256,), 2**62)}),
        r"its header promises 46116860\d+",
    ),
    "a type of fewer bytes": (
        lambda path: write(path, metadata(), {"blk.1.attn_norm.weight": (1, (256,), None)}),
        r"tensor '[\w.]+' must begin at byte \d+, behind the one before, got \d+",
    ),
    "a vector in blocks": (
        lambda path: write(path, metadata(), {"blk.1.attn_norm.weight": (8, (256,), None)}),
        "tensor 'blk.1.attn_norm.weight' of one dimension must be F32, F16 or BF16, got Q8_0",
    ),
    "fewer rows than tokens": (
        lambda path: write(
            path, metadata() | {"tokenizer.ggml.tokens": [*metadata()["tokenizer.ggml.tokens"], "x"]}
        ),
        "tensor token_embd.weight must have a row for each of 513 tokens of tokenizer.ggml.tokens, got 512",
    ),
    "an alignment that is no power of two": (
        lambda path: write(path, metadata() | {"general.alignment": Raw(struct.pack("<II", 4, 24))}),
        "general.alignment must be a power of two from 1 to 1048576, got 24",
    ),
    "text that is no UTF-8": (
        lambda path: write(path, metadata() | {"x.y": Raw(struct.pack("<IQ", 8, 1) + b"\xff")}),
        "damaged header: 'x.y': 'utf-8' codec can't decode byte 0xff",
    ),
    "a billion tensors": (lambda path: write(path, metadata(), {}, 10**9, 1), "at most 100000 tensors"),
    "a billion entries": (lambda path: write(path, metadata(), {}, 1, 10**9), "at most 10000 entries"),
    "a billion layers": (
        lambda path: write(path, metadata() | {"qwen3.block_count": 10**9}),
        "qwen3.block_count must be a whole number from 1 to 10000, got 1000000000",
    ),
    "an array of arrays": (
        lambda path: write(path, metadata() | {"x": array(9, 1, array(9, 1))}),
        "arrays of type 9",
    ),
    "arrays without end": (
        lambda path: write(path, {f"x{i}": array(0, 2**21, bytes(2**21)) for i in range(3)}),
        "at most 4194304 values in all arrays, got 6291456",
    ),
    "a text without end": (
        lambda path: write(path, metadata() | {"x": Raw(struct.pack("<IQ", 8, 2**63))}),
        "at most 16777216 bytes of text, got 9223372036854775808",
    ),
}


@pytest.mark.parametrize(("make", "why"), NAMED.values(), ids=NAMED)
def test_a_bomb_of_gguf_names_its_limit(tmp_path: Path, make: Callable[[Path], Path], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        opened(make(tmp_path / "bomb.gguf"))


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("add_bos_token", "false", "add_bos_token must be true or false, got 'false'"),
        ("add_eos_token", Raw(struct.pack("<II", 4, 1)), "add_eos_token must be true or false, got 1"),
        ("scores", [0.0] * 511 + [float("nan")], "scores must be numbers, got nan for token 511"),
    ],
)
def test_metadata_of_a_tokenizer_have_their_types(tmp_path: Path, key: str, value: Any, why: str) -> None:
    entries = metadata() | {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0] * 512}
    path = write(tmp_path / "typed.gguf", entries | {f"tokenizer.ggml.{key}": value})
    with pytest.raises(ModelError, match=f"typed.gguf: tokenizer.ggml.{why}"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ({"feed_forward_length": 256}, "tensor model.layers.0.mlp.gate_proj.weight must have shape"),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 0.0}, "factor must be a number from 0.001"),
    ],
)
def test_an_error_names_the_file(tmp_path: Path, entries: dict[str, Any], why: str) -> None:
    path = write(tmp_path / "named.gguf", metadata() | {f"qwen3.{key}": entries[key] for key in entries})
    with pytest.raises(ModelError, match=f"^{path}: {why}"):
        opened(path)


def test_an_error_of_a_folder_names_it(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY, tmp_path / "model", ignore=shutil.ignore_patterns("tools", "embed", "vision"))
    with_json(folder / "config.json", lambda given: given | {"hidden_size": 0})
    with pytest.raises(ModelError, match=f"^{folder}: config.json: hidden_size must be"):
        opened(folder)


def test_a_big_endian_file_is_named_so(tmp_path: Path) -> None:
    path = tmp_path / "big.gguf"
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 1, 1))
    with pytest.raises(ModelError, match="is big-endian"):
        opened(path)


# ------------------------------------------------------------ sizes and places


def test_a_file_may_be_larger_than_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    size = 4 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with path.open("wb") as file:
        file.truncate(size)
    assert contents(path)[size - 1] == 0


def test_weights_that_do_not_fit_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sparse file has any size."""
    monkeypatch.setattr("petiole.gpu_worker.runtime.model_files.host_memory", lambda: 2**20)
    found = reader()
    with pytest.raises(MachineError, match=r"its weights must fit into 1048576 bytes of memory, got \d+"):
        found.read(found.find(str(TINY)))


@pytest.mark.parametrize("place", ["../other", "/etc", "a\0b", "x" * 300])
def test_modules_lie_inside_the_folder(tmp_path: Path, place: str) -> None:
    folder = shutil.copytree(EMBEDDER, tmp_path / "model")
    shutil.copytree(EMBEDDER / "1_Pooling", tmp_path / "other")
    with_json(folder / "modules.json", lambda given: [given[0], given[1] | {"path": place}, *given[2:]])
    with pytest.raises(ModelError, match="the path of a module must be inside the model's folder, got"):
        opened(folder)
