"""When call instructions are reached, as Python's monitoring tells."""

import sys
import time
from collections.abc import Iterator

import pytest

from jaxrun.protocol.flight_file import ENTERED_WORD, HEADER_WORDS
from jaxrun_runtime.lockstep import call_entries
from jaxrun_runtime.lockstep.call_entries import CallEntries

pytestmark = pytest.mark.skipif(sys.version_info < (3, 13), reason="the first releases of Python 3.12 cannot tell")


@pytest.fixture
def words() -> memoryview:
    return memoryview(bytearray(8 * HEADER_WORDS)).cast("Q")


@pytest.fixture
def entries(words: memoryview) -> Iterator[CallEntries]:
    made = CallEntries(words)
    yield made
    if made._tool is not None:
        sys.monitoring.free_tool_id(made._tool)


def _site() -> tuple[object, int]:
    frame = sys._getframe(1)
    return frame.f_code, frame.f_lasti


def _cell(entries: CallEntries, place: tuple[object, int]) -> list[int]:
    return entries.cells[id(place[0]), place[1]]


def test_a_watched_call_is_told_before_it_is_made_and_others_are_not(entries: CallEntries, words: memoryview) -> None:
    told: list[list[int]] = []

    def caller() -> None:
        for turn in range(6):
            first = _site()
            second = _site()
            if turn == 1:
                entries.watch(*first)  # type: ignore[arg-type]
            if turn == 3:  # which has been left alone until now
                entries.watch(*second)  # type: ignore[arg-type]
            told.append([cell[0] for cell in entries.cells.values()])

    before = time.time_ns()
    caller()
    after = time.time_ns()
    assert told[:2] == [[], [0]]
    assert before < told[2][0] < told[3][0] < told[4][0] < told[4][1] < told[5][0] < told[5][1] < after
    assert told[3][1] == 0
    assert words[ENTERED_WORD] == told[5][1]


def test_a_forked_process_notes_nothing(entries: CallEntries, words: memoryview) -> None:
    def caller() -> tuple[object, int]:
        return _site()

    entries.watch(*caller())  # type: ignore[arg-type]
    entries.detach()
    caller()
    assert (entries.cells, words[ENTERED_WORD]) == ({}, 0)


def test_where_other_tools_monitor_calls_are_known_without_their_entry(words: memoryview) -> None:
    taken = [number for number in call_entries._TOOLS if sys.monitoring.get_tool(number) is None]
    for number in taken:
        sys.monitoring.use_tool_id(number, "another")
    try:
        entries = CallEntries(words)

        def caller() -> tuple[object, int]:
            return _site()

        place = caller()
        entries.watch(*place)  # type: ignore[arg-type]
        caller()
        assert _cell(entries, place) == [0]
    finally:
        for number in taken:
            sys.monitoring.free_tool_id(number)


def test_no_more_sites_are_kept_than_memory_allows(entries: CallEntries, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_entries, "_MAX_SITES", 2)
    for source in "abc":
        entries.watch(compile("0", source, "eval"), 0)
    assert len(entries.cells) == len(entries._codes) == 1
