"""The defaults of transformers' classes of configurations, for every architecture that is served.

    python -m tests.support.class_defaults      writes petiole/gpu_worker/models/checkpoint/class_defaults.json

How a class treats old spellings of rotations is found out by trying them."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from petiole.gpu_worker.models.checkpoint import class_defaults
from petiole.gpu_worker.models.families.registry import ARCHITECTURES

FILE = Path(class_defaults.__file__).with_suffix(".json")
_OF_ALL = {one.name for one in dataclasses.fields(PreTrainedConfig)} | {"rope_parameters", "use_cache"}
_OF_TRAINING = re.compile(
    r"dropout|pdrop|initializer|aux_loss|router_logits|jitter|pretraining|sparse_pred|_config$"
)
_THETAS = ("rope_theta", "global_rope_theta", "local_rope_theta", "rope_local_base_freq")
_LEFT_TO_ROPES = {*_THETAS, "rope_scaling", "partial_rotary_factor"}
_PROBE = 123_457.0


def table() -> dict[str, Any]:
    """What the file must hold."""
    architectures = {
        name: getattr(transformers, name).config_class
        for name in sorted(ARCHITECTURES)
        if hasattr(transformers, name)
    }
    texts = {one: _texts(one, architectures.values()) for one in architectures.values()}
    classes = {*architectures.values(), *(inner for found in texts.values() for inner in found.values())}
    return {
        "architectures": {name: one.__name__ for name, one in architectures.items()},
        "classes": {
            one.__name__: _described(one, texts.get(one, {}))
            for one in sorted(classes, key=lambda one: one.__name__)
        },
    }


def _texts(outer: Any, known: Any) -> dict[str, Any]:
    """The classes of the text part by model_type, the default first."""
    spec = outer.sub_configs_defaults.get("text_config")
    if spec is None:
        return {}
    default = (
        CONFIG_MAPPING[spec.model_type] if spec.config_class is transformers.AutoConfig else spec.config_class
    )
    found = {default.model_type: default}
    if spec.config_class is transformers.AutoConfig:
        served = {one.model_type: one for one in known if not one.sub_configs_defaults}
        found |= {name: served[name] for name in sorted(served) if name.startswith(("mistral", "ministral"))}
    return found


def _described(one: Any, texts: dict[str, Any]) -> dict[str, Any]:
    fields = {
        one.attribute_map.get(part.name, part.name): part.default
        for part in dataclasses.fields(one)
        if part.name not in _OF_ALL and not _OF_TRAINING.search(part.name)
    }
    found: dict[str, Any] = {
        "model_type": one.model_type,
        "fields": fields,
        "also": sorted(_read_by(one) - fields.keys() - _LEFT_TO_ROPES - _OF_ALL - {"torch_dtype"}),
        "spellings": dict(sorted(one.attribute_map.items())),
        "ropes": _ropes(one) if getattr(one(), "rope_parameters", None) else {},
    }
    if texts:
        found["text"] = {name: inner.__name__ for name, inner in texts.items()}
        found["text_missing"] = dict(one.sub_configs_defaults["text_config"].init_kwargs)
    return {key: value for key, value in found.items() if value}


def _read_by(one: Any) -> set[str]:
    """Keys that the class or its model looks for without a default in the class."""
    configuration = Path(inspect.getfile(one))
    modeling = configuration.with_name(configuration.name.replace("configuration_", "modeling_"))
    found = set(re.findall(r'kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"', configuration.read_text()))
    found |= set(re.findall(r'getattr\((?:self\.)?config, "(\w+)"', modeling.read_text()))
    return {name for name in found if not _OF_TRAINING.search(name)}


def _ropes(one: Any) -> dict[str, Any]:
    none = one().rope_parameters
    nested = all(isinstance(value, dict) for value in none.values())
    kinds = none if nested else {"": none}

    def tried(**given: Any) -> dict[str, Any]:
        try:
            found = one(**given).rope_parameters
        except (KeyError, ValueError, StrictDataclassError):
            return {}
        return found if nested else {"": found}

    marked = {"rope_type": "default", "factor": 2.0}
    named = tried(rope_parameters={kind: dict(marked) for kind in kinds} if nested else dict(marked))
    scaled = tried(rope_scaling=dict(marked))
    ropes = {}
    for kind, default in kinds.items():
        follows = [key for key in _THETAS if tried(**{key: _PROBE}).get(kind, {}).get("rope_theta") == _PROBE]
        fed = [
            key
            for key in _THETAS
            if tried(**{key: _PROBE}, **_given(kinds, nested)).get(kind, {}).get("rope_theta") == _PROBE
        ]
        own = {key: value for key, value in default.items() if key != "partial_rotary_factor" or nested}
        if follows:
            own.pop("rope_theta", None)
        ropes[kind] = {
            "none": own,
            "theta": named.get(kind, {}).get("rope_theta"),
            "theta_key": (fed or follows or [None])[0],
            "scaled": scaled.get(kind, {}).get("factor") == 2.0,
            "partial": named.get(kind, {}).get("partial_rotary_factor"),
        }
    return ropes


def _given(kinds: dict[str, Any], nested: bool) -> dict[str, Any]:
    plain = {"rope_type": "default"}
    return {"rope_parameters": {kind: dict(plain) for kind in kinds} if nested else dict(plain)}


def written() -> str:
    return json.dumps(table(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(written(), encoding="utf-8")
