"""Conversations with tools: a question, the calls that it needs, their results, and the answer from these.

The names of tools and parameters vary, so that the model reads the list of tools and does not know it by heart. As
for `training.text.skills`, the *key* of a question, which is a city or two numbers, alone decides the split.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from training.text import dialogue, skills, words
from training.text.skills import Split, split_of

Call = tuple[str, dict[str, Any]]
NO_TOOL = "I have no tool for this."


@dataclass(frozen=True)
class Conversation:
    """`tools`: the names of the parameters, by tool. `messages`: role, content and calls of each."""

    skill: str
    tools: Mapping[str, Sequence[str]]
    messages: list[dict[str, Any]]


@dataclass(frozen=True)
class Need:
    """What a question needs: a call, what the tool gives back, and what is said of it. `frame`: the question, with
    places for `about`."""

    frame: str
    about: Mapping[str, object]
    call: Call
    result: str
    said: str

    @property
    def question(self) -> str:
        return self.frame.format(**self.about)


_WEATHER = (
    "get_weather",
    "weather_in",
    "current_weather",
    "weather_of",
    "temperature",
    "get_temperature",
    "forecast",
)
_CITY = ("location", "place", "town", "where")
_PRODUCT = ("product", "get_product", "times", "multiply_numbers", "mul", "multiplication")
_PAIRS = (("x", "y"), ("first", "second"), ("left", "right"), ("m", "n"), ("number", "factor"))
_OTHERS = (
    ("send_mail", ("to", "text")),
    ("search", ("query",)),
    ("clock", ()),
    ("translate", ("text", "language")),
    ("get_stock", ("symbol",)),
    ("open_file", ("path", "mode")),
)
_WARM = (
    "How warm is it in {c}?",
    "How warm is it in {c}?",
    "What is the weather in {c}?",
    "How is the weather in {c}?",
    "How cold is it in {c}?",
    "What is the temperature in {c}?",
    "Tell me the weather in {c}.",
    "Weather in {c}?",
    "What is the weather like in {c}?",
    "Give me the weather in {c}.",
    "Is it warm in {c}?",
)
_TIMES = (
    "What is {a} times {b}?",
    "What is {a} times {b}?",
    "Multiply {a} by {b}.",
    "What is {a} x {b}?",
    "How much is {a} times {b}?",
    "Calculate {a} x {b}.",
    "What is the product of {a} and {b}?",
    "Multiply {a} and {b}.",
    "{a} x {b}",
    "{a} times {b}",
)


@dataclass(frozen=True)
class Toolbox:
    """The two tools that a conversation has, under the names that they have there."""

    weather: str
    city: str
    product: str
    factors: tuple[str, str]

    @classmethod
    def drawn(cls, rng: Random) -> Toolbox:
        """Mostly the names of the model card."""
        weather, city, product, factors = "weather", "city", "multiply", ("a", "b")
        if rng.random() < 0.25:
            weather, city = rng.choice(_WEATHER), rng.choice(_CITY)
        if rng.random() < 0.25:
            product, factors = rng.choice(_PRODUCT), rng.choice(_PAIRS)
        return cls(weather, city, product, factors)

    def listed(self, rng: Random, names: Sequence[str]) -> dict[str, Sequence[str]]:
        """The tools of `names`, and sometimes others, in any order."""
        every: dict[str, Sequence[str]] = {self.weather: (self.city,), self.product: self.factors}
        chosen = [(name, every[name]) for name in names]
        if rng.random() < 0.25:
            chosen += rng.sample(_OTHERS, rng.randint(1, 2))
        rng.shuffle(chosen)
        return dict(chosen)


def city(rng: Random, split: Split) -> str:
    while True:
        found = words.any_name(rng, words.CITIES)
        if rng.random() < 0.05:
            found += " " + words.any_name(rng, words.CITIES)
        if split_of("weather", found) == split:
            return found


def weather(rng: Random, box: Toolbox, split: Split) -> Need:
    asked, degrees = city(rng, split), rng.randint(-20, 40)
    forms: list[Any] = [{"celsius": degrees}, {"celsius": degrees}, {"temperature": degrees}, degrees]
    forms.append({box.city: asked, "celsius": degrees})
    result = rng.choice(forms)
    said = f"It is {degrees} degrees in {asked}."
    return Need(rng.choice(_WARM), {"c": asked}, (box.weather, {box.city: asked}), _shown(rng, result), said)


def multiplying(rng: Random, box: Toolbox, split: Split) -> Need:
    while True:
        a, b = (rng.randint(2, rng.choice((12, 99, 999))) for _ in range(2))
        if split_of("multiplying", f"{a} {b}") == split:
            break
    result = rng.choice(({"product": a * b}, {"product": a * b}, {"result": a * b}, a * b))
    call = (box.product, dict(zip(box.factors, (a, b), strict=True)))
    return Need(rng.choice(_TIMES), {"a": a, "b": b}, call, _shown(rng, result), f"{a} x {b} = {a * b}")


def _shown(rng: Random, result: object) -> str:
    """A tool's result as clients write it: JSON with and without spaces, or what Python prints."""
    if rng.random() < 0.2:
        return str(result)
    return json.dumps(result, separators=rng.choice((None, (",", ":"))))


