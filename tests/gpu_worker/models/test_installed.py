"""The FlashInfer that is installed is named at the start, when it is not one to rely on."""

from __future__ import annotations

import subprocess
import sys

import pytest
from packaging.version import Version

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.runtime.cuda.attention import installed


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.6.4", False), ("0.7.2", False), ("0.7.2.post1", True), ("0.7.9rc1", True), ("0.8.0", False)],
)
def test_the_version_is_checked_before_the_package_is_imported(version, known, monkeypatch):
    monkeypatch.setattr(installed, "installed_version", lambda: Version(version))
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # an import fails
    expected = "cannot be imported" if known else r"needs flashinfer-python >=0.7.2.post1,<0.8, found "
    with pytest.raises(ModelError, match=expected) as refused:
        installed.require_version()
    assert version in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setattr(installed, "installed_version", lambda: None)
    with pytest.raises(ModelError, match=r"not installed: pip install 'flashinfer-python>=0.7.2.post1,<0.8'"):
        installed.require_version()


@pytest.mark.parametrize(("before", "expected"), [(None, "1"), ("0", "0")])
def test_norms_are_cuda_kernels_unless_the_environment_says_otherwise(before, expected, monkeypatch):
    name = "FLASHINFER_USE_CUDA_NORM"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    code = f"import os; import petiole.gpu_worker.runtime.cuda.attention.flashinfer; print(os.environ[{name!r}])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == [expected]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Could not find nvcc and default cuda_home='/x' doesn't exist"), "Could not find nvcc"),
        (FileNotFoundError(2, "No such file or directory", "ninja"), "No such file or directory: 'ninja'"),
        (RuntimeError("Ninja build failed. Ninja output:\n[1/4] c++ a.cu\nerror: b"), r"Ninja output:\): install"),
    ],
    ids=["no nvcc", "no ninja", "it does not compile"],
)
def test_a_kernel_that_cannot_be_compiled_is_one_line_that_says_what_to_install(error, expected):
    with pytest.raises(ModelError, match=expected) as refused, installed.kernels_at_hand():
        raise error
    assert "flashinfer-jit-cache" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: out of memory"), ModelError("no room")], ids=str)
def test_other_errors_at_the_start_are_what_they_are(error):
    with pytest.raises(type(error), match=str(error)), installed.kernels_at_hand():
        raise error
