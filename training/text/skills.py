"""The skills of `petiole-tiny`: prompts in a user's words, each with its one right answer.

An example has a *key*: what is asked, without its wording ("17+25", the word "lantern", the list "4 1 9").
The key alone decides the split, by a hash. So no wording of a held-out question is ever trained on, and the
held-out figures speak of new questions, not of new phrasings of known ones.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Literal

from training.text import grammar, words

Split = Literal["train", "held-out"]

HELD_OUT_ONE_IN = 10


@dataclass(frozen=True)
class Example:
    """One question: `answer` is the only text that counts as right."""

    skill: str
    key: str
    prompt: str
    answer: str

    @property
    def split(self) -> Split:
        return split_of(self.skill, self.key)

    def accepts(self, text: str) -> bool:
        """Whether `text` is the answer, to the letter."""
        return text == self.answer


def split_of(skill: str, key: str) -> Split:
    """Where a question belongs, now and on every machine."""
    digest = hashlib.blake2b(f"{skill}|{key}".encode(), digest_size=8).digest()
    return "held-out" if int.from_bytes(digest, "big") % HELD_OUT_ONE_IN == 0 else "train"


_REQUESTS = (
    "Count List Write Show Give Add Calculate Sort Put Order Reverse Spell Repeat Say Echo Extract Return Tell "
    "Describe"
)


def _phrase(rng: Random, *frames: str, **values: object) -> str:
    """One of `frames`, filled in, then worn a little: a lower-case start, no full stop, a "please"."""
    text = rng.choice(frames)
    if text.endswith((".", "?")) and rng.random() < 0.3:
        text = text[:-1]
    if text.split()[0] in _REQUESTS.split():
        wear = rng.random()
        if wear < 0.12:
            text = "Please " + text[0].lower() + text[1:]
        elif wear < 0.22:
            text = text[0].lower() + text[1:]
        elif wear < 0.25:
            text = "Can you " + text[0].lower() + text[1:].removesuffix(".")
    return text.format(**values)


def counting(rng: Random) -> Example:
    """Up by 1 within 0..999, up by 2, 5 or 10 below 250, down by 1 below 100; up to 250 numbers."""
    kind = rng.random()
    size = rng.random()
    items = rng.randint(2, 20) if size < 0.78 else rng.randint(21, 60) if size < 0.96 else rng.randint(61, 250)
    if kind < 0.65:
        step = 1
        first = 1 if rng.random() < 0.35 else rng.randint(0, rng.choice((20, 100, 999 - items)))
    elif kind < 0.85:
        step = rng.choice((2, 5, 10))
        first = rng.choice((0, 0, step, 1, rng.randint(0, 20)))
        items = min(items, (249 - first) // step)
    else:
        step, items = -1, min(items, 60)
        first = items if rng.random() < 0.4 else rng.randint(items, 99)
    last = first + step * (items - 1)
    numbers = range(first, last + (1 if step > 0 else -1), step)
    over = rng.randint(0, step - 1) if step > 1 and rng.random() < 0.25 and last + step <= 999 else 0
    values: dict[str, object] = {"a": first, "b": last + over, "n": step}
    if step == 1:
        frames = [
            "Count from {a} to {b}.",
            "Count from {a} up to {b}.",
            "Count {a} to {b}.",
            "Count from {a} to {b}.",
        ]
        frames += ["List the numbers from {a} to {b}.", "Write the numbers from {a} to {b}."]
        if first == 1:
            frames += ["Count to {b}.", "Count up to {b}.", "Count to {b}."]
    elif step > 1:
        frames = ["Count from {a} to {b} by {n}.", "Count from {a} to {b} in steps of {n}."]
        frames += ["Count by {n} from {a} to {b}.", "Count from {a} to {b} by steps of {n}."]
    else:
        frames = ["Count down from {a} to {b}.", "Count from {a} down to {b}.", "Count backwards from {a} to {b}."]
    return Example(
        "counting",
        f"{first} {last + over} {step}",
        _phrase(rng, *frames, **values),
        ", ".join(map(str, numbers)),
    )


def tables(rng: Random) -> Example:
    """The rows n x 1 to n x m, n up to 12 and m up to 40."""
    n = rng.randint(1, 12)
    size = rng.random()
    rows = rng.randint(2, 12) if size < 0.72 else rng.randint(13, 20) if size < 0.92 else rng.randint(21, 40)
    prompt = _phrase(
        rng,
        "Multiplication table of {n} up to {m}.",
        "Multiplication table of {n} up to {m}",
        "Write the multiplication table of {n} up to {m}.",
        "Write the {n} times table up to {m}.",
        "Show the multiplication table of {n} with {m} rows.",
        "Give me the {n} times table up to {m}.",
        "Times table of {n} up to {m}.",
        "Give me the first {m} rows of the {n} times table.",
        n=n,
        m=rows,
    )
    return Example("tables", f"{n} {rows}", prompt, "\n".join(f"{n} x {i} = {n * i}" for i in range(1, rows + 1)))


def addition(rng: Random) -> Example:
    """Two numbers below 100; the answer repeats the sum, then gives it."""
    a, b = (rng.randint(0, 99 if rng.random() < 0.8 else 9) for _ in range(2))
    prompt = _phrase(
        rng,
        "What is {a} + {b}?",
        "What is {a} + {b}?",
        "What is {a} plus {b}?",
        "Add {a} and {b}.",
        "{a} + {b} =",
        "{a} + {b}",
        "How much is {a} + {b}?",
        "How much is {a} plus {b}?",
        "Calculate {a} + {b}.",
        "What is the sum of {a} and {b}?",
        a=a,
        b=b,
    )
    return Example("addition", f"{a}+{b}", prompt, f"{a} + {b} = {a + b}")


def sorting_numbers(rng: Random) -> Example:
    """Two to six different numbers below 100, smallest first, separated as in the prompt."""
    numbers = rng.sample(range(100 if rng.random() < 0.8 else 20), rng.randint(2, 6))
    gap = rng.choice((" ", ", "))
    prompt = _phrase(
        rng,
        "Sort these numbers: {items}",
        "Sort the numbers {items}.",
        "Sort {items}.",
        "Sort: {items}",
        "Put these numbers in order: {items}",
        "Sort these numbers from smallest to largest: {items}",
        "Order these numbers: {items}",
        items=gap.join(map(str, numbers)),
    )
    return Example("sorting numbers", " ".join(map(str, numbers)), prompt, gap.join(map(str, sorted(numbers))))


def sorting_words(rng: Random) -> Example:
    """Two to five words with different first letters, in alphabetical order, separated as in the prompt."""
    chosen: dict[str, str] = {}
    count = rng.randint(2, 5)
    while len(chosen) < count:
        word = rng.choice(words.WORDS) if rng.random() < 0.7 else words.made_up_word(rng, 3, 8)
        chosen.setdefault(word[0], word)
    items = list(chosen.values())
    gap = rng.choice((" ", ", "))
    prompt = _phrase(
        rng,
        "Sort these words: {items}",
        "Sort the words {items}.",
        "Sort: {items}",
        "Sort these words alphabetically: {items}",
        "Put these words in order: {items}",
        "Put these words in alphabetical order: {items}",
        "Order these words: {items}",
        items=gap.join(items),
    )
    return Example("sorting words", " ".join(items), prompt, gap.join(sorted(items)))


def reversing(rng: Random) -> Example:
    """The letters of a word of 3 to 8 letters, last one first."""
    word = words.content_word(rng)
    prompt = _phrase(
        rng,
        "Reverse the word {w}.",
        "Reverse the word {w}",
        "Reverse {w}.",
        "Reverse: {w}",
        "Write {w} backwards.",
        "Write the word {w} backwards.",
        "What is {w} backwards?",
        "Reverse the letters of {w}.",
        w=word,
    )
    return Example("reversing", word, prompt, word[::-1])


def spelling(rng: Random) -> Example:
    """The letters of a word of 3 to 8 letters, with hyphens between them."""
    word = words.content_word(rng)
    prompt = _phrase(
        rng,
        "Spell the word {w}.",
        "Spell {w}.",
        "Spell {w}",
        "Spell: {w}",
        "How do you spell {w}?",
        "Spell out {w}.",
        "Spell the word {w} letter by letter.",
        "What letters are in {w}?",
        w=word,
    )
    return Example("spelling", word, prompt, "-".join(word))


def repeating(rng: Random) -> Example:
    """One to six words or numbers, as they stand."""
    items = [
        words.any_word(rng) if rng.random() < 0.9 else str(rng.randint(0, 999)) for _ in range(rng.randint(1, 6))
    ]
    if rng.random() < 0.2:
        items[0] = items[0].capitalize()
    gap = ", " if rng.random() < 0.1 else " "
    text = gap.join(items) + rng.choice(("", "", "", "", "", "", ".", "!", "?"))
    prompt = _phrase(
        rng,
        "Repeat after me: {t}",
        "Repeat this: {t}",
        "Repeat: {t}",
        "Repeat these words: {t}",
        "Say: {t}",
        "Echo: {t}",
        "Say this back to me: {t}",
        t=text,
    )
    return Example("repeating", text.lower(), prompt, text)


_PEOPLE = (
    "{name} is {age} and lives in {city}.",
    "{name} is {age} and lives in {city}.",
    "{name} is {age} years old and lives in {city}.",
    "{name} lives in {city} and is {age}.",
    "{name} lives in {city} and is {age} years old.",
    "{name} from {city} is {age} years old.",
    "My name is {name}, I am {age} and I live in {city}.",
    "{name}, {age}, lives in {city}.",
)


def extracting(rng: Random) -> Example:
    """The asked fields of name, age and city, in the order asked, as a JSON object."""
    person: dict[str, str | int] = {
        "name": words.any_name(rng, words.NAMES),
        "age": rng.randint(1, 99),
        "city": words.any_name(rng, words.CITIES),
    }
    asked = list(person)
    if rng.random() < 0.4:
        asked = rng.sample(asked, rng.randint(1, 3))
    fields = " and ".join(filter(None, (", ".join(asked[:-1]), asked[-1])))
    sentence = rng.choice(_PEOPLE).format(**person)
    prompt = _phrase(
        rng,
        "Extract {f} as JSON: {s}",
        "Extract {f} as JSON: {s}",
        "Extract {f} into JSON: {s}",
        "Extract the {f} as JSON: {s}",
        "Give me {f} as JSON: {s}",
        "Return {f} as JSON: {s}",
        "{s} Extract {f} as JSON.",
        f=fields,
        s=sentence,
    )
    key = " ".join(str(person[field]) for field in ("name", "age", "city"))
    return Example("extracting", key, prompt, json.dumps({field: person[field] for field in asked}))


def about(rng: Random) -> Example:
    """Who it is, what Petiole is, what it can do; a fixed answer each. Held out by the wording."""
    question, answer = grammar.about_question(rng)
    key = question.rstrip(".?").lower()
    return Example("about", key, question[:-1] if rng.random() < 0.2 else question, answer)


def describing(rng: Random) -> Example:
    """Three sentences on an animal, from the grammar. Held out by the pair of trait and animal."""
    trait = "" if rng.random() < 0.06 else rng.choice(list(grammar.TRAITS))
    animal = rng.choice(list(grammar.ANIMALS))
    prompt = _phrase(
        rng,
        "Tell me about the {it}.",
        "Tell me about the {it}.",
        "Describe the {it}.",
        "What do you know about the {it}?",
        "Write a few sentences about the {it}.",
        "Say something about the {it}.",
        "Write about the {it}.",
        it=f"{trait} {animal}".strip(),
    )
    return Example(
        "describing", f"{trait} {animal}" if trait else f"plain {animal}", prompt, grammar.describe(trait, animal)
    )


DRAWS: dict[str, Callable[[Random], Example]] = {
    "counting": counting,
    "tables": tables,
    "addition": addition,
    "sorting numbers": sorting_numbers,
    "sorting words": sorting_words,
    "reversing": reversing,
    "spelling": spelling,
    "repeating": repeating,
    "extracting": extracting,
    "about": about,
    "describing": describing,
}


def draw(skill: str, rng: Random, split: Split) -> Example:
    """An example of `skill` from one side of the split."""
    while True:
        example = DRAWS[skill](rng)
        if example.split == split:
            return example
