"""The socket of a running job: requests, orders and events of several clients at once, without delay for the job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import Iterator

import pytest

from jaxrun.controller.supervisor import job_server
from jaxrun.controller.supervisor.job_server import JobServer, JobSockets, parent_socket, report_not_started
from jaxrun.errors import UsageError
from jaxrun.job_events.events import (
    EndRequested,
    Event,
    FaultRequested,
    ParentExited,
    Requested,
    RequestEnded,
    SignalRequested,
)
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.codec import Form, MessageDecoder, encode_json_frame, message_types
from jaxrun.protocol.job_messages import (
    MAX_ANSWER_FRAME_BYTES,
    SOCKET_VERSION,
    Answer,
    Answered,
    AnswerState,
    Ask,
    DebugRequest,
    Dropped,
    EndOrder,
    FaultOrder,
    Follow,
    FromClient,
    Greeting,
    JobBegan,
    JobEnded,
    JobEvent,
    NotStarted,
    OverviewRequest,
    ProfileRequest,
    SignalOrder,
    StacksRequest,
    ToClient,
)
from jaxrun.protocol.names import CONTROL_FD, GANG_ADDRESS

JOB_ID = "ab" * 16
HELLO = Greeting(SOCKET_VERSION)
BY_DEATH = ParentExited("the end of the process that started it")
DONE = Answer(AnswerState.DONE, "", {"a": [1, None]})


class Peer:
    """The other end of one connection."""

    def __init__(self, link: socket.socket) -> None:
        link.setblocking(False)
        self.link = link
        self._decoder: MessageDecoder[ToClient] = MessageDecoder(
            message_types(ToClient), MAX_ANSWER_FRAME_BYTES, form=Form.JSON
        )
        self.is_closed = False

    def send(self, *messages: FromClient) -> None:
        self.link.sendall(b"".join(map(encode_json_frame, messages)))

    def receive(self) -> list[ToClient]:
        """All that has come; notes whether the connection was closed."""
        found: list[ToClient] = []
        with contextlib.suppress(BlockingIOError):
            while data := self.link.recv(2**20):
                found += self._decoder.feed(data)
            self.is_closed = True
        return found


class Job:
    """A JobServer in the loop of an attempt, with what it has told the head and the user."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.notes: list[str] = []
        self._peers: list[Peer] = []
        parent, self._inherited = socket.socketpair()
        self.parent = self._watch(parent)
        self.loop = EventLoop()
        sockets = JobSockets(parent=self._inherited)
        self.server = JobServer(JOB_ID, sockets, self.loop, 0, self.events.append, self.notes.append)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self.server.begin_attempt(self.events)

    def connect(self, *messages: FromClient) -> Peer:
        """Connect a client that sends these."""
        ours, theirs = socket.socketpair()
        self.server.admit(theirs)
        peer = self._watch(ours)
        with contextlib.suppress(BrokenPipeError):  # it was turned away
            peer.send(*messages)
        self.run()
        return peer

    def _watch(self, link: socket.socket) -> Peer:
        self._peers.append(Peer(link))
        return self._peers[-1]

    def close(self) -> None:
        self.server.close()
        self.loop.close()
        for peer in self._peers:
            peer.link.close()

    def run(self, rounds: int = 20) -> None:
        for _ in range(rounds):
            self.loop.run_once(0)

    def take_events(self) -> list[Event]:
        found = self.events[:]
        self.events.clear()
        return found


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


# ---- requests


def test_the_first_frame_names_version_and_job(job: Job) -> None:
    assert job.connect().receive() == job.parent.receive() == [Greeting(SOCKET_VERSION, JOB_ID)]


