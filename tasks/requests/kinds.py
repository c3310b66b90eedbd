"""By a task's name: the schema of its request, and the option that takes the previous task's text in a chain."""

from __future__ import annotations

from petiole.tasks.requests.names import (
    CAPTION,
    CHAT,
    CLASSIFY,
    DETECT,
    EMBED,
    GENERATE,
    POINT,
    QUERY,
    RERANK,
    SCORE,
)
from petiole.tasks.requests.schemas import ChatRequest, Common, GenerateRequest
from petiole.tasks.requests.skills import (
    CaptionRequest,
    ClassifyRequest,
    DetectRequest,
    EmbedRequest,
    PointRequest,
    QueryRequest,
    RerankRequest,
    ScoreRequest,
)

SCHEMAS: dict[str, type[Common]] = {
    GENERATE: GenerateRequest,
    CHAT: ChatRequest,
    QUERY: QueryRequest,
    CAPTION: CaptionRequest,
    POINT: PointRequest,
    DETECT: DetectRequest,
    EMBED: EmbedRequest,
    RERANK: RerankRequest,
    SCORE: ScoreRequest,
    CLASSIFY: ClassifyRequest,
}

CONTINUED = {GENERATE: "prompt", QUERY: "question", POINT: "object", DETECT: "object", RERANK: "query"}
"""In a chain, the text of the previous task is appended to this option; in a chat, it becomes a message."""

BY_TEXT = frozenset({EMBED, RERANK, SCORE, CLASSIFY})
"""Their output has an entry for each text or pair, in place of a token, and one model makes all entries."""

OF_TEXTS = frozenset({EMBED, CLASSIFY})
"""In a chain, the text of the previous task becomes one of their texts, and so does each text of a group."""
