"""The worker's end of vLLM's socket, against a real process in vLLM's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from petiole.gpu_worker import Constraint, InvalidRequest, ModelError
from petiole.gpu_worker.exceptions import EngineError, HandedBack, MachineError
from tests.engines.conftest import STAND_IN, Make
from tests.engines.test_contract import asked, begun, until


def group(pid: int) -> list[int]:
    """The living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == pid and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def rank_of(pid: int) -> int:
    return next(one for one in group(pid) if b"time.sleep(3600)" in Path(f"/proc/{one}/cmdline").read_bytes())


@pytest.mark.parametrize("who", ["child", "rank"])
def test_a_killed_process_ends_the_engine_and_all_others(stand_in: Make, who: str) -> None:
    engine, fatal = stand_in(), list[BaseException]()
    engine.on_fatal = fatal.append
    handles = [begun(engine, asked(max_tokens=200)) for _ in range(3)]
    pid = engine.child.pid
    os.kill(pid if who == "child" else rank_of(pid), signal.SIGKILL)
    for handle in handles:
        with pytest.raises(EngineError, match="vLLM has ended"):
            handle.result()
        assert not isinstance(handle.error, HandedBack)
    until(lambda: fatal)
    assert not engine.healthy
    until(lambda: not group(pid))
    with pytest.raises(EngineError):
        engine.submit(asked()).result()


@pytest.mark.parametrize("who", ["child", "rank"])
def test_a_stopped_process_counts_as_hung(stand_in: Make, who: str) -> None:
    engine, fatal = stand_in(vllm_silence_s=2.0), list[BaseException]()
    engine.on_fatal = fatal.append
    pid = engine.child.pid
    os.kill(pid if who == "child" else rank_of(pid), signal.SIGSTOP)
    until(lambda: engine.heartbeat_age_s() > 1.5)
    until(lambda: fatal)
    assert "no sign of life for 2 s (PETIOLE_VLLM_SILENCE_S)" in str(fatal[0])
    until(lambda: not group(pid))


def test_a_killed_worker_leaves_no_process(tmp_path: Path) -> None:
    """Not even where the child itself is stopped."""
    code = (
        "import sys, time; from petiole.contract.settings.engine import EngineConfig\n"
        "from petiole.engines.vllm import VllmEngine\n"
        "engine = VllmEngine(EngineConfig(vllm_python=sys.executable, max_model_len=256))\n"
        "print(engine.child.pid, flush=True); time.sleep(3600)"
    )
    env = os.environ | {"PYTHONPATH": f"{STAND_IN}{os.pathsep}{Path.cwd()}"}
    worker = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env)
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    os.kill(pid, signal.SIGSTOP)
    worker.kill()
    worker.wait()
    until(lambda: not group(pid))


def test_a_start_that_hangs_or_fails_is_told(stand_in: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_START", "fail")
    with pytest.raises(ModelError, match="ValueError: no such architecture"):
        stand_in()
    monkeypatch.setenv("STAND_IN_START", "hang")
    with pytest.raises(MachineError, match="did not start within 3 s"):
        stand_in(vllm_start_s=3.0)
    monkeypatch.delenv("STAND_IN_START")
    with pytest.raises(ModelError, match="unrecognized arguments: --no-such"):
        stand_in(vllm_args="--no-such 1")


def test_an_interpreter_that_is_none_is_told(stand_in: Make) -> None:
    with pytest.raises(InvalidRequest, match="vllm_python"):
        stand_in(vllm_python="")
    with pytest.raises(MachineError, match="cannot be run"):
        stand_in(vllm_python="/nowhere/python")
    with pytest.raises(MachineError, match="ended while it started: with status 1"):
        stand_in(vllm_python="/bin/false")


def test_what_vllm_has_under_its_own_name_is_refused(stand_in: Make) -> None:
    with pytest.raises(InvalidRequest, match="speculative_tokens"):
        stand_in(speculative_tokens=2)


def test_a_constrained_output_comes_whole_or_not_at_all(stand_in: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_STEP_MS", "30")
    engine = stand_in()
    request = replace(asked(ignore_eos=False), constraint=Constraint("choice", ["12345", "7"]))
    handle = engine.submit(request)
    until(lambda: handle.admitted)
    handle.hand_back()
    with pytest.raises(HandedBack):
        handle.result()
    assert not handle._deltas
    whole = engine.submit(request)
    assert whole.result().text == "12345"
    assert len([delta for delta in whole if delta.token_ids]) == 1
    with pytest.raises(InvalidRequest, match="resume_token_ids"):
        engine.submit(replace(request, resume_token_ids=whole.result().token_ids[:1])).result()


def test_a_reload_is_refused_in_words(stand_in: Make) -> None:
    with pytest.raises(ModelError, match="PETIOLE_MODEL=other"):
        stand_in().prepare_reload("other")


def test_an_adapter_is_known_by_its_content(stand_in: Make, tmp_path: Path) -> None:
    engine = stand_in(lora_slots=2)
    (tmp_path / "adapter_config.json").write_text("{}")
    handle = engine.submit(replace(asked(), adapter=str(tmp_path)))
    assert handle.result()
    first = handle.adapter_key
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    again = engine.submit(replace(asked(), adapter=str(tmp_path)))
    assert again.result()
    assert first != again.adapter_key
    changed = replace(asked(), adapter=str(tmp_path), resume_adapter_key=first, resume_token_ids=[1])
    with pytest.raises(ModelError, match="no longer"):
        engine.submit(changed).result()


def test_two_engines_never_continue_each_other(stand_in: Make) -> None:
    from petiole.contract.settings.engine import EngineConfig
    from petiole.gpu_worker import Engine

    with Engine(EngineConfig(device="cpu", dtype="float32", max_model_len=64)) as own:
        assert own.limits.fingerprint != stand_in().limits.fingerprint
