"""Below its roots a worker reads and writes regular files; nothing leads out, however a location is spelt."""

from __future__ import annotations

import os
import random
import socket
import threading
from pathlib import Path

import pytest

from petiole.tasks.errors import BatchError, InvalidSettings
from petiole.tasks.settings import settings
from petiole.tasks.submission.batches.files import roots, storage

SECRET = "a-password-of-the-worker"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder full of traps. The secret is beside it."""
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "rows-of-others").mkdir()
    (tmp_path / "rows-of-others" / "in.jsonl").write_text(SECRET)
    root = tmp_path / "rows"
    (root / "folder").mkdir(parents=True)
    (root / "folder" / "in.jsonl").write_text("{}\n")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "out").symlink_to(tmp_path)
    (root / "folder" / "up").symlink_to("../..")
    (root / "inside").symlink_to(root / "folder" / "in.jsonl")
    (root / "environ").symlink_to("/proc/self/environ")
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(root / "socket"))
    return root


def test_what_is_below_a_root_is_read_and_written(root: Path) -> None:
    with roots.only([str(root)]):
        assert storage.read(f"{root}/folder/in.jsonl") == b"{}\n"
        assert storage.size(f"{root}/folder/in.jsonl") == 3
        assert storage.size(f"{root}/missing/in.jsonl") is None
        with pytest.raises(roots.LocationRefused):
            storage.read(f"{root}/folder")
        storage.write(f"{root}/new/out.jsonl.pages/1", b"page")
        assert storage.names(f"{root}/new/out.jsonl.pages") == ["1"]
        assert "folder" in storage.names(str(root))
        storage.remove_folder(f"{root}/new/out.jsonl.pages")
        assert storage.names(f"{root}/new") == []
    assert storage.read(f"{root}/link").decode() == SECRET, "a client opens what its user may"


@pytest.mark.parametrize(
    "location",
    [
        "link", "out/secret", "folder/up/secret", "inside", "environ", "fifo", "socket", "../secret", "",
        "folder/../../secret", "./../secret", "//..//secret", "out/rows/folder/in.jsonl", "folder\0",
        "../rows-of-others/in.jsonl",
    ],
)  # fmt: skip
def test_nothing_leads_out_of_a_root(root: Path, location: str) -> None:
    check_refused(root, f"{root}/{location}")


@pytest.mark.parametrize(
    "location",
    [
        "/proc/self/environ", "/dev/zero", "/etc/passwd", "etc/passwd", "-", "~/.netrc", "file:///etc/passwd",
        "FILE:///etc/passwd", "local:///etc/passwd", "file://{root}/folder/in.jsonl", "{root}-of-others/in.jsonl",
        "s3://rowsx/in", "s3://other/in", "S3://rows/in", "s3://rows/../other/in", "s3://rows/%2e%2e/other/in",
        "s3://rows@evil.example/in", "gs://rows/in", "https://h.example@evil.example/f/in",
        "https://h.example.evil.example/f/in", "https://h.example/secrets/in", "https://h.example/f/..%2fsecrets",
        "http://h.example/f/in", "http://169.254.169.254/latest/meta-data", "simplecache::s3://rows/in",
        "s3://rows/in::file:///etc/passwd", "zip://x::{root}/folder/in.jsonl", "memory://rows/in",
    ],
)  # fmt: skip
def test_no_other_place_is_opened(root: Path, location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    check_refused(root, location.replace("{root}", str(root)), "s3://rows", "https://h.example/f/")


def check_refused(root: Path, location: str, *more: str) -> None:
    before = tree(root.parent)
    with roots.only([str(root), *more]):
        for use in (storage.read, storage.size):
            with pytest.raises(roots.LocationRefused) as found:
                use(location)
            assert SECRET not in str(found.value)
        if location.rstrip("/") != str(root):
            with pytest.raises(BatchError):
                storage.write(f"{location}/out.jsonl", b"written")
    assert tree(root.parent) == before


def tree(folder: Path) -> dict[str, bytes | None]:
    found = (Path(at) / name for at, folders, names in os.walk(folder) for name in [*folders, *names])
    return {str(path): path.read_bytes() if path.is_file() else None for path in found}


def test_a_link_is_replaced_and_removed_and_never_followed(root: Path) -> None:
    with roots.only([str(root)]):
        storage.write(f"{root}/link", b"new")
        storage.remove(f"{root}/environ")
    assert (root.parent / "secret").read_text() == SECRET
    assert ((root / "link").is_symlink(), (root / "link").read_bytes()) == (False, b"new")
    assert not (root / "environ").is_symlink()


def test_nobody_puts_a_link_between_a_check_and_the_opening(root: Path) -> None:
    """A folder becomes a link to another one and back, again and again."""
    (root / "a").mkdir()
    (root / "a" / "secret").write_text("good")
    (root / "b").symlink_to(root.parent)
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            for one, other in (("a", "c"), ("b", "a"), ("a", "b"), ("c", "a")):
                (root / one).rename(root / other)

    swapping = threading.Thread(target=swap)
    swapping.start()
    seen = set()
    try:
        with roots.only([str(root)]):
            for _ in range(3000):
                try:
                    seen.add(storage.read(f"{root}/a/secret"))
                except BatchError:
                    seen.add(b"refused")
    finally:
        over.set()
        swapping.join()
    assert SECRET.encode() not in seen
    assert seen == {b"good", b"refused"}


@pytest.mark.parametrize("seed", range(5))
def test_random_locations_read_what_they_should_or_nothing(root: Path, seed: int) -> None:
    random_ = random.Random(seed)
    names = [
        "folder",
        "up",
        "..",
        ".",
        "",
        "link",
        "out",
        "secret",
        "rows",
        "in.jsonl",
        "fifo",
        "environ",
        "inside",
    ]
    with roots.only([str(root)]):
        for _ in range(400):
            location = "/".join([str(root), *random_.choices(names, k=random_.randrange(1, 6))])
            try:
                found = storage.read(location)
            except BatchError:
                continue
            assert found == b"{}\n", location


def test_roots_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, files, found in (
        ("", "", ()),
        (" /data/rows, s3://rows ,", "", ("/data/rows", "s3://rows")),
        ("/data", "/files", ("/data", "/files")),
        ("", "gs://files", ("gs://files",)),
    ):
        monkeypatch.setenv("PETIOLE_BATCH_FILES", given)
        monkeypatch.setenv("PETIOLE_GATEWAY_FILES", files)
        settings.cache_clear()
        assert settings().batch_roots == found
    for wrong in ("rows", "file:///data", "zip://a::file:///b", "/data/../etc"):
        monkeypatch.setenv("PETIOLE_BATCH_FILES", wrong)
        settings.cache_clear()
        with pytest.raises(InvalidSettings, match="PETIOLE_BATCH_FILES"):
            settings()
    monkeypatch.undo()
    settings.cache_clear()
