"""Agents that are processes of their own, with workers by hand, without jax.

ByHand: the agent of one rank, and a head that the test controls. RemoteJob: a whole job, whose launcher starts the
agents by a shell script instead of mpirun.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from harness import TIME_LIMIT, read_events

from jaxrun.node.agent.guard import find_marked, job_marker
from jaxrun.node.channel.connection import AGENT_TO_HEAD, Connection
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.host_addresses import HostAddress
from jaxrun.node.channel.listener import listen_on_tcp
from jaxrun.protocol import auth
from jaxrun.protocol.addresses import format_addresses
from jaxrun.protocol.agent_messages import (
    AgentReport,
    JobInfo,
    OutputChunk,
    Shutdown,
    StartWorker,
    WorkerSpawned,
)
from jaxrun.protocol.env import AgentEnv
from jaxrun.protocol.names import CONTROL_FD
from jaxrun.protocol.settings import WorkerSettings
from jaxrun.protocol.worker_messages import (
    CoordinatorReady,
    DeviceReport,
    Hello,
    Run,
    StartCoordinator,
)
from jaxrun.records.rundir.rundir import VERDICT_FILE

HERE = Path(__file__).parent
FAKE_RUNTIME = f"""
import os, sys
sys.path.insert(0, {str(HERE)!r})
import worker_by_hand
env = worker_by_hand.WorkerEnv.from_env(os.environ)
worker_by_hand.live(env, sys.argv[2 + env.rank])
"""
SLEEPS = "run(); time.sleep(600)"
READY = "run(); print('ready', flush=True); time.sleep(600)"
CLEAN = "run(); done()"


def make_fake_runtime(directory):
    """Make a jaxrun_runtime of workers by hand; returns the PYTHONPATH that has it."""
    fake = directory / "fake" / "jaxrun_runtime"
    fake.mkdir(parents=True)
    (fake / "__init__.py").touch()
    (fake / "__main__.py").write_text(FAKE_RUNTIME)
    return str(fake.parent)


class ByHand:
    """A head that the test controls, and the agent of one rank, or of those that `ranks` names."""

    def __init__(self, directory, job_id, *, rank=0, size=1, run_dir="", timeout=60.0, token=None, ranks="", **env):
        self.rank, self.size, self.job_id = rank, size, job_id
        self.token = auth.new_token()
        loopback = HostAddress("lo", "127.0.0.1")
        self.listener, self.loop = listen_on_tcp([loopback], self.token, everywhere=False), EventLoop()
        self.listener.attach(self.loop, 0, self._on_peer)
        self.job_info = JobInfo(job_id, run_dir, ("cpu",))
        agent_env = AgentEnv(
            job_id, format_addresses(self.listener.addresses), token or self.token, "open-mpi", timeout
        )
        of_engine = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}
        words = [ranks, str(size)] if ranks else []
        path = {"PYTHONPATH": make_fake_runtime(directory)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxrun.node.agent", *words],
            env={**os.environ, **agent_env.to_env(), **of_engine, **path, **env},
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.line = None
        self.received = []
        self._examined = 0  # how many of them

    def _on_peer(self, peer):
        assert peer.rank == self.rank
        self.line = Connection(peer.connection, AGENT_TO_HEAD, peer.tags)
        self.line.send(self.job_info)

    def admit(self):
        """Let the agent in; returns its report."""
        deadline = time.monotonic() + TIME_LIMIT
        while self.line is None:
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.poll()
            self.loop.run_once(0.02)
        return self.expect(AgentReport)

    def begin(self, *codes, **changes):
        """Let it in, and have it start its worker by hand."""
        report = self.admit()
        self.send(self.order(*codes, **changes))
        return report

    def order(self, *codes, **changes):
        values = {
            "rank": self.rank,
            "size": self.size,
            "local_rank": 0,
            "local_size": 1,
            "host": "h1",
            "program": ("p", *([""] * self.rank), *codes),
            "environment": {"COLOUR": "blue sky"},
            "local_device_ids": (),
            "run_dir": "",
            "log_dir": "",
            "show_output": True,
            "settings": WorkerSettings(init_timeout=60.0, compile="each"),
        }
        return StartWorker(**{**values, **changes})

    def run(self, code, **changes):
        """Everything up to Run; returns the worker's process id."""
        self.begin(code, **changes)
        pid = self.expect(WorkerSpawned).pid
        self.expect(Hello)
        self.send(StartCoordinator("127.0.0.1"))
        self.expect(CoordinatorReady)
        self.expect(DeviceReport)
        self.send(Run())
        return pid

    def send(self, *messages):
        for message in messages:
            self.line.send(message)

    def expect(self, kind):
        """The next message of this kind; all are kept in `received`."""
        deadline = time.monotonic() + TIME_LIMIT
        while True:
            while self._examined < len(self.received):
                self._examined += 1
                if isinstance(self.received[self._examined - 1], kind):
                    return self.received[self._examined - 1]
            assert not self.line.lost_reason and time.monotonic() < deadline, (
                kind,
                self.received[-5:],
                self.line.lost_reason,
            )
            self.receive()
            time.sleep(0.002)

    def receive(self):
        arrived = self.line.receive()
        self.received += arrived
        return arrived

    def until(self, condition):
        deadline = time.monotonic() + TIME_LIMIT
        while not condition():
            assert time.monotonic() < deadline, self.received
            self.receive()
            time.sleep(0.002)

    def output(self, stream="out"):
        return b"".join(one.data for one in self.received if isinstance(one, OutputChunk) and one.stream == stream)

    def end(self):
        """(its exit status, its stderr)"""
        _, err = self.process.communicate(timeout=TIME_LIMIT)
        return self.process.returncode, err

    def shut_down(self, status=0):
        self.send(Shutdown(status))
        return self.end()

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()
        if self.line is not None:
            self.line.close()
        self.listener.close()

    def close(self):
        self.kill()
        wait_until_gone(self.job_id)


