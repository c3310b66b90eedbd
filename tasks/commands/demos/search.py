"""`petiole demo --search`: a help desk's passages become vectors, and questions in other words find them.

The small model may be wrong, so the end says how many questions have found their passage.
"""

from __future__ import annotations

from typing import Any

from petiole.contract.results.vectors import Vectors
from petiole.tasks.commands.demos.demo import DELTA_TIMEOUT_S, running
from petiole.tasks.commands.terminal import print_table
from petiole.tasks.submission.definitions import embed

PASSAGES = (
    "We refund the order within thirty days: send it back and the sum returns to your bank.",
    "Press forgot, and we send a link with which the passcode is restored.",
    "Tracking: the number in our mail shows where the parcel is and when it arrives.",
    "Stains on the jacket go away with vinegar and a soft cloth.",
    "Repairs: our workshop mends the bike within three days.",
    "The membership can be cancelled at any time under settings, without a fee.",
    "Before the passport expires we remind you to renew it.",
    "The museum of Lisbon opens at nine.",
)
ASKED = (
    ("How do I get my money back?", 0),
    ("I cannot remember my password.", 1),
    ("When will my package arrive?", 2),
    ("my coat is dirty", 3),
    ("my bicycle is broken", 4),
    ("I do not need the subscription any more", 5),
    ("When can I enter the museum in Lisbon?", 7),
)


def main() -> int:
    """Returns 0 if every question has an answer."""
    with running("petiole-tiny-embed"):
        return search()


def search() -> int:
    tasks = [
        embed.delay(texts=list(PASSAGES), prompt_name="passage"),
        embed.delay(texts=[question for question, _ in ASKED], prompt_name="query"),
    ]
    passages, questions = (Vectors.of(_result(task)) for task in tasks)
    found = [nearest(question, passages) for question in questions]
    rows = [
        (question, PASSAGES[at], f"{score:.2f}", "right" if at == right else "WRONG")
        for (question, right), (at, score) in zip(ASKED, found, strict=True)
    ]
    print_table(("asked", "found", "cosine", ""), rows)
    print(f"\n{sum(row[-1] == 'right' for row in rows)} of {len(rows)} questions have found their passage.")
    return 0


def _result(task: Any) -> dict[str, Any]:
    value: dict[str, Any] = task.get(timeout=DELTA_TIMEOUT_S)
    return value


def nearest(question: list[float], passages: Vectors) -> tuple[int, float]:
    """The passage with the largest cosine, and that. Vectors have the length 1."""
    scores = [sum(a * b for a, b in zip(question, passage, strict=True)) for passage in passages]
    best = max(range(len(scores)), key=scores.__getitem__)
    return best, scores[best]
