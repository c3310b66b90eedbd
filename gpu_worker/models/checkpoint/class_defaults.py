"""What config.json leaves out: the default of the class with which transformers reads it, at every level.

`class_defaults.json` has the classes; `tests/support/class_defaults.py` writes it from transformers. A key that
transformers knows, but the class of this model does not, is dropped: it changes nothing there either.

Rotations are written in one form: `rope_parameters`, for all layers or by kind of layer, with a base each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, architecture_of, shown

_FILE = Path(__file__).with_suffix(".json")
_OWN_LENGTH = ("llama3", "yarn", "longrope")
"""Kinds of rotation that have the length of the training, `original_max_position_embeddings`."""
_OF_OLDER_CLASSES = frozenset({"position_embedding_type", "topk_method"})
"""Keys that classes no longer read, but with which models were trained: families refuse what they do not do."""


@dataclass(frozen=True, slots=True)
class RopeDefaults:
    """The rotation of a kind of layer. none: if config.json names none. theta: the base of one that is named
    without it; None: it must be named. theta_key: the old key of the base, beside `rope_parameters`. scaled:
    whether the old `rope_scaling` means this kind, too. partial: the default of `partial_rotary_factor`."""

    none: JsonObject
    theta: float | None = None
    theta_key: str | None = None
    scaled: bool = True
    partial: float | None = None


@dataclass(frozen=True, slots=True)
class ClassDefaults:
    """A class of configurations. fields: its keys with their defaults. also: keys without a default that it reads.
    spellings: other names of its keys. ropes: by kind of layer; "": all. text: the class of the nested text part
    by `model_type`, the first if none is named; text_missing: that part if config.json has none."""

    model_type: str
    fields: JsonObject
    also: tuple[str, ...] = ()
    spellings: Mapping[str, str] = field(default_factory=dict)
    ropes: Mapping[str, RopeDefaults] = field(default_factory=dict)
    text: Mapping[str, str] = field(default_factory=dict)
    text_missing: JsonObject = field(default_factory=dict)


@cache
def known_classes() -> Mapping[str, ClassDefaults]:
    """By the name of the class."""
    return {
        name: ClassDefaults(
            **{
                **given,
                "also": tuple(given.get("also", ())),
                "ropes": {kind: RopeDefaults(**one) for kind, one in given.get("ropes", {}).items()},
            }
        )
        for name, given in _table()["classes"].items()
    }


@cache
def class_names() -> Mapping[str, str]:
    """The name of the class by architecture."""
    named: dict[str, str] = _table()["architectures"]
    return named


@cache
def _table() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return loaded


@cache
def _every_key() -> frozenset[str]:
    return frozenset(key for one in known_classes().values() for key in (*one.fields, *one.also))


def completed(raw: JsonObject) -> JsonObject:
    """config.json with all that its class adds. One of an architecture that transformers does not have stays as it
    is. Raises ModelError."""
    name = class_names().get(architecture_of(raw))
    if name is None:
        return raw
    outer = known_classes()[name]
    if not outer.text:
        inner = raw.get("text_config")
        if not isinstance(inner, Mapping):
            return _filled(outer, raw)
        return {**raw, "text_config": _filled(outer, inner)}
    inner = raw.get("text_config") or outer.text_missing
    if not isinstance(inner, Mapping):
        raise ModelError(f"config.json: text_config must be an object, got {shown(inner)}")
    kind = str(inner.get("model_type") or next(iter(outer.text)))
    if len(outer.text) > 1 and kind not in outer.text:
        raise ModelError(
            f"config.json: text_config.model_type must be {' or '.join(outer.text)}, got {shown(kind)}"
        )
    of_text = known_classes()[outer.text.get(kind, next(iter(outer.text.values())))]
    tied = raw.get("tie_word_embeddings", outer.fields.get("tie_word_embeddings"))
    tied = tied or ("tie_word_embeddings" not in raw and inner.get("tie_word_embeddings"))
    return {**raw, "tie_word_embeddings": bool(tied), "text_config": _filled(of_text, inner)}


def class_end_tokens(raw: JsonObject) -> object:
    """`eos_token_id` of the class, for files that name no end token."""
    name = class_names().get(architecture_of(raw))
    if name is None:
        return None
    one = known_classes()[name]
    of_text = known_classes()[next(iter(one.text.values()))] if one.text else one
    return of_text.fields.get("eos_token_id")


def _filled(defaults: ClassDefaults, given: JsonObject) -> dict[str, Any]:
    named = dict(given)
    for spelling, key in defaults.spellings.items():
        if spelling in named:
            named[key] = named.pop(spelling)
    unread = _every_key() - defaults.fields.keys() - set(defaults.also) - _OF_OLDER_CLASSES
    filled = {**defaults.fields, **{key: value for key, value in named.items() if key not in unread}}
    if defaults.ropes:
        filled["rope_parameters"] = _ropes(defaults, filled)
        filled.pop("rope_scaling", None)
    return filled


def _ropes(defaults: ClassDefaults, filled: JsonObject) -> JsonObject:
    named, scaling = filled.get("rope_parameters"), filled.get("rope_scaling")
    for key, one in (("rope_parameters", named), ("rope_scaling", scaling)):
        if one is not None and not isinstance(one, Mapping):
            raise ModelError(f"config.json: {key} must be an object, got {shown(one)}")
    if "" in defaults.ropes:
        return _rope(
            defaults.ropes[""], scaling or named, filled, "original_max_position_embeddings" in defaults.fields
        )
    if named is not None and (flat := sorted(set(named) - set(defaults.ropes))):
        kinds = ", ".join(defaults.ropes)
        raise ModelError(f"config.json: rope_parameters must be by kind of layer ({kinds}), got {shown(flat)}")
    if scaling and not any(one.scaled for one in defaults.ropes.values()):
        raise ModelError(f"config.json: rope_scaling must be null beside rope_parameters, got {shown(scaling)}")
    by_kind = {}
    for kind, one in defaults.ropes.items():
        own = None if named is None else named.get(kind)
        if named is not None and own is None and one.theta is None:
            raise KeyError(f"rope_parameters.{kind}")
        if own is not None and not isinstance(own, Mapping):
            raise ModelError(f"config.json: rope_parameters.{kind} must be an object, got {shown(own)}")
        own = own if not (scaling and one.scaled) else {"rope_type": "default", **(own or {}), **scaling}
        by_kind[kind] = _rope(one, own, filled, False)
    return by_kind


def _rope(defaults: RopeDefaults, given: JsonObject | None, filled: JsonObject, outside: bool) -> JsonObject:
    """outside: whether the class has the length of the training beside `rope_parameters`, which then counts."""
    rope = dict(defaults.none if given is None else given)
    if "rope_theta" not in rope:
        theta = filled.get(defaults.theta_key, defaults.theta) if defaults.theta_key else defaults.theta
        if theta is None:
            raise KeyError("rope_parameters.rope_theta")
        rope["rope_theta"] = theta
    part = filled.get("partial_rotary_factor", defaults.partial)
    if part is not None:
        rope.setdefault("partial_rotary_factor", part)
    if (rope.get("rope_type") or rope.get("type")) in (*_OWN_LENGTH, "su"):
        longest = filled["original_max_position_embeddings" if outside else "max_position_embeddings"]
        rope["original_max_position_embeddings"] = (
            longest if outside else rope.get("original_max_position_embeddings", longest)
        )
    return rope
