"""`petiole up`: where models run, and all of it from one terminal."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx2
import pytest

from petiole.tasks.commands.demos.demo import python_path
from petiole.tasks.commands.gateway import placed, told_apart
from petiole.tasks.fleet.models import ModelFacts, find
from petiole.tasks.wire.keys import own_queue

MODELS = ("petiole-tiny", "petiole-tiny-vision")


def test_each_card_has_a_worker_and_models_take_them_in_turn() -> None:
    found = placed(["a", "b"], ["0", "1", "2"], 8, 0.9)
    assert [one.model for one in found] == ["a", "b", "a"]
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in found] == ["0", "1", "2"]
    assert not any("PETIOLE_GPU_MEMORY_UTILIZATION" in one.environment for one in found)


def test_models_on_one_card_share_its_memory() -> None:
    found = placed(["a", "b", "c"], ["4", "5"], 8, 0.9)
    shares = [one.environment.get("PETIOLE_GPU_MEMORY_UTILIZATION") for one in found]
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in found] == ["4", "5", "4"]
    assert shares == ["0.450", None, "0.450"]


def test_without_a_card_models_share_the_cores() -> None:
    assert [one.environment["PETIOLE_NUM_THREADS"] for one in placed(["a", "b", "c"], [], 8, 0.9)] == ["2"] * 3
    assert placed(["a", "b"], [], 1, 0.9)[0].environment["PETIOLE_NUM_THREADS"] == "1"


def test_models_of_one_file_name_answer_each_for_itself() -> None:
    places = told_apart(placed(["q05/model.gguf", "smol/model.gguf", "org/a"], ["0", "1", "2", "3"], 8, 0.9))
    names = [one.environment.get("PETIOLE_SERVED_NAMES") for one in places]
    assert names == ["q05/model.gguf", "smol/model.gguf", None, "q05/model.gguf"]
    known = [
        ModelFacts(fingerprint=name, names=[name], queues=["q"], own_queues=[own_queue("q", name)], worker=name)
        for name in names[:2]
        if name
    ]
    assert len({find(known, name, "q").queue for name in names[:2]}) == 2


def test_a_port_that_is_taken_is_said_before_anything_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ran = subprocess.run(
            [sys.executable, "-m", "petiole.tasks.commands.cli", "up", "petiole-tiny", "--port", port],
            env={**os.environ, "PETIOLE_DEVICE": "cpu", "PYTHONPATH": python_path()},
            capture_output=True,
            text=True,
            check=False,
        )
    assert ran.returncode != 0
    assert f"--host, --port: must be an address that is free here, got 127.0.0.1:{port}" in ran.stderr
    assert "Starting" not in ran.stdout


@pytest.mark.slow
def test_two_models_answer_until_ctrl_c(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PETIOLE_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "petiole.tasks.commands.cli", "up", *MODELS, "--port", "0"],
        env={**environment, "XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONPATH": python_path(),
             "PETIOLE_DEVICE": "cpu", "PETIOLE_QUEUE": f"up-{os.getpid()}"},
        stdout=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        url = next(found[1] for line in process.stdout if (found := re.search(r"serving (\S+)", line)))
        for model in MODELS:
            asked = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
            answer = httpx2.post(f"{url}/chat/completions", json=asked, timeout=60)
            assert (answer.status_code, answer.json()["model"]) == (200, model)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, 130)
    finally:
        process.kill()
        process.wait()
