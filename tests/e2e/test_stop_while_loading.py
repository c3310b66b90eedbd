"""The start of a worker: it waits for its model and its broker alone, and ends at once when it is told to."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from tests.support.site import Site, Worker, eventually
from tests.support.slow_hub import TINY, SlowHub


def loading(site: Site) -> Worker:
    """A worker that will never have loaded its model. Its temporary files lie in `site.folder / "tmp"`."""
    temporary, pidfile = site.folder / "tmp", site.folder / "worker.pid"
    temporary.mkdir()
    worker = site.start_worker(
        *("--pidfile", str(pidfile), "--statedb", str(site.folder / "state")),
        PETIOLE_ENGINE_FACTORY="tests.support.endless_load:EndlessLoad",
        TMPDIR=temporary,
    )
    eventually(lambda: list(temporary.glob("half-loaded-*")), "it loads")
    assert pidfile.exists()
    return worker


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGQUIT])
def test_a_signal_ends_a_load_at_once(own_site: Site, number: signal.Signals) -> None:
    waiting = own_site.generate("waiting", max_tokens=2)
    worker = loading(own_site)
    worker.signal(number)
    assert worker.ended() == 0
    assert worker.output.count("petiole-tiny was still loading") == 1
    assert "Traceback" not in worker.output
    assert own_site.queued() == 1
    assert left_behind(own_site.folder) == []
    own_site.worker()
    assert own_site.get(waiting)["finish_reason"] == "length"


def left_behind(folder: Path) -> list[Path]:
    return [*(folder / "tmp").iterdir(), *folder.glob("*.pid")]


def test_a_second_interrupt_changes_nothing(own_site: Site) -> None:
    worker = loading(own_site)
    worker.signal(signal.SIGINT)
    worker.signal(signal.SIGINT)
    assert worker.ended() == 0
    assert "Traceback" not in worker.output


def test_a_download_ends_with_its_worker_and_leaves_nothing_half(own_site: Site) -> None:
    home = own_site.folder / "hub"
    with SlowHub() as hub:
        worker = own_site.start_worker(
            PETIOLE_ENGINE_FACTORY="petiole.gpu_worker.engine:Engine",
            PETIOLE_DEVICE="cpu",
            PETIOLE_MODEL="somebody/model",
            HF_ENDPOINT=hub.url,
            HF_HOME=home,
        )
        eventually(lambda: only_the_weights_are_missing(home), "the weights are coming")
        worker.signal(signal.SIGTERM)
        assert worker.ended() == 0
    assert unfinished(home) == []
    assert "Traceback" not in worker.output


def unfinished(home: Path) -> list[Path]:
    return list(home.rglob("*.incomplete"))


def only_the_weights_are_missing(home: Path) -> bool:
    arrived = {file.name for file in home.rglob("snapshots/*/*")}
    expected = {file.name for file in TINY.glob("*.json")}
    return arrived == expected and len(unfinished(home)) == 1


def test_a_result_backend_that_hangs_does_not_hold_up_the_start(own_site: Site) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        worker = own_site.worker(PETIOLE_RESULT_BACKEND=url)
        assert worker.stop() == 0
    assert "Traceback" not in worker.output
