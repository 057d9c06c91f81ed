"""The parent's side of a conversation, and the connections below it, with ranks by hand."""

import json
import os
import signal
import socket
import struct
import threading

import numpy as np
import pytest

from jaxrun.gang import call
from jaxrun.gang.call import Disconnected, GangCall, LauncherOutput, Printed, RankMessage, Returned, step_difference
from jaxrun.gang.rank_connections import RankConnections
from jaxrun.protocol.exceptions import pickle_exception
from jaxrun.protocol.payload import GangMessage, GangMessageKind, GangMessageReader, GangMessageWriter, pack

NUMBER = 5  # of the conversation


class Rank:
    """The other end of a connection."""

    def __init__(self, connection):
        self.connection = connection
        self.inbox, self.outbox = GangMessageReader(connection), GangMessageWriter(connection)

    def tell(self, kind, value=None, *, number=NUMBER, note=b""):
        self.put(pack(kind, number, value, share=True, note=note))

    def put(self, parcel):
        self.outbox.add(parcel)
        self.outbox.flush()

    def returns(self, value=None, calls=None):
        self.tell(GangMessageKind.RESULT, value, note=json.dumps(calls or {}).encode())

    def fails(self, error, calls=None):
        words = {"error": type(error).__name__, "message": str(error), "traceback": "", "notes": (), "status": 1}
        value = {**words, "time": 1.0, "home": "builtins", "exception": pickle_exception(error)}
        self.tell(GangMessageKind.EXCEPTION, value, note=json.dumps(calls or {}).encode())

    def prints(self, text, kind=GangMessageKind.STDOUT):
        self.put(GangMessage(kind, NUMBER, text.encode()))

    def hears(self):
        return self.inbox.receive()

    def ends(self):
        self.connection.close()


class FakeGang:
    """What a Conversation and a Switchboard want of a gang, and of its launcher."""

    shares_memory = True

    def __init__(self, size):
        self.output_fd, self.output_write_end = os.pipe()
        os.set_blocking(self.output_fd, False)
        self.has_ended = False
        self.connections = RankConnections(self)
        self.ranks = []
        self.interrupts, self.broken, self.stopped, self.ended = 0, "", False, 0
        self.on_interrupt = lambda: None
        self.display, self.printed = self, []
        for rank in range(size):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            theirs.settimeout(20)
            self.connections.add(rank, ours, GangMessageReader(ours))
            self.ranks.append(Rank(theirs))

    def refresh(self, talk):
        return None

    def show_printed(self, printed):
        self.printed.append(printed)

    def show_launcher_output(self, told):
        self.printed.append(told)

    def read_output(self):
        try:
            return os.read(self.output_fd, 1000).decode()
        except BlockingIOError:
            return ""

    def host(self, rank):
        return f"h{rank}"

    def interrupt(self):
        self.interrupts += 1
        self.on_interrupt()

    def mark_broken(self, reason):
        self.broken = self.broken or reason

    def stop(self):
        self.stopped = True

    def explain_death(self, patience, gone):
        return f"the launcher's verdict on {gone}"

    def end_call(self, *about, **more):
        self.ended += 1

    def start_call(self, value="task"):
        return GangCall(self, NUMBER, pack(GangMessageKind.CALL, NUMBER, value, share=True))

    def close(self):
        self.connections.close()
        for rank in self.ranks:
            rank.ends()
        os.close(self.output_fd)
        if self.output_write_end >= 0:
            os.close(self.output_write_end)


@pytest.fixture
def gang(request):
    fake = FakeGang(getattr(request, "param", 2))
    yield fake
    fake.close()


def events(talk, count):
    return [talk.receive(20) for _ in range(count)]


