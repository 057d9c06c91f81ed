"""Messages that mean nothing, from agents and from clients of the job's socket: the head raises nothing, and ends."""

import json
import signal
import struct
from dataclasses import dataclass
from itertools import cycle

from handshakes import frame
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from simulation import JOB_ID, Simulation, make_registry, report
from values_by_type import Values

from jaxrun.analysis.diagnosis.job_outcome import JobOutcome
from jaxrun.analysis.verdict.decide import decide
from jaxrun.analysis.verdict.verdict import to_json
from jaxrun.analysis.verdict.verdict_text import format_report
from jaxrun.controller.head.consistency import Expected
from jaxrun.controller.head.head import Head
from jaxrun.controller.head.head_state import HeadJob, HeadOptions, TimeLimits
from jaxrun.controller.supervisor.dispatcher import Dispatcher
from jaxrun.errors import ProtocolError
from jaxrun.job_events.actions import Finish, Send, SignalRanks
from jaxrun.job_events.events import (
    AgentLost,
    EndRequested,
    FaultRequested,
    LauncherSignalled,
    ParentExited,
    Requested,
    RequestEnded,
    RequestInput,
    SignalRequested,
    TerminalLine,
    check_event,
)
from jaxrun.node.channel.connection import AGENT_TO_HEAD
from jaxrun.protocol.agent_messages import (
    AtPrompt,
    FirstOutput,
    ForkingDeclined,
    OutputChunk,
    StreamEnded,
    WorkerExited,
    WorkerSpawned,
)
from jaxrun.protocol.codec import Form, MessageDecoder, encode, message_types
from jaxrun.protocol.flight import Flight, ProgramDetails
from jaxrun.protocol.forkserver_messages import Preloaded
from jaxrun.protocol.job_messages import (
    Answer,
    Ask,
    Cancel,
    EndOrder,
    FaultOrder,
    FromClient,
    Greeting,
    Input,
    Request,
    SignalOrder,
)
from jaxrun.protocol.query_messages import ProgramDetailsReply, ProgramDetailsRequest, RankQuery, RankReply
from jaxrun.protocol.worker_messages import CoordinatorReady, Done
from jaxrun.records.event_log.event_log import format_line
from jaxrun.spec.job.rank_placement import agents_by_rank
from jaxrun.terminal import TerminalFormat

HOSTS = {0: "h1", 1: "h1", 2: "h2"}
SIZE = len(HOSTS)
IN_JAX = (
    'Thread 0x01 (most recent call first):\n  File "/x/site-packages/jax/_src/api.py", line 3 in wait\n'
    '  File "/home/me/train.py", line 88 in step\n'
)
LONG_LINE = f'Fatal Python error: Aborted\n\nThread 0x0 (most recent call first):\n  File "a", line {"9" * 5000} in f\n'

RANKS = st.integers(0, SIZE - 1)
SMALL = st.integers(-1, 3)
INTS = SMALL | st.sampled_from([9, 15, 255, -9, -500, 2**31, 2**63, 2**64 - 1, -(2**63)])
FLOATS = st.sampled_from([0.0, 1.0, 7, -1e308, 1e308, 2**63, float("inf"), float("nan")])
GROUPS = st.sampled_from(["0-2"] * 5 + ["0-1", "0, 2", "", "x", "2-0", "0-300000000", "9" * 5000, "7", "\ud800"])
TEXTS = st.sampled_from(
    ["", "a", "cpu", "h1", JOB_ID, "h1:1", "\ud800", "a\nb\x1b[31m", "\0", "x" * 3000, "futex", IN_JAX, LONG_LINE]
)
ODD = st.recursive(
    st.none() | st.booleans() | INTS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=2),
    max_leaves=4,
)
CALLS = st.tuples(FLOATS, GROUPS, SMALL | INTS, st.integers(0, 2), SMALL, SMALL)
PROGRAMS = st.lists(st.sampled_from(["", "a", "b", "\ud800"]), min_size=3, max_size=4)
FLIGHT_FIELDS = {
    "level": st.sampled_from([3, 3, 3, 0, 77]),
    "compiling": st.tuples(TEXTS, FLOATS),
    "pending": st.tuples(GROUPS, INTS, SMALL, SMALL, FLOATS),
    "call_counts": st.dictionaries(GROUPS, INTS, min_size=1, max_size=3),
    "calls": st.lists(CALLS, max_size=4),
    "marks": st.dictionaries(GROUPS, st.dictionaries(INTS, INTS, max_size=2), max_size=2),
    "timings": st.lists(st.tuples(GROUPS, INTS, FLOATS, FLOATS, SMALL), max_size=2),
    "entered": FLOATS,
    "standing": st.tuples(INTS, FLOATS),
    "programs": st.dictionaries(SMALL, PROGRAMS, max_size=3),
    "sites": st.dictionaries(SMALL, st.lists(TEXTS, max_size=2), max_size=3),
    "unknown_programs": INTS,
    "trouble": TEXTS,
    "joint_calls": st.dictionaries(TEXTS, INTS, max_size=2),
    "joint_wait": st.tuples(TEXTS, INTS, FLOATS, SMALL),
}
ARRAYS = st.lists(st.lists(TEXTS, min_size=3, max_size=3), max_size=2)
DETAILS_FIELDS = {"source": TEXTS, "arguments": ARRAYS, "results": ARRAYS, "mesh": TEXTS, "text": TEXTS}


