"""The worker's end of vLLM's socket, against a real process in vLLM's place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from petiole.engines.vllm import VllmEngine
from petiole.gpu_worker import Constraint, InvalidRequest, ModelError, Request, Scoring
from petiole.gpu_worker.exceptions import AdapterError, EngineError, HandedBack, MachineError
from petiole.gpu_worker.request import FinishReason
from tests.engines.conftest import Make
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


def program_of(cmdline: Path) -> bool:
    """Whether a process is the child of this one that runs vLLM's program."""
    try:
        fields = (cmdline.parent / "stat").read_text().rpartition(")")[2].split()
        return int(fields[1]) == os.getpid() and b"program.py" in cmdline.read_bytes()
    except OSError:
        return False


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
def test_a_stopped_process_counts_as_hung(stand_in: Make, monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    """While a request runs: the ranks of an idle engine are seldom asked. On a busy machine a healthy child may be
    silent for seconds, too."""
    monkeypatch.setenv("STAND_IN_STEP_MS", "200")
    engine, fatal = stand_in(vllm_silence_s=10.0), list[BaseException]()
    engine.on_fatal = fatal.append
    handle = begun(engine, asked(max_tokens=200))
    pid = engine.child.pid
    os.kill(pid if who == "child" else rank_of(pid), signal.SIGSTOP)
    until(lambda: engine.heartbeat_age_s() > 1.5)
    until(lambda: fatal)
    assert "no sign of life for 10 s (PETIOLE_VLLM_SILENCE_S)" in str(fatal[0])
    with pytest.raises(EngineError, match="no sign of life"):
        handle.result()
    until(lambda: not group(pid))


def test_a_killed_worker_leaves_no_process(tmp_path: Path, interpreter: str) -> None:
    """Not even where the child itself is stopped."""
    code = (
        "import sys, time; from petiole.contract.settings.engine import EngineConfig\n"
        "from petiole.engines.vllm import VllmEngine\n"
        f"engine = VllmEngine(EngineConfig(vllm_python={interpreter!r}, max_model_len=256))\n"
        "print(engine.child.pid, flush=True); time.sleep(3600)"
    )
    env = os.environ | {"PYTHONPATH": str(Path.cwd())}
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
    begun = whole.result().token_ids[:1]  # a log has a part only of an output that something has ended
    resumed = engine.submit(replace(request, resume_token_ids=begun)).result()
    assert (resumed.token_ids, resumed.finish_reason) == (begun, FinishReason.DEADLINE)


def test_a_reload_is_refused_in_words(stand_in: Make) -> None:
    with pytest.raises(ModelError, match="PETIOLE_MODEL=other"):
        stand_in().prepare_reload("other")


def test_an_adapter_is_known_by_its_content(stand_in: Make, tmp_path: Path) -> None:
    engine = stand_in(lora_slots=2)
    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    handle = engine.submit(replace(asked(), adapter=str(tmp_path)))
    assert handle.result()
    first = handle.adapter_key
    (tmp_path / "adapter_config.json").write_text('{"r": 16}')
    again = engine.submit(replace(asked(), adapter=str(tmp_path)))
    assert again.result()
    assert first != again.adapter_key
    changed = replace(asked(), adapter=str(tmp_path), resume_adapter_key=first, resume_token_ids=[1])
    with pytest.raises(ModelError, match="no longer"):
        engine.submit(changed).result()


def test_an_adapter_that_vllm_cannot_load_fails_its_task_alone(stand_in: Make, tmp_path: Path) -> None:
    engine = stand_in(lora_slots=2)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="vLLM cannot load it"):
        engine.submit(replace(asked(), adapter=str(tmp_path))).result()
    assert engine.submit(asked()).result()
    assert engine.healthy


def test_adapters_have_numbers_of_their_own_and_the_newest_folder(stand_in: Make, tmp_path: Path) -> None:
    engine = stand_in(lora_slots=2)
    assert isinstance(engine, VllmEngine)
    for k in range(20):
        (folder := tmp_path / str(k)).mkdir()
        (folder / "adapter_config.json").write_text(f'{{"r": {k}}}')
    with ThreadPoolExecutor(4) as threads:
        keys = [*threads.map(engine._adapter_key, (str(tmp_path / str(k)) for k in range(20)))]
    assert len({engine._adapters[key][1] for key in keys}) == 20
    number = engine._adapters[keys[3]][1]
    (tmp_path / "3").rename(tmp_path / "moved")
    assert engine._adapter_key(str(tmp_path / "moved")) == keys[3]
    assert engine._adapters[keys[3]] == (keys[3], number, str(tmp_path / "moved"))


def test_whoever_asks_late_is_told_of_the_end(stand_in: Make) -> None:
    engine, told = stand_in(), list[BaseException]()
    os.kill(engine.child.pid, signal.SIGKILL)
    engine._thread.join()
    engine.on_fatal = told.append
    assert "vLLM has ended" in str(told[0])


def test_a_paused_engine_drains_when_it_is_shut_down(stand_in: Make) -> None:
    engine = stand_in()
    engine.pause()
    handle = engine.submit(asked())
    until(lambda: handle.prepared)
    engine.shutdown(drain=True)
    assert handle.result().finish_reason is FinishReason.LENGTH


def test_a_pause_that_fails_is_told(stand_in: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_PAUSE", "fail")
    engine = stand_in()
    with pytest.raises(EngineError, match="ValueError: no pause now"):
        engine.pause()
    assert not engine.stats()["paused"]
    assert engine.submit(asked()).result()


def test_arguments_that_no_shell_reads_are_refused_before_the_start(
    stand_in: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("petiole.engines.vllm.parent.Child", None)
    with pytest.raises(InvalidRequest, match="vllm_args"):
        stand_in(vllm_args='--x "a')


def test_a_start_that_fails_behind_the_child_ends_it(stand_in: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[int] = []

    def fail(*_: object) -> None:
        began.extend(int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if program_of(path))
        raise ModelError("no limits")

    monkeypatch.setattr("petiole.engines.vllm.parent.limits_of", fail)
    with pytest.raises(ModelError, match="no limits"):
        stand_in()
    assert began
    until(lambda: not any(map(group, began)))


def test_texts_are_refused_by_the_engine_that_takes_them(stand_in: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("petiole.gpu_worker.preparation.embeddings.YES", "0")
    monkeypatch.setattr("petiole.gpu_worker.preparation.embeddings.NO", "1")
    asking = Request(texts=[("a", "b")], scoring=Scoring(field="documents"))
    with pytest.raises(InvalidRequest, match=r"documents.*PETIOLE_ENGINE=petiole"):
        stand_in().submit(asking).result()


def test_two_engines_never_continue_each_other(stand_in: Make) -> None:
    from petiole.contract.settings.engine import EngineConfig
    from petiole.gpu_worker import Engine

    with Engine(EngineConfig(device="cpu", dtype="float32", max_model_len=64)) as own:
        assert own.limits.fingerprint != stand_in().limits.fingerprint
