"""A task goes on with the adapter that it began with, or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from petiole.tasks.errors import ModelChanged
from tests.support.site import Site

ENGINE = {
    "PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine",
    "PETIOLE_DEVICE": "cpu",
    "PETIOLE_DTYPE": "float32",
    "PETIOLE_LORA_SLOTS": 1,
}
LONG = 1500


def write_adapter(folder: Path, seed: int) -> Path:
    """A small adapter of petiole-tiny."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    at = "base_model.model.model.layers.0.self_attn.o_proj"
    weights = {
        f"{at}.lora_A.weight": torch.randn(4, 256, generator=generator),
        f"{at}.lora_B.weight": torch.randn(256, 4, generator=generator),
    }
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 4}))
    return folder


@pytest.mark.parametrize("changed", [False, True], ids=["the same", "others"])
def test_files_that_changed_meanwhile_end_a_task_and_the_same_files_do_not(own_site: Site, changed: bool) -> None:
    site, adapter = own_site, write_adapter(own_site.folder / "adapter", seed=1)
    first = site.worker(**ENGINE)
    result = site.generate("Count from 1 to 500.", adapter=str(adapter), max_tokens=LONG, ignore_eos=True)
    site.streaming(result, 10)
    first.kill()
    assert len(site.tokens(result)) < LONG
    replaced = write_adapter(site.folder / "new", seed=2 if changed else 1)
    for file in replaced.iterdir():
        os.replace(file, adapter / file.name)
    site.worker(**ENGINE)
    if changed:
        with pytest.raises(ModelChanged, match="tokens were generated with adapter"):
            site.get(result)
    else:
        value = site.get(result)
        assert (value["attempt"], value["token_ids"]) == (2, site.tokens(result))
        assert len(value["token_ids"]) == LONG
