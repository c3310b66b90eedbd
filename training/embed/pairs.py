"""Pairs of texts that belong together, from a seed: a question and the passage that answers it, or two texts that
say the same. No torch.

A pair is held out by what it is about: an action with its thing, a person's name, a place, words of a topic. Each
of these was seen in training, but not together.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Literal

from training.embed.concepts import ACTIONS, ANSWERS, EVENTS, SENSE, THINGS, TOPICS, WISHES
from training.text.words import CITIES, NAMES, WORDS

Split = Literal["train", "held-out"]
HELD_OUT_ONE_IN = 8


@dataclass(frozen=True, slots=True)
class Pair:
    """about: what both texts are about; texts of other pairs about the same are right, too. Question and
    passage, if `asked`; else two texts that say the same. kind: of which kind a right answer is, where that is
    more than what is about the same."""

    one: str
    two: str
    about: str
    asked: bool = True
    kind: str = ""

    @property
    def right(self) -> str:
        """Texts of pairs that have the same are right answers to each other."""
        return self.kind or self.about


def split_of(about: str) -> Split:
    return "held-out" if zlib.crc32(about.encode()) % HELD_OUT_ONE_IN == 0 else "train"


def _sense() -> Iterator[tuple[str, str]]:
    longest = sorted(THINGS, key=len, reverse=True)
    for line in SENSE.strip().splitlines():
        action, _, rest = line.partition(":")
        for thing in longest:
            if f" {thing} " in f"{rest} ":
                rest = f"{rest} ".replace(f" {thing} ", " ")
                yield action.strip(), thing


INTENTS = tuple(_sense())

QUESTIONS = (
    "How do I {}?",
    "How can I {}?",
    "I want to {}.",
    "Is it possible to {}?",
    "What must I do to {}?",
    "Please help me to {}.",
    "Can you tell me how to {}?",
    "I would like to {}",
    "how to {}",
    "We need to {} today.",
    "{}",
)
DETERMINERS = ("my", "the", "my", "the", "a", "our", "this")


def helped(rng: Random) -> Pair:
    """a question to a help desk, and the passage that helps"""
    action, thing = rng.choice(INTENTS)
    return Pair(question_of(rng, action, thing), passage_of(rng, action, thing), f"{action} {thing}")


def question_of(rng: Random, action: str, thing: str) -> str:
    named = rng.choice(THINGS[thing])
    if rng.random() < 0.4:
        text = rng.choice(WISHES[action]).format(named)
        return text + (
            "?" if text.startswith(("where", "how", "can", "is", "what", "which", "do", "why")) else "."
        )
    verb = rng.choice(ACTIONS[action])
    if action == "refund" and rng.random() < 0.3:
        wish = verb.rpartition(" ")[0]
    elif " the " in verb or verb.endswith(" new"):
        wish = f"{verb} {named}"
    else:
        wish = f"{verb} {rng.choice(DETERMINERS)} {named}"
    return rng.choice(QUESTIONS).format(wish)


ADVICE = (
    "Our staff are glad to help.",
    "Questions are answered by mail.",
    "This holds in all our shops.",
    "You find it in the menu.",
    "It takes a few minutes.",
    "Call us if anything is unclear.",
)


def passage_of(rng: Random, action: str, thing: str) -> str:
    first, second = rng.sample(ANSWERS[action], 2)
    parts = [first.format(rng.choice(THINGS[thing]))]
    if rng.random() < 0.3:
        parts.append(second.format(rng.choice(THINGS[thing])))
    if rng.random() < 0.3:
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(ADVICE))
    return " ".join(parts)


JOBS = (
    "baker",
    "nurse",
    "painter",
    "teacher",
    "sailor",
    "farmer",
    "lawyer",
    "doctor",
    "engineer",
    "tailor",
    "pilot",
)
HOBBIES = (
    "chess",
    "football",
    "tennis",
    "painting",
    "sailing",
    "hiking",
    "singing",
    "cooking",
    "gardening",
    "cycling",
)
FOODS = (
    "soup",
    "rice",
    "apples",
    "bread",
    "cheese",
    "fish",
    "salad",
    "noodles",
    "cake",
    "plums",
    "olives",
    "honey",
)
PETS = ("dog", "cat", "parrot", "horse", "rabbit", "turtle", "goat", "hamster", "canary", "donkey")

Facts = dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]
# of a relation: what can be told, how it is told, how it is asked
RELATIONS: Facts = {
    "home": (
        CITIES,
        ("{} lives in {}.", "{} has a flat in {}.", "The home of {} is in {}."),
        ("Where does {} live?", "In which city is the home of {}?", "What town is {} at home in?"),
    ),
    "job": (
        JOBS,
        ("{} works as a {}.", "{} is a {} by profession.", "{} earns a living as a {}."),
        ("What is the job of {}?", "What does {} do for a living?", "Which profession has {}?"),
    ),
    "hobby": (
        HOBBIES,
        ("{} likes {} at the weekend.", "In spare time {} enjoys {}.", "The hobby of {} is {}."),
        ("What does {} enjoy in spare time?", "Which hobby has {}?", "What does {} do for fun?"),
    ),
    "food": (
        FOODS,
        ("{} loves to eat {}.", "The favourite food of {} is {}.", "For lunch {} has {}."),
        ("What does {} like to eat?", "What is the favourite dish of {}?", "What food does {} love?"),
    ),
    "pet": (
        PETS,
        ("{} has a {}.", "{} keeps a {} as a pet.", "The pet of {} is a {}."),
        ("Which animal does {} keep?", "What pet has {}?", "What kind of animal lives with {}?"),
    ),
}


_SYLLABLES_TEXT = "ba be bo da de do ka ke ko la le lo ma mi mo na ne no ra re ro sa se so ta te to va vi vo"
SYLLABLES = _SYLLABLES_TEXT.split()


def made_up_name(rng: Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=rng.randrange(2, 4))).capitalize() + rng.choice(
        ("", "n", "s", "r", "l")
    )


def told(rng: Random) -> Pair:
    """a question about a person, and what is told of that person"""
    name = rng.choice(NAMES) if rng.random() < 0.5 else made_up_name(rng)
    relations = rng.sample(list(RELATIONS), rng.choice((1, 1, 2)))
    facts = [rng.choice(RELATIONS[one][1]).format(name, rng.choice(RELATIONS[one][0])) for one in relations]
    asked = rng.choice(relations)
    return Pair(rng.choice(RELATIONS[asked][2]).format(name), " ".join(facts), f"{name} {asked}")


SHOPS = (
    "bakery",
    "museum",
    "library",
    "pharmacy",
    "swimming pool",
    "post office",
    "cinema",
    "theatre",
    "zoo",
    "café",
)
HOURS = ("six", "seven", "eight", "nine", "ten", "noon", "four", "five")
OF_PLACES: Facts = {
    "opens": (
        HOURS,
        ("The {} opens at {}.", "Opening hours of the {}: from {} on.", "Doors of the {} open at {}."),
        ("When does the {} open?", "At what time can I enter the {}?", "What are the opening hours of the {}?"),
    ),
    "price": (
        HOURS,
        (
            "Entry to the {} costs {} euros.",
            "A ticket for the {} is {} euros.",
            "The {} charges {} euros a person.",
        ),
        ("How much is a ticket for the {}?", "What does the {} cost?", "Is the {} expensive?"),
    ),
    "way": (
        CITIES,
        ("The {} is in {} Street.", "You find the {} beside {} Park.", "Take the bus to {} Square for the {}."),
        ("Where is the {}?", "How do I get to the {}?", "What is the address of the {}?"),
    ),
    "closed": (
        ("Monday", "Tuesday", "Wednesday", "Thursday", "Sunday"),
        ("The {} is closed on {}.", "The {} has its day of rest on {}.", "On no {} does the {} open."),
        ("On which day is the {} closed?", "When is the {} shut?", "Is the {} open every day?"),
    ),
}


def placed(rng: Random) -> Pair:
    """a question about a place, and what is known of it"""
    relation = rng.choice(list(OF_PLACES))
    values, telling, asking = OF_PLACES[relation]
    place = f"{rng.choice(SHOPS)} of {rng.choice(CITIES)}" if rng.random() < 0.7 else rng.choice(SHOPS)
    tell, value = rng.choice(telling), rng.choice(values)
    turned = tell.startswith(("On no", "Take the"))
    return Pair(
        rng.choice(asking).format(place),
        tell.format(*((value, place) if turned else (place, value))),
        f"{place} {relation}",
    )


def written(rng: Random, slots: dict[str, str]) -> str:
    """An event in some of its words."""
    said = {slot: rng.choice(EVENTS[slot][concept]) for slot, concept in slots.items()}
    order = ["who", "does", "where", "when"]
    if rng.random() < 0.3:
        order = [rng.choice(("where", "when")), *order]
    words = [said[slot] for slot in dict.fromkeys(order) if slot in said]
    return (" ".join(words))[0].upper() + " ".join(words)[1:] + "."


def an_event(rng: Random) -> dict[str, str]:
    slots = {slot: rng.choice(list(EVENTS[slot])) for slot in EVENTS}
    for slot in ("where", "when"):
        if rng.random() < 0.35:
            del slots[slot]
    return slots


def reworded(rng: Random) -> Pair:
    """two sentences that say the same"""
    slots = an_event(rng)
    return Pair(written(rng, slots), written(rng, slots), " ".join(slots.values()), asked=False)


GENERAL = (
    "This text is about {}.",
    "{}",
    "Something about {}",
    "A page on {}.",
    "texts about {}",
    "I am looking for an article on {}.",
)
TOPICAL = (
    "The {} and the {} were in the news today, and so was the {}.",
    "Without a {} there is no {}, says an expert.",
    "She wrote about the {}, the {} and a {}.",
    "First comes the {}, then the {}.",
    "Everyone spoke of the {} and of the {} beside it.",
    "A short story of a {}, a {} and one {}.",
)


def titled(rng: Random) -> Pair:
    """what a text is about, and the text"""
    topic = rng.choice(list(TOPICS))
    tell = rng.choice(TOPICAL)
    words = rng.sample(TOPICS[topic], tell.count("{}") + 1)
    title = topic if rng.random() < 0.6 else words[0]
    return Pair(
        rng.choice(GENERAL).format(title),
        tell.format(*words[1:]),
        f"{topic} {' '.join(sorted(words))}",
        kind=topic,
    )


def quoted(rng: Random) -> Pair:
    """some words, and the note that has them: what a search for words finds"""
    words = rng.sample(WORDS, 6)
    some = rng.sample(words, rng.choice((1, 2, 2, 3)))
    note = rng.choice(("Notes: {}.", "We saw {}.", "In the box were {}.", "He painted {} and nothing else."))
    asked = rng.choice(("Which note has {}?", "{}", "Where did we see {}?", "I am looking for {}"))
    return Pair(asked.format(" and ".join(some)), note.format(", ".join(words)), " ".join(sorted(words)))


Draw = Callable[[Random], Pair]
DRAWS: dict[str, Draw] = {
    "help": helped,
    "people": told,
    "places": placed,
    "rewording": reworded,
    "topics": titled,
    "words": quoted,
}


def draw(name: str, rng: Random, split: Split) -> Pair:
    while True:
        pair = DRAWS[name](rng)
        if split_of(f"{name} {pair.about}") == split:
            return pair


@dataclass(frozen=True, slots=True)
class Graded:
    """Two sentences, and which share of what they say is the same."""

    one: str
    two: str
    share: float


WEIGHTS = {"who": 1.0, "does": 1.5, "where": 1.0, "when": 0.5}


def graded(rng: Random, split: Split) -> Graded:
    """Two events that have some parts in common."""
    while True:
        first, second = an_event(rng), an_event(rng)
        for slot in first:
            if rng.random() < 0.5:
                second[slot] = first[slot]
        if split_of(f"graded {first} {second}") != split:
            continue
        named = first.keys() | second.keys()
        same = sum(WEIGHTS[slot] for slot in named if first.get(slot) == second.get(slot))
        return Graded(written(rng, first), written(rng, second), same / sum(WEIGHTS[slot] for slot in named))
