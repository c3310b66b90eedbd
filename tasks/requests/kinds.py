"""By a task's name: the schema of its request, and the option that takes the previous task's text in a chain."""

from __future__ import annotations

from petiole.tasks.requests.names import CAPTION, CHAT, DETECT, EMBED, GENERATE, POINT, QUERY
from petiole.tasks.requests.schemas import ChatRequest, Common, GenerateRequest
from petiole.tasks.requests.skills import (
    CaptionRequest,
    DetectRequest,
    EmbedRequest,
    PointRequest,
    QueryRequest,
)

SCHEMAS: dict[str, type[Common]] = {
    GENERATE: GenerateRequest,
    CHAT: ChatRequest,
    QUERY: QueryRequest,
    CAPTION: CaptionRequest,
    POINT: PointRequest,
    DETECT: DetectRequest,
    EMBED: EmbedRequest,
}

CONTINUED = {GENERATE: "prompt", QUERY: "question", POINT: "object", DETECT: "object"}
"""In a chain, the text of the previous task is appended to this option; in a chat, it becomes a message. The texts
of a group become texts of `embed`."""
