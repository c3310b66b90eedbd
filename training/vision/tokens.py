"""The tokenizer and the prompts of `petiole-tiny-vision`.

Questions are put as the engine puts them, and answers that locate are the JSON that it reads. A number from 0 to
1000 is one token, and so is what stands between the numbers: an answer has few tokens, which say where something
is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from petiole.gpu_worker.preparation.skills import conversation_of
from petiole.gpu_worker.request.skills import SkillCall
from training.vision.pictures import COLORS, KINDS, Question, Shape

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END_OF_TEXT, IM_START, IM_END, VISION_START, VISION_END, IMAGE, VIDEO = range(len(SPECIAL))
WHOLE = 1000
"""The width and the height of every picture in answers."""
FIRST_NUMBER, VOCAB_SIZE = 512, 1520
CONTEXT = 2048
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' }}"
    "{%- elif 'text' in part %}{{- part.text }}{%- endif %}"
    "{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""As Qwen3-VL's, without tools."""

_ANSWERS = "<|im_end|>\n<|im_start|>assistant\n"
_SENTENCES = (
    "How many are there What color is the Is there a no yes A picture of from left to right shape shapes "
    "Describe this image in one short sentence detail Which more has have first second both none as many"
)


def call_of(question: Question) -> SkillCall:
    """The skill by which the question is asked."""
    option = {"query": "question", "caption": "length"}.get(question.skill, "object")
    return SkillCall(question.skill, {option: question.text})


def text_of(question: Question) -> str:
    """The question as the engine puts it, behind its pictures."""
    (message,) = conversation_of(call_of(question), 1, finds=True)
    text: str = message["content"][-1]["text"]
    return text


def answer_of(question: Question) -> str:
    """The answer's text."""
    if question.skill not in ("point", "detect"):
        return question.answer
    key = {"point": "point_2d", "detect": "bbox_2d"}[question.skill]
    found: list[dict[str, Any]] = [
        {key: _numbers(question.skill, shape), "label": question.text} for shape in question.found
    ]
    return json.dumps(found)


def _numbers(skill: str, shape: Shape) -> list[int]:
    wide, high = (shape.width / 2, shape.height / 2) if skill == "detect" else (0.0, 0.0)
    corners = [shape.x - wide, shape.y - high, shape.x + wide, shape.y + high]
    kept = corners if skill == "detect" else corners[:2]
    return [min(WHOLE, max(0, round(WHOLE * at))) for at in kept]


def _phrases() -> list[str]:
    """What stands around and between the objects and the numbers of questions and answers that locate."""
    found = ["user\n", "assistant\n", "system\n", '], "label": "', '"}]', "[]"]
    for skill, key in (("point", "point_2d"), ("detect", "bbox_2d")):
        found += text_of(Question(skill, "", "@")).split("@")
        found += [f'[{{"{key}": [', f'"}}, {{"{key}": [']
    return list(dict.fromkeys(found))


def _words() -> list[str]:
    nouns = [word for kind in (*KINDS, "shape") for word in (kind, f"{kind}s")]
    plain = [*_SENTENCES.split(), *nouns, *COLORS]
    return list(dict.fromkeys(word for one in plain for word in (one, f" {one}") if len(word) > 1))


def build() -> Tokenizer:
    """The tokenizer, the same on every run."""
    phrases = _phrases()
    spaced = [piece.replace(" ", "Ġ").replace("\n", "Ċ") for piece in (", ", *phrases, *_words())]
    pieces = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *spaced]
    unused = [f"<|unused {k}|>" for k in range(VOCAB_SIZE)]
    pieces += unused[len(pieces) : FIRST_NUMBER]
    assert len(pieces) == FIRST_NUMBER, f"{len(pieces)} tokens before the numbers"
    vocab = {piece: index for index, piece in enumerate(pieces)}
    vocab |= {str(number): FIRST_NUMBER + number for number in range(WHOLE + 1)}  # digits are bytes, too
    taken = set(vocab.values())
    vocab |= {unused[index]: index for index in range(VOCAB_SIZE) if index not in taken}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    longest_first = "|".join(re.escape(phrase) for phrase in sorted(phrases, key=len, reverse=True))
    rest = r", (?=[0-9])|[0-9]+| ?\p{L}+| ?[^\s\p{L}\p{N}]|\s|\p{N}"
    split = pre_tokenizers.Split(Regex(f"{longest_first}|{rest}"), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return tokenizer


@dataclass(frozen=True)
class Row:
    """A question behind its pictures, and its answer. start: the answer's first token. near: whether the answer's
    numbers are places, of which a near one is nearly right."""

    tokens: list[int]
    start: int
    near: bool


def row_of(tokenizer: Tokenizer, question: Question) -> Row:
    prompt: list[int] = tokenizer.encode(text_of(question) + _ANSWERS).ids
    answer: list[int] = tokenizer.encode(answer_of(question)).ids
    return Row([*prompt, *answer, IM_END], len(prompt), question.skill in ("point", "detect"))


def prefix_of(tokenizer: Tokenizer, counts: Sequence[int]) -> list[int]:
    """What stands before a question. counts: the positions of each picture."""
    pictures = [token for n in counts for token in (VISION_START, *[IMAGE] * n, VISION_END)]
    return [*tokenizer.encode("<|im_start|>user\n").ids, *pictures]
