"""What holds for all tests: no property fails because a machine is slow, and a failure says how to repeat it.

Continuous integration (`CI` is set) tries the same examples each time; everyone else tries new ones.
"""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "any machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    derandomize="CI" in os.environ,
)
settings.load_profile("any machine")
