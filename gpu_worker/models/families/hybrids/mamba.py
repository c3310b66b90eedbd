"""What families with Mamba-2 refuse alike."""

from __future__ import annotations

import math

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import JsonObject, shown
from petiole.gpu_worker.models.plan import Mamba2

SCANNING = ("mamba", "linear_attention")
"""The kind of such layers in config.json."""

_ANY_TIME = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])


def checked(raw: JsonObject, mixer: Mamba2, *, groups: str, limits: str = "time_step_limit") -> Mamba2:
    """groups, limits: the keys of the groups of heads, and of the bounds of steps."""
    if mixer.heads % mixer.groups:
        raise ModelError(f"config.json: {groups} must divide {mixer.heads} heads, got {mixer.groups}")
    given = raw.get(limits) or _ANY_TIME[0]
    if not isinstance(given, list | tuple) or list(given) not in _ANY_TIME:
        raise ModelError(f"config.json: {limits} must be 0 to infinity, got {shown(given)}")
    return mixer
