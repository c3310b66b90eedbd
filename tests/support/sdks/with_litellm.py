"""litellm: completion and responses, streamed and whole, through its provider for OpenAI's interface."""

import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices

import litellm

where = {"model": "hosted_vllm/petiole-tiny", "api_base": sys.argv[1], "api_key": "none", "temperature": 0}
said = [{"role": "user", "content": "Count from 1 to 5."}]
whole = litellm.completion(messages=said, **where).choices[0].message.content
assert "1, 2, 3" in whole, whole
pieces = litellm.completion(messages=said, stream=True, **where)
assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
answer = litellm.responses(input="Count from 1 to 5.", **{**where, "model": "openai/petiole-tiny"})
assert "1, 2, 3" in answer.output[-1].content[0].text
print("fine")
