"""Hints for options that a task does not have: names from other APIs, and misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from petiole.contract.requests.submission import SUBMISSION

_ELSEWHERE = {
    "best_of": "submit a group, each with a seed of its own",
    "functions": "tools",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "include_stop_str_in_output": "include_stop",
    "json_mode": "json_schema",
    "length_penalty": "there is no beam search",
    "lora": "adapter",
    "max_completion_tokens": "max_tokens",
    "max_length": "max_tokens, which counts the output alone",
    "max_new_tokens": "max_tokens",
    "n": "submit a group, each with a seed of its own",
    "num_predict": "max_tokens",
    "response_format": "json_schema, which takes a schema or a pydantic class; or regex, choice, grammar",
    "stop_sequences": "stop",
    "stream": "every task has a stream: generate.stream(...), or stream(result)",
    "stream_options": "the result has the usage: result.get()['usage']",
    "system": 'the first of the messages, {"role": "system", "content": ...}',
    "timeout": "deadline_s for the generation, timeout_s for a reader of its stream, timeout of get()",
    "top_logprobs": "logprobs, the number of likeliest tokens",
    "typical_p": "min_p or top_p",
    "user": "salt, to keep prefix caches apart; headers={'tenant': ...} for shares",
}
_OTHER_TASK = {
    **dict.fromkeys(("messages", "tools", "chat_template_kwargs", "tool_choice"), "chat"),
    **dict.fromkeys(("reasoning_effort", "max_reasoning_tokens"), "chat"),
    "prompt": "generate",
    "texts": "embed and count",
    "question": "query",
    "object": "point and detect",
    "image": "query, caption, point and detect; in a chat an image is a part of a message",
}


def instead_of(name: str, known: Collection[str]) -> str:
    """What to write in place of the option `name`, for a task with the options `known`; "" if no option is
    similar."""
    if name in SUBMISSION:
        return (
            "it belongs to the submission: an argument of delay, stream or apply_async, or .set() of a signature"
        )
    if name in _ELSEWHERE:
        return f"use {_ELSEWHERE[name]}" if _ELSEWHERE[name].split()[0].strip(",:;") in known else _ELSEWHERE[name]
    if name in _OTHER_TASK:
        return f"it is one of {_OTHER_TASK[name]}"
    near = difflib.get_close_matches(name, known, 1, cutoff=0.75)
    return f"did you mean {near[0]}?" if near else ""
