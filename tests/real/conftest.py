"""These tests run where they are asked for."""

from __future__ import annotations

from tests.real.models import WANTED

collect_ignore_glob = [] if WANTED else ["test_*.py"]
