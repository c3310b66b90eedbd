"""The compiled CPU path is optional: what stops it from being built stops nothing else."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from gpu_worker.runtime.native import build

load = build.load_library.__wrapped__  # each test asks anew


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    return tmp_path


def test_without_a_compiler_torch_takes_its_place_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert load() is None
    assert "no C compiler" in caplog.text


def test_a_compiler_that_fails_is_named_with_its_complaint(monkeypatch, caplog, tmp_path):
    compiler = tmp_path / "broken-cc"
    compiler.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with caplog.at_level(logging.WARNING):
        assert load() is None
    assert "broken-cc" in caplog.text
    assert "no such flag" in caplog.text
    assert not list(tmp_path.glob("petiole/*"))


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_it_is_built_once_and_kept(monkeypatch, empty_cache):
    monkeypatch.setattr(build, "_FLAGS", ("-O0", "-fopenmp", "-shared", "-fPIC", "-std=gnu11"))
    assert load() is not None
    (built,) = (empty_cache / "petiole").glob("*.so")
    before = built.stat().st_mtime_ns
    assert load() is not None
    assert built.stat().st_mtime_ns == before


@pytest.fixture(params=["no home", "one where no folder can be made"])
def nowhere_to_write(request, monkeypatch, tmp_path):
    """Gives what stands for /tmp."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    if request.param == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", lambda: Path("~nobody-of-this-name").expanduser())
    else:
        (tmp_path / "home").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "tmp"


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_without_a_home_to_write_to_it_is_kept_in_a_private_temporary_folder(monkeypatch, nowhere_to_write):
    monkeypatch.setattr(build, "_FLAGS", ("-O0", "-fopenmp", "-shared", "-fPIC", "-std=gnu11"))
    assert load() is not None
    (folder,) = nowhere_to_write.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.glob("*.so"))) == 1


def test_nothing_is_loaded_from_a_folder_that_others_can_write_to(nowhere_to_write, caplog):
    (nowhere_to_write / f"petiole-{os.getuid()}").mkdir(mode=0o755)
    with caplog.at_level(logging.WARNING):
        assert load() is None
    assert "alone" in caplog.text


def test_it_can_be_turned_off(monkeypatch):
    for value, expected in (("off", False), ("0", False), ("on", True)):
        monkeypatch.setenv("PETIOLE_NATIVE", value)
        assert build.wanted() is expected