def wait_until(condition):
    """Until it holds; returns what it returned."""
    deadline = time.monotonic() + TIME_LIMIT
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def wait_until_gone(job_id):
    """Until no process of the job is left."""
    wait_until(lambda: not list(find_marked(job_marker(job_id))))


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


LAUNCHER = """
import json, os, sys
from pathlib import Path
from jaxrun.spec.backends.remote_plan import plan_remote
from jaxrun.spec.job.fault_spec import parse_faults
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand
from jaxrun.controller.supervisor.run import run

script, options, *codes = sys.argv[1:]
options = json.loads(options)
if "run_dir" in options:
    options["run_dir"] = Path(options["run_dir"])
if "chaos" in options:
    options["chaos"] = parse_faults(options["chaos"])
size = len(codes)
command = LaunchCommand("open-mpi", "a script", ("/bin/sh", script, str(size)))
job = Job(program=("p", *codes), processes=size, backend="mpirun", platform="cpu", **options)
plan = plan_remote(job, os.environ, os.urandom(16).hex(), command, ["?"] * size)
sys.exit(run(plan, dict(os.environ)))
"""
AGENTS = f"""
rank=0
while [ $rank -lt $1 ]; do
  OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=$1 {sys.executable} -m jaxrun.node.agent &
  rank=$((rank + 1))
done
wait
"""


class RemoteJob:
    """A job with a worker by hand for each of `codes`, whose agents `script` starts."""

    def __init__(self, directory, codes, script=AGENTS, control=None, **options):
        environ = {**os.environ, "PYTHONPATH": make_fake_runtime(directory)}
        if control:
            environ[CONTROL_FD] = str(control.fileno())
        (directory / "launch").write_text(script)
        self.run_dir = directory / "run"
        options = {"grace": 0.5, "init_timeout": 60.0, "run_dir": str(self.run_dir), **options}
        if options.get("no_run_dir"):
            del options["run_dir"]
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(directory / "launch"), json.dumps(options), *codes],
            env=environ,
            pass_fds=[control.fileno()] if control else [],
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    @property
    def job_id(self):
        return json.loads((self.run_dir / "job.json").read_text())["job_id"]

    def events(self, name=""):
        with contextlib.suppress(FileNotFoundError):
            return read_events(self.run_dir, name)
        return []

    def until(self, condition):
        deadline = time.monotonic() + TIME_LIMIT
        while not (found := condition()):
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.communicate()
            time.sleep(0.01)
        return found

    def until_output(self, text, count=1):
        self.until(lambda: sum(text in path.read_text() for path in self.run_dir.glob("rank-*.out")) >= count)

    def agents(self):
        """Process ids by rank, of those that have started their worker."""
        parents = {}
        for event in self.events("WorkerSpawned"):
            stat = Path(f"/proc/{event['pid']}/stat").read_text()
            parents[event["rank"]] = int(stat.rpartition(")")[2].split()[1])
        return parents

    def processes(self):
        return list(find_marked(job_marker(self.job_id)))

    def end(self):
        """Its exit status; nothing of the job is left."""
        self.out, self.err = self.process.communicate(timeout=TIME_LIMIT)
        if self.run_dir.exists():
            assert self.processes() == [], self.err
        return self.process.returncode

    def verdict(self):
        return json.loads((self.run_dir / VERDICT_FILE).read_text())

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@contextlib.contextmanager
def remote_jobs(directory):
    """Yields start(CODE, …), which starts a job with a worker by hand for each CODE."""
    with contextlib.ExitStack() as stack:

        def start(*codes, **options):
            job = RemoteJob(directory, codes, **options)
            stack.callback(job.close)
            return job

        yield start
