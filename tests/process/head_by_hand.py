"""The head's side of agents, in threads of a test, which plays the agents: a head that collects what it is told."""

import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import pytest
from listener_thread import wait_until
from msgspec.structs import fields, replace

from jaxrun.analysis.diagnosis.job_end import RankFailed
from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.controller.roster import Roster
from jaxrun.controller.supervisor.attempt_head import AttemptHead
from jaxrun.controller.supervisor.attempt_loop import AttemptLoop
from jaxrun.controller.supervisor.host_watches import HostWatches
from jaxrun.controller.supervisor.job_history import JobHistory
from jaxrun.controller.supervisor.job_server import JobServer, JobSockets
from jaxrun.controller.supervisor.job_terminal import Terminal
from jaxrun.controller.supervisor.launch_process import LaunchProcess
from jaxrun.controller.supervisor.notifier import Notifier
from jaxrun.controller.supervisor.remote_agents import JobAgents, LaunchedAgents, RemoteAgents
from jaxrun.controller.supervisor.supervision import Outside, Supervision
from jaxrun.controller.supervisor.train_job_status import TrainJobStatus
from jaxrun.controller.supervisor.transport import Transport
from jaxrun.errors import UnavailableError
from jaxrun.job_events.actions import Finish
from jaxrun.job_events.events import AgentTurnedAway, BadMessage, SpareLost, SpareReported, Tick
from jaxrun.node.channel.connection import HEAD_TO_AGENT, Connection
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.node.channel.host_addresses import HostAddress
from jaxrun.node.channel.listener import listen_on_tcp
from jaxrun.node.channel.silence import SilenceLimit
from jaxrun.protocol import auth
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport, JobInfo, StartWorker, StartWorkers
from jaxrun.protocol.auth import ClientHandshake
from jaxrun.protocol.bounds import Port
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.probe_messages import FabricFacts, Machine
from jaxrun.records.rundir.rundir import RunDir
from jaxrun.spec.backends.remote_plan import plan_remote
from jaxrun.spec.engines.slurm import SLURM
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.options import HOST_TIMEOUT_S
from jaxrun.spec.job.plan import LaunchCommand
from jaxrun.spec.job.rank_placement import agents_by_rank

TOKEN = auth.new_token()
JOB_INFO = JobInfo("job", "", ("cpu",))


def message(kind, **values):
    """One of this kind; fields that are not given are of the right type."""
    empty = {
        AgentId: 0,
        int: 0,
        Port: 0,
        str: "",
        float: 0.0,
        bool: False,
        Mapping[str, str]: {},
        FabricFacts | None: None,
        Machine: Machine("h1", ()),
    }
    return kind(**{field.name: empty.get(field.type, ()) for field in fields(kind)} | values)


def start_of(rank=0, *, waits=False):
    return StartWorkers((worker_of(rank),), waits)


def worker_of(rank):
    return StartWorker(WorkerEnv("ab" * 16, rank, 2, 0, 1, "h1"), ("train.py",), {})


class Registry:
    """An AgentRegistry in which all that is needed has reported."""

    complete = True

    def check_command(self, report):
        """All are started for this job."""

    def check_installation(self, report):
        """All are alike, unless a test has installed another version."""
        if report.jaxrun_version:
            raise UnavailableError(f"{report.host} has another version")

    def prepare(self, reports):
        return [worker_of(one.agent) for one in reports]


class Head:
    """Collects events, and seats those who report; at a Tick it wants what a test has ordered, in another thread."""

    is_healthy = True

    def __init__(self, roster):
        self._roster = roster
        self.hosts = {0: "h1", 1: "h2"}
        self.events = []
        self.ours, self._theirs = socket.socketpair()
        self._orders = []

    def order(self, *actions):
        self._orders.append(list(actions))
        self._theirs.send(b".")

    def handle(self, event, now):
        if not isinstance(event, Tick):
            self.events.append(event)
            if isinstance(event, AgentReport) and event.agent in self._roster.agents:
                self._roster.add_report(event)
            return []
        self.ours.recv(1)
        return self._orders.pop(0)

    def deadline(self):
        return None

    def close(self):
        self.ours.close()
        self._theirs.close()


class Screen:
    """An Output without ranks."""

    congested = False

    def __init__(self):
        self.printed = []

    def flush_due(self):
        return None

    def set_hosts(self, hosts):
        """It shows no prefixes."""

    def print_line(self, text):
        self.printed.append(text)


