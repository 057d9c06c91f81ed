"""An interrupt of a rank ends what its function does, and loses nothing that is on its way."""

import select
import signal
import threading
import time

import pytest
from conversing import playing

from jaxrun.protocol.gang_messages import GangMessageKind, pack
from jaxrun_runtime.gang import calls, interrupts

pytestmark = pytest.mark.jax_version

LARGE = 2**20  # bytes that do not fit into a socket


@pytest.fixture
def play(monkeypatch):
    with playing(monkeypatch) as run:
        yield run


def current():
    return calls.current_call()


def test_an_interrupt_ends_the_function_and_not_the_rank(play):
    def sleeping():
        current().send("asleep")
        time.sleep(60)

    def parent(side):
        side.run(sleeping)
        side.hear()
        side.interrupt()
        kind, failure = side.hear()
        side.run(lambda: "next", number=2, interrupts=1)
        return kind, failure["error"], side.hear()

    assert play(parent) == (GangMessageKind.EXCEPTION, "KeyboardInterrupt", (GangMessageKind.RESULT, "next"))


def test_while_nothing_runs_there_is_nothing_to_interrupt(play):
    def parent(side):
        side.run(int)
        side.hear()
        side.interrupt()
        side.run(lambda: "next", number=2, interrupts=1)
        return side.hear()

    assert play(parent) == (GangMessageKind.RESULT, "next")


def test_an_interrupt_may_be_faster_than_the_function_it_is_meant_for(play):
    def parent(side):
        side.interrupt()
        side.run(time.sleep, 60)
        first = side.hear()[1]["error"]
        side.run(lambda: "next", number=2, interrupts=1)
        return first, side.hear()

    assert play(parent) == ("KeyboardInterrupt", (GangMessageKind.RESULT, "next"))


@pytest.mark.parametrize("working", [True, False], ids=["while it works", "while it is idle"])
def test_an_interrupt_from_elsewhere_hits_one_function_at_most(play, working):
    def parent(side):
        if not working:
            side.interrupt()
        side.run(signal.raise_signal, signal.SIGINT) if working else side.run(time.sleep, 60)
        heard = [side.hear()[1]["error"]]
        for number in (2, 3):
            side.run(lambda: "undisturbed", number=number)
            heard.append(side.hear()[1])
        return heard

    assert play(parent) == ["KeyboardInterrupt", "undisturbed", "undisturbed"]


def test_an_interrupt_that_was_meant_for_an_earlier_function_does_not_hit_the_next(play, monkeypatch):
    """It comes by way of the launcher, and may be slower than the next task."""
    waited = threading.Event()
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (waited.set(), sleep(seconds)))

    def parent(side):
        side.run(lambda: "undisturbed", interrupts=1)
        assert waited.wait(20)
        side.interrupt()
        return side.hear()

    assert play(parent) == (GangMessageKind.RESULT, "undisturbed")


def test_an_interrupt_that_does_not_come_is_not_waited_for_for_ever(play, monkeypatch):
    monkeypatch.setattr(interrupts, "_ARRIVAL_TIMEOUT_S", 0.01)

    def parent(side):
        side.run(lambda: "late", interrupts=5)
        first = side.hear()
        side.run(lambda: "at once", number=2, interrupts=5)
        return first, side.hear()

    assert play(parent) == ((GangMessageKind.RESULT, "late"), (GangMessageKind.RESULT, "at once"))


def test_an_interrupt_while_a_value_leaves_waits_until_it_has_left(play):
    def sending():
        try:
            current().send(bytes(LARGE))
        except KeyboardInterrupt:
            current().send("and then interrupted")

    def parent(side):
        side.run(sending)
        select.select([side.connection], [], [], 20)  # it has begun, and cannot end before we read
        side.interrupt()
        return [side.hear() for _ in range(3)]

    (_, value), second, last = play(parent)
    assert len(value) == LARGE
    assert (second, last) == ((GangMessageKind.VALUE, "and then interrupted"), (GangMessageKind.RESULT, None))


def test_an_interrupt_while_a_value_comes_loses_nothing(play):
    def receiving():
        talk = current()
        talk.send("ready")
        try:
            talk.receive()
        except KeyboardInterrupt:
            talk.send("interrupted")
        return len(talk.receive()), talk.receive()

    def parent(side):
        side.run(receiving)
        said = [side.hear()]
        frame = b"".join(pack(GangMessageKind.VALUE, 1, bytes(LARGE), share=False).to_frame())
        side.connection.sendall(frame[:-1])  # more than fits, so it has taken some of it
        side.interrupt()
        side.connection.sendall(frame[-1:])
        said.append(side.hear())
        side.say("next")
        return *said, side.hear()

    assert play(parent) == (
        (GangMessageKind.VALUE, "ready"),
        (GangMessageKind.VALUE, "interrupted"),
        (GangMessageKind.RESULT, (LARGE, "next")),
    )


def test_an_interrupt_in_a_result_on_its_way_is_no_failure(play):
    """The function is over then."""

    def parent(side):
        side.run(lambda: bytes(LARGE))
        select.select([side.connection], [], [], 20)
        side.interrupt()
        kind, value = side.hear()
        side.run(lambda: "next", number=2, interrupts=1)
        return kind, len(value), side.hear()

    assert play(parent) == (GangMessageKind.RESULT, LARGE, (GangMessageKind.RESULT, "next"))
