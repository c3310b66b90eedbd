"""Switches: one spelling for all, and a value that none has ends a start at once."""

from __future__ import annotations

import pytest

from petiole.contract.errors import InvalidRequest
from petiole.contract.settings.engine import SWITCHES, EngineConfig, switch


@pytest.mark.parametrize("name", SWITCHES)
def test_each_has_a_default_and_common_spellings(name, monkeypatch):
    variable = f"PETIOLE_{name.upper()}"
    monkeypatch.delenv(variable, raising=False)
    assert switch(name) == SWITCHES[name].values[0]
    monkeypatch.setenv(variable, "")
    assert switch(name) == SWITCHES[name].values[0]
    for value in SWITCHES[name].values:
        monkeypatch.setenv(variable, value.upper())
        assert switch(name) == value
    if "off" in SWITCHES[name].values:
        for spelling, value in (("0", "off"), ("No", "off"), ("false", "off"), ("1", "on"), ("yes", "on")):
            monkeypatch.setenv(variable, spelling)
            assert switch(name) == value


@pytest.mark.parametrize("name", SWITCHES)
def test_another_value_is_named_before_anything_is_loaded(name, monkeypatch):
    monkeypatch.setenv(f"PETIOLE_{name.upper()}", "nope")
    with pytest.raises(InvalidRequest) as refused:
        EngineConfig()
    assert (refused.value.field, refused.value.value) == (name, "nope")
    assert refused.value.limit == f"must be one of {', '.join(SWITCHES[name].values)}"