class HeadByHand:
    """The RemoteAgents of one attempt after the other, in a thread each; a head that only collects events."""

    def __init__(self, *, attached=False, **wanted):
        self._quiet = socket.socketpair()
        self.roster = Roster(waits="wait_hosts" in wanted)
        self.head, self._screen = Head(self.roster), Screen()
        self.records, directory = [], RunDir(None)  # what the head does not see
        directory.on_event(lambda logged, line: self._note(logged.message))
        self.loop = loop = EventLoop(time.time)
        unasked = JobServer("ab" * 16, JobSockets(), loop, 0, pytest.fail, pytest.fail)
        self._shared = Supervision(
            {},
            directory,
            self._screen,
            loop,
            None,
            Outside(
                self._quiet[0],
                Terminal(self._screen, loop, 0, pytest.fail),
                unasked,
                Notifier(loop, "", {}, {}, pytest.fail),
                TrainJobStatus({}, pytest.fail),
                deque(),
            ),
            history=JobHistory(0.0, 0.0),
        )
        command = LaunchCommand(
            SLURM, "srun", ("/bin/sleep", "600"), agent_hosts=("h1", "h2", "h3"), survive_host_loss=True
        )
        command = replace(command, attached=attached)
        job = Job(program=("train.py",), processes=2, backend="slurm", **wanted)
        self.plan = plan_remote(job, {}, "ab" * 16, command, ["h1", "h2"])
        self._launched = LaunchedAgents(LaunchProcess(command, {}, None))
        self.listener = listen_on_tcp([HostAddress("lo", "127.0.0.1")], TOKEN, everywhere=False)
        self.transport = Transport(loop)
        self._acceptor = self.listener.accept(loop, 0, self.transport.on_peer, self.transport.on_dropped)
        self._watches = HostWatches(self.transport, SilenceLimit.of_head(HOST_TIMEOUT_S, 2), time.time)
        self._clients = []
        self._begin(anew=True)

    @property
    def events(self):
        return self.head.events

    def _note(self, told):
        if isinstance(told, AgentTurnedAway | BadMessage | SpareReported | SpareLost):
            self.records.append(told)

    @property
    def printed(self):
        return self._screen.printed

    def _begin(self, *, anew):
        called = self.roster.begin(self.plan, anew=anew)
        link = AttemptHead(self._shared, self.head, self.plan.attempt)
        link.loop.add_reader(self.head.ours.fileno(), 0, lambda: link.handle(Tick()))
        of_job = JobAgents(self.transport, self._watches, self.roster, JOB_INFO, None)
        self.agents = RemoteAgents(self._shared, link, self.plan, of_job, self._launched, Registry())
        self.agents.execute(called)
        self.agents.admit(())
        attempt = AttemptLoop(self._shared, link, self.agents)
        self._thread = threading.Thread(target=self._run, args=(attempt, self.agents))
        self._thread.start()

    def _run(self, attempt, agents):
        agents.complete(attempt.run())

    def order(self, *actions):
        self.head.order(*actions)

    def let_srun_say(self, line):
        """Returns once this line is known."""
        launch = self._launched.launch
        Path(f"/proc/{launch.pid}/fd/2").write_text(f"{line}\n")
        wait_until(lambda: line in launch.last_lines())

    def end_attempt(self, outcome=None):
        self.order(Finish(outcome or JobOutcome(RankFailed())))
        self._thread.join()

    def begin_next_attempt(self, agents=None, awaited=None):
        """End the attempt, unless it has ended, and begin the next."""
        if self._thread.is_alive():
            self.end_attempt()
        agents, attempt = agents or agents_by_rank(2), self.plan.attempt + 1
        placement = replace(self.plan.placement, agents=agents, awaited=awaited or {})
        self.plan = replace(self.plan, attempt=attempt, placement=placement)
        self._begin(anew=False)

    def connect(self, rank):
        """An agent's connection, to which the head has said its first word."""
        address = self.listener.addresses[0]
        plain = socket.create_connection((address.ip, address.port))
        plain.setblocking(False)
        handshake = ClientHandshake(plain, TOKEN, rank)
        wait_until(handshake.advance)
        client = Connection(plain, HEAD_TO_AGENT, handshake.tags)
        self._clients.append(client)
        return client, self.received(client)

    def received(self, client, count=1):
        """The next messages to this client, at least so many, unless it is lost."""
        found = []
        wait_until(lambda: found.extend(client.receive()) or len(found) >= count or client.lost_reason)
        return found

    def close(self):
        if self._thread.is_alive():
            self.end_attempt()
        self.agents.close(wait=False)
        self._watches.close()
        self._acceptor.close()
        self.listener.close()
        self._launched.launch.ask_to_end()
        self._launched.launch.stop(self.loop, hurry=True)
        for one in (*self._clients, *self._quiet, self.head, self._launched.launch):
            one.close()
        self.loop.close()
