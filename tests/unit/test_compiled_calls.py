"""A rank compiles a program for a call, and others do something else: whether that is a divergence already."""

import pytest
from calls_by_hand import ALL, flight, lowered
from msgspec.structs import replace

from jaxrun.protocol.flight import PendingCall, ProgramInfo
from jaxrun.protocol.flight_file import FIRST_CALLS
from jaxrun.protocol.query_messages import RankDetail

SITE, ELSEWHERE = 1, 5
BEFORE = flight("a", "a")  # after call #2
OTHER = ProgramInfo("jit(other)", "", "other")


def compiles(program=OTHER, number=3, before=BEFORE):
    """The flight of a rank that compiles this program for a call."""
    call = PendingCall(ALL, number, 9, SITE, 5.0)
    return replace(before, programs={**before.programs, 9: program}, compiling=(program.name, 5.0), compiled_for=call)


def stands(site=SITE, before=BEFORE):
    """The flight of a rank whose main thread is in the C++ dispatch at this site whenever its stacks are written."""
    return replace(before, standing=(site, 1e9))


def made_it(before=BEFORE):
    """The flight of a rank that has made the call with the other program."""
    call = replace(before.calls[-1], number=3, chain=99, program=8)
    known = knows(OTHER._replace(key="k"), before)
    return replace(known, calls=(*before.calls, call), call_counts={ALL: 3})


def knows(program, before):
    return replace(before, programs={**before.programs, 8: program})


# What rank 0 and rank 2 do.
TOLD = {
    "both have made it with another": (flight("a", "a", "a"), flight("a", "a", "a")),
    "one has made it, and gone on": (flight("a", "a", "a", "a"), BEFORE),
    "both stand in it": (stands(), stands()),
    "one stands in it": (BEFORE, stands()),
    "one compiles something else for it": (compiles(ProgramInfo("jit(third)", "", "third")), BEFORE),
    "one has entered it with another": (replace(BEFORE, pending=PendingCall(ALL, 3, 1, SITE, 5.0)), BEFORE),
}
SILENT = {
    "they are before it": (BEFORE, BEFORE),
    "they have not begun": (flight(), flight()),
    "they compile the same, and have not said so": (compiles(), compiles()),
    "they have made it with the same": (made_it(), BEFORE),
    "they stand where no call was made": (stands(ELSEWHERE), stands(ELSEWHERE)),
    "they stand in a call of another group": (stands(before=flight("a", "a", group="0,2")), BEFORE),
    "they know the program": (knows(OTHER, stands()), knows(OTHER, stands())),
    "they have failed to compile it, and made another": (knows(OTHER, flight("a", "a", "a")), BEFORE),
    "they stand, behind": (stands(before=flight("a")), stands(before=flight("a"))),
    "they record less": (replace(flight("a", "a", "b"), level=FIRST_CALLS), replace(stands(), level=FIRST_CALLS)),
}


@pytest.fixture
def job(simulate):
    job = simulate(3, lockstep="record").run()
    job.flights = dict.fromkeys(range(3), BEFORE)
    return job.wait(60)  # by when the recorders are read twice a minute


def begin(job, one, other, mine=None):
    job.flights = {0: one, 1: mine or compiles(), 2: other}
    return job.handle(lowered(1, 3, code="other"))


@pytest.mark.parametrize("doings", TOLD.values(), ids=TOLD)
def test_it_is_reported_within_3_s(job, doings):
    began = job.now
    begin(job, *doings).wait(120)
    ((when, text),) = job.printed
    assert when - began < 3 and "the processes disagree at cross-process call #3\n" in text
    assert "jit(a)" in text or "jit(third)" in text
    assert "jit(other)" in text


@pytest.mark.parametrize("doings", SILENT.values(), ids=SILENT)
def test_nothing_is_reported_while_they_may_make_the_same_call(job, doings):
    begin(job, *doings).wait(120)
    assert not job.printed


def test_a_program_whose_code_is_not_known_may_be_any(job):
    begin(job, stands(), flight("a", "a", "a"), mine=compiles(ProgramInfo("jit(other)", "", ""))).wait(120)
    assert not job.printed


def test_a_rank_that_computes_at_the_line_of_its_calls_is_not_in_a_call(job):
    job.cpu = lambda now: now
    begin(job, stands(), stands()).wait(120)
    assert not job.printed


def test_a_late_rank_is_sampled_until_it_comes(job):
    begin(job, BEFORE, BEFORE).wait(47)
    came, job.flights = job.now, {**job.flights, 0: stands()}
    job.wait(3)
    assert len(job.printed) == 1 and job.printed[0][0] > came


def test_the_report_names_what_was_called_last_at_the_line(job):
    before = flight("b", "a")
    job.flights = dict.fromkeys(range(3), before)
    begin(job, stands(before=before), before, compiles(before=before)).wait(3)
    assert "rank 0:  jit(a)" in job.lines[0] and "rank 1:  jit(other)" in job.lines[0]
    assert "called at train.py:9" in job.lines[0]


def test_once_the_compilation_is_over_nothing_is_read_for_it(job):
    begin(job, BEFORE, BEFORE).wait(5)
    reads = [time for time, detail, _ in job.queries if detail is RankDetail.CALLS and time > 60]
    assert 5 <= len(reads) <= 9  # the announcement is still there, as where the compilation fails
    job.flights = dict.fromkeys(range(3), BEFORE)
    job.wait(2)
    job.queries.clear()
    job.wait(100)
    assert len(job.queries) <= 4