def some(known):
    """Tables with some of these fields, of which a few may be anything."""
    likely = st.fixed_dictionaries({}, optional=known)
    return likely | likely | st.fixed_dictionaries({}, optional={name: ODD for name in known})


NAMED = {
    "group": GROUPS,
    "number": INTS,
    "key": st.sampled_from("ab"),
    "code": st.sampled_from(["", "a", "b", "\ud800"]),
    "kind": st.sampled_from(["kill", "pause", "odd"]),
}
VALUES = Values(
    {
        int: INTS,
        float: FLOATS,
        bool: st.booleans(),
        bytes: st.just("YQ==") | TEXTS,
        str: TEXTS,
        type(None): st.none(),
        Flight: some(FLIGHT_FIELDS),
        ProgramDetails: st.fixed_dictionaries(DETAILS_FIELDS),
    },
    NAMED,
    keys={str: TEXTS | st.sampled_from(["cuda", "rocm"]), int: st.sampled_from([0, 1, 7, -1, 2**63])},
    sequence=list,
    choice=lambda member: member.value,
    record=lambda kind, fields: st.fixed_dictionaries(fields),
    within_bounds=False,
)


def messages_of(kind):
    """What an agent may write as a message of this kind, as plain values, and the number of it and of its rank."""
    fields = VALUES.fields_of(kind)

    def one(rank):
        ours = {name: st.just(rank) if name in ("rank", "agent") else values for name, values in fields.items()}
        content = st.fixed_dictionaries(ours).map(lambda content: {"type": kind.__name__, **content})
        return st.tuples(st.just(rank), content)

    return RANKS.flatmap(one)


_NOT_FOR_HEAD = (AtPrompt, OutputChunk, StreamEnded, FirstOutput, ForkingDeclined, Preloaded)
KINDS = {name: kind for name, kind in AGENT_TO_HEAD.items() if kind not in _NOT_FOR_HEAD}
MESSAGES = st.one_of(*map(messages_of, KINDS.values()))
LAUNCHER_EVENTS = st.one_of(
    st.builds(AgentLost, RANKS, TEXTS, st.booleans()),
    st.builds(LauncherSignalled, st.sampled_from([1, 2, 3, 10, 15])),
    st.builds(SignalRequested, st.just(10)),
    st.builds(FaultRequested, st.just("kill"), st.just((0, 2, 5))),
    st.builds(ParentExited, st.just("the end of its parent")),
    st.builds(TerminalLine, TEXTS),
)


@dataclass(frozen=True)
class FromASocket:
    """What a client of the job's socket may write as a message, as JSON."""

    content: dict


CLIENT_KINDS = message_types(FromClient)
REQUESTS = st.one_of(
    *(
        VALUES.of(kind).map(lambda content, name=name: content | {"type": name})
        for name, kind in message_types(Request).items()
    )
)
ASKS = st.fixed_dictionaries({"number": st.integers(0, 3) | INTS, "request": REQUESTS})
CLIENT_MESSAGES = st.one_of(
    *(
        (ASKS if kind is Ask else VALUES.of(kind)).map(
            lambda content, name=name: FromASocket({"type": name, **content})
        )
        for name, kind in CLIENT_KINDS.items()
        if kind is not Greeting
    )
)
STEPS = st.lists(
    st.one_of(MESSAGES, MESSAGES, MESSAGES, CLIENT_MESSAGES, LAUNCHER_EVENTS, st.floats(0.0, 9.0)), max_size=25
)
ANSWERS = st.lists(messages_of(RankReply), min_size=1, max_size=4)
DETAILS = st.lists(messages_of(ProgramDetailsReply), min_size=1, max_size=2)


class Files:
    """The run directory, without a disk."""

    shown_path = None

    def record(self, event):
        format_line(event).encode("utf-8", "backslashreplace")

    def write_text(self, name, text):
        text.encode("utf-8", "backslashreplace")


class Server:
    """A JobServer without a socket."""

    def answer(self, number: str, answer: Answer) -> None:
        assert "jaxrun failed" not in answer.text


