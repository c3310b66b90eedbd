"""llama.cpp in a process of its own: its death is a line in the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.harness.report import NotAvailableError, Report
from bench.models.decoding import in_turns, works
from bench.peers.llama_cpp import LlamaCpp, open_peer

FAKE = """
import ctypes, os, signal

class Any: pass

def llama_log_callback(function): return function
def llama_log_set(function, data): pass
def llama_context_default_params(): return Any()
def llama_init_from_model(model, settings): return 1
def llama_get_memory(context): return 1
def llama_memory_clear(memory, data): pass
def llama_memory_seq_rm(memory, sequence, first, last): return True
def llama_batch_free(batch): pass
def llama_free(context): pass

def llama_model_default_params():
    settings = Any()
    settings.use_extra_bufts = True
    return settings

def llama_model_load_from_file(path, settings):
    global extra
    extra = settings.use_extra_bufts
    return 1

def llama_batch_init(n, width, sequences):
    batch = Any()
    batch.token, batch.pos, batch.n_seq_id, batch.logits = ([0] * n for _ in range(4))
    batch.seq_id = [[0] for _ in range(n)]
    return batch

def llama_decode(context, batch):
    dies = os.environ["DIES"]
    if dies == "always" or (dies == "with extra buffers" and extra) or os.path.exists(dies):
        os.kill(os.getpid(), signal.SIGSEGV)
    return 0

def llama_get_logits_ith(context, i): return (ctypes.c_float * 8)(0, 0, 1)
"""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("DIES", "never")
    return tmp_path


def test_it_decodes(fake: Path) -> None:
    peer = LlamaCpp(fake / "model.gguf", 8, 1)
    assert peer.decode([[5, 6], [7, 5]], 3)() > 0
    assert peer.prefill([5, 6, 7])() > 0
    peer.close()


def test_a_build_that_dies_with_its_extra_buffers_computes_without(
    fake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIES", "with extra buffers")
    peer = LlamaCpp(fake / "model.gguf", 8, 1)
    assert peer.whole([[5, 6]], 2) > 0
    peer.close()


def test_one_that_dies_at_the_start_is_absent(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    monkeypatch.setenv("DIES", "always")
    report = Report("a bench")
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    assert open_peer(raw, "float32", 1, report) is None
    assert report.absent == {"llama.cpp": "died of SIGSEGV"}


def test_one_that_dies_in_its_turn_is_left_out(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIES", str(fake / "now"))
    report, peer = Report("a bench"), LlamaCpp(fake / "model.gguf", 8, 1)
    work = works([peer], lambda side: side.decode([[5, 6]], 2), report)
    (fake / "now").touch()
    rates = in_turns({"petiole": lambda: 0.5, **work}, 4, 1, report)
    assert rates == {"petiole": [8.0]}
    assert report.absent == {"llama.cpp": "died of SIGSEGV"}
    assert works([peer], lambda side: side.decode([[5, 6]], 2), report) == {}
    with pytest.raises(NotAvailableError, match="died of SIGSEGV"):
        peer.whole([[5]], 1)
    peer.close()
