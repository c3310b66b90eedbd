"""The request and the result of `count`: tokens are counted, or made to text, without a generation."""

from __future__ import annotations

from typing import Annotated, NotRequired, Self, TypedDict

from pydantic import Field, model_validator

from petiole.contract.errors import InvalidRequest
from petiole.contract.limits import MAX_MESSAGES, MAX_PROMPT_CHARACTERS, MAX_PROMPT_TOKENS, MAX_TOOLS
from petiole.contract.requests.bounds import Entries, Object
from petiole.contract.requests.generation import ChatRequest, checked_text
from petiole.contract.requests.sampling import TokenIds
from petiole.contract.requests.validation import Declared, Given, validate

MOST = 1024
SUFFIX = ".count"
_SUBJECTS = ("texts", "messages", "token_ids")
_OF_A_CHAT = ("messages", "tools", "chat_template_kwargs", "continue_final_message")


class CountRequest(Declared):
    """What to count. Exactly one of `texts`, `messages` and `token_ids` is given."""

    texts: Annotated[list[str], Entries(MOST, least=1), Given(str)] | None = None
    """Texts, each counted as `generate` would count it as a prompt."""
    messages: Annotated[list[Object], Entries(MAX_MESSAGES)] | None = None
    """A conversation, counted as `chat` would count it: rendered, with its images."""
    tools: Annotated[list[Object], Entries(MAX_TOOLS)] | None = None
    """The conversation's tools."""
    chat_template_kwargs: Object = Field(default_factory=dict)
    """Variables for the chat template."""
    continue_final_message: bool = False
    """The last message is continued."""
    add_generation_prompt: bool = True
    """`False`: the conversation ends with its last message, and no answer begins."""
    add_special_tokens: bool = True
    """`False`: without the tokenizer's own in `texts`."""
    token_ids: Annotated[list[TokenIds], Entries(MOST, least=1)] | None = None
    """Lists of token ids, to get their texts."""
    with_ids: bool = False
    """Also return the token ids. A position of an image is -1."""
    with_tokens: bool = False
    """Also return the tokens as the vocabulary writes them (`Ġthe`). A position of an image is empty."""
    skip_special_tokens: bool = True
    """`False` keeps special tokens in the texts of `token_ids`."""

    @model_validator(mode="after")
    def _one_subject(self) -> Self:
        given = [name for name in _SUBJECTS if getattr(self, name) is not None]
        if len(given) != 1:
            limit = f"exactly one of {', '.join(_SUBJECTS)} must be given"
            raise InvalidRequest(given[1] if given else "texts", limit, f"{len(given)} of them")
        for position, text in enumerate(self.texts or ()):
            checked_text(f"texts[{position}]", text)
        characters, tokens = sum(map(len, self.texts or ())), sum(map(len, self.token_ids or ()))
        if characters > MAX_PROMPT_CHARACTERS:
            limit = f"must have at most {MAX_PROMPT_CHARACTERS} characters in all"
            raise InvalidRequest("texts", limit, characters)
        if tokens > MAX_PROMPT_TOKENS:
            raise InvalidRequest("token_ids", f"must have at most {MAX_PROMPT_TOKENS} tokens in all", tokens)
        if self.messages is None:
            for name in _OF_A_CHAT[1:]:
                if getattr(self, name):
                    raise InvalidRequest(name, "needs messages", given[0])
            if not self.add_generation_prompt:
                raise InvalidRequest("add_generation_prompt", "needs messages", given[0])
        else:
            self.chat()
        return self

    def chat(self) -> ChatRequest:
        """The conversation as `chat` takes it. Raises `InvalidRequest`."""
        return validate(ChatRequest, {name: getattr(self, name) for name in _OF_A_CHAT})


class CountDict(TypedDict):
    """What `count` returns."""

    counts: list[int]
    """The number of tokens of each text, of the conversation, or of each list."""
    max_model_len: int
    """The most tokens of a prompt and its output together."""
    model: str
    """The model that has counted."""
    token_ids: NotRequired[list[list[int]]]
    """With `with_ids`: the tokens of each."""
    tokens: NotRequired[list[list[str]]]
    """With `with_tokens`: the same, as the vocabulary writes them."""
    texts: NotRequired[list[str]]
    """The text of each list of token ids."""


def queue_of(queue: str) -> str:
    """Where the workers of this queue take counts from."""
    return f"{queue}{SUFFIX}"
