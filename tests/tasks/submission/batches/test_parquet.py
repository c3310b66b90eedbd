"""Files of Parquet cost bounded memory, whatever they say of themselves, and what is broken is named.

`PETIOLE_FUZZ_SEED` repeats the broken files, `PETIOLE_FUZZ_PARQUET` sets their number."""

from __future__ import annotations

import io
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks.errors import BatchError
from petiole.tasks.submission.batches.files.storage import StorageError
from petiole.tasks.submission.batches.rows import pages
from petiole.tasks.submission.batches.rows.frames import is_missing
from petiole.tasks.submission.batches.rows.sources import source_of
from tests.tasks.submission.batches.test_sources import values

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

SEED = int(os.environ.get("PETIOLE_FUZZ_SEED") or random.SystemRandom().randrange(2**31))
if "CI" in os.environ:
    SEED = 1
FILES = int(os.environ.get("PETIOLE_FUZZ_PARQUET", 200))
MiB = 2**20


@pytest.fixture
def pool() -> Iterator[Any]:
    """What Arrow allocates meanwhile."""
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    yield pool
    pa.set_memory_pool(before)


def test_parquet(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pyarrow = pytest.importorskip("pyarrow")
    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["a", None]}), tmp_path / "in.parquet")
    assert source_of(tmp_path / "in.parquet").total == 2
    first, second = values(tmp_path / "in.parquet")
    assert first == {"id": 1, "text": "a"}
    assert is_missing(second["text"])


def test_a_row_group_above_its_limit_is_refused_before_it_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pa.table({"prompt": ["a" * 1000 + str(n) for n in range(100)]})
    parquet.write_table(table, tmp_path / "in.parquet", row_group_size=50, use_dictionary=False)
    assert source_of(tmp_path / "in.parquet").total == 100
    monkeypatch.setattr(pages, "MAX_GROUP_BYTES", 10_000)
    with pytest.raises(BatchError, match=r"in\.parquet: row group 0 must have at most 10000 bytes, .* got 5\d{4}"):
        source_of(tmp_path / "in.parquet")


# ------------------------------------------------------------ pages

DICTIONARY, DATA = 2, 0


def varint(value: int) -> bytes:
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def header(kind: int, size: int, stored: int, values: int) -> bytes:
    """A page's, in Thrift's compact protocol."""
    field = lambda value: b"\x15" + varint(value << 1)  # noqa: E731
    encodings = 1 if kind == DICTIONARY else 3
    return b"".join([
        *map(field, (kind, size, stored)),
        b"\x4c" if kind == DICTIONARY else b"\x2c",
        field(values), *[field(0)] * encodings, b"\0\0",
    ])  # fmt: skip


def with_header(path: Path, kind: int, size: int, values: int) -> None:
    """Change the header of a file's only dictionary, or of its first page of data. What is longer in it is taken
    from its page."""
    metadata, data = parquet.read_metadata(path), bytearray(path.read_bytes())
    column = metadata.row_group(0).column(0)
    at = column.dictionary_page_offset if kind == DICTIONARY else column.data_page_offset
    was, length = pages._header(bytes(data[at : at + 2**12]))
    whole = length + was.stored
    made = next(
        found
        for stored in range(whole, 0, -1)
        if len(found := header(kind, size, stored, values)) + stored == whole
    )
    data[at : at + len(made)] = made
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("kind", "size", "count", "said"),
    [
        (DICTIONARY, 2**31 - 1, 3, "must have at most 268435456 bytes, inflated, got 2147483647"),
        (DICTIONARY, 100, 2**31 - 1, "must have at most 101 values in its bytes, got 2147483647"),
        (DATA, 2**31 - 1, 3, "must have at most 268435456 bytes, inflated, got 2147483647"),
    ],
)
def test_a_page_that_claims_too_much_is_named_before_it_is_decoded(
    tmp_path: Path, pool: Any, kind: int, size: int, count: int, said: str
) -> None:
    path = tmp_path / "in.parquet"
    parquet.write_table(pa.table({"prompt": ["".join(map(chr, range(48, 120))), "b", "c"]}), path)
    assert len(values(path)) == 3
    with_header(path, kind, size, count)
    before = pool.max_memory()
    with pytest.raises(
        BatchError, match=rf"in\.parquet: row group 0, column 0, page at byte \d+ {said}"
    ) as refused:
        values(path)
    assert not isinstance(refused.value, StorageError), "no other try succeeds"
    assert pool.max_memory() - before < MiB


@pytest.mark.parametrize("encoding", [{}, {"use_dictionary": False, "column_encoding": "DELTA_BYTE_ARRAY"}])
def test_a_value_that_stands_in_a_thousand_rows_is_not_in_memory_so_often(
    tmp_path: Path, pool: Any, monkeypatch: pytest.MonkeyPatch, encoding: dict[str, Any]
) -> None:
    monkeypatch.setattr(pages, "MAX_READ_BYTES", 2 * MiB)
    path, value = tmp_path / "in.parquet", "a" * MiB
    with parquet.ParquetWriter(path, pa.schema([("prompt", pa.string())]), compression="zstd", **encoding) as file:
        file.write_table(pa.table({"prompt": [value] * 60}))
    assert path.stat().st_size < MiB / 8
    before = pool.max_memory()
    assert all(row.value() == {"prompt": value} for row in source_of(path))
    assert pool.max_memory() - before < 30 * MiB


def test_a_list_of_more_values_than_its_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty ones take a bit or less."""
    path = tmp_path / "in.parquet"
    parquet.write_table(
        pa.table({"prompt": [[None] * 1000] * 10}, schema=pa.schema([("prompt", pa.list_(pa.int8()))])), path
    )
    assert values(path)[0] == {"prompt": [None] * 1000}
    monkeypatch.setattr(pages, "MAX_VALUES", 9_999)
    with pytest.raises(BatchError, match="column 0 must have at most 9999 values of lists, got 10000"):
        values(path)


def outcome(path: Path) -> str:
    try:
        [*source_of(path)]
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_broken_file_is_read_or_named(tmp_path: Path) -> None:
    print(f"PETIOLE_FUZZ_SEED={SEED} PETIOLE_FUZZ_PARQUET={FILES}")
    chance, path = random.Random(SEED), tmp_path / "in.parquet"
    table = pa.table({"prompt": ["a", "b", None] * 20, "n": [[1, 2], [], None] * 20, "x": [{"y": 0.5}] * 60})
    sound = list[bytes]()
    for version in ("1.0", "2.0"):
        file = io.BytesIO()
        parquet.write_table(table, file, data_page_version=version, row_group_size=30)
        sound.append(file.getvalue())
    read = 0
    for number in range(FILES):
        data = bytearray(chance.choice(sound))
        for _ in range(chance.choice([1, 1, 2, 8])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.randrange(len(data))] if chance.random() < 0.1 else data)
        said = outcome(path)
        assert said == "" or said.startswith(f"BatchError: {path}: "), f"seed {SEED}, file {number}: {said}"
        read += said == ""
    assert 0 < read < FILES
