"""Files with the KV of chunks: what comes back is what was written, whatever happens to a file or a process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from petiole.contract.errors import InvalidRequest
from petiole.gpu_worker.runtime.memory import chunk_files
from petiole.gpu_worker.runtime.memory.chunk_files import HEADER, ChunkFiles
from tests.support.failing_os import FailingOs

LAYOUT, N = "a layout", 5000


def content(seed: int, n: int = N) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n).astype(np.uint8)


def key(n: int) -> bytes:
    return n.to_bytes(32, "big")


def read(files: ChunkFiles, layout: str, key: bytes, n: int) -> np.ndarray | None:
    found = np.empty(n, np.uint8)
    return found if files.read(layout, key, found) else None


def only_file(folder: Path) -> Path:
    (path,) = folder.rglob("*.kv")
    return path


def test_a_file_is_found_by_layout_and_key_in_every_process(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    assert ChunkFiles(folder, 1 << 20).write(LAYOUT, key(1), content(1))
    assert only_file(folder).stat().st_mode & 0o777 == 0o600
    files = ChunkFiles(folder, 1 << 20)
    found = read(files, LAYOUT, key(1), N)
    assert found is not None
    assert (found == content(1)).all()
    assert read(files, LAYOUT, key(2), N) is None
    assert read(files, "another", key(1), N) is None
    assert only_file(folder).stat().st_mode & 0o777 == 0o400, "it has been used again"
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trial", range(40))
def test_a_damaged_file_is_removed(tmp_path: Path, trial: int) -> None:
    rng, files = random.Random(trial), ChunkFiles(tmp_path / "kv", 1 << 20)
    files.write(LAYOUT, key(1), content(1))
    path = only_file(tmp_path)
    data = bytearray(path.read_bytes())
    how = rng.choice(["a bit", "cut", "longer", "zeros", "empty", "another's"])
    if how == "a bit":
        data[rng.choice([rng.randrange(200), rng.randrange(HEADER - 16, len(data))])] ^= 1 << rng.randrange(8)
    elif how == "zeros":
        begin = rng.randrange(HEADER, len(data))
        data[begin:] = bytes(len(data) - begin)
    elif how == "another's":
        files.write(LAYOUT, key(2), content(2))
        data = bytearray(path.with_name(f"{key(2).hex()}.kv").read_bytes())
    else:
        data = {"cut": data[: rng.randrange(len(data))], "longer": data + b"x", "empty": bytearray()}[how]
    path.write_bytes(data)
    assert read(files, LAYOUT, key(1), N) is None, how
    assert files.counters.damaged == 1
    assert not path.exists()
    assert files.write(LAYOUT, key(1), content(1))
    assert (read(files, LAYOUT, key(1), N) == content(1)).all()  # type: ignore[union-attr]


def test_what_is_not_its_own_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    files = ChunkFiles(folder, 1 << 20)
    files.write(LAYOUT, key(1), content(1))
    layout = only_file(folder).parent
    strangers = [folder / "models" / "weights.safetensors", layout / "notes.txt", folder / "loose.kv"]
    strangers += [folder / f"{'0' * 32}x" / only_file(folder).name]
    for path in strangers:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100))
    (layout / f"{'a' * 64}.kv").symlink_to(strangers[0])
    (folder / ("b" * 32)).symlink_to(folder / "models")
    (layout / f"{'c' * 64}.kv").mkdir()
    files.evict(0)
    assert all(path.exists() for path in strangers)
    assert files.counters.evicted == 1
    assert read(files, LAYOUT, key(1), N) is None


def test_a_full_disk_makes_room_of_its_own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ChunkFiles(tmp_path / "kv", 1 << 20)
    for n in range(20):
        files.write(LAYOUT, key(n), content(n))
    now = [time.monotonic()]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert not files.write(LAYOUT, key(20), content(20))
        assert files.counters.evicted == 2
        assert not files.write(LAYOUT, key(21), content(21)), "not at once again"
        assert files.counters.failed == 1
    now[0] += chunk_files._PAUSE_S
    assert files.write(LAYOUT, key(21), content(21))


def test_of_a_chain_the_end_goes_first(tmp_path: Path) -> None:
    files = ChunkFiles(tmp_path / "kv", 1 << 20)
    for n in range(4):
        files.write(LAYOUT, key(n), content(n))
    assert files.touch(LAYOUT, [key(n) for n in (0, 1, 2, 3, 7)]) == [key(7)]
    files.evict(2 * (HEADER + N))
    assert [n for n in range(4) if read(files, LAYOUT, key(n), N) is not None] == [0, 1]


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    each = HEADER + N
    files = ChunkFiles(tmp_path / "kv", 4 * each)
    for n in range(4):
        files.write(LAYOUT, key(n), content(n))
        os.utime(tmp_path / "kv" / next(iter(os.listdir(tmp_path / "kv"))) / f"{key(n).hex()}.kv", (n, n))
    assert read(files, LAYOUT, key(0), N) is not None  # used now
    files.write(LAYOUT, key(9), content(9))
    left = [n for n in (0, 1, 2, 3, 9) if read(files, LAYOUT, key(n), N) is not None]
    assert left == [0, 2, 3, 9]


def left(files: ChunkFiles, layout: str, keys: range) -> int:
    return sum(files._path(layout, key(n)).exists() for n in keys)


def test_a_pass_over_many_texts_takes_nothing_from_conversations(tmp_path: Path) -> None:
    each = HEADER + N
    files = ChunkFiles(tmp_path / "kv", 100 * each)
    conversations, documents = range(70), range(1000, 1400)
    for n in conversations:
        files.write(LAYOUT, key(n), content(n))
        files.touch(LAYOUT, [key(n)], 1)
    for n in documents:
        files.write(LAYOUT, key(n), content(n))
        files.touch(LAYOUT, [key(n)])
    assert left(files, LAYOUT, conversations) == 70
    assert 28 <= left(files, LAYOUT, documents) <= 30, "a fiftieth may be free"
    assert left(ChunkFiles(tmp_path / "kv", 61 * each), LAYOUT, conversations) == 48, "a fifth is for what is new"


def test_a_process_that_begins_with_full_files_stays_below_the_limit(tmp_path: Path) -> None:
    each = HEADER + N
    files = ChunkFiles(tmp_path / "kv", 1000 * each)
    for n in range(100):
        files.write(LAYOUT, key(n), content(n))
    files = ChunkFiles(tmp_path / "kv", 100 * each)
    for n in range(100, 110):
        files.write(LAYOUT, key(n), content(n))
        assert len(list(tmp_path.rglob("*.kv"))) <= 100


def test_conversations_of_a_model_that_is_gone_make_room(tmp_path: Path) -> None:
    each = HEADER + N
    files = ChunkFiles(tmp_path / "kv", 50 * each)
    old, new = range(45), range(100, 150)
    for n in old:
        files.write("another", key(n), content(n))
        files.touch("another", [key(n)], 1)
    past = time.time() - chunk_files._LAPSES_S - 60
    for path in tmp_path.rglob("*.kv"):
        os.utime(path, (past, past))
    for n in new:
        files.write(LAYOUT, key(n), content(n))
    assert left(files, "another", old) == 0
    assert left(files, LAYOUT, new) >= 48, "a fiftieth may be free"


def test_new_conversations_have_room_beside_old_ones(tmp_path: Path) -> None:
    each = HEADER + N
    files = ChunkFiles(tmp_path / "kv", 50 * each)
    for n in range(200):
        files.write(LAYOUT, key(n), content(n))
        for past in range(max(0, n - 5), n):  # each comes back a few times
            files.touch(LAYOUT, [key(past)], 1)
    assert left(files, LAYOUT, range(155, 200)) >= 44, "old ones that nobody asks for make room"


def test_files_that_nobody_will_finish_are_removed(tmp_path: Path) -> None:
    files = ChunkFiles(tmp_path / "kv", 1 << 20)
    files.write(LAYOUT, key(1), content(1))
    old, new = (only_file(tmp_path).with_name(f"{name * 16}.tmp") for name in "ab")
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * chunk_files._UNFINISHED_S,) * 2)
    files.evict(1 << 20)
    assert (old.exists(), new.exists()) == (False, True)


def test_a_folder_or_file_of_others_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(InvalidRequest, match="kv_tier: must be a folder in which only this user may write"):
        ChunkFiles(shared, 1 << 20)
    (tmp_path / "file").write_text("no folder")
    for path in (tmp_path / "file", Path("a\0b")):
        with pytest.raises(InvalidRequest, match="kv_tier: must be a folder that this user may write to"):
            ChunkFiles(path, 1 << 20)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(InvalidRequest, match="and no link"):
        ChunkFiles(tmp_path / "link", 1 << 20)
    files = ChunkFiles(tmp_path / "kv", 1 << 20)
    files.write(LAYOUT, key(1), content(1))
    path = only_file(tmp_path)
    elsewhere = path.rename(tmp_path / "elsewhere")
    path.symlink_to(elsewhere)
    assert read(files, LAYOUT, key(1), N) is None
    assert files.counters.failed == 1


@pytest.mark.parametrize("seed", range(30))
def test_any_call_of_the_system_may_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    rng = random.Random(seed)
    files = ChunkFiles(tmp_path / "kv", 6 * (HEADER + N))

    with monkeypatch.context() as patch:
        patch.setattr(chunk_files, "os", FailingOs(rng, 0.1))
        patch.setattr(chunk_files, "logger", type("Quiet", (), {"warning": lambda *_: None}))
        for _ in range(100):
            n = rng.randrange(12)
            if rng.random() < 0.5:
                files.write(LAYOUT, key(n), content(n))
            elif (found := read(files, LAYOUT, key(n), N)) is not None:
                assert (found == content(n)).all()
    assert files.counters.failed > 0
    for n in range(12):
        found = read(files, LAYOUT, key(n), N)
        assert found is None or (found == content(n)).all()


def test_a_limit_of_a_files_size_is_a_full_disk(tmp_path: Path) -> None:
    """The signal that comes with it ends no worker."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))\n"
    limited += WRITER.replace("while True", "while n < 5") + "print(files.counters.failed, flush=True)\n"
    ended = subprocess.run([sys.executable, "-c", limited, str(tmp_path / "kv")], stdout=subprocess.PIPE)
    assert ended.returncode == 0
    assert ended.stdout.split() == [b"ready", b"1"], "one write failed; for a second there was no other"
    assert not [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]


