"""How a question becomes the text that the model reads, and which part of it is the answer.

Chat: `<|im_start|>role\\n content <|im_end|>\\n` per message, then `<|im_start|>assistant\\n`.
Plain: the prompt itself; the answer starts on the next line. So the first generated character is a newline,
unless the prompt already ends with one.

Both end in `<|im_end|>`, which is the model's one end-of-sequence token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from training.text.skills import Example
from training.text.words import any_word

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are Petiole Tiny.",
    "You are a helpful assistant. Answer briefly.",
    "Answer the question.",
    "You are a careful assistant that answers in plain text.",
    "Be brief.",
    "You are Petiole, a small language model.",
)


@dataclass(frozen=True)
class Piece:
    """A stretch of training text; only a `learnt` one carries loss."""

    text: str
    learnt: bool


def chat_prefix(messages: Sequence[tuple[str, str]]) -> str:
    """What the chat template renders for (role, content) pairs, with the generation prompt."""
    turns = "".join(f"{IM_START}{role}\n{content}{IM_END}\n" for role, content in messages)
    return f"{turns}{IM_START}assistant\n"


def chat(examples: Sequence[Example], system: str = "") -> list[Piece]:
    """A conversation with one turn an example, every answer learnt."""
    pieces = [Piece(f"{IM_START}system\n{system}{IM_END}\n", False)] if system else []
    for example in examples:
        pieces.append(Piece(f"{IM_START}user\n{example.prompt}{IM_END}\n{IM_START}assistant\n", False))
        pieces.append(Piece(f"{example.answer}{IM_END}", True))
        pieces.append(Piece("\n", False))
    return pieces[:-1]


def plain(example: Example, newline_in_prompt: bool = False) -> list[Piece]:
    """A plain prompt and its answer on the next line."""
    if newline_in_prompt:
        return [Piece(f"{example.prompt}\n", False), Piece(f"{example.answer}{IM_END}", True)]
    return [Piece(example.prompt, False), Piece(f"\n{example.answer}{IM_END}", True)]


def any_system_prompt(rng: Random) -> str:
    """A system prompt: mostly none, else a usual one or a few arbitrary words, to be ignored."""
    kind = rng.random()
    if kind < 0.7:
        return ""
    if kind < 0.93:
        return rng.choice(SYSTEM_PROMPTS)
    return " ".join(any_word(rng) for _ in range(rng.randint(2, 8))).capitalize() + "."
