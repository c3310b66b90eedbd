"""A journal holds whatever was written to it before its process died, and nothing half."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from petiole.tasks.errors import BatchError
from petiole.tasks.submission.batches.journal import Journal, JournalEntry, OutputFiles
from petiole.tasks.submission.batches.segments import FileStore


def entry(row: int, good: bool = True, word: str = "") -> JournalEntry:
    return JournalEntry(row, 2**63 + row, good, json.dumps({"row": row, "good": good, "word": word}).encode())


def opened(output: Path, about: dict[str, str], name: str = "id") -> Journal:
    return Journal(FileStore(str(output)), about, name)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 12), in_order=st.booleans())
def test_cut_anywhere_it_goes_on_and_every_row_is_once_in_the_output(
    tmp_path_factory: pytest.TempPathFactory, seed: int, rows: int, in_order: bool
) -> None:
    random_ = random.Random(seed)
    output = tmp_path_factory.mktemp("journal") / "out.jsonl"
    order = random_.sample(range(rows), rows)
    while True:
        journal = opened(output, {"task": "generate"})
        left = [row for row in order if not journal.digest_of(row)]
        for row in left:
            journal.sent(row)
            journal.append([entry(row)])
            if random_.random() < 0.3:
                break
        else:
            journal.join(OutputFiles(str(output)), in_order)
            journal.conclude()
            journal.close()
            break
        journal.close()
        path = Path(journal.store.name)
        whole = path.read_bytes()
        path.write_bytes(whole[: random_.randrange(whole.index(b"\n"), len(whole) + 1)])
    ended = [line["row"] for line in lines(output)]
    assert sorted(ended) == list(range(rows))
    assert ended == sorted(ended) or not in_order
    left_over = opened(output, {"task": "generate"}, "other")
    assert left_over.complete == {"rows": rows, "failed": 0, "digest": left_over.complete["digest"]}  # type: ignore[index]
    assert left_over.batch == "id" or len(whole) < 60
    left_over.close()


def test_rows_that_failed_may_be_sent_again_and_their_last_line_counts(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    journal = opened(output, {})
    journal.append([entry(0), entry(1, good=False), entry(2, good=False)])
    journal.forget_failures()
    assert (journal.count, journal.failed, journal.round) == (1, 0, 2)
    journal.append([entry(1)])
    journal.close()
    journal = opened(output, {})
    assert [bool(journal.digest_of(row)) for row in range(3)] == [True, True, False]
    journal.append([entry(2, good=False)])
    assert journal.failed == 1
    journal.join(OutputFiles(str(output)), in_order=False)
    assert [(line["row"], line["good"]) for line in lines(output)] == [(0, True), (1, True), (2, False)]


def test_one_process_has_it_and_one_batch(tmp_path: Path) -> None:
    journal = opened(tmp_path / "out.jsonl", {"task": "generate"})
    with pytest.raises(BatchError, match="another process"):
        opened(tmp_path / "out.jsonl", {"task": "generate"})
    journal.close()
    with pytest.raises(BatchError, match="journal is of another batch: task was another"):
        opened(tmp_path / "out.jsonl", {"task": "chat"})
    (tmp_path / "other.jsonl").write_text("mine")
    with pytest.raises(BatchError, match="exists"):
        opened(tmp_path / "other.jsonl", {})
    assert not (tmp_path / "other.jsonl.journal").exists()
