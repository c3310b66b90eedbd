"""Answers from Petiole's own documentation: `python examples/ask_the_docs.py "What happens when a worker dies?"`.

The sections of the pages become vectors, the nearest ones are put before the question, and the answer streams.
Each step waits for as long as its worker takes. The fleet has two models, so the one of vectors has a queue of
its own:

    PETIOLE_MODEL=petiole-tiny-embed celery -A petiole worker -Q embed -n embed@%h &
    PETIOLE_MODEL=petiole-tiny celery -A petiole worker &
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from petiole import chat, embed

DOCS = Path(__file__).parents[1] / "docs"
NEAREST = 3
MOST_LETTERS = 600
"""Of a section in the prompt: a small model reads little."""


@dataclass(frozen=True)
class Section:
    page: str
    title: str
    text: str


def sections(folder: Path = DOCS) -> Iterator[Section]:
    for page in sorted(folder.glob("*.md")):
        for part in re.split(r"^(?=#+ )", page.read_text(), flags=re.M):
            title, _, text = part.strip("# ").partition("\n")
            if text.strip():
                yield Section(page.name, title, text.strip())


class Index:
    """Vectors of length 1, so that a product is a cosine. An application keeps them in a database, with the
    result's `fingerprint`: another model's vectors mean something else (docs/embeddings.md)."""

    def __init__(self, found: list[Section]) -> None:
        self.sections = found
        texts = [f"{section.title}: {section.text}" for section in found]
        self.vectors = embed.many(texts, prompt_name="passage", truncate=True, queue="embed").numpy()

    def nearest(self, question: str) -> list[Section]:
        cosines = self.vectors @ embed.many([question], prompt_name="query", queue="embed").numpy()[0]
        return [self.sections[k] for k in np.argsort(-cosines)[:NEAREST]]


def answer(question: str, found: list[Section]) -> Iterator[str]:
    known = "\n\n".join(f"{section.title}: {section.text[:MOST_LETTERS]}" for section in found)
    messages = [
        {"role": "system", "content": f"Answer from these pages, or say that they do not say.\n\n{known}"},
        {"role": "user", "content": question},
    ]
    with chat.stream(messages=messages, max_tokens=80, truncate="start", temperature=0) as deltas:
        for delta in deltas:
            yield delta.text


if __name__ == "__main__":
    question = sys.argv[1]
    found = Index(list(sections())).nearest(question)
    for section in found:
        print(f"{section.page}: {section.title}")
    print()
    for text in answer(question, found):
        print(text, end="", flush=True)
    print()
