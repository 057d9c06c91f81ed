"""The recorder's file, written and read back."""

import os
import resource
import signal
import time

import pytest
from flights import Flight, about_program, add_program, file, recorder

from jaxrun.analysis.lockstep.reader import FlightReader
from jaxrun.protocol import flight_file
from jaxrun_runtime.lockstep.flight_recorder import FlightRecorder

pytestmark = pytest.mark.jax_version


__all__ = ["file", "recorder"]  # fixtures


@pytest.fixture
def program(recorder):
    return add_program(recorder)


def test_an_empty_file_becomes_a_recorder(file):
    assert not Flight(file).written
    FlightRecorder(file, 3, level=flight_file.EVERY_CALL, strict=True)
    read = Flight(file)
    assert read.written
    words = [read.words[word] for word in (flight_file.PID_WORD, flight_file.RANK_WORD, flight_file.STRICT_WORD)]
    assert (words, read.level) == ([os.getpid(), 3, 1], flight_file.EVERY_CALL)
    assert (read.made, read.calls, read.lines, read.pending) == (0, [], [], None)


def test_the_file_does_not_reach_programs_that_the_worker_starts(file):
    os.set_inheritable(file, True)
    FlightRecorder(file, 0)
    assert not os.get_inheritable(file)


def test_a_file_that_is_too_short_is_refused(file):
    os.ftruncate(file, 100)
    with pytest.raises(ValueError, match="length"):
        FlightRecorder(file, 0)


def test_calls_are_numbered_within_their_group(file, recorder):
    step, pair = add_program(recorder, "0-3", name="jit(step)"), add_program(recorder, "0,2", name="jit(pair)")
    recorder.add_site(1, ["/a/b.py:7 main", "/a/b.py:9 <module>"])
    for program in (step, pair, step):
        recorder.record(program, 1)
    calls = Flight(file).calls
    assert [(call.number, call.ranks, call.name) for call in calls] == [
        (1, "0-3", "jit(step)"),
        (1, "0,2", "jit(pair)"),
        (2, "0-3", "jit(step)"),
    ]
    assert calls[0].stack == ("/a/b.py:7 main", "/a/b.py:9 <module>")
    assert calls[0].time <= calls[1].time <= calls[2].time


def test_a_program_that_was_announced_keeps_its_number_and_its_text(file, recorder):
    group, about = recorder.add_group("0-1"), about_program()
    announced = recorder.add_program(group, {name: value for name, value in about.items() if name != "key"})
    other = recorder.add_program(group, about_program(name="jit(g)"))
    compiled = recorder.add_program(group, {**about, "mesh": "1,0"}, announced=announced)
    assert (announced.number, other.number, compiled.number) == (1, 2, 1)
    assert (announced.key, compiled.key) == ("", about["key"])
    read = Flight(file)
    assert [line.get("text") for line in read.lines if "program" in line] == ["eJw=", "eJw=", None]
    assert (read.programs[1]["text"], read.programs[1]["mesh"]) == ("eJw=", "1,0")


def test_a_group_is_described_once(file, recorder):
    assert recorder.add_group("0-3") is recorder.add_group("0-3")
    recorder.add_group("0,2")
    assert Flight(file).lines == [{"group": 1, "ranks": "0-3"}, {"group": 2, "ranks": "0,2"}]


def _chains(file, calls):
    """The chains after `calls`, (group, key, code) each, in a recorder of their own."""
    os.ftruncate(file, 0)
    os.ftruncate(file, flight_file.TEXT_OFFSET)
    recorder = FlightRecorder(file, 0)
    programs = {}
    for ranks, key, code in calls:
        program = programs.setdefault((ranks, key, code), None) or add_program(recorder, ranks, key=key, code=code)
        programs[ranks, key, code] = program
        recorder.record(program, 0)
    return [call.chain for call in Flight(file).calls]


A, B, C = (("0-1", "1" * 16, code * 16) for code in "123")


def test_equal_histories_have_equal_chains_and_others_do_not(file):
    assert _chains(file, [A, B, A, C]) == _chains(file, [A, B, A, C])
    for other in ([B, A, A, C], [A, A, B, C], [A, B, C], [A, B, A, A, C], [A, B, B, C]):
        assert _chains(file, [A, B, A, C])[-1] != _chains(file, other)[-1], other
    unknown, another = (("0-1", digit * 16, "") for digit in "78")  # which count by their keys
    assert _chains(file, [unknown]) == _chains(file, [unknown]) != _chains(file, [another])
    pair = ("0,2", "4" * 16, "")  # another group's
    assert _chains(file, [A, pair, pair, B])[::3] == _chains(file, [A, B])


@pytest.mark.parametrize(
    ("mine", "theirs"), [([A, *[C] * 5000], [B, *[C] * 5000]), ([A, B] * 3000, [B, A] * 3000)], ids=["first", "phase"]
)
def test_after_a_difference_chains_never_agree_again(file, mine, theirs):
    one, other = _chains(file, mine), _chains(file, theirs)
    assert len(one) == len(other) == flight_file.RING_RECORDS
    assert not set(one) & set(other)


