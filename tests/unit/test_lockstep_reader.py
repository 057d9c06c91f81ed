"""Reads a flight recorder while it is written, after torn writes, and with any content."""

import json
import mmap
import os
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import astuple

from jaxrun.analysis.lockstep.reader import FlightReader
from jaxrun.protocol import flight_file as recorder
from jaxrun.protocol.flight import CompilationStage, Flight, ProgramDetails

MASK = 2**64 - 1
SECOND = 10**9
HELD = recorder.RING_RECORDS - 8  # of a full ring, less what may be being written


def chain_after(number):
    return number * 0x9E3779B97F4A7C15 & MASK


class Writer:
    """Makes a recorder in its documented format, with one group 1 of ranks 0-3 unless a test adds others."""

    def __init__(self, path):
        self.file = path.open("w+b", buffering=0)
        self.file.truncate(recorder.TEXT_OFFSET)
        self.map = mmap.mmap(self.file.fileno(), recorder.TEXT_OFFSET)
        self.words = memoryview(self.map).cast("Q")
        self.numbers: dict[int, int] = {}

    def close(self):
        self.words.release()
        self.map.close()
        self.file.close()

    def begin(self, level=recorder.EVERY_CALL):
        self.words[recorder.FORMAT_WORD] = recorder.FORMAT
        self.words[recorder.LEVEL_WORD] = level
        self.words[recorder.MAGIC_WORD] = recorder.MAGIC
        self.line({"group": 1, "ranks": "0-3"})
        self.program(
            3, name="jit(step)", key="a" * 16, code="b" * 16, source="step at /job/model.py:40", text="x" * 500
        )
        self.line({"site": 7, "stack": ["/job/train.py:88 train_step", "/job/train.py:120 main"]})

    def line(self, content):
        self.text(json.dumps(content).encode() + b"\n")

    def program(self, number, **about):
        self.line({"program": number, "group": 1, **about})

    def text(self, data):
        size = self.words[recorder.TEXT_SIZE_WORD]
        os.pwrite(self.file.fileno(), data, recorder.TEXT_OFFSET + size)
        self.words[recorder.TEXT_SIZE_WORD] = size + len(data)

    def call(self, group=1, program=3, site=7, entered=0):
        made, number = self.words[recorder.RECORD_COUNT_WORD], self.numbers.get(group, 0) + 1
        at = recorder.HEADER_WORDS + made % recorder.RING_RECORDS * recorder.RECORD_WORDS
        self.numbers[group] = number
        self.words[at] = (1000 + number) * SECOND
        self.words[at + 1] = chain_after(number)
        self.words[at + 2] = program | site << 32
        self.words[at + 3] = number | group << 48
        self.words[at + 4] = entered
        self.words[recorder.RECORD_COUNT_WORD] = made + 1

    def calls(self, count):
        for _ in range(count):
            self.call()


@pytest.fixture
def writer(tmp_path):
    made = Writer(tmp_path / "rank-0000.flight")
    made.begin()
    yield made
    made.close()


def read(writer, reader=None):
    return (reader or FlightReader(writer.file.fileno())).brief()


def numbers(flight):
    return [call.number for call in flight.calls]


def test_a_call_is_read_with_all_that_is_known_of_it(writer):
    writer.words[recorder.STRICT_WORD] = 1
    writer.call()
    flight = read(writer)
    assert (flight.level, flight.strict, flight.call_counts) == (recorder.EVERY_CALL, True, {"0-3": 1})
    (call,) = flight.calls
    assert astuple(call) == (1001.0, "0-3", 1, chain_after(1), 3, 7, 0.0)
    assert flight.program(call) == ("jit(step)", "a" * 16, "b" * 16, "step at /job/model.py:40")
    assert flight.place(call) == "train.py:88 train_step"
    assert flight.sites == {7: ("/job/train.py:88 train_step", "/job/train.py:120 main")}
    assert (flight.unknown_programs, flight.trouble, flight.pending, flight.compiling) == (0, "", None, None)


@pytest.mark.parametrize("size", [0, 100, recorder.HEADER_WORDS * 8, recorder.TEXT_OFFSET])
def test_a_file_that_was_never_written_is_an_empty_flight(tmp_path, size):
    path = tmp_path / "rank-0000.flight"
    path.write_bytes(bytes(size))
    with path.open("rb") as file:
        reader = FlightReader(file.fileno())
        assert reader.brief() == reader.history() == Flight()
        assert (set(reader.progress_counters()), reader.program_details(1)) == ({0}, ProgramDetails())
    folder = os.open(tmp_path, os.O_RDONLY)  # which cannot be read
    assert FlightReader(folder).brief() == Flight()
    os.close(folder)