class Job:
    """A head with all that it speaks to on its side; the answers to its questions are absurd, too."""

    def __init__(self, limits, lockstep, *, agents_late, terminal, reports_kills):
        self.now = 0.0
        self.reports_kills = reports_kills
        self.outcome: JobOutcome | None = None
        expected = Expected(SIZE, JOB_ID, "cpu", 1)
        options = HeadOptions(agents_late, lockstep, no_terminal="" if terminal else "it has none")
        head = Head(HeadJob(HOSTS, agents_by_rank(SIZE), expected, limits, options), 0.0, make_registry(SIZE))
        for rank in () if agents_late else range(SIZE):
            head.handle(report(rank, HOSTS[rank], SIZE), 0.0)
        self.dispatcher = Dispatcher(head, Files(), Server(), lambda: self.now)
        self.answers = self.details = None

    def receive(self, rank, content):
        """What comes from the agent of a rank; what is no message would end its connection."""
        try:
            (message,) = MessageDecoder(AGENT_TO_HEAD).feed(frame(content))
            check_event(message, agent=rank, ranks=(rank,))
        except ProtocolError as error:
            assert str(error)
            return
        self.handle(message)

    def receive_from_client(self, content):
        """What comes to the job's socket; what is no message ends the client's connection."""
        body = json.dumps(content).encode()
        try:
            (message,) = MessageDecoder(CLIENT_KINDS, form=Form.JSON).feed(struct.pack("!I", len(body)) + body)
        except ProtocolError as error:
            assert str(error)
            return
        match message:
            case Ask(number=number, request=request):
                self.handle(Requested(f"1.{number}", request))
            case Input(number=number, data=data):
                self.handle(RequestInput(f"1.{number}", data))
            case Cancel(number=number):
                self.handle(RequestEnded(f"1.{number}"))
            case SignalOrder(signum=signum):
                self.handle(SignalRequested(signum))
            case FaultOrder(kind=kind, ranks=ranks):
                self.handle(FaultRequested(kind, ranks))
            case EndOrder(gracefully=True):
                self.handle(LauncherSignalled(signal.SIGTERM))
            case EndOrder():
                self.handle(EndRequested("an order at its socket"))

    def handle(self, *events):
        for event in events:
            self._execute(self.dispatcher.handle(event))

    def wait(self, seconds):
        until, turns = self.now + seconds, 0
        while (at := self.dispatcher.deadline()) is not None and at <= until:
            turns += 1
            assert turns < 3000, "it wakes for nothing"
            self.now = max(self.now, at)
            self._execute(self.dispatcher.handle_timeouts())
        self.now = until

    def _execute(self, actions):
        for action in actions:
            assert set(getattr(action, "ranks", ())) <= HOSTS.keys()
            match action:
                case Send(ranks=ranks, message=ProgramDetailsRequest()):
                    self._answer(ranks, self.details, program=action.message.program)
                case Send(ranks=ranks, message=RankQuery()):
                    self._answer(ranks, self.answers, number=action.message.number)
                case Send():
                    encode(action.message)
                case SignalRanks(signum=9, ranks=ranks) if self.reports_kills:
                    self.handle(*(WorkerExited(rank, -9) for rank in ranks))
                case Finish():
                    assert self.outcome is None
                    self.outcome = action.outcome

    def _answer(self, ranks, contents, **asked):
        for rank in ranks if contents else ():
            _, content = next(contents)
            self.receive(rank, {**content, "rank": rank, **asked})


def regular_events(registry):
    """A job from its first agent to the end of its programs."""
    simulation = Simulation(SIZE, hosts=HOSTS)
    return [
        *(report(rank, HOSTS[rank], SIZE) for rank in HOSTS if registry),
        *(WorkerSpawned(rank, 1000 + rank) for rank in HOSTS),
        *(simulation.hello(rank) for rank in HOSTS),
        CoordinatorReady(0, "h1:4711"),
        *(simulation.device_report(rank) for rank in HOSTS),
        *(Done(rank, 1.0) for rank in HOSTS),
    ]


def test_whatever_agents_say_the_head_raises_nothing_and_two_signals_end_the_job():
    limits = TimeLimits(init=60.0, job=None, grace=5.0, signal_grace=30.0, stall=None, stall_notice=3.0)
    some_limits = st.sampled_from([limits, replace(limits, job=20.0, stall=8.0, stall_notice=None)])
    lockstep = st.sampled_from(["off", "record", "strict"])
    begun = st.sampled_from([0, 3, 6, *[13] * 6, 15])

    @given(some_limits, lockstep, begun, st.booleans(), st.booleans(), st.booleans(), STEPS, ANSWERS, DETAILS)
    def survive(limits, lockstep, begun, registry, terminal, reports_kills, steps, answers, details):
        job = Job(limits, lockstep, agents_late=registry, terminal=terminal, reports_kills=reports_kills)
        first = regular_events(registry)
        job.handle(*first[: begun and begun + len(first) - len(regular_events(False))])
        job.answers, job.details = cycle(answers), cycle(details)
        for step in steps:
            match step:
                case float():
                    job.wait(step)
                case FromASocket(content=content):
                    job.receive_from_client(content)
                case (rank, content):
                    job.receive(rank, content)
                case event:
                    job.handle(event)
        for _ in range(3):  # the third where the second is taken for the first, sent twice
            if job.outcome is None:
                job.handle(LauncherSignalled(2))
                job.wait(60.0)
        assert job.outcome is not None
        verdict = decide(job.outcome, started=0.0, ended=job.now, timeout=limits.job)
        assert 0 <= verdict.exit_code <= 255
        to_json(verdict).encode("utf-8", "backslashreplace")
        format_report(verdict, None, TerminalFormat.at(1, {}), []).encode("utf-8", "backslashreplace")

    survive()
