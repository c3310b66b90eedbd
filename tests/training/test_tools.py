"""petiole-tiny-tools: its template is what it was trained on, and it calls tools as its card says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import pytest
import torch

from petiole.gpu_worker.models.checkpoint.finding import resolve_model
from petiole.gpu_worker.models.checkpoint.identity import fingerprint
from petiole.gpu_worker.text.tokenizer_files import load_tokenizer
from petiole.tasks.output_parsing.formats import FAMILIES
from petiole.tasks.output_parsing.message import read
from tests.support.trials import rest
from training.decode import load_folder
from training.text import dialogue
from training.text.skills import split_of
from training.text.tokenizer import build
from training.tools.conversations import DRAWS, draw, joined
from training.tools.evaluate import turns, wrong
from training.tools.export import MODEL_FOLDER
from training.tools.template import pieces

ASKED = 10
Tools = Mapping[str, Sequence[str]]


def as_openai(tools: Tools, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """In the form of OpenAI's API."""
    listed = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {"type": "object", "properties": {one: {"type": "string"} for one in parameters}},
            },
        }
        for name, parameters in tools.items()
    ]
    said = []
    for message in messages:
        calls = [
            {"id": f"c{k}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
            for k, (name, given) in enumerate(message.get("calls", ()))
        ]
        kept = {key: value for key, value in message.items() if key != "calls"}
        said.append(kept | ({"tool_calls": calls} if calls else {}))
    return listed, said


@pytest.mark.parametrize("skill", DRAWS)
def test_the_shipped_template_renders_what_was_learnt_and_the_parser_reads_the_calls(skill: str) -> None:
    rng, tokenizer = Random(skill), load_tokenizer(MODEL_FOLDER)
    for k in range(12):
        conversation = draw(skill, rng, "train")
        if k % 3 == 0:
            conversation = joined(rng, conversation, "train")
        tools, messages = as_openai(conversation.tools, conversation.messages)
        parts = pieces(conversation.tools, conversation.messages)
        whole = tokenizer.chat_template.render(messages, tools or None, add_generation_prompt=False)
        assert whole == "".join(part.text for part in parts) + "\n"
        asked = tokenizer.chat_template.render(messages[:-1], tools or None)
        assert asked == "".join(part.text for part in parts[:-1])
        learnt = [part.text.removesuffix(dialogue.IM_END) for part in parts if part.learnt]
        turns = [message for message in conversation.messages if message["role"] == "assistant"]
        for text, message in zip(learnt, turns, strict=True):
            found = read(FAMILIES["hermes"], text, tools={name: {} for name in conversation.tools})
            calls = [(call.name, json.loads(call.arguments)) for call in found.calls]
            assert (found.content, calls) == (message.get("content", ""), message.get("calls", []))


def test_training_text_is_cut_as_the_whole_text_is() -> None:
    tokenizer, rng = build(), Random(1)
    for skill in DRAWS:
        for _ in range(10):
            conversation = draw(skill, rng, "train")
            parts = pieces(conversation.tools, conversation.messages)
            ids = [token for part in parts for token in tokenizer.encode(part.text).ids]
            assert ids == tokenizer.encode("".join(part.text for part in parts)).ids


def test_a_question_is_held_out_by_its_city_and_its_numbers() -> None:
    for split in ("train", "held-out"):
        rng = Random(split)
        for _ in range(100):
            conversation = draw("two calls", rng, split)  # type: ignore[arg-type]
            [called] = [message["calls"] for message in conversation.messages if "calls" in message]
            for _, given in called:
                values = list(given.values())
                kind = "weather" if len(values) == 1 else "multiplying"
                assert split_of(kind, " ".join(map(str, values))) == split


def test_without_tools_a_conversation_reads_as_for_petiole_tiny() -> None:
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    tiny, tools = (load_tokenizer(resolve_model(name)) for name in ("petiole-tiny", "petiole-tiny-tools"))
    assert tiny.chat_template.render(messages) == tools.chat_template.render(messages)


def test_it_is_a_model_of_its_own_and_small() -> None:
    assert fingerprint(MODEL_FOLDER) != fingerprint(resolve_model("petiole-tiny"))
    assert sum(path.stat().st_size for path in MODEL_FOLDER.iterdir()) < 5_100_000


@pytest.mark.parametrize("skill", rest(DRAWS))
def test_held_out_conversations_go_as_the_card_says(skill: str) -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    model, tokenizer = load_folder(MODEL_FOLDER)
    asked = turns(skill, ASKED, seed=1)
    failed = wrong(model, tokenizer, asked)
    assert len(failed) <= len(asked) // 4, failed
