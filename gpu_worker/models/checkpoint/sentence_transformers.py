"""The files of sentence-transformers beside a checkpoint: how its texts are pooled, and how it is asked.

modules.json                         the modules after the transformer, a folder each
1_Pooling/config.json                in the old names (`pooling_mode_mean_tokens`) or the new one (`pooling_mode`)
2_Dense/config.json, model.safetensors
1_LogitScore/config.json             the tokens by which a model that generates scores pairs
config_sentence_transformers.json    prompts by name
sentence_bert_config.json            the longest text
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, inside, read_json, read_list, shown
from petiole.gpu_worker.models.plan import MAX_POSITION, Dense, Pooling, PoolingKind
from petiole.gpu_worker.request.pooling import Judge

_OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""In the order in which several are joined."""
_KINDS: dict[str, PoolingKind] = {
    "cls": "first",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "sqrt_mean",
    "weightedmean": "weighted_mean",
    "lasttoken": "last",
}
_ACTIVATIONS: dict[str, Literal["none", "tanh", "gelu", "relu"]] = {
    "identity": "none",
    "tanh": "tanh",
    "gelu": "gelu",
    "relu": "relu",
}
_MAX_WIDTH = 2**20


@dataclass(frozen=True, slots=True)
class TextModel:
    """How a model of texts is asked. prompts: by name, what stands before a text. max_tokens: of a text, if the
    files limit it. lower_case: texts are lowered first. lacking: outputs that the model would make with other
    files than it has, by name, and why not."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False
    lacking: Mapping[str, str] = field(default_factory=dict)


_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules after a transformer. folders: those that have weights."""

    pooling: Pooling
    folders: tuple[str, ...]


def read_modules(folder: Path) -> Modules | None:
    """What modules.json says; None if the folder has none, or if it names no pooling."""
    path = folder / "modules.json"
    if not path.is_file():
        return None
    pooling: Pooling | None = None
    denses, folders, normalize = list[Dense](), list[str](), False
    last = 0
    for k, module in enumerate(read_list(path)):
        name, where = str(module.get("type", "")), str(module.get("path", ""))
        place, short = inside(folder, where, f"{path}: the path of a module"), name.rpartition(".")[2]
        if short in _ORDER:
            if _ORDER.index(short) < last:
                raise ModelError(f"{path}: modules must be in the order {', '.join(_ORDER)}, got {short} late")
            last = _ORDER.index(short)
        match short:
            case "Transformer":
                if k or where:
                    at = f"must be the first, in the model's own folder, got number {k} in {shown(where)}"
                    raise ModelError(f"{path}: the module Transformer {at}")
            case "Pooling":
                pooling = _pooling(place / "config.json")
            case "Dense":
                denses.append(_dense(place / "config.json", where))
                _refuse_pickles(place)
                folders.append(where)
            case "Normalize":
                normalize = True
            case "Dropout" | "LogitScore":
                pass
            case _:
                known = "Transformer, Pooling, Dense, Normalize, Dropout or LogitScore"
                raise ModelError(f"{path}: modules must be {known}, got {shown(name)}")
    if pooling is None:
        return None
    return Modules(replace(pooling, denses=tuple(denses), normalize=normalize), tuple(folders))


def read_judge(folder: Path) -> Judge | None:
    """What a module LogitScore says; None if there is none."""
    path = folder / "modules.json"
    listed = read_list(path) if path.is_file() else []
    found = [module for module in listed if str(module.get("type", "")).rpartition(".")[2] == "LogitScore"]
    if not found:
        return None
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in listed]
    if kinds != ["Transformer", "LogitScore"]:
        raise ModelError(f"{path}: modules must be Transformer and LogitScore, got {', '.join(kinds)}")
    path = inside(folder, str(found[0].get("path", "")), f"{path}: the path of a module") / "config.json"
    raw, told = read_json(path), _optional(folder / "config_sentence_transformers.json")
    tokens = [raw.get(f"{name}_token_id") for name in ("true", "false")]
    if not all(type(token) is int and token >= 0 for token in tokens):
        limit = "true_token_id and false_token_id must be ids of tokens"
        raise ModelError(f"{path}: {limit}, got {shown(tokens)}")
    named = str(told.get("activation_fn") or "Sigmoid").rpartition(".")[2]
    if named not in ("Identity", "Sigmoid"):
        known = "activation_fn must be Identity or Sigmoid"
        raise ModelError(f"config_sentence_transformers.json: {known}, got {shown(named)}")
    asked = read_text_model(folder)
    instruction = None if asked.default_prompt is None else asked.prompts[asked.default_prompt]
    yes, no = (int(token) for token in tokens if token is not None)
    return Judge(yes, no, named == "Sigmoid", instruction)


def read_text_model(folder: Path) -> TextModel:
    """Prompts and lengths. Files that are missing say nothing."""
    told = _optional(folder / "config_sentence_transformers.json")
    sizes = _optional(folder / "sentence_bert_config.json")
    prompts, default = told.get("prompts") or {}, told.get("default_prompt_name")
    if not isinstance(prompts, Mapping) or not all(isinstance(one, str) for one in prompts.values()):
        raise ModelError(f"config_sentence_transformers.json: prompts must be texts by name, got {shown(prompts)}")
    if default is not None and (not isinstance(default, str) or default not in prompts):
        known = shown(sorted(prompts)) if prompts else "(none)"
        raise ModelError(
            f"config_sentence_transformers.json: default_prompt_name must be one of {known}, got {shown(default)}"
        )
    longest = sizes.get("max_seq_length")
    if longest is not None and not (type(longest) is int and 1 <= longest <= MAX_POSITION):
        limit = f"must be a whole number from 1 to {MAX_POSITION}"
        raise ModelError(f"sentence_bert_config.json: max_seq_length {limit}, got {shown(longest)}")
    return TextModel(dict(prompts), default, longest, bool(sizes.get("do_lower_case", False)))


def _pooling(path: Path) -> Pooling:
    raw = read_json(path)
    modes: Any = raw.get("pooling_mode")
    if modes is None:
        modes = [mode for name, mode in _OLD_MODES.items() if raw.get(name)]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or not modes or not all(mode in _KINDS for mode in modes):
        raise ModelError(f"{path}: pooling_mode must be of {', '.join(_KINDS)}, got {shown(modes)}")
    return Pooling(tuple(_KINDS[mode] for mode in modes), prompts=raw.get("include_prompt") is not False)


def _dense(path: Path, where: str) -> Dense:
    raw = read_json(path)
    sizes = [raw.get(name) for name in ("in_features", "out_features")]
    if not all(type(size) is int and 1 <= size <= _MAX_WIDTH for size in sizes):
        limit = f"in_features and out_features must be whole numbers from 1 to {_MAX_WIDTH}"
        raise ModelError(f"{path}: {limit}, got {shown(sizes)}")
    function = str(raw.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2].lower()
    if function not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelError(f"{path}: activation_function must be one of {known}, got {shown(function)}")
    inputs, outputs = (int(size) for size in sizes if size is not None)
    return Dense(f"{where}/linear", inputs, outputs, bool(raw.get("bias", True)), _ACTIVATIONS[function])


def _refuse_pickles(folder: Path) -> None:
    pickles = sorted(path.name for path in folder.glob("*.bin"))
    if pickles and not (folder / "model.safetensors").exists():
        needed = "model.safetensors with the tensors linear.weight and linear.bias"
        raise ModelError(f"{folder / pickles[0]} is a pickle, which is not read: {needed} must stand beside it")


def _optional(path: Path) -> JsonObject:
    return read_json(path) if path.is_file() else {}
