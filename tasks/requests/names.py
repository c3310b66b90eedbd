"""The names of Petiole's tasks in messages."""

GENERATE, CHAT = "tasks.generate", "tasks.chat"
