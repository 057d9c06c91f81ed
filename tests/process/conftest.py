"""Jobs of real processes: `run_job`, of workers by hand without jax; `start` and `run_cases`, of real workers.

Puts this directory and that of the unit tests on the path, for the helpers in them.
"""

import contextlib
import itertools
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import jaxrun
from jaxrun.clock import Clock
from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.head import Head
from jaxrun.controller.head.head_state import TimeLimits
from jaxrun.controller.supervisor.attempts import AttemptContext
from jaxrun.controller.supervisor.executor import Dispatcher, Executor
from jaxrun.controller.supervisor.local import LocalLink, setup_of
from jaxrun.controller.supervisor.terminal import Terminal
from jaxrun.node.agent.agent import Agent
from jaxrun.node.agent.guard import find_marked, job_marker
from jaxrun.node.agent.process_tree import become_subreaper
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.node.agent.worker_group import WorkerGroup
from jaxrun.node.forkserver import client
from jaxrun.protocol.env import attempt_nonce
from jaxrun.records.output.output import Output
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import Plan, Worker

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "unit")]

from agent_by_hand import ByHand  # noqa: E402
from simulation import Simulation  # noqa: E402
from worker_harness import worker_harnesses  # noqa: E402

LAUNCHER = str(Path(jaxrun.__file__).parents[1])
SIGNALS = (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1)


@pytest.fixture(scope="session")
def simulate():
    """Makes a Simulation."""
    return Simulation


class RecordedEvents(list):
    """RunFiles of a Dispatcher that keeps the messages."""

    def record(self, event):
        self.append(event.message)

    def write_text(self, name, text):
        self.append((name, text))

    def take_requests(self):
        return []

    def write_answer(self, number, answer):
        self.append((number, answer))

    def names(self, rank):
        return [type(message).__name__ for message in self if getattr(message, "rank", None) == rank]


def _end_processes(job_id):
    """Kill what is left of a job, by its mark, as other tests have children of this process, too; returns the pids."""
    killed = set()
    while left := [pid for pid in find_marked(job_marker(job_id)) if pid != os.getpid()]:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        for pid in killed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.002)
    return sorted(killed)


class LocalJob:
    """A job of workers by hand (worker_by_hand.py), from its start until nothing is left of it."""

    def __init__(self, directory, argv, size, *, fork=False, grace=0.3, init=60.0, job=None):
        self.events = RecordedEvents()
        plan = Plan(
            job=Job(program=("p",), platform="cpu", init_timeout=init),
            job_id=os.urandom(16).hex(),
            workers=tuple(Worker(rank, rank, size, "h1") for rank in range(size)),
            argv=tuple(map(str, argv)),
            set_env={},
            unset_env=(),
            local_devices=None,
            device_names=(),
            fork=fork,
        )
        self.directory = directory
        self._screen = directory / "screen"
        began = time.time()
        setup = setup_of(plan, os.environ)
        server = None
        if fork:
            server = client.start(plan.argv[:1], setup.environ)
            assert server.configure(client.program_of(plan.argv), setup.environ)
        expected = Expected(size, attempt_nonce(plan.job_id, 1), "cpu", None)
        head = Head(dict.fromkeys(range(size), "h1"), expected, TimeLimits(init, job, grace, grace), "127.0.0.1", began)
        with SignalPipe(SIGNALS) as signals, self._screen.open("wb") as screen:
            fd = screen.fileno()
            output = Output(size, log_dir=directory, stdout_fd=fd, stderr_fd=fd)
            clock = Clock()
            guard = SimpleNamespace(attach=lambda *words: None)
            dispatcher = Dispatcher(head, self.events, clock)
            executor = Executor(
                AttemptContext(plan, None, dispatcher, output, signals, clock, None, guard, Terminal(output))
            )
            agent = Agent(executor.loop, WorkerGroup(setup, server), output, executor.receive, clock)
            try:
                self.ending = executor.run(LocalLink(agent, executor))
            finally:
                self.seconds = time.time() - began
                self.left_over = _end_processes(plan.job_id)
                agent.close()
                executor.loop.close()
                output.close()

    @property
    def statuses(self):
        return [end.status for end in self.ending.workers]

    @property
    def screen(self):
        return self._screen.read_text()

    def log(self, rank, stream="out"):
        return (self.directory / f"rank-{rank:04d}.{stream}").read_bytes()


@pytest.fixture
def run_job(tmp_path):
    """run_job(CODE, …) → a LocalJob with one worker by hand per CODE; run_job(argv=…, size=…) of any program."""
    become_subreaper()

    def run(*codes, argv=None, size=None, fork="", **options):
        if fork:
            script = HERE / "fork_by_hand.py"
            python = tmp_path / "python"
            python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {script} "$@"\n')
            python.chmod(0o755)
            argv = [python, "-m", "jaxrun_runtime", LAUNCHER, fork, *codes]
        elif argv is None:
            argv = [sys.executable, "-IS", HERE / "worker_by_hand.py", LAUNCHER, *codes]
        if fork == "fork":  # many processes end at once, which may take its time
            options.setdefault("grace", 20.0)
        directory = Path(tempfile.mkdtemp(dir=tmp_path))
        return LocalJob(directory, argv, size or len(codes), fork=bool(fork), **options)

    return run


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
