"""A stranger's config.json: whatever its values are, it is served or refused in one line."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from petiole.gpu_worker import models
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_DEPTH, parsed
from petiole.gpu_worker.models.families.registry import model_of
from petiole.gpu_worker.models.loading import LoadOptions
from petiole.gpu_worker.models.parts.rotary import rotary_table
from tests.support.families import EVERY_FAMILY, configuration
from tests.support.mutated import mutated, read_by
from tests.support.pictures import MODEL
from tests.support.trials import examples

FOLDER = Path(models.__file__).parent
KEYS = [key for room in ("families", "moondream", "weights/formats") for key in read_by(FOLDER / room)]
CHECKED = LoadOptions(device=torch.device("meta"), dtype=torch.bfloat16, max_positions=101)


class AnyTensor:
    """A source that has every weight, in every shape."""

    def __contains__(self, name: str) -> bool:
        return name.endswith(".weight") and not name.startswith("text_model.")

    def copy(self, name: str, into: Tensor) -> int:
        return 0

    def quantised(self, name: str, outputs: int, inputs: int) -> None:
        return None


def configuration_of(name: str) -> dict[str, Any]:
    if name == "moondream":
        raw: dict[str, Any] = json.loads((Path(MODEL) / "config.json").read_text())
        return raw
    kind, made = configuration(name)
    architecture = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    raw = json.loads(made.to_json_string())
    return raw | {"architectures": [architecture]}


def planned(raw: dict[str, Any]) -> None:
    """All that a configuration decides before a weight is read."""
    model = model_of(raw)
    for rotary in model.plan.rotaries:
        rotary_table(rotary, 64, torch.device("cpu"))
    model.plan.at_length(100)
    with torch.no_grad():
        model.read(AnyTensor(), model, CHECKED)


@pytest.mark.parametrize("name", ["moondream", *sorted(EVERY_FAMILY)])
def test_a_configuration_is_planned_or_refused_in_one_line(name: str) -> None:
    given, draw = configuration_of(name), random.Random(name)
    planned(given)
    for _ in range(examples(120)):
        raw = mutated(given, draw, KEYS)
        said = ""
        try:
            planned(raw)
        except ModelError as error:
            said = str(error)
        assert "\n" not in said, raw
        assert len(said) < 1000, raw
        assert "makes no sense" not in said, (said, raw)


@pytest.mark.parametrize("text", ["[" * 101 + "]" * 101, "[" * 3000 + "]" * 3000, '{"a":' * 900 + "1" + "}" * 900])
def test_json_that_cannot_be_shown_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_DEPTH} deep"):
        parsed(text)


def test_halves_of_characters_are_refused_and_whole_ones_are_not() -> None:
    with pytest.raises(ValueError, match=r"must be text that UTF-8 can encode, got '.ud83d'"):
        parsed(r'{"a": ["\ud83d"]}')
    assert parsed(r'"\ud83d\ude00"') == "😀"
    assert parsed("[" * 100 + "]" * 100) is not None
