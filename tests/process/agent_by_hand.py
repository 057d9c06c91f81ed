"""Agents that are processes of their own, with workers by hand, without jax.

ByHand: the agent of one rank, and a head that the test controls. remote_jobs: whole jobs, whose launcher starts the
agents by a shell script instead of mpirun.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from harness import TIME_LIMIT, started, wait_until, wait_until_gone, write_fake_runtime
from msgspec.structs import fields, replace

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
    StartWorkers,
    WorkerSpawned,
)
from jaxrun.protocol.env import AgentEnv, WorkerEnv
from jaxrun.protocol.names import CONTROL_FD
from jaxrun.protocol.worker_messages import CoordinatorReady, DeviceReport, Hello, Run, StartCoordinator

SLEEPS = "run(); time.sleep(600)"
READY = "run(); print('ready', flush=True); time.sleep(600)"
CLEAN = "run(); done()"
_AGENT = "import sys; from jaxrun.node.agent.__main__ import main; sys.exit(main())"


class ByHand:
    """A head that the test controls, and the agent of one rank, or of those that `ranks` names.

    `changes` are statements that the agent's process executes first.
    """

    def __init__(
        self,
        directory,
        job_id,
        *,
        rank=0,
        size=1,
        run_dir="",
        timeout=60.0,
        token=None,
        ranks="",
        changes="",
        **env,
    ):
        self.rank, self.size, self.job_id = rank, size, job_id
        self.token = auth.new_token()
        loopback = HostAddress("lo", "127.0.0.1")
        self.listener, self.loop = listen_on_tcp([loopback], self.token, everywhere=False), EventLoop()
        self.acceptor = self.listener.accept(self.loop, 0, self._on_peer)
        self.job_info = JobInfo(job_id, run_dir, ("cpu",))
        agent_env = AgentEnv(
            job_id, format_addresses(self.listener.addresses), token or self.token, "open-mpi", timeout
        )
        of_engine = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}
        words = [ranks, str(size)] if ranks else []
        self.process = subprocess.Popen(
            [sys.executable, *(("-c", f"{changes}\n{_AGENT}") if changes else ("-m", "jaxrun.node.agent")), *words],
            env={**os.environ, **agent_env.to_env(), **of_engine, **write_fake_runtime(directory), **env},
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.line = None
        self.received = []
        self._examined = 0  # how many of them

    def _on_peer(self, peer):
        assert peer.number == self.rank
        self.line = Connection(peer.connection, AGENT_TO_HEAD, peer.tags)
        self.line.send(self.job_info)

    def admit(self):
        """Let the agent in; returns its report."""
        self.connect()
        return self.expect(AgentReport)

    def connect(self):
        deadline = time.monotonic() + TIME_LIMIT
        while self.line is None:
            assert time.monotonic() < deadline and self.process.poll() is None, self.process.poll()
            self.loop.run_once(0.02)

    def begin(self, *codes, **changes):
        """Let it in, and have it start its worker by hand."""
        report = self.admit()
        self.send(self.order(*codes, **changes))
        return report

    def order(self, *codes, **changes):
        """The order to start the worker; `changes` are fields of it, or of what the worker is told."""
        told = {"init_timeout": 60.0, "compile": "each"}
        told |= {field.name: changes.pop(field.name) for field in fields(WorkerEnv) if field.name in changes}
        worker = replace(WorkerEnv(self.job_id, self.rank, self.size, 0, 1, "h1"), **told)
        program = ("p", *([""] * self.rank), *codes)
        start = StartWorker(**{"worker": worker, "program": program, "environment": {"COLOUR": "blue sky"}} | changes)
        return StartWorkers((start,))

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
        def has_come():
            self.receive()
            return condition()

        wait_until(has_come, "what the agent should have sent")

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
        self.acceptor.close()
        self.listener.close()

    def close(self):
        self.kill()
        wait_until_gone(self.job_id)


LAUNCHER = """
import json, os, sys
from pathlib import Path
from jaxrun.spec.backends.remote_plan import plan_remote
from jaxrun.spec.engines.open_mpi import OPEN_MPI
from jaxrun.spec.job.fault_spec import parse_faults
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand
from jaxrun.controller.supervisor.run_job import run

script, options, *codes = sys.argv[1:]
options = json.loads(options)
if "run_dir" in options:
    options["run_dir"] = Path(options["run_dir"])
if "chaos" in options:
    options["chaos"] = parse_faults(options["chaos"])
size = len(codes)
command = LaunchCommand(OPEN_MPI, "a script", ("/bin/sh", script, str(size)))
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


@contextlib.contextmanager
def remote_jobs(directory):
    """Yields start(CODE, …), which starts a job with a worker by hand for each CODE, whose agents `script` starts."""
    with contextlib.ExitStack() as stack:

        def start(*codes, script=AGENTS, control=None, popen=None, **options):
            env = write_fake_runtime(directory)
            (directory / "launch").write_text(script)
            options = {"grace": 0.5, "init_timeout": 60.0, **options}
            if not options.get("no_run_dir"):
                options["run_dir"] = str(directory / "run")
            more = dict(popen or {})
            if control:
                env[CONTROL_FD] = str(control.fileno())
                more["pass_fds"] = [control.fileno()]
            command = [sys.executable, "-c", LAUNCHER, str(directory / "launch"), json.dumps(options)]
            return stack.enter_context(started(directory, *codes, command=command, env=env, **more))

        yield start


def agents(job):
    """Process ids by rank, of those that have started their worker."""
    parents = {}
    for event in job.events("WorkerSpawned"):
        stat = Path(f"/proc/{event['pid']}/stat").read_text()
        parents[event["rank"]] = int(stat.rpartition(")")[2].split()[1])
    return parents