def _worn(rng: Random, text: str) -> str:
    if text[-1] in ".?" and rng.random() < 0.2:
        text = text[:-1]
    return text[0].lower() + text[1:] if rng.random() < 0.1 else text


def _turn(question: str, needs: Sequence[Need], answer: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "calls": [need.call for need in needs]},
        *({"role": "tool", "content": need.result} for need in needs),
        {"role": "assistant", "content": answer},
    ]


def one_call(rng: Random, split: Split) -> Conversation:
    """One tool, called once; the answer has what the tool gave."""
    box = Toolbox.drawn(rng)
    need = rng.choice((weather, multiplying))(rng, box, split)
    names = (box.weather, box.product) if rng.random() < 0.6 else (need.call[0],)
    return Conversation("one call", box.listed(rng, names), _turn(_worn(rng, need.question), [need], need.said))


def two_calls(rng: Random, split: Split) -> Conversation:
    """Two calls in one turn: of one tool for two things, or of both tools."""
    box = Toolbox.drawn(rng)
    first = weather(rng, box, split)
    if rng.random() < 0.5:
        second = weather(rng, box, split)
        question = first.frame.format(c=f"{first.about['c']} and in {second.about['c']}")
        answer = f"{first.said[:-1]} and {second.said.removeprefix('It is ')}"
        names: tuple[str, ...] = (box.weather,) if rng.random() < 0.4 else (box.weather, box.product)
    else:
        needs = [first, multiplying(rng, box, split)]
        rng.shuffle(needs)
        first, second = needs
        texts = [need.question for need in needs]
        question = f"{texts[0].rstrip('.?')}, and {texts[1][0].lower()}{texts[1][1:]}"
        if rng.random() < 0.4:
            question = f"{texts[0]} {texts[1]}"
        answer = f"{first.said} {second.said}" if first.said[-1] == "." else f"{first.said}. {second.said}"
        names = (box.weather, box.product)
    return Conversation("two calls", box.listed(rng, names), _turn(_worn(rng, question), [first, second], answer))


def no_tool(rng: Random, split: Split) -> Conversation:
    """The tool that the question needs is not there."""
    box = Toolbox.drawn(rng)
    need = rng.choice((weather, multiplying))(rng, box, split)
    other = box.product if need.call[0] == box.weather else box.weather
    tools = box.listed(rng, (other,)) if rng.random() < 0.6 else {}
    if not tools and rng.random() < 0.5:
        tools = dict(rng.sample(_OTHERS, rng.randint(1, 2)))
    question = {"role": "user", "content": _worn(rng, need.question)}
    return Conversation("no tool", tools, [question, {"role": "assistant", "content": NO_TOOL}])


def unneeded(rng: Random, split: Split) -> Conversation:
    """Tools are there, and the question needs none: a skill of petiole-tiny."""
    box = Toolbox.drawn(rng)
    example = skills.draw(rng.choice(_SHORT), rng, split)
    tools = box.listed(rng, rng.choice(((box.weather,), (box.product,), (box.weather, box.product))))
    asked = [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.answer}]
    return Conversation("unneeded", tools, asked)


_SHORT = tuple(name for name in skills.DRAWS if name != "tables")

DRAWS: dict[str, Callable[[Random, Split], Conversation]] = {
    "one call": one_call,
    "two calls": two_calls,
    "no tool": no_tool,
    "unneeded": unneeded,
}


def draw(skill: str, rng: Random, split: Split) -> Conversation:
    return DRAWS[skill](rng, split)


def joined(rng: Random, first: Conversation, split: Split) -> Conversation:
    """`first` after a turn without tools: a system prompt, or a short question that is answered."""
    if rng.random() < 0.5:
        system = dialogue.any_system_prompt(rng) or dialogue.SYSTEM_PROMPTS[0]
        before = [{"role": "system", "content": system}]
    else:
        example = skills.draw(rng.choice(("addition", "spelling", "about", "repeating")), rng, split)
        before = [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.answer}]
    return Conversation(first.skill, first.tools, [*before, *first.messages])
