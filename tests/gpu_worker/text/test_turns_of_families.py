"""A turn of each family's conversations: its template, its special tokens, and where it ends, as in transformers.

The files are written as the published ones are: end tokens as a list in generation_config.json, of which the
tokenizer knows one alone; config.json may have fewer, or keep them in its text part.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from petiole.gpu_worker.models.checkpoint.configuration import end_token_ids
from petiole.gpu_worker.models.families.registry import find_model
from petiole.gpu_worker.text.tokenizer_files import load_tokenizer
from tests.support import tokenizers as samples
from tests.support.families import SHAPE

transformers = pytest.importorskip("transformers")


@dataclass(frozen=True)
class Turns:
    """kind: of configuration. begin, close: around a message's text. answer: what stands before an answer. ends:
    the tokens that end an answer; the first is the tokenizer's. bos: in front of all. more: other special tokens.
    assistant: the role's name in the template."""

    kind: str
    begin: str
    close: str
    answer: str
    ends: tuple[str, ...]
    bos: str = ""
    more: tuple[str, ...] = ()
    assistant: str = "assistant"

    @property
    def template(self) -> str:
        role = "{{ '" + self.assistant + "' if m['role'] == 'assistant' else m['role'] }}"
        begin = self.begin.replace("ROLE", role)
        turn = f"{begin}{{{{ m['content'] | trim }}}}{self.close}"
        each = f"{{% for m in messages %}}{turn}{{% endfor %}}"
        return f"{{{{ bos_token }}}}{each}{{% if add_generation_prompt %}}{self.answer}{{% endif %}}"

    @property
    def special(self) -> list[str]:
        return list(dict.fromkeys(one for one in (self.bos, *self.ends, *self.more) if one))


_CHATML = ("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant\n")
_PHI = ("<|ROLE|>\n", "<|end|>\n", "<|assistant|>\n")
_INST = ("{{ '[INST]' if m['role'] == 'user' else '' }}", "{{ '[/INST]' if m['role'] == 'user' else '</s>' }}", "")
_PHI_ROLES = ("<|user|>", "<|assistant|>")

FAMILIES = {
    "llama3": Turns(
        "Llama",
        "<|start_header_id|>ROLE<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
        "<|begin_of_text|>",
        ("<|start_header_id|>", "<|end_header_id|>"),
    ),
    "mistral": Turns("Mistral", *_INST, ("</s>",), "<s>", ("[INST]", "[/INST]")),
    "ministral3": Turns("Mistral3", *_INST, ("</s>",), "<s>", ("[INST]", "[/INST]")),
    "qwen3": Turns("Qwen3", *_CHATML, ("<|im_end|>", "<|endoftext|>"), "", ("<|im_start|>",)),
    "gemma3": Turns(
        "Gemma3",
        "<start_of_turn>ROLE\n",
        "<end_of_turn>\n",
        "<start_of_turn>model\n",
        ("<eos>", "<end_of_turn>"),
        "<bos>",
        ("<start_of_turn>",),
        "model",
    ),
    "gemma4": Turns(
        "Gemma4",
        "<|turn>ROLE\n",
        "<turn|>\n",
        "<|turn>model\n",
        ("<eos>", "<turn|>"),
        "<bos>",
        ("<|turn>",),
        "model",
    ),
    "phi3": Turns("Phi3", *_PHI, ("<|endoftext|>", "<|end|>", "<|assistant|>"), "<s>", _PHI_ROLES),
    "phi4-mini": Turns("Phi3", *_PHI, ("<|endoftext|>", "<|end|>"), "", _PHI_ROLES),
    "granite": Turns(
        "Granite",
        "<|start_of_role|>ROLE<|end_of_role|>",
        "<|end_of_text|>\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        ("<|end_of_text|>",),
        "",
        ("<|start_of_role|>", "<|end_of_role|>"),
    ),
    "smollm3": Turns("SmolLM3", *_CHATML, ("<|im_end|>",), "", ("<|im_start|>",)),
    "olmo3": Turns("Olmo3", *_CHATML, ("<|endoftext|>", "<|im_end|>"), "", ("<|im_start|>",)),
}
_WRAPPERS = {"Gemma3", "Gemma4", "Mistral3"}
TALK = [
    {"role": "user", "content": "hello "},
    {"role": "assistant", "content": "hello world"},
    {"role": "user", "content": "the fox"},
]


def folder_of(name: str, folder: Path) -> tuple[Path, list[int]]:
    """The family's files without weights, and the tokens that end an answer."""
    turns = FAMILIES[name]
    backend = samples.byte_level()
    backend.add_special_tokens(turns.special)
    samples.save(folder, backend)
    ends = [backend.token_to_id(text) for text in turns.ends]
    roles = {"eos_token": turns.ends[0], "additional_special_tokens": turns.special}
    roles |= {"bos_token": turns.bos} if turns.bos else {}
    given = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": turns.template, **roles}
    (folder / "tokenizer_config.json").write_text(json.dumps(given))
    shape: dict[str, Any] = SHAPE | {"vocab_size": 512, "eos_token_id": ends[0], "bos_token_id": None}
    kind, wrapper = turns.kind, turns.kind in _WRAPPERS
    if wrapper:
        kind_of_text = {"model_type": "ministral3"} if kind == "Mistral3" else {}
        config = getattr(transformers, f"{kind}Config")(text_config=shape | kind_of_text)
    else:
        config = getattr(transformers, f"{kind}Config")(**shape)
    config.architectures = [f"{kind}ForConditionalGeneration" if wrapper else f"{kind}ForCausalLM"]
    config.save_pretrained(folder)
    transformers.GenerationConfig(eos_token_id=ends if len(ends) > 1 else ends[0]).save_pretrained(folder)
    return folder, ends


@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_ends_where_transformers_ends_it(name: str, tmp_path: Path) -> None:
    folder, ends = folder_of(name, tmp_path)
    find_model(folder)  # so these are files of a family that is served
    theirs = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    wanted = {theirs} if isinstance(theirs, int) else set(theirs)
    assert wanted == set(ends)
    assert end_token_ids(folder) == wanted, "without a tokenizer"
    assert load_tokenizer(folder).eos_token_ids == wanted


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("asked", [True, False], ids=["asked", "told"])
def test_a_conversation_and_its_special_tokens_are_those_of_transformers(
    name: str, asked: bool, tmp_path: Path
) -> None:
    folder, ends = folder_of(name, tmp_path)
    ours, theirs = load_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    ids = ours.apply_chat_template(TALK, add_generation_prompt=asked)
    assert ids == theirs.apply_chat_template(TALK, add_generation_prompt=asked, return_dict=False)
    assert {theirs.convert_tokens_to_ids(text) for text in FAMILIES[name].special} <= ours.special_token_ids
    assert set(theirs.all_special_ids) <= ours.special_token_ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert set(ids) & set(ends), "the turn of the assistant in the talk has ended"
