"""A task goes on with the adapter that it began with, or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from petiole.tasks.errors import InvalidRequest, ModelChanged
from tests.support.site import Site

ENGINE = {
    "PETIOLE_ENGINE_FACTORY": "petiole.gpu_worker.engine:Engine",
    "PETIOLE_DEVICE": "cpu",
    "PETIOLE_DTYPE": "float32",
    "PETIOLE_LORA_SLOTS": 1,
    "PETIOLE_LORA_FILES": tempfile.gettempdir(),
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


def test_a_request_names_adapters_that_the_workers_settings_name_and_no_other_folder(own_site: Site) -> None:
    site = own_site
    allowed, elsewhere = (write_adapter(site.folder / name, seed=1) for name in ("allowed", "elsewhere"))
    (allowed / "linked").symlink_to(elsewhere)
    (site.folder / "served").symlink_to(elsewhere)
    served = f"sql={site.folder / 'served'}"
    site.worker(**ENGINE | {"PETIOLE_LORA_FILES": f"{allowed},acme", "PETIOLE_SERVED_ADAPTERS": served})
    for adapter in (allowed, site.folder / "served"):
        assert site.get(site.generate("x", adapter=str(adapter), max_tokens=1))["token_ids"]
    for adapter in (elsewhere, allowed / "linked", allowed / ".." / "elsewhere", "/proc/self", "acme2/x"):
        result = site.generate("x", adapter=str(adapter), max_tokens=1)
        with pytest.raises(InvalidRequest, match="PETIOLE_LORA_FILES or PETIOLE_SERVED_ADAPTERS") as caught:
            site.get(result)
        assert (caught.value.field, caught.value.value) == ("adapter", str(adapter))


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
