"""By a task's name: what it takes, and which of its options continues the task before it in a chain."""

from __future__ import annotations

from petiole.tasks.requests.names import CAPTION, CHAT, DETECT, GENERATE, POINT, QUERY
from petiole.tasks.requests.schemas import ChatRequest, Common, GenerateRequest
from petiole.tasks.requests.skills import CaptionRequest, DetectRequest, PointRequest, QueryRequest

SCHEMAS: dict[str, type[Common]] = {
    GENERATE: GenerateRequest,
    CHAT: ChatRequest,
    QUERY: QueryRequest,
    CAPTION: CaptionRequest,
    POINT: PointRequest,
    DETECT: DetectRequest,
}

CONTINUED = {GENERATE: "prompt", QUERY: "question", POINT: "object", DETECT: "object"}
"""The text of the task before is put behind this option. To a chat it is a message."""
