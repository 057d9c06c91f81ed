"""`simulate`: a head with a clock and a kernel of its own. Puts this directory on the path, for the helpers in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from simulation import Simulation


@pytest.fixture(scope="session")
def simulate():
    """Makes a Simulation."""
    return Simulation
