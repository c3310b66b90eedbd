"""The units of one machine, from one file: systemd takes them, and wrong files are refused by name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks.settings import Settings
from tests.support.site import REPOSITORY

HERE = REPOSITORY / "deploy" / "systemd"


def render(file: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "render.py"), str(file), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """Its own tool checks them. The commands and the user are this machine's for it."""
    bin_folder = tmp_path / "env" / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("celery", "petiole"):
        (bin_folder / name).write_text("#!/bin/sh\n")
        (bin_folder / name).chmod(0o755)
    text = (HERE / "models.toml").read_text().replace("/srv/petiole", str(tmp_path / "env"))
    file, folder = tmp_path / "models.toml", tmp_path / "units"
    file.write_text(text.replace('user = "petiole"', 'user = "root"'))
    folder.mkdir()
    assert render(file, folder).returncode == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {
        *("petiole.target", "petiole-gateway.service", "petiole-metrics.service"),
        *("petiole-worker-chat.service", "petiole-worker-search.service"),
    }
    chat = (folder / "petiole-worker-chat.service").read_text()
    assert 'Environment="PETIOLE_MODEL=/models/Qwen3-8B"' in chat
    urls = {"worker-chat": "broker", "worker-search": "broker", "gateway": "gateway", "metrics": "monitor"}
    for part, user in urls.items():
        unit = (folder / f"petiole-{part}.service").read_text()
        assert f'Environment="PETIOLE_BROKER_URL_FILE=/etc/petiole/{user}-url"' in unit
    assert 'Environment="CUDA_VISIBLE_DEVICES=0"' in chat
    assert "CPUAffinity=0-3" in chat
    assert "-n chat@%%h" in chat, "systemd reads %h as a folder"
    assert "TimeoutStopSec=40" in chat
    variables = {line.split('"')[1].partition("=")[0] for line in chat.splitlines() if line.startswith("Environ")}
    known = {f"PETIOLE_{name.upper()}" for name in Settings.model_fields} | {"PETIOLE_BROKER_URL_FILE"}
    assert {name for name in variables if name.startswith("PETIOLE_")} <= known
    if (tool := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    units = [str(path) for path in sorted(folder.iterdir())]
    checked = subprocess.run([tool, "verify", *units], capture_output=True, text=True, check=False)
    said = [line for line in checked.stderr.splitlines() if str(folder) in line or "petiole" in line]
    assert said == []


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"modles": {}}, "modles: must be one of"),
        ({"gateway": "yes"}, "gateway: must be true, false or a table, got 'yes'"),
        ({"metrics": {"port": 1}}, "metrics.port: must be one of settings"),
        ({"models": {"Chat": {}}}, "models.Chat: must be"),
        (
            {"settings": {"PETIOLE_BROKER_URL": "redis://", "PETIOLE_BROKER_URL_FILE": "/etc/url"}},
            "PETIOLE_BROKER_URL must not be set beside PETIOLE_BROKER_URL_FILE",
        ),
        ({"models": {"chat": {"model": "m"}}}, "models.chat.queue: must be text, got None"),
        ({"models": {"chat": {"model": "m", "queue": "q", "gpu": 1}}}, "models.chat.gpu: must be one of"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, change: dict[str, Any], refused: str) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("units", HERE / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    told = tomllib.loads((HERE / "models.toml").read_text()) | change
    with pytest.raises(module.WrongError) as error:
        module.units(told)
    assert refused in str(error.value)