def test_histories_are_the_chains_unless_some_code_is_not_known(file, recorder):
    step, pair = add_program(recorder), add_program(recorder, "0,2")
    for program in (step, pair, step):
        recorder.record(program, 0)
    chains = [call.chain for call in Flight(file).calls]
    assert recorder.call_chains() == {"0-1": chains[2], "0,2": chains[1]}
    add_program(recorder, code="")
    assert recorder.call_chains() == {}


def test_the_ring_keeps_the_last_calls(file, recorder, program):
    for _ in range(flight_file.RING_RECORDS + 10):
        recorder.record(program, 0)
    read = Flight(file)
    assert read.made == flight_file.RING_RECORDS + 10
    assert [call.number for call in read.calls] == list(range(11, flight_file.RING_RECORDS + 11))


def test_a_call_is_pending_until_it_is_left(file, recorder):
    program = add_program(recorder, name="jit(step)")
    recorder.add_site(1, ["/a/b.py:7 main"])
    recorder.record(program, 1)
    ticket = recorder.begin_call(program, 1, time.time_ns())
    assert Flight(file).pending == (2, "0-1", "jit(step)", "b.py:7 main")
    recorder.record(program, 1)
    recorder.end_call(ticket)
    assert Flight(file).pending is None


def test_of_several_pending_calls_the_oldest_is_shown(file, recorder):
    first, second = (recorder.begin_call(add_program(recorder, name=name), 0, 5) for name in ("jit(a)", "jit(b)"))
    assert Flight(file).pending[2] == "jit(a)"
    recorder.end_call(first)
    assert Flight(file).pending[2] == "jit(b)"
    recorder.end_call(second)
    assert Flight(file).pending is None


def test_a_stage_of_a_compilation_is_noted_with_its_times_unless_it_was_short(file, recorder):
    before = time.time()
    recorder.add_stage("trace", "f", 0.0009)
    recorder.add_stage("compile", "jit(f)", 2.0)
    (stage,) = FlightReader(file).compilation_stages()
    assert (stage.stage, stage.name) == ("compile", "jit(f)")
    assert before <= stage.until <= time.time()
    assert stage.until - stage.since == pytest.approx(2.0, abs=1e-5)


def test_trouble_only_ever_lowers_the_level(file):
    recorder = FlightRecorder(file, 0, level=flight_file.FIRST_CALLS)
    recorder.add_trouble("odd")
    assert (Flight(file).level, Flight(file).troubles) == (flight_file.FIRST_CALLS, ["odd"])
    recorder.add_trouble("odder", flight_file.COMPILATIONS)
    recorder.add_trouble("oddest", flight_file.EVERY_CALL)
    assert Flight(file).level == flight_file.COMPILATIONS


def test_when_the_text_is_full_one_line_says_so_and_calls_go_on(file, monkeypatch):
    monkeypatch.setattr(flight_file, "MAX_TEXT_BYTES", 4096)
    recorder = FlightRecorder(file, 0)
    program = add_program(recorder)
    for number in range(200):
        recorder.add_site(number, ["x" * 50])
    recorder.record(program, 1)
    read = Flight(file)
    assert "full" in read.troubles[-1]
    assert read.lines[-1] == {"trouble": read.troubles[-1]}
    assert read.words[flight_file.TEXT_SIZE_WORD] <= 4096
    assert read.made == 1


def test_lowered_programs_leave_room_for_the_rest(file, monkeypatch):
    monkeypatch.setattr("jaxrun_runtime.lockstep.flight_recorder._TEXTS_LIMIT", 1000)
    recorder = FlightRecorder(file, 0)
    for number in range(4):
        add_program(recorder, name=f"jit(f{number})", text="x" * 600)
    assert [len(program["text"]) for program in Flight(file).programs.values()] == [600, 600, 0, 0]


def test_a_full_disk_ends_the_text_and_nothing_else(file, recorder, program):
    lines = Flight(file).lines
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.fstat(file).st_size, before[1]))
    try:
        recorder.add_site(1, ["/a/b.py:7 main"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    recorder.add_site(2, ["/a/b.py:8 main"])
    recorder.record(program, 0)
    read = Flight(file)
    assert read.lines == lines
    assert read.made == 1


def test_a_descriptor_that_is_another_files_now_is_not_written_to(file, tmp_path):
    own, copy = os.dup(file), os.dup(file)
    recorder = FlightRecorder(own, 0)
    program = add_program(recorder)
    with open(tmp_path / "data", "wb") as data:
        os.dup2(data.fileno(), own)
        recorder.begin_compilation("jit(f)")
        recorder.record(program, 0)
        assert os.fstat(own).st_size == 0
    os.close(own)
    assert Flight(copy).made == 1
    os.close(copy)


def test_a_forked_process_writes_nowhere(file):
    recorder = FlightRecorder(file, 0, level=flight_file.EVERY_CALL)
    program = add_program(recorder)
    recorder.record(program, 0)
    before = Flight(file)
    recorder.detach()
    recorder.record(program, 0)
    recorder.end_call(recorder.begin_call(program, 0, 5))
    recorder.begin_compilation("jit(f)")
    recorder.add_trouble("odd", flight_file.NOTHING)
    after = Flight(file)
    assert (bytes(after.words), after.lines) == (bytes(before.words), before.lines)
