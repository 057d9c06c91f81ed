"""Flight recorders that several threads write."""

import json
import os
import signal
import threading

import flights
import msgspec
import pytest
from flights import add_program, file, recorder

from jaxrun.analysis.lockstep.reader import FlightReader
from jaxrun.protocol import flight_file
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.flight_file import GANG_BARRIER, RESTORE, SNAPSHOT, TEXT_OFFSET
from jaxrun_runtime import joint_calls
from jaxrun_runtime.lockstep.call_sites import CallSites
from jaxrun_runtime.lockstep.flight_recorder import FlightRecorder

pytestmark = pytest.mark.jax_version
__all__ = ["file", "recorder"]  # fixtures


@pytest.fixture
def recorded(monkeypatch):
    """Reads what this process, as a rank, has noted so far."""
    fd = os.memfd_create("flight")
    os.ftruncate(fd, TEXT_OFFSET)
    recorder, reader = FlightRecorder(fd, 0), FlightReader(fd)
    monkeypatch.setattr(joint_calls, "_recorder", recorder)
    monkeypatch.setattr(joint_calls, "_find_site", CallSites(recorder.add_site).find)
    yield reader
    os.close(fd)


def test_a_rank_that_waits_for_others_notes_in_which_call_and_where(recorded):
    seen = []
    for _ in range(2):
        with joint_calls.JointCall(SNAPSHOT):
            joint_calls.wait_for_ranks(lambda: seen.append(recorded.brief()))
    flight = seen[1]
    assert flight.joint_calls == {SNAPSHOT: 2} and flight.joint_wait[:2] == (SNAPSHOT, 2)
    assert "test_recorder_threads.py:" in flight.place(flight.joint_wait)
    assert recorded.brief().joint_wait is None and recorded.brief().joint_calls == {SNAPSHOT: 2}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(flight), type=Flight) == flight


def test_each_step_of_a_joint_call_is_progress(recorded):
    counters = [recorded.progress_counters()]
    with joint_calls.JointCall(RESTORE):
        counters.append(recorded.progress_counters())
        joint_calls.wait_for_ranks(lambda: counters.append(recorded.progress_counters()))
    assert len(set(counters)) == 3


def test_a_wait_that_fails_has_ended_and_one_in_the_background_is_not_noted(recorded):
    with pytest.raises(OSError), joint_calls.JointCall(SNAPSHOT):
        joint_calls.wait_for_ranks(os.stat, "/nonexistent")
    assert recorded.brief().joint_wait is None
    with joint_calls.JointCall(SNAPSHOT):
        seen = []
        thread = threading.Thread(target=joint_calls.wait_for_ranks, args=(lambda: seen.append(recorded.brief()),))
        thread.start()
        thread.join()
    assert seen[0].joint_wait is None and seen[0].joint_calls == {SNAPSHOT: 2}


def test_a_test_counts_the_gathers_of_its_gang_from_1_again(recorded):
    with joint_calls.JointCall(GANG_BARRIER):
        pass
    joint_calls.forget(GANG_BARRIER)
    assert recorded.brief().joint_calls == {}


def test_threads_and_signal_handlers_tear_no_record(file, recorder):
    program, other = add_program(recorder), add_program(recorder, "0,2", name="jit(g)")
    handled = []

    def handle(*_):
        handled.append(recorder.record(other, 0))

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        threads = [threading.Thread(target=lambda: [recorder.record(program, 0) for _ in range(500)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(1000):
            recorder.record(program, 0)
        for thread in threads:
            thread.join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    read = flights.Flight(file)
    assert read.made == 3000 + len(handled)
    numbers = {ranks: [call.number for call in read.calls if call.ranks == ranks] for ranks in ("0-1", "0,2")}
    assert numbers["0-1"] == list(range(1, 3001))
    assert numbers["0,2"] == list(range(1, len(handled) + 1))


def test_a_call_that_a_program_is_compiled_for_is_shown_unless_several_threads_make_calls(file, recorder):
    program = add_program(recorder, name="jit(step)")
    ticket = recorder.begin_call_compilation(program, 1, 5)
    assert FlightReader(file).brief().compiled_for.number == 1
    recorder.end_call(ticket)
    assert FlightReader(file).brief().compiled_for is None
    thread = threading.Thread(target=lambda: recorder.end_call(recorder.begin_call(program, 1, 5)))
    thread.start()
    thread.join()
    assert recorder.begin_call_compilation(program, 1, 5) is None


def test_compilations_are_counted_and_the_oldest_is_shown(file):
    def shown():
        words = flights.Flight(file).words
        return words[flight_file.COMPILING_SINCE_WORD], words[flight_file.COMPILED_COUNT_WORD]

    recorder = FlightRecorder(file, 0)
    recorder.begin_compilation("jit(a)")
    since, _ = shown()
    assert since > 0
    while_elsewhere = []

    def elsewhere():
        recorder.begin_compilation("jit(\udcff\n)")
        while_elsewhere.append(shown())
        recorder.end_compilation()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert (while_elsewhere, shown()) == ([(since, 0)], (since, 1))
    recorder.end_compilation()
    recorder.end_compilation()  # the end of one that began before there was a recorder
    assert shown() == (0, 2)
    assert flights.Flight(file).compiled == ["jit(a)", "jit(\udcff\n)"]  # which is no text


def test_lines_of_several_threads_do_not_mix(file, recorder):
    stacks = [[f"{name * 3000}:1 f"] for name in "abcd"]
    threads = [
        threading.Thread(target=lambda s=stack: [recorder.add_site(1, s) for _ in range(50)]) for stack in stacks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = flights.Flight(file).lines
    assert len(lines) == 200
    assert {json.dumps(line["stack"]) for line in lines} == set(map(json.dumps, stacks))