def test_all_ranks_get_the_task_and_their_results_come_back(gang):
    with gang.converse(("f", 1)) as talk:
        assert talk.missing == (0, 1)
        for rank in gang.ranks:
            task = rank.hears()
            assert (task.kind, task.conversation, task.open()) == (GangMessageKind.CALL, NUMBER, ("f", 1))
        gang.ranks[1].returns("one")
        (event,) = events(talk, 1)
        assert isinstance(event, Returned) and (event.rank, event.value(), event.error) == (1, "one", None)
        assert talk.missing == (0,) and talk.receive(0) is None
        gang.ranks[0].returns("zero")
        events(talk, 1)
        assert talk.missing == () and talk.receive() is None
        assert {rank: outcome.value() for rank, outcome in talk.outcomes.items()} == {0: "zero", 1: "one"}
    assert (gang.sick, gang.interrupts, gang.ended) == ("", 0, 1)


def test_events_of_a_rank_come_in_their_order(gang):
    with gang.converse() as talk:
        one, other = gang.ranks
        one.tell(GangMessageKind.VALUE, {"a": 1})
        one.prints("half ")
        one.prints("bad\n", GangMessageKind.STDERR)
        one.fails(KeyError("x"))
        said, out, err, failed = events(talk, 4)
        assert said == RankMessage(0, {"a": 1})
        assert (out, err) == (Printed(0, "out", b"half "), Printed(0, "err", b"bad\n"))
        assert failed.error.error == "KeyError" and failed.error.host == "h0"
        assert [failure.rank for failure in talk.failures] == [0]
        other.returns()
        events(talk, 1)


def test_what_a_rank_printed_last_is_there_after_it_has_returned(gang):
    """Both may come in one piece; nobody is missing then, and there is still something to show."""
    with gang.converse() as talk:
        for rank in gang.ranks:
            rank.prints("last words\n")
            rank.returns()
        assert [type(event) for event in events(talk, 4)].count(Printed) == 2
        assert talk.receive() is None


def test_what_nobody_has_taken_is_printed_at_the_end(gang):
    with gang.converse() as talk:
        for number, rank in enumerate(gang.ranks):
            rank.prints(f"{number}\n")
            rank.returns()
        assert events(talk, 1) == [Printed(0, "out", b"0\n")]
    assert gang.printed == [Printed(1, "out", b"1\n")]


def test_what_the_launcher_says_is_an_event_which_is_shown_if_nobody_takes_it(gang):
    with gang.converse() as talk:
        os.write(gang.mouth, b"jaxrun: taken\n")
        assert events(talk, 1) == [LauncherOutput("jaxrun: taken\n")]
        os.write(gang.mouth, b"jaxrun: left\n")
        for rank in gang.ranks:
            rank.returns()
    assert gang.printed == [LauncherOutput("jaxrun: left\n")]


def test_values_go_to_all_or_to_some(gang):
    with gang.converse() as talk:
        talk.send("all")
        talk.send("one", ranks=[1])
        heard = [[rank.hears().open()] for rank in gang.ranks]
        assert [rank.hears().open() for rank in gang.ranks] == ["all", "all"] and heard == [["task"], ["task"]]
        assert gang.ranks[1].hears().open() == "one"
        for rank in gang.ranks:
            rank.returns()
        events(talk, 2)


def test_what_was_sent_is_what_it_was_then(gang):
    """A rank may read late; the caller's arrays are the caller's again at once."""
    with gang.converse() as talk:
        value = np.zeros(2**12)
        for number in range(20):
            value[:] = number
            talk.send(value, ranks=[0])
        thread = threading.Thread(target=talk.receive, args=(20,))
        thread.start()
        assert gang.ranks[0].hears().open() == "task"
        assert [gang.ranks[0].hears().open().max() for _ in range(20)] == list(range(20))
        gang.ranks[0].returns()
        thread.join()
        gang.ranks[1].returns()
        events(talk, 1)


def test_what_belongs_to_an_earlier_conversation_is_dropped(gang):
    with gang.converse() as talk:
        gang.ranks[0].tell(GangMessageKind.VALUE, "late", number=NUMBER - 1)
        gang.ranks[0].tell(GangMessageKind.RESULT, "late", number=NUMBER - 1)
        gang.ranks[0].returns("right")
        (event,) = events(talk, 1)
        assert event.value() == "right"
        gang.ranks[1].returns()
        events(talk, 1)


