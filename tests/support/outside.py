"""What the tests take over from the shell that starts them. A setting of its owner's would change what a test
sees, and might lead a test to the Redis of a real fleet.

What the product reads is dropped, but for `KEPT`. The tests' own switches stay, as does what says where a machine
has its programs, its files and its mirrors."""

from __future__ import annotations

import os
import re

from petiole.tasks.settings import IN_FILES, PREFIX, Settings

SETTINGS = {PREFIX + name.upper() for name in (*Settings.model_fields, *(f"{name}_file" for name in IN_FILES))} - {
    "PETIOLE_CUDA_GRAPHS"
}
OTHERS = re.compile("CELERY_.*|OTEL_.*|DJANGO_SETTINGS_MODULE|COLUMNS|LINES|NO_COLOR|FORCE_COLOR|PYTHONWARNINGS")
"""Of the libraries that tests look at the outcome of."""
KEPT = {"CC", "CUDA_VISIBLE_DEVICES", "PYTHONPATH", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"}
HERE = ("localhost", "127.0.0.1", "::1")


def dropped(name: str) -> bool:
    return name in SETTINGS or OTHERS.fullmatch(name) is not None


def shut_out() -> None:
    """Drop from the environment what is no business of the tests'. No proxy stands before this machine."""
    for name in [*os.environ]:
        if dropped(name):
            del os.environ[name]
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(dict.fromkeys([*os.environ.get(name, "").split(","), *HERE])).strip(",")