def test_another_format_is_not_read(writer):
    writer.call()
    writer.words[recorder.FORMAT_WORD] = 9
    flight = read(writer)
    assert (flight.level, flight.calls) == (recorder.NOTHING, ())
    assert "format 9" in flight.trouble


@pytest.mark.parametrize(
    ("made", "oldest"),
    [(100, 1), (2 * recorder.RING_RECORDS + 5, 2 * recorder.RING_RECORDS + 6 - HELD)],
    ids=["all are held", "the ring has turned"],
)
def test_brief_holds_the_last_calls_and_history_all_that_the_ring_holds(writer, made, oldest):
    writer.calls(made)
    reader = FlightReader(writer.file.fileno())
    assert numbers(reader.brief()) == list(range(made - 15, made + 1))
    assert numbers(reader.history()) == list(range(oldest, made + 1))
    assert reader.history().call_counts == {"0-3": made}


def test_marks_are_the_latest_multiples_of_each_stride(writer):
    writer.calls(4000)
    marks = read(writer).marks["0-3"]
    assert list(marks) == [2048, 3072, 3328, 3584, 3840, 3952, 3968, 3984, 4000]
    assert all(chain == chain_after(number) for number, chain in marks.items())


def test_each_group_has_its_numbers_and_marks(writer):
    writer.line({"group": 2, "ranks": "0,2"})
    writer.line({"group": 3, "ranks": "0,3"})
    writer.calls(40)
    for _ in range(3):
        writer.call(group=2)
    flight = read(writer)
    assert flight.call_counts == {"0-3": 40, "0,2": 3, "0,3": 0}
    assert list(flight.marks) == ["0-3"]
    assert [call.number for call in flight.calls_of("0,2")] == [1, 2, 3]


@given(steps=st.lists(st.integers(0, 700), max_size=8))
def test_frequent_reads_find_what_one_last_read_finds(tmp_path, steps):
    writer = Writer(tmp_path / "rank-0000.flight")
    writer.begin()
    often = FlightReader(writer.file.fileno())
    for step in steps:
        writer.calls(step)
        writer.line({"site": 100 + step, "stack": [f"/job/a.py:{step} f"]})
        writer.call(site=100 + step)
        often.brief()
    assert read(writer, often) == read(writer)
    assert often.history() == FlightReader(writer.file.fileno()).history()
    writer.close()


def test_the_entered_call_is_pending_until_its_record_stands(writer):
    writer.calls(4)
    writer.words[recorder.PENDING_SITE_WORD] = 3 | 7 << 32
    writer.words[recorder.PENDING_SINCE_WORD] = 5 * SECOND
    writer.words[recorder.PENDING_TAG_WORD] = 5 | 1 << 48
    flight = read(writer)
    assert (flight.pending.group, flight.pending.number, flight.pending.since) == ("0-3", 5, 5.0)
    assert flight.program(flight.pending).name == "jit(step)"
    assert flight.place(flight.pending) == "train.py:88 train_step"
    assert (flight.last_number("0-3"), flight.call_counts) == (5, {"0-3": 4})
    writer.call()
    assert read(writer).pending is None


def test_a_call_whose_program_is_being_compiled_is_not_entered(writer):
    writer.calls(4)
    writer.words[recorder.PENDING_COMPILES_WORD] = 1
    writer.words[recorder.PENDING_SITE_WORD] = 3 | 7 << 32
    writer.words[recorder.PENDING_TAG_WORD] = 5 | 1 << 48
    flight = read(writer)
    assert (flight.pending, flight.last_number("0-3")) == (None, 4)
    assert (flight.compiled_for.group, flight.compiled_for.number) == ("0-3", 5)
    assert flight.place(flight.coming_calls[-1]) == "train.py:88 train_step"
    writer.call()  # of another thread, perhaps
    assert read(writer).compiled_for is None


def test_a_search_for_a_nan_is_known_until_the_next_one(writer):
    writer.calls(4)
    assert read(writer).nan_search is None
    writer.words[recorder.NAN_SEARCH_SINCE_WORD] = 3 * SECOND
    writer.words[recorder.NAN_SEARCH_UNTIL_WORD] = recorder.NAN_SEARCH_GOES_ON
    since, until = read(writer).nan_search
    assert since == 3 and until > time.time()
    writer.words[recorder.NAN_SEARCH_UNTIL_WORD] = 4 * SECOND
    assert read(writer).nan_search == (3, 4)