def test_a_rank_that_ends_is_gone_after_what_it_said(gang):
    with gang.converse() as talk:
        assert talk.died() is None
        gang.ranks[1].tell(GangMessageKind.VALUE, "farewell")
        gang.ranks[1].ends()
        assert events(talk, 2) == [RankMessage(1, "farewell"), Disconnected(1)]
        assert (talk.gone, talk.missing, talk.died()) == ({1}, (0,), "the launcher's verdict on {1}")
        gang.ranks[0].returns()
        events(talk, 1)
    assert gang.sick == "rank 1 ended" and gang.switchboard.ranks == (0,)


def test_a_rank_that_ends_after_it_has_returned_is_no_event(gang):
    with gang.converse() as talk:
        gang.ranks[1].returns("done")
        gang.ranks[1].ends()
        gang.ranks[0].returns()
        assert {type(event) for event in events(talk, 2)} == {Returned} and talk.receive(0) is None
    gang.switchboard.poll(0)
    assert gang.switchboard.ranks == (0,)


def test_what_is_no_parcel_ends_a_connection(gang):
    with gang.converse() as talk:
        gang.ranks[0].connection.sendall(b"x" * 1000)
        assert events(talk, 1) == [Disconnected(0)]
        gang.ranks[1].returns()
        events(talk, 1)


# ---- how it ends


def test_ranks_that_are_still_at_it_are_interrupted_and_told_that_it_is_over(gang):
    gang.on_interrupt = lambda: [rank.returns() for rank in gang.ranks]
    with gang.converse():
        pass
    assert (gang.interrupts, gang.sick, gang.ended) == (1, "", 1)
    for rank in gang.ranks:
        assert [rank.hears().kind for _ in range(2)] == [GangMessageKind.CALL, GangMessageKind.END_CALL]


def test_who_does_not_come_back_makes_the_gang_sick(gang, monkeypatch):
    monkeypatch.setattr(call, "INTERRUPT_PATIENCE", 0.01)
    gang.ranks[0].returns()
    with gang.converse():
        pass
    assert gang.sick == "rank 1 did not come back from the last call" and not gang.stopped


def test_an_error_of_the_parent_is_not_hidden_by_the_end(gang):
    gang.on_interrupt = lambda: [rank.returns() for rank in gang.ranks]
    with pytest.raises(KeyError, match="mine"):
        with gang.converse():
            raise KeyError("mine")
    assert gang.ended == 1 and not gang.sick


def test_a_second_interrupt_stops_the_gang(gang):
    def again():
        raise KeyboardInterrupt

    gang.on_interrupt = again
    with pytest.raises(KeyboardInterrupt):
        with gang.converse():
            raise KeyboardInterrupt
    assert gang.stopped and gang.ended == 1 and gang.sick == "ranks 0-1 did not end when interrupted twice"


def test_ranks_that_made_different_calls_make_the_gang_sick(gang):
    with gang.converse() as talk:
        gang.ranks[0].returns(calls={"0-1": 3})
        gang.ranks[1].fails(ValueError("x"), calls={"0-1": 2})
        events(talk, 2)
    assert gang.sick.startswith("ranks 0-1 are out of step")


def test_ranks_that_failed_in_step_do_not(gang):
    with gang.converse() as talk:
        for rank in gang.ranks:
            rank.fails(ValueError("x"), calls={"0-1": 3})
        events(talk, 2)
    assert gang.sick == ""


