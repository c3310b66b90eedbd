"""What holds for all tests: no property fails because a machine is slow, and a failure says how to repeat it.

Continuous integration (`CI` is set) tries the same examples each time; everyone else tries new ones.

Without CUDA's driver Triton interprets the kernels. It settles that when it is imported, by transformers perhaps.
"""

import ctypes
import os
from contextlib import suppress

from hypothesis import HealthCheck, settings

os.environ.setdefault("TRITON_INTERPRET", "1")
with suppress(OSError):
    ctypes.CDLL("libcuda.so.1")
    del os.environ["TRITON_INTERPRET"]

settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize="CI" in os.environ,
)
settings.load_profile("any machine")
