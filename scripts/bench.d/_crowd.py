"""A crowd of simulated agents in one process, with real sockets and no jax. It replaces an mpirun.

Each agent proves itself, reports, sends the messages of a worker up to Run, and exits when the head says so. One of
them fails once all run. The head starts `python _crowd.py SIZE CULPRIT RESULT`; the measurements are written to RESULT.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jaxrun.protocol import addresses, auth
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentReport,
    ClockProbe,
    ClockReply,
    HeadToAgent,
    JobInfo,
    Shutdown,
    SignalWorker,
    StartWorker,
    StartWorkers,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.codec import MessageDecoder, encode, message_types
from jaxrun.protocol.env import AgentEnv, attempt_nonce
from jaxrun.protocol.message_tags import digest
from jaxrun.protocol.names import VERSION
from jaxrun.protocol.probe_messages import Machine
from jaxrun.protocol.worker_messages import (
    CoordinatorReady,
    DeviceReport,
    Failed,
    Hello,
    Join,
    Run,
    StartCoordinator,
    WorkerStage,
)
from jaxrun.spec.backends import remote_plan
from jaxrun.spec.engines.by_hand import BY_HAND
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand, Plan

RANKS_PER_HOST = 8
CORES_PER_HOST = 64
_HEARD = message_types(HeadToAgent)
_PIECE = 2**16
_PATIENCE = 60.0  # seconds without a word from the head
_COORDINATOR = "127.0.0.1:4711"


@dataclass(frozen=True)
class Look:
    """The head's process at one moment: processor seconds so far, bytes in memory, open files."""

    cpu: float
    memory: int
    files: int


@dataclass
class Result:
    """The crowd's measurements.

    at:              when the last agent made each step, in seconds after the first connection
    sent, received:  bytes after the handshake, from the head's point of view
    """

    size: int
    at: dict[str, float] = field(default_factory=dict)
    looks: dict[str, Look] = field(default_factory=dict)
    sent: int = 0
    received: int = 0


def plan(size: int, culprit: int, directory: Path) -> Plan:
    """A job whose launch command starts a crowd, which leaves `crowd.json` beside the run directory."""
    job = Job(
        program=("simulated.py",),
        backend="mpirun",
        platform="cpu",
        devices_per_process=1,
        interface="127.0.0.1",
        run_dir=directory / "run",
    )
    argv = (sys.executable, __file__, str(size), str(culprit), str(directory / "crowd.json"))
    hosts = [_host(rank) for rank in range(size)]
    return remote_plan.plan_remote(
        job, os.environ, secrets.token_hex(16), LaunchCommand(BY_HAND, "the crowd", argv), hosts
    )


class Agent:
    """One simulated agent. `hear` is called when its socket is readable."""

    def __init__(self, rank: int, crowd: Crowd) -> None:
        self.rank = rank
        self.socket = socket.socket()
        self._crowd = crowd
        self._handshake = auth.ClientHandshake(self.socket, crowd.env.token, rank)
        self._codec: MessageDecoder[object] | None = None  # once the handshake is over
        self._ended = False

    def connect(self, address: addresses.Address) -> None:
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect_ex((address.ip, address.port))

    def hear(self) -> None:
        if self._codec is None:
            if self._handshake.advance():
                assert self._handshake.tags is not None
                self._codec = MessageDecoder(_HEARD, tags=self._handshake.tags.received)
            return
        data = self.socket.recv(_PIECE)
        if not data:
            raise ConnectionError(f"the head has left rank {self.rank} without a word")
        self._crowd.result.sent += len(data)
        for message in self._codec.feed(data):
            self._on_message(message)

    def say(self, *messages: object) -> None:
        assert self._handshake.tags is not None
        tags, frames = self._handshake.tags.sent, b""
        for frame in map(encode, messages):
            frames += frame + tags.next(digest(frame))
        self._crowd.result.received += len(frames)
        if self.socket.send(frames) < len(frames):
            raise BufferError(f"the head does not take what rank {self.rank} says")

    def _on_message(self, message: object) -> None:
        match message:
            case JobInfo():
                self.say(_report(self.rank, self._crowd.size, bool(message.run_dir)))
                self._crowd.reached("welcome")
            case StartWorkers():
                self.say(WorkerSpawned(self.rank, 1000 + self.rank), _hello(message.workers[0]))
                self._crowd.reached("orders")
            case StartCoordinator():
                self.say(CoordinatorReady(0, _COORDINATOR), self._jax_proof())
            case Join():
                self.say(self._jax_proof())
                self._crowd.reached("join", of=self._crowd.size - 1)
            case Run():
                self._crowd.reached("go")
            case SignalWorker() if message.signum == signal.SIGKILL and not self._ended:
                self.exit(-signal.SIGKILL)
                self._crowd.reached("told", of=self._crowd.size - 1)
            case ClockProbe():
                with suppress(OSError):  # the head may have ended the job meanwhile
                    self.say(ClockReply(AgentId(self.rank), message.asked_at, time.time()))
            case Shutdown():
                self._crowd.dismiss(self)

    def fail(self) -> None:
        text = "ValueError: simulated"
        self.say(
            Failed(self.rank, time.time(), WorkerStage.PROGRAM, 1, "ValueError", "simulated", f"Traceback\n{text}\n")
        )
        self.exit(1)

    def exit(self, status: int) -> None:
        self._ended = True
        self.say(WorkerExited(self.rank, status))

    def _jax_proof(self) -> DeviceReport:
        size, now = self._crowd.size, time.time()
        nonce = attempt_nonce(self._crowd.env.job_id, 1)
        return DeviceReport(self.rank, self.rank, size, 1, size, ("cpu",), "cpu", nonce, now, now)


