"""llama-index-llms-openai-like: completed, chatted, streamed."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

common = {"api_base": sys.argv[1], "api_key": "none", "model": "petiole-tiny", "temperature": 0, "max_tokens": 60}
chat = OpenAILike(is_chat_model=True, **common)
said = [ChatMessage(role="user", content="Count from 1 to 5.")]
whole = chat.chat(said).message.content
assert "1, 2, 3" in whole, whole
assert "".join(piece.delta for piece in chat.stream_chat(said)) == whole
text = OpenAILike(is_chat_model=False, **common)
assert text.complete("Count from 1 to 5.").text
print("fine")
