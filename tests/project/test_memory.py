"""What was freed goes back to the system, whichever thread has freed it."""

from __future__ import annotations

import subprocess
import sys
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
