"""A job for the night: `python examples/nightly_parquet.py questions.parquet answers.parquet`.

Reads the column `question`, asks the fleet at the lowest priority, and writes a row for each row, in their order.
Live traffic is served first. Killed at 4 o'clock, the same command goes on where it was: a row is answered once.
"""

import sys

import pyarrow.parquet as pq

import petiole


def answer(questions: str, answers: str) -> int:
    """Returns how many rows failed."""
    job = petiole.batch(
        questions,
        answers,
        task="chat",
        prompt="{question}",  # braces name a column; the rest of this text is the same in each row
        max_tokens=64,
        temperature=0,
        fields=["text", "finish_reason"],
    )
    progress = job.run(lambda now: print(f"\r{now.ended} of {now.rows}", end="", file=sys.stderr))
    print(
        f"\n{progress.ended} rows, {progress.failed} failed, {progress.rows_per_s:.0f} a second", file=sys.stderr
    )
    return progress.failed


if __name__ == "__main__":
    failed = answer(*sys.argv[1:3])
    print(*pq.read_table(sys.argv[2]).slice(0, 3).to_pylist(), sep="\n")
    sys.exit(1 if failed else 0)
