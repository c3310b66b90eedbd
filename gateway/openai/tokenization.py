"""vLLM's /tokenize and /detokenize: text or a conversation to token ids, and back. Pure.

A prompt is counted as completions would count it, with the special tokens that the tokenizer adds; a conversation
as chat/completions would, as its template renders it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from petiole.contract.limits import MAX_MESSAGES, MAX_TOOLS
from petiole.contract.requests.bounds import Entries, Object
from petiole.contract.requests.count import CountDict
from petiole.gateway.core.foreign import spellings
from petiole.gateway.core.requests import Ids, RequestBody
from petiole.gateway.openai import conversation
from petiole.tasks.errors import InvalidRequest
from petiole.tasks.fleet.models import ModelFacts

NAMES = {"texts": "prompt", "token_ids": "tokens"}
_OF_A_CHAT = ("messages", "tools", "chat_template_kwargs", "continue_final_message")


def of_a_chat(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the count of what `chat` with these options is given."""
    return {name: options[name] for name in _OF_A_CHAT if name in options} | {"with_ids": True}


class Tokenize(RequestBody):
    """Either a prompt or messages."""

    model: str = Field(min_length=1, max_length=1024)
    prompt: str | None = None
    messages: Annotated[list[Object], Entries(MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Object = Field(default_factory=dict)
    tools: Annotated[list[Object], Entries(MAX_TOOLS)] | None = None
    mm_processor_kwargs: Object = Field(default_factory=dict)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_subject(self) -> Any:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("prompt", "exactly one of prompt and messages must be given", "none or both")
        return self

    def options(self) -> dict[str, Any]:
        """The options of the count. Raises `InvalidRequest`."""
        if self.messages is None:
            return {"texts": [self.prompt], "with_ids": True} | self._more("add_special_tokens")
        given = {name: value for name in _OF_A_CHAT if (value := getattr(self, name))}
        view = spellings.view(self.mm_processor_kwargs)
        told = of_a_chat(given | {"messages": conversation.messages(self.messages, view=view)})
        return told | self._more("add_generation_prompt")

    def _more(self, name: str) -> dict[str, Any]:
        return {name: getattr(self, name), "with_tokens": self.return_token_strs}


class Detokenize(RequestBody):
    model: str = Field(min_length=1, max_length=1024)
    tokens: Ids

    def options(self) -> dict[str, Any]:
        return {"token_ids": [self.tokens], "skip_special_tokens": False}


def described(model: ModelFacts) -> dict[str, Any]:
    """vLLM's /tokenizer_info: what a model's tokenizer is, without the files that only its workers have."""
    special = {number: {"content": text, "special": True} for number, text in model.special_tokens.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.max_model_len,
        "vocab_size": model.vocab_size,
        "added_tokens_decoder": special,
    }


def tokenized(counted: CountDict) -> dict[str, Any]:
    return {
        "count": counted["counts"][0],
        "max_model_len": counted["max_model_len"],
        "tokens": counted["token_ids"][0],
        "token_strs": counted["tokens"][0] if "tokens" in counted else None,
    }