class Crowd:
    """All simulated agents, and the clock."""

    def __init__(self, size: int, culprit: int, env: AgentEnv) -> None:
        self.size = size
        self.env = env
        self.result = Result(size)
        self._culprit = culprit
        self._head = os.getppid()
        self._reached: dict[str, int] = {}
        self._agents = [Agent(rank, self) for rank in range(size)]
        self._by_fd = {agent.socket.fileno(): agent for agent in self._agents}
        self._epoll = select.epoll()

    def run(self) -> Result:
        """Play all agents from the first connection to the last Dismiss, and return the measurements."""
        (address,) = addresses.parse_addresses(self.env.head_addresses)
        self.result.looks["begin"] = _look(self._head)
        self._began = time.monotonic()
        for fd, agent in self._by_fd.items():
            agent.connect(address)
            self._epoll.register(fd, select.EPOLLIN)
        while self._by_fd:
            ready = self._epoll.poll(_PATIENCE, self.size)
            if not ready:
                raise TimeoutError(f"the head has said nothing for {_PATIENCE:g} s; reached: {self._reached}")
            for fd, _ in ready:
                self._by_fd[fd].hear()
        return self.result

    def reached(self, step: str, of: int = 0) -> None:
        """Count an agent that has made this step. When the last one has, note the time."""
        self._reached[step] = count = self._reached.get(step, 0) + 1
        if count < (of or self.size):
            return
        self.result.at[step] = time.monotonic() - self._began
        if step in ("go", "told", "dismissed"):
            self.result.looks[step] = _look(self._head)
        if step == "go":
            self.result.at["failure"] = time.monotonic() - self._began
            self._agents[self._culprit].fail()

    def dismiss(self, agent: Agent) -> None:
        self.reached("dismissed")
        del self._by_fd[agent.socket.fileno()]
        agent.socket.close()


def _host(rank: int) -> str:
    return f"node{rank // RANKS_PER_HOST:04d}"


def _report(rank: int, size: int, sees_run_dir: bool) -> AgentReport:
    return AgentReport(
        agent=AgentId(rank),
        size=size,
        host=_host(rank),
        boot_id=f"00000000-0000-0000-0000-{rank // RANKS_PER_HOST:012d}",
        pid=1000 + rank,
        time=time.time(),
        jaxrun_version=VERSION,
        address="127.0.0.1",
        head_address="127.0.0.1",
        directory=os.getcwd(),
        machine=Machine(_host(rank), tuple(range(CORES_PER_HOST)), cuda_plugin=False),
        can_write_run_dir=sees_run_dir,
    )


def _hello(begin: StartWorker) -> Hello:
    now = time.time()
    versions = {"python": "3.11.7", "jax": "0.10.2", "jaxlib": "0.10.2", "numpy": "2.4.0"}
    rank, host = begin.worker.rank, begin.worker.host
    return Hello(rank, host, 1000 + rank, now, now, versions, "0" * 64, dict(begin.environment))


def _look(pid: int) -> Look:
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s*(\d+) kB", status)
    assert found is not None
    # The kernel's name for the processor time of a process, as clock_getcpuclockid(3) makes it.
    cpu = time.clock_gettime((~pid << 3) | 2)
    return Look(cpu, int(found[1]) * 1024, len(os.listdir(f"/proc/{pid}/fd")))


def main(size: str, culprit: str, result: str) -> None:
    crowd = Crowd(int(size), int(culprit), AgentEnv.from_env(os.environ))
    Path(result).write_text(json.dumps(asdict(crowd.run())))


if __name__ == "__main__":
    main(*sys.argv[1:])
