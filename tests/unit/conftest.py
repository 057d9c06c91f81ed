"""`simulate`: a head with a clock and a kernel of its own. Puts this directory on the path, for the helpers in it."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from simulation import Simulation

# Other tests run beside these: how long one example takes says nothing.
settings.register_profile("beside others", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("beside others")


@pytest.fixture(scope="session")
def simulate():
    """Makes a Simulation."""
    return Simulation
