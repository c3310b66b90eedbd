"""What was freed goes back to the system, whichever thread has freed it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from petiole import memory

PARSED = """
import json, threading, time
from petiole import memory

def mib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) // 1024

def work():
    texts = [json.dumps(k) * 100 for k in range(150_000)]
    kept.append(texts[-1])  # glibc gives back by itself what is free at the end

kept = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
before = mib()
memory.release()
memory.release()
deadline = time.monotonic() + 60
while mib() > before - 30 and time.monotonic() < deadline:
    time.sleep(0.05)
print(before - mib())
"""


@pytest.mark.skipif(memory._trim() is None or not Path("/proc/self/status").exists(), reason="of glibc and Linux")
def test_what_a_thread_has_freed_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", PARSED], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 30


def test_without_a_thread_nothing_fails_and_the_next_one_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory, "_waiting", threading.Lock())
    monkeypatch.setattr(memory, "_trim", lambda: lambda _: 0)
    memory._say.cache_clear()

    def none_left(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited:
        limited.setattr(threading.Timer, "start", none_left)
        memory.release()
        memory.release()
    assert caplog.text.count("can't start new thread") == 1
    assert not memory._waiting.locked()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="of systems that fork")
def test_a_forked_child_starts_fresh() -> None:
    forked = "import os\nfrom petiole import memory\nmemory._waiting.acquire()\n"
    forked += "child = os.fork()\n"
    forked += "os._exit(memory._waiting.locked()) if not child else exit(os.waitpid(child, 0)[1])"
    assert subprocess.run([sys.executable, "-c", forked], check=False).returncode == 0


SHARED = """
import ctypes, threading
from petiole import memory
memory.share_one_heap()

def mib():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) // 1024

def work():
    for k in range(300):
        took[k] = malloc(64 * 1024)
        ctypes.memset(took[k], 1, 64 * 1024)
    for one in reversed(took):
        free(one)

libc, took = ctypes.CDLL(None), [None] * 300
malloc, free = libc.malloc, libc.free
malloc.restype, free.argtypes, malloc.argtypes = ctypes.c_void_p, [ctypes.c_void_p], [ctypes.c_size_t]
free(malloc(16 * 2**20))  # from now on glibc keeps so much, and twice as much at a heap's end
before = mib()
thread = threading.Thread(target=work)
thread.start()
thread.join()
memory._trim()(0)
print(mib() - before)
"""


@pytest.mark.skipif(memory._trim() is None or not Path("/proc/self/status").exists(), reason="of glibc and Linux")
def test_the_end_of_a_heap_that_all_share_goes_back() -> None:
    done = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 8, "of 18 MiB"
