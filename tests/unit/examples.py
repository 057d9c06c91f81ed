"""Hypothesis with the settings of this suite: `from examples import given`.

The suite has the same examples each time; JAXRUN_EXAMPLES=5000 looks for others. Other tests run beside these, so how
long one example takes says nothing.
"""

import os

from hypothesis import HealthCheck, given, settings

__all__ = ["given"]

_EXAMPLES = os.environ.get("JAXRUN_EXAMPLES")
settings.register_profile(
    "jaxrun",
    max_examples=int(_EXAMPLES or 50),
    derandomize=not _EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("jaxrun")
