"""Bad input is refused by name: field, limit, value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from celery.exceptions import TimeLimitExceeded

from petiole.contract.requests.generation import RESERVED_VARIABLES, ChatRequest, GenerateRequest, Options
from petiole.contract.requests.sampling import check
from petiole.contract.requests.validation import validate
from petiole.gpu_worker.exceptions import InvalidRequest as EngineInvalidRequest
from petiole.gpu_worker.request import SamplingParams
from petiole.gpu_worker.text import chat as chat_templates
from petiole.tasks import InvalidRequest, chat, errors, generate
from petiole.tasks.app.application import make_app
from petiole.tasks.submission.options import parse
from petiole.tasks.worker.generation.engine_requests import engine_request


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "prompt: is required, got nothing"),
        ({"prompt": ""}, "prompt: must not be empty, got ''"),
        ({"prompt": []}, "prompt: must not be empty, got []"),
        ({"prompt": 5}, "prompt: must be text or a list of token ids, got 5"),
        ({"prompt": [1, -2]}, "prompt[1]: must be a token id, got -2"),
        ({"prompt": [1, True]}, "prompt[1]: must be a token id, got True"),
        ({"prompt": [1, "2"]}, "prompt[1]: must be a token id, got 2"),
        ({"prompt": "a\udcff"}, "prompt: must be valid Unicode, got '\\udcff' at 1"),
        ({"prompt": "x" * 10_000_000}, "prompt: must have at most 4000000 characters, got 10000000"),
        ({"prompt": [1] * 500_001}, "prompt: must have at most 500000 tokens, got 500001"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"max_tokens": "all"}, "max_tokens: must be an integer, or \"rest\", got 'all'"),
        ({"max_tokens": "5"}, "max_tokens: must be an integer, or \"rest\", got '5'"),
        ({"max_tokens": 5.5}, 'max_tokens: must be an integer, or "rest", got 5.5'),
        ({"max_tokens": True}, 'max_tokens: must be an integer, or "rest", got True'),
        ({"min_tokens": -1}, "min_tokens: must be at least 0, got -1"),
        ({"min_tokens": 1.5}, "min_tokens: must be an integer, got 1.5"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: must be at most max_tokens, 8, got 9"),
        ({"min_tokens": 300}, "min_tokens: must be at most max_tokens, 256, got 300"),
        ({"temperature": -1}, "temperature: must be at least 0.0, got -1"),
        ({"temperature": float("nan")}, "temperature: must be a finite number, got nan"),
        ({"temperature": None}, "temperature: must be a number, got None"),
        ({"top_p": 0}, "top_p: must be above 0.0, got 0"),
        ({"top_p": 1.5}, "top_p: must be at most 1.0, got 1.5"),
        ({"presence_penalty": 2.5}, "presence_penalty: must be at most 2.0, got 2.5"),
        ({"frequency_penalty": -3}, "frequency_penalty: must be at least -2.0, got -3"),
        ({"promt": "x"}, "promt: is not an option of this task (did you mean prompt?), got 'x'"),
        ({"tempreature": 1}, "tempreature: is not an option of this task (did you mean temperature?), got 1"),
        ({"stop": ["a", ""]}, "stop[1]: must not be empty, got ''"),
        ({"stop": ["a"] * 65}, "stop: must have at most 64 entries, got ['a'"),
        ({"stop_token_sequences": [[1], []]}, "stop_token_sequences[1]: must not be empty, got []"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias.a: must be an integer, got 'a'"),
        ({"logit_bias": {"5": "a"}}, "logit_bias[5]: must be a number, got 'a'"),
        ({"logprob_texts": True}, "logprob_texts: needs logprobs, got no logprobs"),
        ({"logprobs": 21}, "logprobs: must be at most 20, got 21"),
        ({"regex": "a", "choice": ["b"]}, "choice: cannot be combined with regex, got regex and choice"),
        ({"json_schema": "[]"}, "json_schema: must be an object, got []"),
        ({"json_schema": "{"}, "json_schema: must be an object or JSON text of one, got '{'"),
        ({"json_schema": "[" * 100_000}, "json_schema: must be an object or JSON text of one, got '[[["),
        ({"json_schema": 5}, "json_schema: must be an object, got 5"),
        *(
            (
                {"json_schema": kind},
                "json_schema: must be an object or a pydantic class; for other types give TypeAd",
            )
            for kind in (int, list[int], dict[str, int] | None)
        ),
        (
            {"json_schema": {"a": "x" * 10**6}},
            "json_schema: must have at most 1000000 characters as JSON, got 10000",
        ),
        ({"json_schema": {"a": {1}}}, "json_schema: must be JSON, got TypeError"),
        ({"choice": ["x" * 10**6] * 300}, "choice[0]: must have at most 4096 characters, got 'xxx"),
        ({"choice": "x"}, "choice: must be a list, got 'x'"),
        ({"stop": ["x" * 10**6] * 300}, "stop: must have at most 64 entries, got ['xxx"),
        ({"deadline_s": 0}, "deadline_s: must be above 0.0, got 0"),
        ({"deadline_s": 1e10}, "deadline_s: must be at most 1000000000.0, got 10000000000.0"),
        ({"skip_special_tokens": 0}, "skip_special_tokens: must be true or false, got 0"),
        ({"tools": []}, "tools: is not an option of this task (it is one of chat), got []"),
        ({"continue_final_message": True}, "continue_final_message: is not an option of this task, got True"),
        ({"salt": "x" * 257}, "salt: must have at most 256 characters, got 'xxx"),
    ],
)
def test_a_bad_option_is_named(options: dict[str, object], message: str) -> None:
    given = options if not options or {"prompt", "promt"} & options.keys() else {"prompt": "Hello", **options}
    with pytest.raises(InvalidRequest) as raised:
        validate(GenerateRequest, given)
    assert str(raised.value).startswith(message)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages: must not be empty, got []"),
        ("Hello", "messages: must be a list, got 'Hello'"),
        (["Hello"], "messages[0]: must be an object, got 'Hello'"),
        ([{"content": "Hello"}], "messages[0].role: must be text, got None"),
        ([{"role": "user", "content": 5}], "messages[0].content: must be text, got 5"),
        (
            [{"role": "user", "content": "\ud800"}],
            "messages[0].content: must be valid Unicode, got '\\ud800' at 0",
        ),
        (
            [{"role": "user", "content": "x" * 3_000_000}] * 2,
            "messages: must have at most 4000000 characters in all",
        ),
    ],
)
def test_a_bad_message_is_named(messages: object, message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        validate(ChatRequest, {"messages": messages})
    assert str(raised.value).startswith(message)


SAID = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template_kwargs": None}, "chat_template_kwargs: must be an object, got None"),
        ({"chat_template_kwargs": ["x"]}, "chat_template_kwargs: must be an object, got ['x']"),
        ({"chat_template_kwargs": {5: 1}}, "chat_template_kwargs[5]: must be text, got 5"),
        ({"chat_template_kwargs": {"x": {1}}}, "chat_template_kwargs: must be JSON, got TypeError"),
        (
            {"chat_template_kwargs": {"x": "y" * 10**6}},
            "chat_template_kwargs: must have at most 1000000 characters as JSON, got 10000",
        ),
        (
            {"chat_template_kwargs": {"x": 1, "tools": []}},
            "chat_template_kwargs: must not have add_generation_prompt, chat_template, continue_final_message, "
            "messages, tokenize, tools, got tools",
        ),
        ({"continue_final_message": 1}, "continue_final_message: must be true or false, got 1"),
        (
            {"continue_final_message": True, "messages": SAID[:1]},
            "continue_final_message: needs a final message of the assistant, got user",
        ),
    ],
)
def test_a_bad_option_of_a_chat_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        validate(ChatRequest, {"messages": SAID, **options})
    assert str(raised.value).startswith(message)
    assert len(str(raised.value)) < 400


def test_reserved_template_variables_are_the_engines_own() -> None:
    assert RESERVED_VARIABLES == chat_templates.RESERVED_VARIABLES


def test_all_options_of_a_task_reach_the_engine() -> None:
    options = {"tools": [{}], "chat_template_kwargs": {"enable_thinking": False}, "continue_final_message": True}
    request = engine_request("t", validate(ChatRequest, {"messages": SAID, **options}))
    assert {name: getattr(request, name) for name in options} == options
    assert request.messages == SAID
    assert engine_request("t", validate(GenerateRequest, {"prompt": "x"})).prompt == "x"


def test_sampling_options_are_the_engines_own() -> None:
    """Same names, same defaults, and each reaches the engine."""
    assert validate(GenerateRequest, {"prompt": "Hello"}).sampling() == SamplingParams()
    given = {"max_tokens": "rest", "top_k": 3, "stop": "a", "logit_bias": {"7": 1}, "banned_token_ids": (1, 2)}
    told = SamplingParams(max_tokens="rest", top_k=3, stop=["a"], logit_bias={7: 1.0}, banned_token_ids=[1, 2])
    assert validate(GenerateRequest, {"prompt": "Hello", **given}).sampling() == told


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]
)
@pytest.mark.parametrize("value", [-100, -2.01, -2, -0.01, 0, 0.005, 0.01, 1, 1.01, 2, 2.01, 100, 100.1])
def test_sampling_limits_are_the_engines_own(name: str, value: float) -> None:
    def refusal(check: Callable[[], object]) -> str | None:
        try:
            check()
        except (InvalidRequest, EngineInvalidRequest) as error:
            return error.field
        return None

    sampling = replace(SamplingParams(), **{name: value})  # type: ignore[arg-type]
    there = refusal(lambda: check(sampling))
    assert refusal(lambda: validate(GenerateRequest, {"prompt": "x", name: value})) == there


def test_json_is_taken_as_it_comes() -> None:
    request = validate(GenerateRequest, {"prompt": "x", "logit_bias": {"7": -1}, "stop": "\n", "temperature": 0})
    assert (request.logit_bias, request.stop, request.temperature) == ({7: -1.0}, ["\n"], 0.0)


def test_at_most_one_constraint() -> None:
    assert validate(GenerateRequest, {"prompt": "x"}).constraint() is None
    assert validate(GenerateRequest, {"prompt": "x", "choice": ["a"]}).constraint() == ("choice", ["a"])


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("max_tokens", "must be at most 64", 65),
        errors.InvalidRequest("prompt", "must be shorter", "x" * 5000),
        errors.WorkersLost(3, "Once upon a"),
        errors.ModelChanged("begun with a, this is b"),
        errors.GenerationFailed("out of memory"),
        TimeLimitExceeded(30),
    ],
)
def test_an_error_survives_a_json_backend_and_a_delta(error: Exception) -> None:
    app = make_app()
    app.conf.update(result_backend="cache+memory://", broker_url="memory://")
    app.backend.mark_as_failure("t", error)
    with pytest.raises(type(error)) as raised:
        app.AsyncResult("t").get()
    assert str(raised.value) == str(error)
    again = errors.rebuild(errors.describe(error))
    assert (type(again), str(again)) == (type(error), str(error))


def test_an_unknown_error_keeps_its_words() -> None:
    error = errors.rebuild({"type": "CosmicRay", "message": "bit flipped", "args": [1, 2, 3]})
    assert (type(error), str(error)) == (errors.GenerationFailed, "CosmicRay: bit flipped")
    assert type(errors.rebuild({"type": "shorten", "message": ""})) is errors.GenerationFailed


RESULT = {"text": "five", "token_ids": [1]}


@pytest.mark.parametrize(
    ("given", "prompt", "expected"),
    [
        ([], "Count.", "Count."),
        ([RESULT], None, "five"),
        ([RESULT], "Spell ", "Spell five"),
        ([[RESULT, "six"]], "Sort:\n", "Sort:\nfive\nsix"),
    ],
)
def test_a_chain_passes_its_text_on(given: list[object], prompt: str | None, expected: str) -> None:
    options = {} if prompt is None else {"prompt": prompt}
    assert parse(generate.name, given, options).prompt == expected  # type: ignore[union-attr]


def test_a_chain_ends_in_a_conversation() -> None:
    request = parse(chat.name, [RESULT], {"messages": [{"role": "system", "content": "Be brief."}]})
    assert request.messages[-1] == {"role": "user", "content": "five"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ([1], {}, "args[0]: must be text, a generation's result, or a list of these, got 1"),
        (["a", "b"], {}, "args: must be empty, or the previous task's result, got 2 of them"),
        (
            [RESULT],
            {"prompt": [1, 2]},
            "prompt: must be text if the previous task's result is appended, got [1, 2]",
        ),
    ],
)
def test_what_a_chain_cannot_pass_on(given: list[object], options: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse(generate.name, given, options)
    assert str(raised.value) == message


def test_tasks_take_every_option() -> None:
    assert set(Options.model_fields) < set(GenerateRequest.model_fields)
    assert set(Options.model_fields) < set(ChatRequest.model_fields)
