"""The table of docs/models.md says what the registry has and what the paths compute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from docs.families import PUBLISHED, Published
from petiole.gpu_worker.exceptions import MachineError, ModelError
from petiole.gpu_worker.models.families.registry import FOUND, model_of
from petiole.gpu_worker.models.fast_paths import unknown_value
from petiole.gpu_worker.models.plan import Attention, Recurrent
from petiole.gpu_worker.runtime.cpu.native.supported import VALUES
from petiole.gpu_worker.runtime.cuda.simulated import SimulatedCard
from tests.support.families import EVERY_FAMILY, NOT_ON_CUDA, configuration
from tests.support.text_models import ENCODERS, transformers

Mixer = Attention | Recurrent
ROWS = {name: row for row in PUBLISHED for name in row.architectures}


def test_the_table_has_every_architecture_once() -> None:
    assert sorted(name for row in PUBLISHED for name in row.architectures) == sorted(FOUND)


@pytest.mark.parametrize("family", sorted(EVERY_FAMILY.keys() - NOT_ON_CUDA))
def test_the_paths_of_decoders_are_as_the_table_says(family: str) -> None:
    kind, config = configuration(family)
    architecture = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    check(ROWS[architecture], config.to_dict() | {"architectures": [architecture]})


@pytest.mark.parametrize("family", sorted(NOT_ON_CUDA))
def test_layers_of_mamba_are_computed_on_the_cpu_alone(family: str) -> None:
    kind, config = configuration(family)
    name = f"{kind}ForCausalLM"
    row = replace(ROWS[name], cuda=False)
    assert "Mamba2" in str(check(row, config.to_dict() | {"architectures": [name]}))


@pytest.mark.parametrize("name", [name for name in ENCODERS if name not in ("electra", "embedding-gemma")])
def test_the_paths_of_encoders_are_as_the_table_says(name: str) -> None:
    kind, settings, _ = ENCODERS[name]
    raw = getattr(transformers, f"{kind}Config")(**settings).to_dict()
    check(ROWS[f"{kind}Model"], raw | {"architectures": [f"{kind}Model"]})


def check(row: Published, raw: dict[str, Any]) -> str | None:
    """Returns the refusal of CUDA."""
    plan = model_of(raw).plan
    unknown = [
        unknown_value(plan, VALUES, without=("layers",)),
        *(unknown_value(one, VALUES) for one in plan.layers),
    ]
    assert ("compiled" if not any(unknown) else "torch") == row.cpu, unknown
    layers = (replace(one, mixer=of_published_size(one.mixer)) for one in plan.layers)
    plan = replace(plan, layers=tuple(layers))
    try:
        SimulatedCard(0, lambda: 0).require(plan)
        refused = None
    except (MachineError, ModelError) as error:
        refused = str(error)
    assert (refused is None) == row.cuda, refused
    return refused


def of_published_size(mixer: Mixer) -> Mixer:
    if not isinstance(mixer, Attention):
        return mixer
    if mixer.latent is None:
        return replace(mixer, head_dim=64)
    return replace(mixer, head_dim=576, latent=replace(mixer.latent, rank=512))


def test_a_refusal_names_the_nearest_architecture_and_is_short() -> None:
    with pytest.raises(ModelError, match="the nearest that is: Glm4MoeLiteForCausalLM") as caught:
        model_of({"architectures": ["Glm4MoeLightForCausalLM"]}, "/a/very/long/name" * 40)
    assert len(str(caught.value)) < 300
    with pytest.raises(ModelError, match="is not supported") as caught:
        model_of({"architectures": ["X" * 5000]})
    assert len(str(caught.value)) < 300
