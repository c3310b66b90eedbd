"""The generator: its answers are right by an independent reading, and its split keeps questions apart."""

import ast
import json
import re
from itertools import pairwise
from random import Random

import pytest

from training import card
from training.text import grammar, words
from training.text.skills import DRAWS, HELD_OUT_ONE_IN, Example, draw, split_of

DRAWN = 300


def drawn(skill: str, split: str = "train", count: int = DRAWN) -> list[Example]:
    rng = Random(f"{skill} in a test")
    return [draw(skill, rng, "held-out" if split == "held-out" else "train") for _ in range(count)]


def numbers(text: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", text)]


@pytest.mark.parametrize("skill", DRAWS)
def test_checker_accepts_the_own_answer_and_nothing_else(skill: str) -> None:
    for example in drawn(skill):
        assert example.accepts(example.answer)
        for other in (example.answer + " ", example.answer[:-1], "", example.answer + example.answer):
            assert not example.accepts(other)


@pytest.mark.parametrize("skill", DRAWS)
def test_the_same_seed_draws_the_same_examples(skill: str) -> None:
    assert drawn(skill, count=20) == drawn(skill, count=20)


@pytest.mark.parametrize("skill", DRAWS)
def test_splits_are_disjoint_by_what_is_asked(skill: str) -> None:
    train = {example.key for example in drawn(skill, "train")}
    held_out = {example.key for example in drawn(skill, "held-out")}
    assert not train & held_out
    assert all(split_of(skill, key) == "held-out" for key in held_out)


def test_about_one_question_in_ten_is_held_out() -> None:
    held_out = sum(split_of("addition", f"{n}+{n}") == "held-out" for n in range(10_000))
    assert abs(held_out - 10_000 / HELD_OUT_ONE_IN) < 150


def test_the_split_is_the_same_on_every_machine() -> None:
    held_out = [word for word in words.WORDS if split_of("reversing", word) == "held-out"]
    assert held_out[:5] == ["beacon", "branch", "button", "castle", "cloud"]


def test_counting_starts_and_steps_as_asked_and_never_passes_the_end() -> None:
    for example in drawn("counting"):
        first, end, step = (int(part) for part in example.key.split())
        counted = numbers(example.answer)
        assert counted[0] == first
        assert all(later - earlier == step for earlier, later in pairwise(counted))
        assert abs(end - counted[-1]) < abs(step)
        assert str(end) in example.prompt


def test_every_row_of_a_table_is_a_true_product() -> None:
    for example in drawn("tables"):
        n, rows = (int(part) for part in example.key.split())
        lines = [numbers(line) for line in example.answer.split("\n")]
        assert [left for left, _, _ in lines] == [n] * rows
        assert [right for _, right, _ in lines] == list(range(1, rows + 1))
        assert all(left * right == product for left, right, product in lines)


def test_sums_are_true() -> None:
    for example in drawn("addition"):
        left, right = example.answer.split(" = ")
        assert sum(numbers(left)) == int(right)
        assert numbers(example.prompt) == numbers(left)


def test_sorted_numbers_are_those_of_the_prompt() -> None:
    for example in drawn("sorting numbers"):
        assert numbers(example.answer) == sorted(numbers(example.prompt))


def test_sorted_words_start_with_different_letters_and_are_in_order() -> None:
    for example in drawn("sorting words"):
        items = re.findall(r"[a-z]+", example.answer)
        assert items == sorted(example.key.split())
        assert len({item[0] for item in items}) == len(items)


def test_reversed_and_spelt_words_have_the_letters_of_the_prompt() -> None:
    for example in drawn("reversing"):
        assert example.answer[::-1] in example.prompt
    for example in drawn("spelling"):
        assert example.answer.replace("-", "") in example.prompt
        assert all(len(letter) == 1 for letter in example.answer.split("-"))


def test_a_repeated_text_stands_in_its_prompt() -> None:
    for example in drawn("repeating"):
        assert example.prompt.endswith(example.answer)


def test_extracted_fields_are_json_with_the_values_of_the_sentence() -> None:
    for example in drawn("extracting"):
        fields = json.loads(example.answer)
        assert set(fields) <= {"name", "age", "city"}
        assert all(str(value) in example.prompt for value in fields.values())
        assert ast.literal_eval(example.answer) == fields


def test_descriptions_follow_the_grammar() -> None:
    for example in drawn("describing"):
        trait, animal = example.key.split(" ", 1)
        home, food = grammar.ANIMALS[animal]
        assert f"lives {home}. It likes to eat {food}." in example.answer
        assert trait == "plain" or f"The {trait} {animal} " in example.answer


def test_a_question_about_the_model_has_one_answer() -> None:
    answers: dict[str, set[str]] = {}
    for example in drawn("about", count=3000):
        answers.setdefault(example.key, set()).add(example.answer)
    assert all(len(found) == 1 for found in answers.values())


def test_the_card_has_two_examples_a_skill_and_every_figure() -> None:
    assert card.EXAMPLES.keys() == DRAWS.keys()
    assert all(len(pairs) >= 2 for pairs in card.EXAMPLES.values())
    text = card.render(2_500_000, dict.fromkeys(DRAWS, (199, 200)), {}, [0.91, 0.8])
    assert text.count("99.5 % of 200") == len(DRAWS)
