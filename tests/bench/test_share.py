"""`petiole bench share`: a record has figures and machine, and nothing that says whose it is."""

from __future__ import annotations

import json
import platform
from pathlib import Path

import pytest

from bench import __main__, share

RUN = {
    "title": "Models",
    "machine": {
        "cpu": "AMD EPYC",
        "cores": 2,
        "memory_gib": 23.5,
        "system": "Linux 6.1-acme-7",
        "host": "db.acme.test",
    },
    "versions": {"python": "3.11.7"},
    "commit": "0123456+",
    "command": "models.py --checkpoint /home/ana/model",
    "seconds": 1.5,
    "results": [{"name": "batch 1", "value": 2.0, "note": "read from /home/ana/x by Ana on box7 at 10.0.0.7"}],
    "absent": {"vllm": "no module at C:\\\\Users\\\\ana\\\\lib, asked redis://u:p@db.acme.test:6379/0"},
    "environment": {"TOKEN": "secret"},
}


def test_a_record_says_nothing_of_whose_it_is(tmp_path: Path) -> None:
    (tmp_path / "models.json").write_text(json.dumps(RUN))
    text = json.dumps(share.packed(tmp_path, ["ana", "box7"]))
    for private in ("ana", "box7", "acme", "/home", "10.0.0.7", "secret", "Users", "u:p"):
        assert private not in text.lower(), text
    [run] = json.loads(text)["workloads"].values()
    assert run["machine"] == {"cpu": "AMD EPYC", "cores": 2, "memory_gib": 23.5, "system": "Linux"}
    assert run["results"][0]["value"] == 2.0


def test_a_record_of_a_run_comes_back_as_the_tables_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["share", "cache", "--quick"]) == 0
    assert platform.node() not in Path(share.RECORD).read_text() or len(platform.node()) < 3
    assert share.unpack(Path(share.RECORD), tmp_path / "cpu-new") == ["cache"]
    run = json.loads((tmp_path / "cpu-new" / "cache.json").read_text())
    assert run["results"]


@pytest.mark.parametrize("record", [{}, {"petiole": 1, "workloads": {"../x": {}}}])
def test_what_is_no_record_is_not_unpacked(tmp_path: Path, record: dict[str, object]) -> None:
    (tmp_path / "record.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="is no"):
        share.unpack(tmp_path / "record.json", tmp_path / "into")
    assert not (tmp_path / "into").exists()


def test_a_run_that_measured_nothing_is_no_record(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        share.packed(tmp_path)
