"""`simulate`: a head with a clock and a kernel of its own. `plans`: those of the command line.

Puts this directory on the path, for the helpers in it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))

from simulation import Simulation

# Other tests run beside these: how long one example takes says nothing. The suite has the same examples each time, and
# JAXRUN_EXAMPLES=5000 looks for others.
_EXAMPLES = os.environ.get("JAXRUN_EXAMPLES")
settings.register_profile(
    "jaxrun",
    max_examples=int(_EXAMPLES or 50),
    derandomize=not _EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("jaxrun")


@pytest.fixture(scope="session")
def simulate():
    """Makes a Simulation."""
    return Simulation


@pytest.fixture
def plans(monkeypatch):
    """Collects the plans that the command line would run; the job's exit code is then 42."""
    collected = []
    run = "jaxrun.controller.supervisor.run_job.run"
    monkeypatch.setattr(run, lambda plan, environ, early_server: collected.append(plan) or 42)
    return collected


@pytest.fixture(scope="session")
def run_python():
    """run_python(CODE, *ARGUMENTS) runs it in an interpreter of its own; returns stdout and stderr."""

    def run(code, *arguments):
        env = {"PYTHONPATH": str(Path(__file__).parents[2] / "launcher"), "PATH": os.environ["PATH"]}
        done = subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run
