"""`python3 deploy/systemd/render.py MODELS.toml FOLDER` writes the units of one machine: a worker for each model,
the gateway, the exporter, and `petiole.target`, which starts and stops all of them. It needs Python 3.11 alone."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KEYS = {"user", "environment", "drain_seconds", "gateway", "metrics", "settings", "models"}
OF_A_PART = {"settings"}
OF_A_MODEL = {"model", "queue", "card", "cores", "memory", "settings"}
CONFINED = """\
NoNewPrivileges=true
PrivateTmp=true
ProtectSystem=strict
ProtectHome=true
CacheDirectory=petiole
RuntimeDirectory={name}
CapabilityBoundingSet=
RestrictSUIDSGID=true"""
UNIT = """\
[Unit]
Description=Petiole: {about}
PartOf=petiole.target
Wants=network-online.target
After=network-online.target redis.service

[Service]
User={user}
{environment}
ExecStart={command}
Restart=always
RestartSec=2
# A setting or a checkpoint is wrong: another try would not help.
RestartPreventExitStatus=2
KillMode=mixed
TimeoutStopSec={stop_s}
{limits}
{confined}

[Install]
WantedBy=petiole.target
"""
TARGET = """\
[Unit]
Description=Petiole: all parts on this machine
Wants={parts}

[Install]
WantedBy=multi-user.target
"""


class WrongError(Exception):
    """What is wrong with the file."""


def units(told: Mapping[str, Any]) -> dict[str, str]:
    """By name, the units of this machine. Raises `WrongError`."""
    refuse_unknown("", told, KEYS)
    models = told.get("models", {})
    drain_s, common = int(told.get("drain_seconds", 20)), dict(told.get("settings", {}))
    found = {}
    for name, one in models.items():
        if not re.fullmatch(r"[a-z0-9-]{1,32}", name):
            raise WrongError(f"models.{name}: must be 1 to 32 small letters, digits and hyphens")
        refuse_unknown(f"models.{name}.", one, OF_A_MODEL)
        for key in ("model", "queue"):
            if not isinstance(one.get(key), str) or not one[key]:
                raise WrongError(f"models.{name}.{key}: must be text, got {one.get(key)!r}")
        unit, card = f"petiole-worker-{name}", one.get("card")
        settings = {
            "PETIOLE_MODEL": one["model"],
            "PETIOLE_QUEUE": one["queue"],
            "PETIOLE_DRAIN_SECONDS": drain_s,
            "PETIOLE_DEVICE": "cpu" if card is None else "cuda",
            "PETIOLE_HEARTBEAT_FILE": f"/run/{unit}/alive",
            **({} if card is None else {"CUDA_VISIBLE_DEVICES": card}),
            **common,
            **one.get("settings", {}),
        }
        limits = [f"CPUAffinity={one['cores']}"] if "cores" in one else []
        limits += [f"MemoryMax={one['memory']}"] if "memory" in one else []
        command = f"celery -A petiole worker --loglevel INFO -n {name}@%%h"
        found[f"{unit}.service"] = unit_of(
            told, unit, f"a worker of {one['model']}", command, settings, drain_s, limits
        )
    for part, command in (("gateway", "petiole serve"), ("metrics", "petiole metrics")):
        asked = told.get(part, False)
        if not isinstance(asked, bool | Mapping):
            raise WrongError(f"{part}: must be true, false or a table, got {asked!r}")
        own = asked if isinstance(asked, Mapping) else {}
        refuse_unknown(f"{part}.", own, OF_A_PART)
        if asked is not False:
            settings = {**common, **own.get("settings", {})}
            found[f"petiole-{part}.service"] = unit_of(told, f"petiole-{part}", part, command, settings, drain_s)
    return {"petiole.target": TARGET.format(parts=" ".join(found)), **found}


def unit_of(
    told: Mapping[str, Any],
    name: str,
    about: str,
    command: str,
    settings: Mapping[str, Any],
    drain_s: int,
    limits: list[str] | None = None,
) -> str:
    if twice := sorted(settings.keys() & {key.removesuffix("_FILE") for key in settings if key.endswith("_FILE")}):
        raise WrongError(f"settings of {name}: {twice[0]} must not be set beside {twice[0]}_FILE")
    home = str(told.get("environment", "/srv/petiole"))
    known = {"HOME": "/var/cache/petiole", "HF_HOME": "/var/cache/petiole/huggingface", **settings}
    return UNIT.format(
        about=about,
        user=told.get("user", "petiole"),
        environment="\n".join(f"Environment={quoted(f'{key}={value}')}" for key, value in known.items()),
        command=f"{home}/bin/{command}",
        stop_s=drain_s + 20,
        limits="\n".join(limits or []),
        confined=CONFINED.format(name=name),
    ).replace("\n\n\n", "\n\n")


def quoted(text: str) -> str:
    if "\n" in text:
        raise WrongError(f"settings: must be of one line, got {text!r}")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def refuse_unknown(where: str, told: Mapping[str, Any], known: set[str]) -> None:
    for key in sorted(told.keys() - known):
        raise WrongError(f"{where}{key}: must be one of {', '.join(sorted(known))}")


def main(file: str, folder: str) -> int:
    try:
        found = units(tomllib.loads(Path(file).read_text()))
    except (WrongError, tomllib.TOMLDecodeError, OSError) as error:
        print(f"{file}: {error}", file=sys.stderr)
        return 2
    for name, text in found.items():
        (Path(folder) / name).write_text(text)
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]) if len(sys.argv) == 3 else print(__doc__) or 2)