def test_no_two_facts_of_the_header_share_a_word():
    names = [name for name in vars(recorder) if name.endswith("_WORD")]
    places = [getattr(recorder, name) for name in names]
    assert len(set(places)) == len(places), sorted(zip(places, names, strict=True))
    assert max(places) == recorder.JOINT_WORD


def test_where_a_rank_stood_is_known_until_its_next_call(writer):
    writer.calls(4)
    last = max(call.time for call in read(writer).calls)
    writer.words[recorder.STANDING_AT_WORD] = int((last + 1) * SECOND)
    assert read(writer).standing is None
    writer.words[recorder.STANDING_SITE_WORD] = 7
    assert read(writer).standing == (7, last + 1)
    writer.words[recorder.STANDING_AT_WORD] = int((last - 0.5) * SECOND)
    assert read(writer).standing is None


def test_a_history_has_programs_of_which_no_call_is_left(writer):
    writer.calls(4)
    writer.program(9, name="jit(too large)")
    reader = FlightReader(writer.file.fileno())
    assert 9 in reader.history().programs and 9 not in reader.brief().programs


def test_a_compilation_is_reported_while_it_lasts(writer):
    writer.line({"compiling": "jit(a)"})
    writer.line({"compiling": "jit(b)", "ranks": "0-3"})
    writer.words[recorder.COMPILING_SINCE_WORD] = 12 * SECOND
    assert (read(writer).compiling, read(writer).compiling_ranks) == (("jit(b)", 12.0), "0-3")
    writer.words[recorder.COMPILING_SINCE_WORD] = 0
    assert (read(writer).compiling, read(writer).compiling_ranks) == (None, "")


def test_stages_of_compilations_are_read_and_odd_lines_left_out(writer):
    writer.line({"stage": "trace", "name": "f"})
    writer.text(b'{"stage": "trace", "name"\n')
    writer.line({"stage": "compile", "name": "jit(f)", "since": 2 * SECOND, "until": 5 * SECOND})
    stages = FlightReader(writer.file.fileno()).compilation_stages()
    assert stages == (CompilationStage("compile", "jit(f)", 2.0, 5.0),)


def test_a_program_is_described_by_its_line(writer):
    reader = FlightReader(writer.file.fileno())
    assert reader.program_details(3) == ProgramDetails("step at /job/model.py:40", text="x" * 500)
    arrays = [["x", "float32[4]", "P('é',)"]]
    writer.program(4, source="f at /m.py:4", arguments=arrays, results=arrays, mesh="d=2: 0,1", text="zz")
    described = ProgramDetails("f at /m.py:4", (tuple(arrays[0]),), (tuple(arrays[0]),), "d=2: 0,1", "zz")
    assert reader.program_details(4) == described
    writer.program(8, name="jit(g)", source="g at /m.py:5", arguments=arrays, results=[["", "f32[]", ""]], text="yy")
    writer.program(8, name="jit(g)", key="a" * 16, results=arrays, mesh="d=2: 0,1")
    compiled = ProgramDetails("g at /m.py:5", (tuple(arrays[0]),), (tuple(arrays[0]),), "d=2: 0,1", "yy")
    assert reader.program_details(8) == compiled
    writer.program(5, arguments=5)
    writer.program(6, arguments=[["x"]])
    assert [reader.program_details(number) for number in (5, 6, 7)] == [ProgramDetails()] * 3


def test_progress_changes_with_every_step(writer):
    reader = FlightReader(writer.file.fileno())
    counted = (recorder.RECORD_COUNT_WORD, recorder.COMPILED_COUNT_WORD)
    for word in (*counted, recorder.PENDING_TAG_WORD, recorder.COMPILING_SINCE_WORD):
        before = reader.progress_counters()
        assert reader.progress_counters() == before
        writer.words[word] += 1
        assert reader.progress_counters() != before


def test_a_half_written_line_is_read_when_it_is_complete(writer):
    reader = FlightReader(writer.file.fileno())
    writer.text(b'{"site": 9, "stack": ["/job/a.py')
    writer.call(site=9)
    assert read(writer, reader).place(read(writer, reader).calls[0]) == ""
    writer.text(b':5 f"]}\n')
    assert read(writer, reader).place(read(writer, reader).calls[0]) == "a.py:5 f"


