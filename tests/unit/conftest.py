"""`simulate`: a head with a clock and a kernel of its own. `plans`: the plans that the command line would run.

Puts this directory on the path, for the helpers in it. A test in this directory that starts a process or a thread, or
listens, fails where it does so.
"""

import sys
from collections.abc import Generator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import examples  # noqa: F401 - loads the settings for hypothesis
from simulation import Simulation

_REFUSED = {
    "os.exec": "replaces the process",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.posix_spawn": "starts a process",
    "os.system": "starts a process",
    "subprocess.Popen": "starts a process",
    "socket.bind": "listens",
    "_thread.start_joinable_thread": "starts a thread",  # Python 3.13
    "_thread.start_new_thread": "starts a thread",
}
_is_refusing = False


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if _is_refusing and event in _REFUSED:
        pytest.fail(f"a test in tests/unit {_REFUSED[event]} ({event}): make it pure, or move it to tests/process")


sys.addaudithook(_refuse)


def _refusing() -> Generator[None, object, object]:
    global _is_refusing
    _is_refusing = True
    try:
        return (yield)
    finally:
        _is_refusing = False


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from _refusing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from _refusing())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    return (yield from _refusing())


@pytest.fixture(scope="session")
def simulate():
    """Makes a Simulation."""
    return Simulation


@pytest.fixture
def plans(monkeypatch):
    """Collects the plans that the command line would run; the job's exit code is then 42."""
    collected = []
    run = "jaxrun.controller.supervisor.run_job.run"
    monkeypatch.setattr(run, lambda plan, environ, prestarted: collected.append(plan) or 42)
    return collected
