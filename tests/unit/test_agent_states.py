"""The states of an agent's process: each kind of message has one handler in each, and a few of them end it."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from fakes import NotingAgent, NotingRelay

from jaxrun.errors import JaxrunError, NoPlaceError, NotUniformError, UnavailableError
from jaxrun.node.agent.agent_states import (
    HEAD_LOST,
    AgentState,
    Connecting,
    HeadLink,
    Supervising,
    WaitingForOrders,
)
from jaxrun.node.agent.signals import SignalPipe
from jaxrun.node.channel import connection as connection_module
from jaxrun.node.channel.connection import AGENT_TO_HEAD, HEAD_TO_AGENT, Connection
from jaxrun.node.channel.event_loop import EventLoop
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import (
    AgentRefused,
    AgentSignalled,
    ClockProbe,
    ClockReply,
    JobInfo,
    NextAttempt,
    OutputCredit,
    Shutdown,
    SignalWorker,
    StartWorkers,
    ToRanks,
)


class Linked:
    """A state of an agent, and the head at the other end of its connection."""

    def __init__(self, *, by_terminal: bool = False) -> None:
        ours, theirs = socket.socketpair()
        self.head = Connection(theirs, AGENT_TO_HEAD, None)
        self.signals = SignalPipe((signal.SIGTERM,)).__enter__()
        connection = Connection(ours, HEAD_TO_AGENT, None)
        self.link = HeadLink(AgentId(3), connection, self.signals, by_terminal=by_terminal)
        self.loops: list[EventLoop] = []
        self.calls: list[Any] = []

    def loop(self) -> EventLoop:
        self.loops.append(EventLoop())
        return self.loops[-1]

    def connecting(self) -> Connecting:
        return Connecting(self.link, self.loop())

    def waiting(self) -> WaitingForOrders:
        report, do = (lambda is_stopped: iter(())), (lambda order, is_stopped: iter(()))
        return WaitingForOrders(self.link, self.loop(), lambda: None, report, do, self.calls.append)

    def supervising(self) -> Supervising:
        note = self.calls.append
        agent: Any = NotingAgent(note)
        relay: Any = NotingRelay(note)
        return Supervising(self.link, self.loop(), lambda: None, agent, relay, (3, 4))

    def close(self) -> None:
        for each in (*self.loops, self.head, self.link.connection):
            each.close()
        self.signals.receive()  # else those that a test has left would be handed over
        self.signals.__exit__()


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Linked]:
    monkeypatch.setattr(connection_module, "enable_keepalive", lambda connection: None)
    made = Linked()
    with contextlib.closing(made):
        yield made


@pytest.mark.parametrize(
    ("state", "ending"),
    [
        ("connecting", {JobInfo, Shutdown}),
        ("waiting", {NextAttempt, Shutdown}),  # and StartWorkers, unless the agent waits
        ("supervising", {NextAttempt, Shutdown}),
    ],
)
def test_each_kind_of_message_has_a_handler_in_each_state_and_few_end_it(
    linked: Linked, state: str, ending: set[type]
) -> None:
    handlers = getattr(linked, state)()._handlers
    assert handlers.keys() == {*HEAD_TO_AGENT.values()}
    assert {kind for kind, handle in handlers.items() if handle.__name__ == "_end"} == ending


def test_a_table_that_lacks_a_kind_is_refused(linked: Linked) -> None:
    with pytest.raises(ValueError, match=r"JobInfo, AgentRefused, .* has no handler"):
        AgentState(linked.link, linked.loop(), {Shutdown: lambda order: order}, ())


def test_messages_behind_the_one_that_ends_a_state_are_for_the_next_one(linked: Linked) -> None:
    info, start = JobInfo("ab" * 16, "", ("cpu",)), StartWorkers((), waits=True)
    for message in (OutputCredit(9), info, start, NextAttempt(2, (5,)), ToRanks((4,), SignalWorker(10)), Shutdown(7)):
        linked.head.send(message)
    assert linked.connecting().run() == info
    assert linked.waiting().run() == NextAttempt(2, (5,))
    assert linked.supervising().run() == Shutdown(7)
    assert linked.calls == [start, "start", ((4,), SignalWorker(10))]


def test_an_order_is_for_all_ranks_of_the_agent_unless_it_names_some_and_its_clock_is_its_own(linked: Linked) -> None:
    for message in (SignalWorker(15), ToRanks((4,), SignalWorker(10)), OutputCredit(9), ClockProbe(1.5), Shutdown(0)):
        linked.head.send(message)
    assert linked.supervising().run() == Shutdown(0)
    assert linked.calls == ["start", ((3, 4), SignalWorker(15)), ((4,), SignalWorker(10)), 9]
    (reply,) = linked.head.receive()
    assert isinstance(reply, ClockReply) and (reply.agent, reply.asked_at) == (3, 1.5)


@pytest.mark.parametrize("state", ["connecting", "waiting", "supervising"])
def test_the_loss_of_the_head_ends_each_state_and_kills_the_workers(linked: Linked, state: str) -> None:
    linked.head.close()
    assert getattr(linked, state)().run() is HEAD_LOST
    assert linked.calls == (["start", signal.SIGSTOP, signal.SIGKILL] if state == "supervising" else [])


def test_an_agent_that_is_told_to_end_and_loses_its_head_at_once_was_told_first(linked: Linked) -> None:
    linked.head.close()
    linked.signals.put_back([signal.SIGTERM])
    assert linked.supervising().run() is HEAD_LOST and linked.link.stopped_by == signal.SIGTERM


@pytest.mark.parametrize(
    ("state", "refused", "error"),
    [
        ("connecting", {}, NoPlaceError),
        ("waiting", {}, NotUniformError),
        ("waiting", {"is_taken": True}, UnavailableError),
        ("waiting", {"may_return": True}, NoPlaceError),
    ],
)
def test_a_head_that_refuses_the_agent_says_why(
    linked: Linked, state: str, refused: dict[str, bool], error: type[JaxrunError]
) -> None:
    linked.head.send(AgentRefused("the job has 4 ranks", **refused))
    with pytest.raises(JaxrunError, match="the job has 4 ranks") as raised:
        getattr(linked, state)().run()
    assert type(raised.value) is error


@pytest.mark.parametrize("by_terminal", [True, False])
def test_the_head_decides_at_a_stop_signal_and_at_a_terminal_the_second_ends_the_agent(
    monkeypatch: pytest.MonkeyPatch, by_terminal: bool
) -> None:
    monkeypatch.setattr(connection_module, "enable_keepalive", lambda connection: None)
    with contextlib.closing(Linked(by_terminal=by_terminal)) as linked:
        forward = linked.link.forward_stop
        assert forward(signal.SIGINT) is None
        assert forward(signal.SIGINT) == (Shutdown(130) if by_terminal else None)
        sent = linked.head.receive()
        assert sent == [AgentSignalled(AgentId(3), signal.SIGINT)] * (1 if by_terminal else 2)