STEPS = {
    "nothing recorded": ({0: b"", 1: b""}, ""),
    "none made": ({0: {}, 1: {}}, ""),
    "as many": ({0: {"0-1": 3}, 1: {"0-1": 3}}, ""),
    "one more": ({0: {"0-1": 3}, 1: {"0-1": 2}}, "ranks 0-1 .*(rank 1 2, rank 0 3)"),
    "none yet": ({0: {"0-1": 1}, 1: {}}, "ranks 0-1 .*(rank 1 0, rank 0 1)"),
    "only for its members": ({0: {"0-1": 1}, 1: {"0-1": 1}, 2: {}}, ""),
    "groups apart": ({0: {"0,2": 1}, 1: {"1,3": 5}, 2: {"0,2": 1}, 3: {"1,3": 5}}, ""),
    "one of two groups": (
        {0: {"0-1": 1}, 1: {"0-1": 1}, 2: {"2-3": 2}, 3: {"2-3": 4}},
        "ranks 2-3 .*(rank 2 2, rank 3 4)",
    ),
    "many alike": ({rank: {"0-4": rank // 3} for rank in range(5)}, "ranks 0-4 .*(ranks 0-2 0, ranks 3-4 1)"),
}


@pytest.mark.parametrize(("notes", "text"), STEPS.values(), ids=STEPS)
def test_out_of_step(notes, text):
    found = step_difference({rank: note if note == b"" else json.dumps(note).encode() for rank, note in notes.items()})
    first, _, counts = text.partition(".*")
    assert found.startswith(first) and found.endswith(counts) and bool(found) is bool(text)


# ---- the connections


def test_a_rank_that_does_not_read_holds_nobody_up(gang):
    large = pack(GangMessageKind.VALUE, 1, np.zeros(2**20), share=False)
    gang.switchboard.send(large, (0, 1))
    thread = threading.Thread(target=gang.ranks[1].hears)
    thread.start()
    while thread.is_alive():
        gang.switchboard.poll(0.01)
    thread.join()
    reader = threading.Thread(target=gang.ranks[0].hears)
    reader.start()
    while reader.is_alive():
        gang.switchboard.poll(0.01)
    reader.join()
    gang.ranks[0].returns()
    assert [rank for rank, _ in gang.switchboard.poll(20)] == [0]


def test_who_is_not_there_is_sent_nothing(gang):
    gang.ranks[0].ends()
    assert gang.switchboard.poll(20) == [(0, None)]
    gang.switchboard.send(pack(GangMessageKind.VALUE, 1, "x", share=False), (0, 1, 7))
    assert gang.ranks[1].hears().open() == "x"


def test_a_rank_that_goes_while_it_is_sent_something_is_told_once(gang):
    gang.ranks[0].connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gang.ranks[0].ends()
    gang.switchboard.send(pack(GangMessageKind.VALUE, 1, "x", share=False), (0,))
    assert gang.switchboard.poll(20) == [(0, None)] and gang.switchboard.poll(0) == []


def test_what_the_launcher_says_is_kept(gang):
    os.write(gang.mouth, b"jaxrun: look\n")
    assert gang.switchboard.poll(20) == [] and gang.switchboard.take_words() == "jaxrun: look\n"
    assert gang.switchboard.take_words() == ""


def test_the_end_of_the_launcher_is_no_reason_to_wake_up_again(gang):
    os.close(gang.mouth)
    gang.mouth, gang.over = -1, True
    assert gang.switchboard.poll(20) == []
    gang.ranks[1].tell(GangMessageKind.VALUE, 1)
    assert [rank for rank, _ in gang.switchboard.poll(20)] == [1]


def test_a_ctrl_c_while_bytes_move_comes_afterwards(gang):
    """Or what a rank has said would be half taken, and all that follows would be nonsense."""
    read = GangMessageReader.receive

    def interrupted(inbox):
        parcel = read(inbox)
        signal.raise_signal(signal.SIGINT)
        return parcel

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GangMessageReader, "receive", interrupted)
        gang.ranks[0].tell(GangMessageKind.VALUE, "whole")
        with pytest.raises(KeyboardInterrupt):
            gang.switchboard.poll(20)
    gang.ranks[0].tell(GangMessageKind.VALUE, "next")
    ((rank, parcel),) = gang.switchboard.poll(20)
    assert (rank, parcel.open()) == (0, "next")
