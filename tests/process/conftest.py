"""Real processes: `by_hand`, an agent with a worker by hand; `start` and `run_cases`, workers of JAX.

Puts this directory and that of the unit tests on the path, for the helpers in them.
"""

import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit")]

from agent_by_hand import ByHand  # noqa: E402
from simulation import Simulation  # noqa: E402
from worker_harness import worker_harnesses  # noqa: E402


@pytest.fixture(scope="session")
def simulate():
    """Makes a Simulation."""
    return Simulation


@pytest.fixture
def job_id():
    return os.urandom(16).hex()


@pytest.fixture
def by_hand(tmp_path, job_id):
    """by_hand(…) makes a ByHand; after the test nothing of it is left."""
    with contextlib.ExitStack() as stack:

        def start(**more):
            head = ByHand(tmp_path, job_id, **more)
            stack.callback(head.close)
            return head

        yield start


@pytest.fixture
def start(tmp_path):
    """start(argv, size, …) → a WorkerHarness of workers."""
    with worker_harnesses(tmp_path) as begin:
        yield begin


@pytest.fixture(scope="module")
def run_cases(tmp_path_factory):
    """run_cases({name: source}) → {name: HarnessWorker}: each source is the program of one rank of a single job.

    Rank 0 has no case: its program is `rank_0`, and it leaves when all others have ended; it comes as "rank 0". Each
    runs in a directory of its own, `worker.folder`.
    """
    folder = tmp_path_factory.mktemp("cases")
    with worker_harnesses(folder) as begin:

        def run(cases, on_failed=None, rank_0=""):
            for name, source in cases.items():
                (folder / name).mkdir()
                (folder / name / "program.py").write_text(source)
            names = ["", *cases]
            (folder / "program.py").write_text(_CASES.format(names=names, folder=str(folder), rank_0=rank_0))
            harness = begin([folder / "program.py"], len(names))
            workers = dict(zip(cases, harness.workers[1:], strict=True))
            harness.workers[0].folder = folder
            for name, worker in workers.items():
                worker.folder = folder / name
            harness.run(kill_on_failure=False, on_failed=on_failed)
            return {**workers, "rank 0": harness.workers[0]}

        yield run


_CASES = """
import os, sys
import jaxrun_runtime as jr
name = {names}[jr.rank]
if not name:
    exec({rank_0!r})
else:
    os.chdir(os.path.join({folder!r}, name))
    exec(compile(open("program.py").read(), name, "exec"))
"""


@pytest.fixture(scope="session")
def run_python():
    """run_python(CODE, *ARGUMENTS) runs it in an interpreter of its own; returns stdout and stderr."""

    def run(code, *arguments):
        env = {"PYTHONPATH": str(Path(__file__).parents[2] / "launcher"), "PATH": os.environ["PATH"]}
        done = subprocess.run([sys.executable, "-c", code, *arguments], env=env, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run


@pytest.fixture(scope="module")
def patient_gangs():
    """Ranks of gangs may take as long as they need to end a call that is interrupted or has failed elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("INTERRUPT_TIMEOUT_S", "FAILURE_GRACE_S"):
            patch.setattr(f"jaxrun.frontends.gang.call.{name}", 60.0)
        yield


@pytest.fixture
def script(tmp_path):
    """script(text) → the path of a program with that text."""
    numbers = itertools.count()

    def write(text, name=None):
        path = tmp_path / (name or f"program{next(numbers)}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write