def test_clients_that_ask_by_the_same_number_get_their_own_answers(job: Job) -> None:
    one, other = (job.connect(HELLO, Ask(1, request)) for request in (StacksRequest(native=True), OverviewRequest()))
    first, second = job.take_events()
    assert isinstance(first, Requested) and isinstance(second, Requested)
    assert (first.request, second.request) == (StacksRequest(native=True), OverviewRequest())
    progress = Answer(AnswerState.PROGRESS, "é")
    job.server.answer(second.number, progress)
    job.server.answer(second.number, DONE)
    job.server.answer(second.number, DONE)  # which nobody waits for any more
    job.server.answer(first.number, Answer(AnswerState.REFUSED, "no"))
    assert other.receive()[1:] == [Answered(1, progress), Answered(1, DONE)]
    assert one.receive()[1:] == [Answered(1, Answer(AnswerState.REFUSED, "no"))]


def test_an_answer_of_many_megabytes_arrives_whole_and_delays_nobody(job: Job) -> None:
    slow = job.connect(HELLO, Ask(1, StacksRequest()))
    (asked,) = job.take_events()
    assert isinstance(asked, Requested)
    frames = [["train.py", number, "step"] for number in range(10)]
    content = {"dumps": {str(rank): {"frames": frames, "text": "x" * 20_000} for rank in range(512)}}
    job.server.answer(asked.number, Answer(AnswerState.DONE, content=content))
    quick = job.connect(HELLO, Ask(7, OverviewRequest()))
    (more,) = job.take_events()
    assert isinstance(more, Requested)
    job.server.answer(more.number, DONE)
    assert quick.receive()[1:] == [Answered(7, DONE)]
    received: list[ToClient] = []
    while len(received) < 2:
        received += slow.receive()
        job.run(1)
    assert received[1] == Answered(1, Answer(AnswerState.DONE, content=content))


def test_an_answer_that_no_frame_can_hold_is_refused(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_server, "MAX_ANSWER_FRAME_BYTES", 1000)
    peer = job.connect(HELLO, Ask(1, StacksRequest()))
    (asked,) = job.take_events()
    assert isinstance(asked, Requested)
    job.server.answer(asked.number, Answer(AnswerState.DONE, content="x" * 2000))
    *_, answered = peer.receive()
    assert isinstance(answered, Answered) and answered.answer.state is AnswerState.REFUSED
    assert "the answer is too long" in answered.answer.text


def test_frames_may_come_in_pieces(job: Job) -> None:
    peer = job.connect()
    for byte in (
        encode_json_frame(HELLO)
        + encode_json_frame(Ask(3, OverviewRequest()))
        + encode_json_frame(SignalOrder(signal.SIGINT))
    ):
        assert job.events == []
        peer.link.sendall(bytes([byte]))
        job.run(1)
        if job.events:
            break
    assert [type(event) for event in job.take_events()] == [Requested]


def test_a_client_that_dies_in_the_midst_of_a_frame_or_before_its_answer_is_forgotten(job: Job) -> None:
    peer = job.connect(HELLO, Ask(1, OverviewRequest()))
    peer.link.sendall(encode_json_frame(SignalOrder(signal.SIGINT))[:-3])
    job.run()
    peer.link.close()
    job.run()
    asked, ended = job.take_events()
    assert isinstance(asked, Requested) and ended == RequestEnded(asked.number)
    job.server.answer(asked.number, DONE)
    assert job.notes == [] and job.events == []
    assert job.connect().receive() == [Greeting(SOCKET_VERSION, JOB_ID)]


def test_a_request_that_the_end_of_an_attempt_leaves_open_is_refused_and_the_next_attempt_answers(job: Job) -> None:
    peer = job.connect(HELLO, Ask(1, OverviewRequest()))
    job.take_events()
    job.begin_attempt()
    *_, answered = peer.receive()
    assert isinstance(answered, Answered) and "the attempt ended before" in answered.answer.text
    peer.send(Ask(2, OverviewRequest()))
    job.run()
    (asked,) = job.take_events()
    assert isinstance(asked, Requested)
    job.server.answer(asked.number, DONE)
    assert peer.receive() == [Answered(2, DONE)]


