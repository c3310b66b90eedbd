"""`embed.many`: any number of texts, as tasks of some texts each whose vectors are joined."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from petiole.contract.limits import MAX_PROMPT_CHARACTERS
from petiole.contract.results.vectors import DENSE, Vectors, most_texts
from petiole.tasks.errors import InvalidRequest, ModelChanged
from petiole.tasks.fleet import control
from petiole.tasks.streams.readers import AsyncGeneration
from petiole.tasks.submission.task import GenerationTask

BATCH = 256
"""Texts of one task, unless the caller says otherwise."""
AHEAD = 16
"""Tasks that are submitted before the first of them has ended."""
_WIDEST = 4096
"""Dimensions of the widest usual models, where a request does not say how many it wants."""


class EmbeddingTask(GenerationTask):
    """A task that makes vectors of texts."""

    abstract = True

    def many(
        self,
        texts: Iterable[str],
        *,
        batch: int = BATCH,
        timeout_s: float | None = None,
        on_progress: Callable[[int], object] | None = None,
        **options: Any,
    ) -> Vectors:
        """The vectors of any number of texts, in their order. Waits for them.

        The texts become tasks of at most `batch` texts, some of which are submitted ahead. `on_progress(n)` is
        called whenever the vectors of the first n texts are there. `timeout_s` limits the wait for each task.
        `options` are those of `delay`. If a task fails, the others are cancelled, and its error is raised;
        ModelChanged, too, if another model answers the rest. The results of the tasks are forgotten once they are
        read."""
        if options.get("outputs", [DENSE]) != [DENSE]:
            raise InvalidRequest("outputs", "must be ['dense'], which embed.many joins", options["outputs"])
        most = most_texts(options.get("dimensions") or _WIDEST, options.get("encoding", "float32"))
        if type(batch) is not int or batch < 1:
            raise InvalidRequest("batch", "must be a whole number of at least 1", batch)
        waiting, joined = deque[AsyncGeneration](), list[str]()
        dimensions, encoding, made_by = 0, options.get("encoding", "float32"), ""
        try:
            parts = batches(texts, min(batch, most))
            while True:
                while len(waiting) < AHEAD and (part := next(parts, None)) is not None:
                    waiting.append(self.delay(texts=part, **options))
                if not waiting:
                    return Vectors(joined, dimensions, encoding)
                value = waiting[0].get(timeout=timeout_s)
                waiting.popleft().forget()
                now_by = value.get("fingerprint") or ""  # a worker of the version before does not say it
                if made_by and now_by and made_by != now_by:
                    so_far = f"{len(joined)} texts were answered by model {made_by}"
                    raise ModelChanged(f"{so_far}, and the next ones by model {now_by}")
                made_by = made_by or now_by
                joined += value["vectors"]
                dimensions = value["dimensions"]
                if on_progress is not None:
                    on_progress(len(joined))
        finally:
            for task in waiting:
                control.cancel(task)


def batches(texts: Iterable[str], most: int) -> Iterator[list[str]]:
    """Lists of at most `most` texts, which are not too long together."""
    part, characters = list[str](), 0
    for text in texts:
        length = len(text) if isinstance(text, str) else 0  # a request refuses what is no text, by its position
        if part and (len(part) == most or characters + length > MAX_PROMPT_CHARACTERS):
            yield part
            part, characters = [], 0
        part.append(text)
        characters += length
    if part:
        yield part
