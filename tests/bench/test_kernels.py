"""What a machine without internet is given: kernels that were compiled before are found by the names asked for."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.gpu.wheelhouse.collecting import is_used
from bench.gpu.wheelhouse.kernels import EQUAL_STRIDES, cuda_home, take, unpacked


def archive(path: Path, **modules: bytes) -> Path:
    with tarfile.open(path, "w:xz") as tar:
        for name, content in modules.items():
            entry = tarfile.TarInfo(f"{name}/{name}.so")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def spec(name: str, folder: Path) -> Any:
    """Compiles to its own name."""
    library = folder / "compiled.so"
    return SimpleNamespace(name=name, jit_library_path=library, build=lambda: library.write_bytes(name.encode()))


@pytest.mark.parametrize(
    ("asked", "how", "content"),
    [
        ("norm", "adopted", b"n"),
        ("prefill" + EQUAL_STRIDES, "adopted", b"any strides"),
        ("decode", "compiled", b"decode"),
        ("decode" + EQUAL_STRIDES, "compiled", ("decode" + EQUAL_STRIDES).encode()),
    ],
)
def test_a_module_is_adopted_where_one_does_what_is_asked_for(
    asked: str, how: str, content: bytes, tmp_path: Path
) -> None:
    adopted = unpacked(archive(tmp_path / "aot.tar.xz", norm=b"n", prefill=b"any strides"))
    target = tmp_path / asked / f"{asked}.so"
    assert take(spec(asked, tmp_path), adopted, target) == how
    assert target.read_bytes() == content


def test_the_toolkit_is_where_the_headers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvcc on the path may be a script far from them."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    monkeypatch.setattr("shutil.which", lambda name: str(tmp_path / "elsewhere" / "bin" / name))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert cuda_home() == tmp_path


@pytest.mark.parametrize(
    ("name", "used"),
    [
        ("flashinfer/decode.py", True),
        ("flashinfer/data/csrc/norm.cu", True),
        ("flashinfer/data/csrc/fused_moe/moe.cu", False),
        ("flashinfer/data/cutlass/include/cutlass/cutlass.h", True),
        ("flashinfer/data/cutlass/tools/util/include/util.h", False),
        ("flashinfer/data/aot/norm/norm.so", False),
    ],
)
def test_a_wheel_is_trimmed_to_what_is_called(name: str, used: bool) -> None:
    assert is_used(name) is used
