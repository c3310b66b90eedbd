"""The folder that ships: small, whole, readable by transformers, and as good as its card says."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from tests.support.trials import rest
from training import card
from training.decode import greedy, load_folder
from training.drafts import HEAD, HEAD_FILE, Head
from training.evaluate import answers, held_out
from training.export import MODEL_FOLDER, export
from training.model import Qwen3, Shape
from training.text import dialogue
from training.text.skills import DRAWS
from training.text.tokenizer import END_OF_TEXT_ID, IM_END_ID

LARGEST_MB = 8
ASKED = 20


@pytest.fixture(scope="module", autouse=True)
def two_threads() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))


def test_the_folder_is_small_and_whole() -> None:
    names = {path.name for path in MODEL_FOLDER.iterdir()}
    assert names >= {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    assert sum(path.stat().st_size for path in MODEL_FOLDER.iterdir()) <= LARGEST_MB * 1_000_000


def test_the_weights_are_bfloat16_and_fit_the_configuration() -> None:
    config = json.loads((MODEL_FOLDER / "config.json").read_text())
    assert config["max_position_embeddings"] >= 2048
    assert config["vocab_size"] % 64 == 0
    head = {HEAD + name for name in Head(Shape()).state_dict()}
    for file, names in (("model.safetensors", {*Qwen3(Shape()).state_dict()}), (HEAD_FILE, head)):
        with safe_open(MODEL_FOLDER / file, "pt") as weights:
            assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
            assert set(weights.keys()) == names


def test_transformers_gives_the_same_logits(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = Qwen3(Shape(hidden_size=64, intermediate_size=96, num_hidden_layers=2))
    export(model, tmp_path)
    ours, _ = load_folder(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 512, (2, 80))
    with torch.inference_mode():
        torch.testing.assert_close(
            ours.logits(ours.hidden(tokens)[0]), theirs(tokens).logits, atol=1e-4, rtol=1e-4
        )


def test_transformers_renders_the_chat_and_answers_it() -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL_FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL_FOLDER, dtype=torch.float32)
    assert model.generation_config.eos_token_id == [IM_END_ID, END_OF_TEXT_ID]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Count from 3 to 12."},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == dialogue.chat_prefix([(m["role"], m["content"]) for m in messages])
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    output = model.generate(prompt, max_new_tokens=60, do_sample=False)[0, prompt.shape[1] :]
    assert tokenizer.decode(output) == "3, 4, 5, 6, 7, 8, 9, 10, 11, 12<|im_end|>"


def test_a_batch_decodes_to_what_each_prompt_gives_alone() -> None:
    model, tokenizer = load_folder(MODEL_FOLDER)
    prompts = [tokenizer.encode(question.text).ids for question in held_out("repeating", 6, seed=2)]
    assert greedy(model, prompts, 70) == [greedy(model, [prompt], 70)[0] for prompt in prompts]


@pytest.mark.parametrize("skill", rest(DRAWS))
def test_held_out_questions_are_answered_to_the_letter(skill: str) -> None:
    model, tokenizer = load_folder(MODEL_FOLDER)
    questions = held_out(skill, ASKED, seed=1)
    texts = answers(model, tokenizer, questions)
    wrong = [(q.text, text) for q, text in zip(questions, texts, strict=True) if not q.accepts(text)]
    assert len(wrong) <= ASKED // 10, wrong


@pytest.mark.parametrize("skill", rest(DRAWS))
def test_the_examples_of_the_card_hold_in_both_forms_and_end_by_themselves(skill: str) -> None:
    model, tokenizer = load_folder(MODEL_FOLDER)
    pairs = card.EXAMPLES[skill]
    chats = [tokenizer.encode(dialogue.chat_prefix([("user", prompt)])).ids for prompt, _ in pairs]
    plains = [tokenizer.encode(prompt).ids for prompt, _ in pairs]
    texts = [tokenizer.decode(ids) for ids in greedy(model, chats + plains, 500)]
    assert texts == [answer for _, answer in pairs] + [f"\n{answer}" for _, answer in pairs]


def test_a_long_answer_streams_more_than_300_tokens() -> None:
    _, tokenizer = load_folder(MODEL_FOLDER)
    assert max(len(tokenizer.encode(answer).ids) for pairs in card.EXAMPLES.values() for _, answer in pairs) > 300


def test_a_second_turn_is_answered_like_a_first() -> None:
    model, tokenizer = load_folder(MODEL_FOLDER)
    messages = [
        ("user", "Count from 1 to 5."),
        ("assistant", "1, 2, 3, 4, 5"),
        ("user", "Spell the word garden."),
    ]
    ids = tokenizer.encode(dialogue.chat_prefix(messages)).ids
    assert tokenizer.decode(greedy(model, [ids], 40)[0]) == "g-a-r-d-e-n"