_MALFORMED = rb"""[] 7 null "group" {"group":"x","ranks":"0"} {"group":9} {"group":Infinity,"ranks":"0"}
{"program":[]} {"site":9,"stack":5}"""


@pytest.mark.parametrize("line", [*_MALFORMED.split(), b"", b"\x00\xff", b"[" * 100_000])
def test_a_malformed_line_is_skipped(writer, line):
    writer.text(line + b"\n")
    writer.line({"trouble": "it was so"})
    writer.call()
    flight = read(writer)
    assert (flight.trouble, len(flight.calls)) == ("it was so", 1)


def test_programs_without_key_or_code_are_counted(writer):
    writer.program(4, name="jit(a)", key="a" * 16, code="")
    writer.line({"program": 5, "group": 1, "name": "jit(b)", "key": None})
    writer.program(6, name="jit(c)", code="c" * 16)  # which is not compiled yet
    assert read(writer).unknown_programs == 2
    writer.program(6, name="jit(c)", key="", code="c" * 16)
    assert read(writer).unknown_programs == 3


def test_calls_of_unknown_groups_are_left_out(writer):
    writer.call(group=9)
    writer.call()
    assert [call.group for call in read(writer).calls] == ["0-3"]


@pytest.mark.parametrize(("before", "meanwhile"), [(recorder.RING_RECORDS + 500, 300), (50, 2 * recorder.RING_RECORDS)])
def test_records_that_are_overwritten_while_they_are_read_are_dropped(writer, monkeypatch, before, meanwhile):
    writer.calls(before)
    original = os.pread

    def pread(fd, size, offset):
        if offset == recorder.HEADER_WORDS * recorder.WORD_BYTES:
            writer.calls(meanwhile)  # the count was read, the ring is read now: what stands in these places is newer
        return original(fd, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    held = list(range(before + meanwhile - HELD + 1, before + 1))  # none where the ring has turned
    assert numbers(FlightReader(writer.file.fileno()).history()) == held


def test_a_record_that_a_thread_has_not_written_yet_is_not_a_call(writer):
    writer.calls(3)
    writer.words[recorder.HEADER_WORDS + recorder.RECORD_WORDS] = 0
    assert [call.number for call in read(writer).calls] == [1, 3]


_WORDS = st.dictionaries(st.integers(1, 20), st.integers(0, MASK) | st.integers(0, 9), max_size=20)
_LINE = st.binary(max_size=60) | st.builds(
    lambda content: json.dumps(content).encode() + b"\n",
    st.dictionaries(
        st.sampled_from(["group", "ranks", "site", "stack", "program", "name", "key", "compiling", "trouble", "stage"]),
        st.integers(0, 5) | st.text(max_size=5) | st.none() | st.lists(st.text(max_size=5), max_size=3),
    ),
)


@given(header=_WORDS, ring=st.binary(max_size=2000), lines=st.lists(_LINE, max_size=10))
def test_whatever_it_holds_a_flight_is_read(tmp_path, header, ring, lines):
    words: list[Any] = [recorder.MAGIC, recorder.FORMAT] + [0] * (recorder.HEADER_WORDS - 2)
    for place, value in header.items():
        words[place] = value
    path = tmp_path / "rank-0000.flight"
    data = b"".join(word.to_bytes(8, "little") for word in words)
    path.write_bytes((data + ring).ljust(recorder.TEXT_OFFSET, b"\0") + b"".join(lines))
    with path.open("rb") as file:
        reader = FlightReader(file.fileno())
        for _ in range(2):
            reader.brief()
            reader.history()
            reader.progress_counters(), reader.program_details(1), reader.compilation_stages()


def test_of_more_calls_than_a_brief_holds_the_times_are_read(writer):
    for number in range(1, 201):
        writer.call(entered=0 if number == 150 else (1000 + number) * SECOND - 2 * SECOND // 10)
    writer.words[recorder.ENTERED_WORD] = 1200 * SECOND + SECOND // 2
    flight = read(writer)
    assert [timing.number for timing in flight.timings] == [number for number in range(73, 201) if number != 150]
    assert astuple(flight.timings[-1]) == ("0-3", 200, 1199.8, 1200.0, 7)
    assert flight.entered == 1200.5  # after its last call was made: it is in the next
    writer.call(entered=1200 * SECOND + SECOND // 2)
    assert read(writer).entered == 0.0
