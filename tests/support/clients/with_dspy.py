# /// script
# dependencies = ["dspy"]
# ///
"""DSPy: programs over a language model."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices

import dspy
import litellm
import steps
from dspy.utils.exceptions import ContextWindowExceededError
from steps import COUNTED, SHORT

KNOWN = {"supports_function_calling": True, "supports_response_schema": True, "mode": "chat"}
litellm.register_model({f"hosted_vllm/{steps.SCRIPTED}": KNOWN, f"hosted_vllm/{steps.MODEL}": KNOWN})


def _model(model=steps.MODEL, provider="hosted_vllm"):
    common = {"api_base": steps.URL, "api_key": "none", "temperature": 0, "cache": False, "num_retries": 0}
    return dspy.LM(f"{provider}/{model}", engine="litellm" if provider == "hosted_vllm" else "auto", **common)


def chat():
    for provider in ("hosted_vllm", "openai"):
        [answer] = _model(provider=provider)(SHORT)
        assert (answer if isinstance(answer, str) else answer["text"]) == COUNTED


async def stream():
    answer = "[[ ## answer ## ]]\n" + "It is warm. " * 20 + "\n\n[[ ## completed ## ]]"
    listener = dspy.streaming.StreamListener(signature_field_name="answer")
    program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
    with dspy.context(lm=_model(steps.SCRIPTED)):
        pieces = [piece async for piece in program(question=steps.reciting(answer))]
    assert len(pieces) > 2, pieces
    assert pieces[-1].answer.startswith("It is warm.")


def tools():
    asked = []

    def weather(city: str) -> str:
        """How warm a city is."""
        asked.append(city)
        return '{"celsius": 20}'

    calls = [steps.calling("weather", city=city) for city in ("Rome", "Oslo", "Lima")]
    last = steps.calling("submit", answer=steps.AFTER_THREE_ROUNDS)
    adapter = dspy.ChatAdapter(use_native_function_calling=True)
    with dspy.context(lm=_model(steps.SCRIPTED), adapter=adapter):
        made = dspy.ReActV2("question -> answer", [weather])(question=steps.reciting(*calls, last))
    assert (asked, made.answer) == (["Rome", "Oslo", "Lima"], steps.AFTER_THREE_ROUNDS), made


def structured():
    class Person(dspy.Signature):
        text: str = dspy.InputField()
        name: str = dspy.OutputField()
        age: int = dspy.OutputField()

    with dspy.context(lm=_model(), adapter=dspy.JSONAdapter()):
        made = dspy.Predict(Person)(text="Ana is 31.")
    assert isinstance(made.age, int), made


abort = steps.lacks("no call")


def error():
    for provider in ("hosted_vllm", "openai"):
        with steps.refused(ContextWindowExceededError):
            _model(provider=provider)(steps.TOO_LONG)


resume = steps.lacks("asks anew")
steps.run(globals())
