"""The link to the parent: what a Python process wants of the launcher that it has started."""

import os
import select
import signal
import socket

import pytest

from jaxrun.controller.head.head_state import JobPhase
from jaxrun.controller.supervisor.parent_link import ParentLink
from jaxrun.errors import UsageError
from jaxrun.protocol.names import CONTROL_FD
from jaxrun.records.event_log.actions import PrintLine
from jaxrun.records.event_log.events import FaultRequested, ParentExited, SignalRequested

BY_ORDER = ParentExited("the process that started it")
BY_DEATH = ParentExited("the end of the process that started it")


class FakeDispatcher:
    """Answers each event with an action that names it."""

    def handle(self, event):
        return [event]


@pytest.fixture
def ends():
    """(the parent's end, a ParentLink on the other)."""
    ours, theirs = socket.socketpair()
    with ours:
        yield ours, ParentLink.from_env({CONTROL_FD: str(theirs.fileno())}, FakeDispatcher())
        theirs.close()


ORDERS = {
    '{"fault": "kill", "ranks": [1]}': FaultRequested("kill", (1,)),
    '{"fault": "pause", "ranks": [3, 0]}': FaultRequested("pause", (3, 0)),
    '{"ranks": [], "fault": "pause"}': FaultRequested("pause", ()),
    '{"signal": 2}': SignalRequested(signal.SIGINT),
    f'{{"signal": {signal.SIGUSR2.value}}}': SignalRequested(signal.SIGUSR2),
    '{"end": true}': BY_ORDER,
}


@pytest.mark.parametrize(("text", "event"), ORDERS.items(), ids=ORDERS)
def test_a_request_becomes_an_event(ends, text, event):
    parent, link = ends
    parent.sendall(f"{text}\n".encode())
    assert link.receive() == [event] and link.receive() == []


WRONG = (
    "kill 1",
    "[1]",
    "{}",
    '{"fault": "maim", "ranks": [1]}',
    '{"fault": "kill"}',
    '{"fault": "kill", "ranks": 1}',
    '{"fault": "kill", "ranks": [true]}',
    '{"fault": "kill", "ranks": ["1"]}',
    '{"fault": "kill", "ranks": [1], "at": 3}',
    '{"signal": 9}',
    '{"signal": "2"}',
    '{"end": false}',
    "\xff",
)


@pytest.mark.parametrize("text", WRONG)
def test_a_malformed_line_is_printed_and_ignored(ends, text):
    parent, link = ends
    parent.sendall(text.encode("latin-1") + b'\n\n{"signal": 10}\n')
    printed, next_one = link.receive()
    assert isinstance(printed, PrintLine) and printed.text.startswith(
        "the process that started jaxrun has sent what is not"
    )
    assert next_one == SignalRequested(signal.SIGUSR1)


def test_orders_may_come_in_pieces_and_together(ends):
    parent, link = ends
    parent.sendall(b'{"sig')
    assert link.receive() == []
    parent.sendall(b'nal": 10}\n{"end": true}\n{"fau')
    assert link.receive() == [SignalRequested(10), BY_ORDER]


def test_end_of_file_ends_the_job_and_is_read_once(ends):
    parent, link = ends
    parent.sendall(b'{"signal": 10}\n')
    with select.epoll() as loop:
        loop.register(link.fileno(), select.EPOLLIN)
        parent.close()
        assert link.receive() == [SignalRequested(10), BY_DEATH]
        assert loop.poll(0) == []


def test_it_is_not_handed_on_and_never_blocks(ends):
    _, link = ends
    assert not os.get_inheritable(link.fileno()) and not os.get_blocking(link.fileno())


def test_without_a_number_there_is_none():
    assert ParentLink.from_env({}, FakeDispatcher()) is None


@pytest.mark.parametrize("number", ["", "x", "-1", "999999"])
def test_a_number_of_no_descriptor_is_an_error(number):
    with pytest.raises(UsageError, match=f"{CONTROL_FD}='{number}' names no open descriptor"):
        ParentLink.from_env({CONTROL_FD: number}, FakeDispatcher())


# ---- the head


def test_a_signal_is_sent_to_all_running_ranks(simulate):
    job = simulate(3).run().done(1).handle(SignalRequested(signal.SIGUSR2))
    assert job.kills(signal.SIGUSR2) == [(0, (0, 2))]
    assert job.head.phase is JobPhase.RUNNING and not job.printed


@pytest.mark.parametrize("stage", ["spawn", "say_hello", "join"])
def test_a_worker_that_cannot_handle_a_signal_yet_is_sent_none(simulate, stage):
    assert getattr(simulate(2), stage)().handle(SignalRequested(signal.SIGINT)).killed == []


@pytest.mark.parametrize("stage", ["say_hello", "run"])
@pytest.mark.parametrize("asked", [BY_ORDER, BY_DEATH], ids=["by order", "by death"])
def test_the_end_comes_at_once(simulate, stage, asked):
    job = getattr(simulate(2, grace=5.0), stage)().handle(asked).wait(1)
    assert job.kills() == [(0, (0, 1))] and job.finished_at == pytest.approx(0.001)
    assert (job.outcome.reason, job.outcome.text, job.outcome.signum) == ("interrupted", asked.reason, signal.SIGHUP)


def test_before_anything_was_started_there_is_nothing_to_end(simulate):
    assert simulate(2).handle(BY_DEATH).outcome.reason == "interrupted"


def test_a_running_grace_period_is_cut_short(simulate):
    job = simulate(2, grace=60.0).run().listen().interrupt(signal.SIGTERM).wait(1).handle(BY_DEATH).wait(1)
    assert job.kills() == [(1000, (0, 1))] and job.outcome.signum == signal.SIGTERM