def test_a_client_that_uses_a_number_twice_at_once_is_dropped_and_its_request_ends(job: Job) -> None:
    peer = job.connect(HELLO, Ask(1, DebugRequest(0)))
    (asked,) = job.take_events()
    assert isinstance(asked, Requested)
    peer.send(Ask(1, DebugRequest(1)))
    job.run()
    *_, last = peer.receive()
    assert isinstance(last, Dropped) and "asks by the number 1 again" in last.reason and peer.is_closed
    assert job.take_events() == [RequestEnded(asked.number)]


def test_a_number_may_be_used_again_after_the_last_answer(job: Job) -> None:
    peer = job.connect(HELLO)
    for _ in range(2):
        peer.send(Ask(1, OverviewRequest()))
        job.run()
        (asked,) = job.take_events()
        assert isinstance(asked, Requested)
        job.server.answer(asked.number, DONE)
    assert peer.receive()[1:] == [Answered(1, DONE)] * 2


def test_a_client_that_asks_too_much_at_once_is_dropped_and_others_are_not(job: Job) -> None:
    other = job.connect(HELLO, Ask(0, OverviewRequest()))
    peer = job.connect(HELLO, *(Ask(number, OverviewRequest()) for number in range(65)))
    *_, last = peer.receive()
    assert isinstance(last, Dropped) and "64 of its requests are not answered" in last.reason and peer.is_closed
    assert other.receive()[1:] == [] and not other.is_closed
    assert sum(isinstance(event, RequestEnded) for event in job.take_events()) == 64


# ---- orders

ORDERS = {
    "interrupt": (SignalOrder(signal.SIGINT), SignalRequested(signal.SIGINT)),
    "usr2": (SignalOrder(signal.SIGUSR2), SignalRequested(signal.SIGUSR2)),
    "kill": (FaultOrder("kill", (1,)), FaultRequested("kill", (1,))),
    "pause": (FaultOrder("pause", (3, 0)), FaultRequested("pause", (3, 0))),
}


def test_to_end_gracefully_is_the_same_as_sigterm_to_the_launcher(job: Job) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: received.append(signum))
    try:
        job.connect(HELLO, EndOrder(gracefully=True))
        job.run()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == [signal.SIGTERM] and job.take_events() == []


@pytest.mark.parametrize(("order", "event"), ORDERS.values(), ids=ORDERS)
def test_an_order_becomes_an_event_whoever_gives_it(job: Job, order: FromClient, event: Event) -> None:
    job.connect(HELLO, order)
    job.parent.send(HELLO, order, order)
    job.run()
    assert job.take_events() == [event] * 3


def test_the_end_of_the_job_names_who_has_ordered_it(job: Job) -> None:
    job.connect(HELLO, EndOrder())
    job.parent.send(HELLO, EndOrder())
    job.run()
    assert job.take_events() == [
        EndRequested("an order at its socket"),
        ParentExited("the process that started it"),
    ]


def test_the_death_of_the_parent_ends_the_job_and_each_further_attempt(job: Job) -> None:
    job.parent.link.close()
    job.run()
    assert job.take_events() == [BY_DEATH]
    job.begin_attempt()
    job.run()
    assert job.take_events() == [BY_DEATH]


def test_what_comes_between_two_attempts_is_for_the_next(job: Job) -> None:
    """The loop of the job serves the socket meanwhile."""
    peer = job.connect(HELLO)
    peer.receive()
    peer.send(Ask(1, OverviewRequest()))
    job.parent.link.close()
    job.run()
    job.begin_attempt()
    waiting = job.take_events()
    assert [type(event) for event in waiting] == [Requested, ParentExited]  # each once
    assert isinstance(waiting[0], Requested)
    job.server.answer(waiting[0].number, DONE)
    assert peer.receive() == [Answered(1, DONE)]


def test_the_end_of_another_client_ends_nothing(job: Job) -> None:
    job.connect(HELLO).link.close()
    job.run()
    assert job.take_events() == [] and job.notes == []


# ---- what is not understood


