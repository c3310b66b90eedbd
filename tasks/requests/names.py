"""The names of Petiole's tasks in messages."""

GENERATE, CHAT = "tasks.generate", "tasks.chat"
QUERY, CAPTION, POINT, DETECT = "tasks.query", "tasks.caption", "tasks.point", "tasks.detect"
COUNT = "tasks.count"
EMBED, RERANK, SCORE, CLASSIFY = "tasks.embed", "tasks.rerank", "tasks.score", "tasks.classify"
TASKS = frozenset({GENERATE, CHAT, QUERY, CAPTION, POINT, DETECT, EMBED, RERANK, SCORE, CLASSIFY})
