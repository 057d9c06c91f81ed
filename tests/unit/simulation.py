"""A job as its head sees it, with a clock and a kernel of its own."""

import itertools
import signal

from jaxrun import __version__
from jaxrun.analysis.verdict.decide import decide
from jaxrun.analysis.verdict.stack_text import describe_stacks, format_stall_notice
from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.head import Head
from jaxrun.controller.head.head_state import HeadJob, HeadOptions, JobPhase, TimeLimits
from jaxrun.controller.roster import Roster
from jaxrun.controller.seat import LinkId
from jaxrun.job_events.actions import (
    AnswerRequest,
    Finish,
    LookForHosts,
    PrintLine,
    PrintLoss,
    PrintStacks,
    PrintStallNotice,
    ReadTerminalLine,
    RecordTime,
    Send,
    SendToAgents,
    ShowTerminalText,
    SignalRanks,
)
from jaxrun.job_events.events import LauncherSignalled, Tick
from jaxrun.protocol.agent_messages import (
    AgentConnected,
    AgentReport,
    InjectFault,
    NextAttempt,
    Shutdown,
    StartAgain,
    StartWorkers,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.probe_messages import Gpus, Machine
from jaxrun.protocol.query_messages import (
    ProgramDetailsReply,
    ProgramDetailsRequest,
    RankQuery,
    RankReply,
)
from jaxrun.protocol.worker_messages import (
    CoordinatorReady,
    DeviceReport,
    Done,
    Failed,
    Hello,
    SignalHandlers,
    StartCoordinator,
)
from jaxrun.spec.backends.remote_plan import plan_remote
from jaxrun.spec.engines.open_mpi import OPEN_MPI
from jaxrun.spec.job.fault_spec import parse_faults
from jaxrun.spec.job.job import Job
from jaxrun.spec.job.plan import LaunchCommand
from jaxrun.spec.job.worker_assignment import LauncherSettings
from jaxrun.text import format_ranks

JOB_ID = "ab" * 16
REAPED_AFTER_S = 0.001
PLANNED = {"gpu": "cuda"}  # what the plan calls the platform that JAX calls so
IN_JAX = """Thread 0x1 (most recent call first):
  File "/v/lib/python3.11/site-packages/jax/_src/array.py", line 1 in _value
  File "/home/me/train.py", line 2 in <module>
"""
IN_QUEUE = """Thread 0x1 (most recent call first):
  File "/v/lib/python3.11/queue.py", line 1 in get
  File "/home/me/train.py", line 2 in <module>
"""


class Clock:
    """A clock that says what a test sets."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Simulation:
    """One job from its first spawn to its Finish. Times are seconds since its start."""

    def __init__(
        self,
        size=4,
        *,
        hosts=None,
        platform="cpu",
        local_devices=1,
        init=60.0,
        job=None,
        save=None,
        ends_at=None,
        grace=None,
        stall=None,
        stall_notice=None,
        lockstep="off",
        chaos="",
        no_terminal="",
        requeue=False,
        unhurried=False,
        grow=None,
        drains=False,
        debug=False,
        post_mortem=False,
        learns_stall=None,
        cores=0,
        keep_survivors=False,
        returns=0,
        returns_used=0,
        spares=(),
        in_pods=False,
        stage=(),
        plan=None,
    ):
        self.size = size
        self.hosts = hosts or dict.fromkeys(range(size), "h1")
        self.local_devices = local_devices
        self.platform = platform
        self.now = 0.0
        self.exited = {}
        self.killed = []  # (time, signal, ranks)
        self.stuck = set()  # ranks whose agents do not answer
        self.sent = []  # (time, ranks, message)
        self.printed = []  # (time, text)
        self.statuses_shown = []  # the same, of lines that are shown until the next
        self.injected = []  # (time, kind, ranks)
        self.losses = []  # what was printed of ranks without which others go on
        self.outcome = None
        self.finished_at = None
        self.stacks = {}  # rank → dump, for those that answer
        self.terminal = []  # what debuggers have written
        self.answered = []  # (number of a request, answer)
        self.searches = []  # when hosts were looked for
        self.reads = 0  # lines that were asked for
        self.answers = True  # whether any do
        self.cpu = lambda now: 0.0  # seconds that each rank has used by then
        self.core_wait = lambda now: 0.0  # seconds that threads of each rank have waited for a core by then
        self.written = lambda now: 0  # bytes that each has written by then
        self.flights = {}  # by rank, of the recorders that can be read; histories are the same
        self.programs = {}  # (rank, program) → ProgramDetails
        self.queries = []  # (time, detail, ranks)
        self.times = []  # what was logged of how the time is spent
        self.nccl = None  # what NCCL's own service says
        self.stuck_for_nccl = False  # whether the agent that is to ask it never answers
        self.identities = {}  # rank → fields of its RankReply by which others know it
        self._clock = 0.0
        self._due = []  # (time, number, event)
        self._number = itertools.count()
        expected = Expected(size, JOB_ID, platform, local_devices)
        signal_grace = 30.0 if grace is None else grace
        limits = TimeLimits(
            init,
            job,
            5.0 if grace is None else grace,
            signal_grace,
            stall,
            stall_notice,
            save,
            ends_at,
            unhurried,
            grow,
            grace,
            learns_stall,
        )
        faults = parse_faults(chaos) if chaos else ()
        options = {
            "lockstep": lockstep,
            "chaos": faults,
            "no_terminal": no_terminal,
            "requeue": requeue,
            "drains": drains,
            "debug": debug,
            "post_mortem": post_mortem,
            "cores": cores,
            "keep_survivors": keep_survivors,
            "returns": returns,
            "returns_used": returns_used,
            "in_pods": in_pods,
        }
        asked = HeadOptions(has_other_clocks=False, **options)
        of_job = {"platform": PLANNED.get(platform, platform), "devices_per_process": local_devices}
        if spares:
            of_job |= {"ranks_on": tuple(self.hosts.values()), "spare_hosts": spares, "spares": 1, "max_restarts": 1}
            of_job |= {"stage": stage}
        registry = make_registry(size, **of_job)
        if plan is not None:
            registry = AgentRegistry(plan, LauncherSettings({}, "", ""), Roster.of(plan))
        self.roster = registry.roster
        self.head = Head(HeadJob(self.hosts, self.roster.placement.agents, expected, limits, asked), 0.0, registry)
        for rank in range(size):  # what their agents are told to start is nobody's concern here
            self.head.handle(self._report(rank), 0.0)
        for number, host in enumerate((*self.hosts.values(), *spares) if spares else ()):
            self.roster.arrive(number, number)
            self.roster.say(number, AgentConnected(number, host))
            if number >= size:
                self.roster.add_report(report(number, host, size))

    def _report(self, rank):
        host = self.hosts.get(rank, "h9")
        ranks = sum(other == host for other in self.hosts.values())
        gpus = range(ranks * (self.local_devices or 1)) if self.platform in PLANNED else ()
        return report(rank, host, self.size, gpus=gpus)

    def handle(self, *events):
        """Events that arrive now."""
        for event in events:
            if isinstance(event, WorkerExited):
                self.exited[event.rank] = event.status
            for action in self.head.handle(event, self.now):
                self._execute(action)
        return self

    def wait(self, seconds):
        """Let time pass: ticks when the head wants them, exits of killed workers, answers to RankQuery."""
        until = self.now + seconds
        while True:
            alarm = self.head.deadline()
            times = [time for time, _, _ in self._due] + ([alarm] if alarm is not None else [])
            if not times or min(times) > until:
                break
            self.now = max(self.now, min(times))
            if alarm is not None and alarm <= self.now:
                self.handle(Tick())
            for item in sorted(item for item in self._due if item[0] <= self.now):
                self._due.remove(item)
                if not (isinstance(item[2], WorkerExited) and item[2].rank in self.exited):
                    self.handle(item[2])
        self.now = until
        return self

    def spawn(self, *ranks):
        return self.handle(*(WorkerSpawned(rank, 1000 + rank) for rank in ranks or range(self.size)))

    def say_hello(self, **changes):
        self.spawn()
        return self.handle(*(self.hello(rank, **changes.get(f"r{rank}", {})) for rank in range(self.size)))

    def join(self):
        self.say_hello()
        return self.handle(CoordinatorReady(0, "127.0.0.1:4711"))

    def run(self):
        """Everything up to Run."""
        self.join()
        return self.handle(*(self.device_report(rank) for rank in range(self.size)))

    def listen(self, *ranks):
        """The programs of these ranks, without any of all, listen to SIGTERM."""
        return self.handle(*(SignalHandlers(rank, False, True) for rank in ranks or range(self.size)))

    def hello(self, rank, **changes):
        values = {
            "host": self.hosts.get(rank, "h9"),
            "pid": 1000 + rank,
            "time": self.now,
            "started_at": 0.0,
            "versions": {"python": "3.11.7", "jax": "0.10.2"},
            "program_hash": "0123456789abcdef",
            "environment": {},
        }
        return Hello(rank=rank, **{**values, **changes})

    def device_report(self, rank, **changes):
        values = {
            "process_index": rank,
            "process_count": self.size,
            "local_devices": self.local_devices or 1,
            "global_devices": self.size * (self.local_devices or 1),
            "device_kinds": ("cpu",),
            "platform": self.platform,
            "nonce": JOB_ID,
            "joined_at": self.now,
            "time": self.now,
        }
        return DeviceReport(rank=rank, **{**values, **changes})

    def failure(self, rank, error="ValueError", message="bad record", status=1, stage="program"):
        traceback = f"Traceback (most recent call last):\n{error}: {message}\n"
        return Failed(rank, self.now, stage, status, error, message, traceback)

    def done(self, *ranks):
        return self.handle(*(Done(rank, self.now) for rank in ranks))

    def exit(self, status, *ranks):
        return self.handle(*(WorkerExited(rank, status) for rank in ranks))

    def interrupt(self, signum):
        return self.handle(LauncherSignalled(signum))

    def ranks_sent(self, kind):
        """The ranks that were sent a message of this kind, in order."""
        return [rank for _, ranks, message in self.sent if isinstance(message, kind) for rank in ranks]

    def kills(self, signum=signal.SIGKILL):
        """[(time, ranks)] of this signal, times in milliseconds."""
        return [(round(time * 1000), ranks) for time, number, ranks in self.killed if number == signum]

    @property
    def verdict(self):
        return decide(self.outcome, started=0.0, ended=self.now)

    @property
    def lines(self):
        return [text for _, text in self.printed]

    @property
    def statuses(self):
        return [end.status for end in self.outcome.workers]

    def _execute(self, action):
        match action:
            case SignalRanks():
                assert action.ranks and not set(action.ranks) & set(self.exited)
                self.killed.append((self.now, action.signum, action.ranks))
                if action.signum == signal.SIGKILL:
                    for rank in set(action.ranks) - self.stuck:
                        self._later(REAPED_AFTER_S, WorkerExited(rank, -signal.SIGKILL))
            case Send(message=InjectFault()):
                assert action.ranks and not set(action.ranks) & set(self.exited)
                self.injected.append((self.now, action.message.kind, action.ranks))
                if action.message.kind == "kill":
                    for rank in action.ranks:
                        self._later(REAPED_AFTER_S, WorkerExited(rank, -signal.SIGKILL))
            case Send(ranks=(rank,), message=ProgramDetailsRequest(program)):
                details = self.programs.get((rank, program))
                if details is not None:
                    last_calls = self.flights.get(rank, Flight())
                    self._later(0.002, ProgramDetailsReply(rank, program, details, last_calls))
            case Send(message=RankQuery()):
                self._answer(action.ranks, action.message)
            case Send():
                assert action.ranks and (action.ranks == (0,) or not isinstance(action.message, StartCoordinator))
                self.sent.append((self.now, action.ranks, action.message))
                if isinstance(action.message, StartAgain):
                    self.exited = {rank: status for rank, status in self.exited.items() if rank not in action.ranks}
            case SendToAgents(agents=agents, message=Shutdown()):
                self.sent.append((self.now, agents, action.message))
            case SendToAgents(message=NextAttempt()):
                self.sent.append((self.now, action.message.ranks, action.message))
            case SendToAgents(message=StartWorkers()) if self.head.phase is JobPhase.RUNNING:
                ranks = tuple(start.worker.rank for start in action.message.workers)
                self.sent.append((self.now, ranks, action.message))
                self.exited = {rank: status for rank, status in self.exited.items() if rank not in ranks}
            case PrintLoss():
                self.losses.append(action)
                where = f", starts on {action.spare}" if action.spare else ""
                names = format_ranks([loss.worker.rank for loss in action.losses])
                be = "is" if len(action.losses) == 1 else "are"
                self.printed.append((self.now, f"{names} {be} lost, {action.others} go on{where}"))
            case PrintStacks():
                self.printed.append((self.now, f"{action.heading}{describe_stacks(action.stacks)}"))
            case PrintStallNotice():
                how = {"limit_s": action.limit_s, "is_as_before": action.is_as_before}
                self.printed.append((self.now, format_stall_notice(action.stacks, action.idle_s, None, **how)))
            case PrintLine(status=True):
                self.statuses_shown.append((self.now, action.text))
            case PrintLine():
                self.printed.append((self.now, action.text))
            case AnswerRequest():
                self.answered.append((action.number, action.answer))
            case RecordTime():
                self.times.append(action)
            case ShowTerminalText():
                self.terminal.append(action.text)
            case LookForHosts():
                self.searches.append(self.now)
            case ReadTerminalLine():
                self.reads += 1
            case Finish():
                assert self.outcome is None
                self.outcome = action.outcome
                self.finished_at = self.now

    def _answer(self, ranks, query):
        self.queries.append((self.now, query.detail, ranks))
        is_stuck = self.stuck_for_nccl and "nccl" in query.detail
        for rank in ranks if self.answers and not is_stuck else ():
            stacks = {"stacks": self.stacks.get(rank, ""), "kernel_wait": "futex_wait_queue"}
            reply = RankReply(
                rank,
                query.number,
                self.now,
                cpu_seconds=self.cpu(self.now),
                core_wait_s=self.core_wait(self.now),
                bytes_written=self.written(self.now),
                flight=self.flights.get(rank, Flight()),
                nccl=self.nccl if "nccl" in query.detail else None,
                **self.identities.get(rank, {}),
                **(stacks if query.detail.needs_signal else {}),
            )
            self._later(0.1 if query.detail.needs_signal else 0.002, reply)

    def _later(self, seconds, event):
        self._due.append((self.now + seconds, next(self._number), event))


# ---- agents on several hosts

HEAD_ADDRESS = "10.0.0.9"


def make_registry(
    size, *, given=None, run_dir="/shared/run", directory="/shared", agents=0, ranks_on=(), spare_hosts=(), **wanted
):
    """Where the agents of a job of so many ranks report; `wanted` are fields of its Job."""
    job = Job(**{"program": ("train.py",), "backend": "mpirun", "platform": "cpu", "processes": size, **wanted})
    there = (*ranks_on, *spare_hosts) or ("?",) * agents
    command = LaunchCommand(OPEN_MPI, "mpirun", ("mpirun",), agent_hosts=there, size=agents, survive_host_loss=True)
    plan = plan_remote(job, {}, JOB_ID, command, ranks_on or ["?"] * size, (), spare_hosts)
    return AgentRegistry(
        plan,
        LauncherSettings(given or {}, run_dir, run_dir),
        Roster.of(plan),
        directory=directory,
        listen_addresses="eth0 10.0.0.9:40",
    )


def seated(plan, there=(), *, reported=()):
    """The roster of an attempt in which agents are `there`, and some have reported; those that wait are ready."""
    roster = Roster.of(plan)
    for agent in there:
        roster.arrive(LinkId(agent), agent)
        roster.say(LinkId(agent), AgentConnected(agent, f"h{agent}"))
    for agent in {*reported, *(agent for agent in there if not plan.placement.agents[agent])}:
        roster.add_report(report(agent, roster.seats[agent].host, len(plan.workers)))
    return roster


def report(rank, host, size, *, gpus=(), **changes):
    """The report of an agent; `gpus`: the ids of the GPUs that it sees; `changes`, also of its Gpus and its Machine."""
    of_gpus = {"names": ("NVIDIA A100",) * len(gpus), "source": "NVML", "ids": tuple(map(str, gpus))}
    of_gpus |= {name: changes.pop(f"gpu_{name}") for name in ("cores", "trouble") if f"gpu_{name}" in changes}
    of_machine = {"cores": tuple(range(8)), "gpus": {"cuda": Gpus(**of_gpus)} if gpus or "trouble" in of_gpus else {}}
    of_machine |= {name: changes.pop(name) for name in ("cores", "all_cores", "cuda_plugin") if name in changes}
    values = {
        "boot_id": f"boot-{host}",
        "pid": 1000 + rank,
        "time": 1.0,
        "jaxrun_version": __version__,
        "address": f"10.0.0.{host[1:] if host[1:].isdecimal() else rank + 1}",
        "head_address": HEAD_ADDRESS,
        "directory": "/shared",
        "machine": Machine(host, **of_machine),
        "can_write_run_dir": True,
    }
    return AgentReport(agent=rank, size=size, host=host, **{**values, **changes})
