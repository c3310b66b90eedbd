"""`petiole plan`, as it is typed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from petiole.tasks.commands import cli, plan
from petiole.tasks.settings import settings

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    def petiole(*arguments: str) -> tuple[int, str, str]:
        settings.cache_clear()
        status = cli.main(["plan", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    monkeypatch.setenv("PETIOLE_DEVICE", "cpu")
    yield petiole
    settings.cache_clear()


def test_the_settings_are_those_of_a_worker(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_MAX_NUM_SEQS", "5")
    status, out, err = run("petiole-tiny", "--memory", "1GiB", "--json")
    sizes = json.loads(out)
    assert (status, err) == (0, "")
    assert (sizes["model"], sizes["device"], sizes["memory_bytes"]) == ("petiole-tiny", "cpu", 2**30)
    assert (sizes["rows"], sizes["sequences"], sizes["bounded_by"]) == (5, 5, "max_num_seqs")


def test_the_text_says_what_bounds_the_sequences(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETIOLE_NUM_PAGES", "601")
    status, out, _ = run("--memory", "1 GB", "--length", "200")
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert status == 0
    assert lines["at once"].strip() == "3 of 200 tokens, bounded by num_pages"
    assert lines["tokens that fit"].strip() == "600"


def test_texts_that_are_computed_whole_take_no_pages(run: Run) -> None:
    status, out, _ = run("petiole-tiny-embed", "--memory", "1 GB", "--length", "200")
    lines = dict(line.split("  ", 1) for line in out.splitlines())
    assert status == 0
    assert lines["pages"].strip() == "none: each text is computed in one step"
    assert lines["at once"].strip() == "10 of 200 tokens, bounded by max_num_batched_tokens"
    assert "tokens that fit" not in lines


def test_a_card_by_its_name(run: Run) -> None:
    status, out, _ = run("petiole-tiny-vision", "--gpu", "L4", "--json")
    sizes = json.loads(out)
    assert (status, sizes["device"], sizes["memory_bytes"]) == (0, "cuda", 22 * 2**30)


@pytest.mark.parametrize(("card", "status"), [("a100", 1), ("a10", 1), ("l4", 0), ("h100", 0)])
def test_a_card_is_planned_as_its_worker_would_serve(
    run: Run, monkeypatch: pytest.MonkeyPatch, card: str, status: int
) -> None:
    """Before capability 8.9 a card multiplies no eight-bit floats."""
    monkeypatch.setenv("PETIOLE_WEIGHT_QUANTIZATION", "fp8")
    code, _, err = run("petiole-tiny", "--gpu", card)
    assert code == status
    assert err == ("petiole: weight_quantization: must be none, int4 on this card, got fp8\n" if status else "")


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("24GiB", 24 * 2**30), ("1.5 gb", 1_500_000_000), ("4096", 4096), ("2KiB", 2048)]
)
def test_sizes_of_memory(text: str, n_bytes: int) -> None:
    assert plan._size(text) == n_bytes


@pytest.mark.parametrize("text", ["", "GiB", "24 apples", "-1GiB", "0", "1e9", "0.1"])
def test_a_size_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", f"--memory={text}"])
    assert ended.value.code == 2
    assert f"must be a number of bytes above 0 such as 24GiB or 24GB, got {text!r}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--memory", "1MiB"], 1, "petiole: memory: must be more than "),
        (["--length", "5000"], 1, "petiole: length: must be 1 to 2048, the longest sequence, got 5000\n"),
        (["/not/there"], 1, "petiole: model folder /not/there does not exist\n"),
        (["--gpu", "l4", "--device", "cpu"], 2, "petiole: device: must be cuda beside --gpu l4, got cpu\n"),
    ],
)
def test_what_cannot_be_ends_in_one_line(run: Run, arguments: list[str], status: int, message: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (status, "", 1)
    assert err.startswith(message)


def test_without_the_packages_of_a_worker_it_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "petiole.tasks.worker.reports.inspection", None)
    code, out, err = run("--memory", "1GiB")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("petiole: a plan needs 'petiole[worker]': ")


def test_models_can_says_how_a_configuration_is_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By config.json alone; what is refused is refused in one line that names the nearest architecture."""
    told = {"architectures": ["MPNetModel"], "vocab_size": 30, "hidden_size": 16, "intermediate_size": 32}
    told |= {"num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 66}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(told))
    assert cli.main(["models", "--can", str(file)]) == 0
    assert capsys.readouterr().out == "yes: MPNetModel makes vectors of up to 64 tokens, on CPU and CUDA\n"
    assert cli.main(["models", "--can", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makes"] == "vectors"
    file.write_text(json.dumps(told | {"architectures": ["MPNetForTokens"]}))
    assert cli.main(["models", "--can", str(file)]) == 1
    said = capsys.readouterr().err
    assert "architecture MPNetForTokens is not supported, the nearest that is: MPNetFor" in said
    assert len(said) < 300