def framed(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


WRONG = {
    "no json": framed(b"what?"),
    "no frame": b"GET / HTTP/1.1\r\n\r\n",
    "a type of no client": encode_json_frame(JobEvent("")),
    "a frame of an older jaxrun": framed(b'{"v":2,"type":"Follow"}'),
    "a missing field": framed(b'{"type":"SignalOrder"}'),
    "a field too many": framed(b'{"type":"Follow","at":3}'),
    "a rank that is no number": framed(b'{"type":"FaultOrder","kind":"kill","ranks":[true]}'),
    "a fault of no kind": encode_json_frame(FaultOrder("maim", (1,))),
    "a signal that kills": encode_json_frame(SignalOrder(signal.SIGKILL)),
    "another version": encode_json_frame(Greeting(99)),
    "a profile after a time that never passes": encode_json_frame(Ask(1, ProfileRequest(1, "/p", "s", float("nan")))),
    "a profile that leaves its directory": encode_json_frame(Ask(1, ProfileRequest(1, "/p", "../../esc", 1.0))),
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG)
def test_only_a_client_that_sends_nonsense_is_dropped_with_the_reason(job: Job, data: bytes) -> None:
    other, peer = job.connect(HELLO, Follow()), job.connect(HELLO)
    peer.link.sendall(data)
    job.run()
    *_, last = peer.receive()
    assert isinstance(last, Dropped) and last.reason and peer.is_closed
    assert job.events == [] and len(job.notes) == 1
    assert f"process {os.getpid()}" in job.notes[0] and last.reason in job.notes[0]
    job.server.publish("{}")
    assert other.receive()[1:] == [JobEvent("{}")]


def test_a_client_that_does_not_greet_first_is_dropped(job: Job) -> None:
    peer = job.connect(EndOrder())
    assert peer.receive()[1:] == [Dropped("its first frame is a EndOrder, not a Greeting")]
    assert job.events == []


def test_a_parent_that_is_not_understood_is_taken_for_gone(job: Job) -> None:
    job.parent.link.sendall(framed(b"what?"))
    job.run()
    (event,) = job.take_events()
    assert isinstance(event, ParentExited) and "not understood" in event.reason
    assert len(job.notes) == 1 and "'what?'" in job.notes[0]


def test_more_clients_than_are_served_are_turned_away(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_server, "_MAX_CLIENTS", 3)  # one of them is the parent
    job.connect(HELLO)
    job.connect(HELLO)
    peer = job.connect()
    (last,) = peer.receive()
    assert isinstance(last, Dropped) and "others ask or follow" in last.reason and peer.is_closed


def test_another_user_is_turned_away(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_server, "is_trusted", lambda uid: False)
    (last,) = job.connect().receive()
    assert isinstance(last, Dropped) and "only the user who has started the job" in last.reason


# ---- events


def test_those_who_follow_get_each_event_and_all_get_the_verdict(job: Job) -> None:
    job.server.publish("too early")
    followers = [job.connect(HELLO, Follow()) for _ in range(2)]
    asks = job.connect(HELLO)
    job.server.publish('{"time": 1}')
    job.server.end('{"exit_code": 0}')
    for peer in followers:
        assert peer.receive()[1:] == [JobEvent('{"time": 1}'), JobEnded('{"exit_code": 0}')]
    assert asks.receive()[1:] == [JobEnded('{"exit_code": 0}')] and asks.is_closed
    assert job.parent.receive()[1:] == [JobEnded('{"exit_code": 0}')] and job.parent.is_closed


def test_a_follower_that_does_not_read_is_dropped_with_one_line_and_no_other(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_server, "_MAX_UNSENT_BYTES", 2**20)
    job.connect(HELLO, Follow())
    reads = job.connect(HELLO, Follow())
    line = "x" * 2**16
    received = reads.receive()
    for _ in range(40):
        job.server.publish(line)
        job.run(2)
        received += reads.receive()
    assert len(job.notes) == 1 and "has not read" in job.notes[0]
    assert received[1:] == [JobEvent(line)] * 40


def test_one_that_reads_again_gets_all_that_it_has_missed(job: Job) -> None:
    peer = job.connect(HELLO, Follow())
    lines = [f"{number}{'x' * 2**16}" for number in range(30)]
    for line in lines:
        job.server.publish(line)
    received: list[ToClient] = []
    while len(received) < 31:
        received += peer.receive()
        job.run(1)
    assert received[1:] == [JobEvent(line) for line in lines] and job.notes == []


# ---- the inherited socket


def test_the_parents_socket_is_not_handed_on_and_never_blocks() -> None:
    ours, theirs = socket.socketpair()
    with ours, contextlib.closing(EventLoop()) as loop:
        os.set_inheritable(theirs.fileno(), True)
        found = parent_socket({CONTROL_FD: str(theirs.detach())})
        assert found is not None and not found.get_inheritable()
        server = JobServer(JOB_ID, JobSockets(parent=found), loop, 0, print, print)
        assert not found.getblocking()
        server.close()


def test_the_parent_alone_hears_where_its_job_is(job: Job) -> None:
    other = job.connect(HELLO)
    job.server.announce("/a/run")
    assert job.parent.receive()[1:] == [JobBegan("/a/run")]
    assert other.receive()[1:] == []


def test_a_parent_that_waits_for_a_job_hears_why_there_is_none_unless_it_reads_the_output() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        environ = {CONTROL_FD: str(theirs.fileno())}
        assert not report_not_started("no", 2, {})
        assert not report_not_started("no", 2, {**environ, GANG_ADDRESS: "unix:/a"})
        assert report_not_started("no", 2, environ)
        assert Peer(ours).receive() == [NotStarted("no", 2)]
    assert not report_not_started("no", 2, environ)


def test_without_a_number_there_is_no_parent() -> None:
    assert parent_socket({}) is None


@pytest.mark.parametrize("number", ["", "x", "-1", "999999", "a file"])
def test_a_number_of_no_socket_is_an_error(number: str) -> None:
    with open(os.devnull) as null, pytest.raises(UsageError, match=f"{CONTROL_FD}='[^']*' names no open socket"):
        parent_socket({CONTROL_FD: str(null.fileno()) if number == "a file" else number})


# ---- other versions of the socket


def frame_of_version_1(kind: str, **fields: object) -> bytes:
    return framed(json.dumps({"v": 2, "type": kind, **fields}, separators=(",", ":")).encode())


def read_by_version_1(frames: bytes) -> list[dict[str, object]]:
    """What the jaxrun of the first version of the socket makes of bytes; asserts that it would read each frame."""
    fields = {"Greeting": {"version", "job_id"}, "Dropped": {"reason"}}
    read = []
    while frames:
        (length,) = struct.unpack_from("!I", frames)
        content, frames = json.loads(frames[4 : 4 + length]), frames[4 + length :]
        assert content.pop("v") == 2 and content.keys() - {"type"} == fields[content["type"]]
        read.append(content)
    return read


def test_an_older_client_reads_why_it_gets_no_answer(job: Job) -> None:
    peer = job.connect()
    peer.link.sendall(frame_of_version_1("Greeting", version=1, job_id="") + frame_of_version_1("Follow"))
    job.run()
    greeting, dropped = read_by_version_1(peer.link.recv(2**16))
    assert greeting == {"type": "Greeting", "version": SOCKET_VERSION, "job_id": JOB_ID}
    assert dropped == {
        "type": "Dropped",
        "reason": "it is of an older jaxrun, and speaks version 1 of this socket, not 2; ask with the jaxrun that "
        "started the job",
    }


def test_a_newer_client_reads_why_it_gets_no_answer(job: Job) -> None:
    peer = job.connect()
    peer.link.sendall(framed(b'{"type":"Greeting","version":3,"wants":["everything"]}') + framed(b'{"type":"New"}'))
    job.run()
    greeting, dropped = peer.receive()
    assert greeting == Greeting(SOCKET_VERSION, JOB_ID) and isinstance(dropped, Dropped)
    assert "it is of a newer jaxrun, and speaks version 3 of this socket, not 2" in dropped.reason