def test_a_full_file_system_leaves_whole_files(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100k,mode=700", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a file system")
    try:
        files = ChunkFiles(folder, 1 << 30)
        for n in range(30):
            files._paused_until = 0.0
            files.write(LAYOUT, key(n), content(n))
        found = [n for n in range(30) if read(files, LAYOUT, key(n), N) is not None]
        assert found
        assert all((read(files, LAYOUT, key(n), N) == content(n)).all() for n in found)
        assert files.counters.evicted > 0, "it makes room of its own files"
        assert not list(folder.rglob("*.tmp"))
    finally:
        subprocess.run(["umount", folder], check=True)


WRITER = """
import sys
from pathlib import Path
from tests.gpu_worker.runtime.memory.test_chunk_files import LAYOUT, content, key
from petiole.gpu_worker.runtime.memory.chunk_files import ChunkFiles
files = ChunkFiles(Path(sys.argv[1]), 40_000_000)
print("ready", flush=True)
n = 0
while True:
    files.write(LAYOUT, key(n % 60), content(n % 60, 1_000_000))
    n += 1
"""


def test_two_writers_killed_at_any_instant_leave_whole_files(tmp_path: Path) -> None:
    folder, rng = tmp_path / "kv", random.Random(1)
    for _ in range(6):
        writers = [
            subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE) for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        time.sleep(rng.random() * 0.1)
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
    files = ChunkFiles(folder, 40_000_000)
    found = 0
    for n in range(60):
        copy = read(files, LAYOUT, key(n), 1_000_000)
        if copy is not None:
            found += 1
            assert (copy == content(n, 1_000_000)).all()
    assert found
    assert files.counters.damaged == 0
