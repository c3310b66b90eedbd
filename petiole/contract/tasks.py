"""The tasks, in one table.

The type of a task's request is imported when it is first asked for: the names alone cost a producer nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from petiole.contract.requests.generation import Common


@dataclass(frozen=True)
class Task:
    """A task.

    declared: the room in `petiole.contract.requests` and the class of its request there.
    answers: the field of the result that has the answer.
    filled: the option that takes the text of the task before, in a chain. A list gets one more entry.
    """

    name: str
    declared: str
    answers: str
    filled: str | None = None

    @cached_property
    def request(self) -> type[Common]:
        room, name = self.declared.split(":")
        request: type[Common] = getattr(import_module(f"petiole.contract.requests.{room}"), name)
        return request

    @property
    def by_text(self) -> bool:
        """Whether the output has an entry for each text or pair, in place of a token. One model makes all
        entries."""
        return self.answers in ("vectors", "scores")


TASKS = {
    f"tasks.{task.name}": task
    for task in (
        Task("generate", "generation:GenerateRequest", "text", "prompt"),
        Task("chat", "generation:ChatRequest", "text", "messages"),
        Task("query", "image_tasks:QueryRequest", "answer", "question"),
        Task("caption", "image_tasks:CaptionRequest", "caption"),
        Task("point", "image_tasks:PointRequest", "points", "object"),
        Task("detect", "image_tasks:DetectRequest", "objects", "object"),
        Task("embed", "embedding_tasks:EmbedRequest", "vectors", "texts"),
        Task("rerank", "embedding_tasks:RerankRequest", "scores", "query"),
        Task("score", "embedding_tasks:ScoreRequest", "scores"),
        Task("classify", "embedding_tasks:ClassifyRequest", "scores", "texts"),
    )
}
"""By the name in messages."""

COUNT = "tasks.count"
"""No generation: it has a queue, a request and a result of its own (`requests.count`)."""
