"""Whatever is wrong with a quantised checkpoint: it is read, or one line says what is wrong.

Damage is drawn from a seed, which a failure prints: of bytes, of the header, of the configuration."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.families.registry import find_model
from petiole.gpu_worker.models.loading import LoadOptions, load_model
from tests.support.quantised import FORMATS

KINDS = ["ct w4 groups, zeros", "ct w4 channels", "ct nvfp4", "ct mxfp4", "gptq 4 v1", "awq", "fp8 blocks"]
SEEDS = 20
"""Of each kind."""

JUNK: list[Any] = [None, True, -1, 0, 3, 2**70, 1.5, "", "four", "a\nb", [], [1], [48, "x"], {}, {"a": {}}]
DTYPES = ["F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "U8", "I8", "I32", "I64", "F6_E3M2", "a\nb", "F" * 5000, ""]


@pytest.fixture(scope="module")
def quantised(
    checkpoint: Callable[[str], tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """A checkpoint whose linear layers have this format; made once."""
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            pack, config = FORMATS[kind]
            plain, _ = checkpoint("llama2")
            folder = tmp_path_factory.mktemp("whole") / "model"
            shutil.copytree(plain, folder)
            tensors = load_file(folder / "model.safetensors")
            tensors = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
            for name in [name for name in tensors if "_proj" in name]:
                packed, _ = pack(tensors.pop(name))
                at = name.removesuffix(".weight")
                tensors |= {at + suffix: tensor.contiguous() for suffix, tensor in packed.items()}
            save_file(tensors, str(folder / "model.safetensors"))
            raw = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(
                json.dumps(raw | {"num_hidden_layers": 1, "quantization_config": config})
            )
            made[kind] = folder
        return made[kind]

    return get


def load(folder: Path, device: str) -> None:
    options = LoadOptions(device=torch.device(device), dtype=torch.float32, max_positions=64)
    load_model(folder, find_model(folder), options)


def said(folder: Path) -> str | None:
    """The refusal; None if the checkpoint is read."""
    try:
        load(folder, "meta")
        load(folder, "cpu")
    except ModelError as error:
        return str(error)
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused_in_a_line_or_read(quantised: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    whole = quantised(kind)
    assert said(whole) is None
    folder, refused = tmp_path / "damaged", 0
    shutil.copytree(whole, folder)
    for seed in range(SEEDS):
        draw = random.Random(f"{kind} {seed}")
        damage = draw.choice([of_config, of_header, of_header, of_tensor, of_tensor, of_bytes])
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(whole / name, folder / name)
        done = damage(draw, folder)
        try:
            message = said(folder)
        except Exception as error:
            raise AssertionError(f"{kind}, seed {seed}: {done[:200]}: {str(error)[:300]!r}") from error
        if message is not None:
            refused += 1
            assert "\n" not in message, f"{kind}, seed {seed}: {done[:200]}: {message[:300]}"
            assert len(message) < 1000, f"{kind}, seed {seed}: {done[:200]}: {message[:300]}"
    assert refused > SEEDS // 3


# ------------------------------------------------------------ damage; each says what it has done


def of_config(draw: random.Random, folder: Path) -> str:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    at: Any = raw["quantization_config"]
    while (inner := [value for value in at.values() if isinstance(value, dict)]) and draw.random() < 0.7:
        at = draw.choice(inner)
    keys = [*at, "quant_method", "bits", "group_size", "weight_block_size", "checkpoint_format", "config_groups"]
    key, value = draw.choice(keys), draw.choice(JUNK)
    at[key] = value
    if draw.random() < 0.1:
        raw["quantization_config"] = value
    path.write_text(json.dumps(raw))
    return f"{key} = {value!r}"


def of_header(draw: random.Random, folder: Path) -> str:
    header, data = _parts(folder)
    name = draw.choice([one for one in header if "proj" in one])
    entry = header[name]
    shape, offsets = entry["shape"], entry["data_offsets"]
    change: Callable[[], object] = draw.choice(
        [
            lambda: header.pop(name),
            lambda: header.update({draw.choice(sorted(header)): header.pop(name)}),
            lambda: header.update(
                {name.rpartition(".")[0] + draw.choice([".qzeros", ".weight"]): header.pop(name)}
            ),
            lambda: entry.update(dtype=draw.choice(DTYPES)),
            lambda: entry.update(shape=shape[::-1]),
            lambda: entry.update(shape=[*shape, 1]),
            lambda: entry.update(shape=[size * draw.choice([0, 1, 2, 2**40]) for size in shape]),
            lambda: entry.update(data_offsets=[offsets[0], offsets[1] + draw.choice([-4, -1, 1, 2**50])]),
            lambda: entry.update(data_offsets=[offset + draw.choice([1, 2, 4]) for offset in offsets]),
            lambda: entry.update({draw.choice(["dtype", "shape", "data_offsets"]): draw.choice(JUNK)}),
            lambda: header.update({name: draw.choice(JUNK)}),
        ]
    )
    change()
    _write(folder, json.dumps(header).encode(), data)
    return f"{name}: {header.get(name)}"


def of_tensor(draw: random.Random, folder: Path) -> str:
    """Other numbers: NaN, groups that there are not, zeros."""
    header, data = _parts(folder)
    name = draw.choice([one for one in header if "proj" in one and not one.endswith(("packed", "qweight"))])
    start, end = header[name]["data_offsets"]
    spoilt, byte = bytearray(data), draw.choice([0, 0x7F, 0x80, 0xFF])
    first = draw.randrange(start, end)
    last = draw.choice([first + 1, end])
    spoilt[first:last] = bytes([byte]) * (last - first)
    _write(folder, json.dumps(header).encode(), bytes(spoilt))
    return f"{name}: bytes {first - start} to {last - start} are {byte}"


def of_bytes(draw: random.Random, folder: Path) -> str:
    path = folder / "model.safetensors"
    whole = bytearray(path.read_bytes())
    length = 8 + int.from_bytes(whole[:8], "little")
    at = draw.randrange(draw.choice([8, length]))
    if draw.random() < 0.4:
        path.write_bytes(whole[: draw.randrange(len(whole))])
        return "truncated"
    whole[at] = draw.randrange(256)
    path.write_bytes(whole)
    return f"byte {at} = {whole[at]}"


def _parts(folder: Path) -> tuple[dict[str, Any], bytes]:
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    return header, raw[8 + length :]


def _write(folder: Path, header: bytes, data: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
