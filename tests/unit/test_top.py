"""What `jaxrun top` shows of a job, without one."""

import re
from pathlib import Path
from typing import get_args

import pytest
from calls_by_hand import flight_after
from fakes import FollowedJob
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import fields, replace
from rich.cells import cell_len

import jaxrun
from jaxrun.analysis.diagnosis.doing import Doing, StandingOut
from jaxrun.analysis.diagnosis.overview import Overview, RankEnd
from jaxrun.analysis.lockstep.straggler import Straggler
from jaxrun.frontends.top import feed
from jaxrun.frontends.top.feed import CallRate
from jaxrun.frontends.top.finding import describe_finding
from jaxrun.frontends.top.rows import group_samples
from jaxrun.frontends.top.samples import RankSample, take_samples
from jaxrun.frontends.top.view import Pace, View, format_memory, format_pace, lay_out, render, render_pages
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.query_messages import ProcessState, RankReply
from jaxrun.records.document_types import TopRank

LIKE_OTHERS, SLOW, LATE, STOPPED, FAILED = StandingOut
NOW = 1000.0
FUTEX = "futex_wait_queue"
GROUP = "0-3"
SLEEPS = "hrtimer_nanosleep"


def flight(made, *, group, pending_s=None, ago_s=0.1):
    """A rank that has made so many calls, the last one so long ago; with `pending_s` it is in the next one."""
    entered_at = None if pending_s is None else NOW - pending_s
    return flight_after(made, group, time=NOW - ago_s, entered_at=entered_at, name="train_step")


def vitals(time=NOW, cpu_s=10.0, memory=2**28, wait="", gpu=(-1.0, -1)):
    percent, used = gpu
    return RankReply(
        0, 1, time, cpu_seconds=cpu_s, memory_bytes=memory, kernel_wait=wait, gpu_percent=percent, gpu_bytes=used
    )


def overview(flights, *, hosts=None, waits=None, time=NOW, cpu_s=10.0, **more):
    """A job with these flights, by rank; `waits` is what the kernel says of some."""
    known = {rank: vitals(time, cpu_s, wait=(waits or {}).get(rank, FUTEX)) for rank in flights}
    hosts = hosts or dict.fromkeys(flights, "h1")
    return Overview(time, "running", hosts, tuple(flights), flights, **{"vitals": known, **more})


def states(now, before=None, rate=None):
    return {sample.rank: (sample.state, sample.standing_out) for sample in take_samples(now, before, rate)}


# ---- the states of ranks


def test_ranks_wait_for_the_one_that_has_not_come():
    flights = {rank: flight(120, group=GROUP, pending_s=12.0) for rank in (0, 1, 3)}
    found = take_samples(overview(flights | {2: flight(120, group=GROUP)}, waits={2: SLEEPS}))
    assert {s.state for s in found if s.rank != 2} == {"waits for rank 2 in train_step"}
    late = next(s for s in found if s.rank == 2)
    assert (late.state, late.standing_out, late.behind, late.late_s) == ("sleeps", LATE, 1, 12.0)
    assert [s.number for s in found] == [121, 121, 120, 121]


def test_who_waits_for_a_result_after_the_call_is_seen_by_the_others_numbers_and_all_in_the_same_call_run_it():
    flights = {0: flight(121, group="0-1", ago_s=5.0), 1: flight(120, group="0-1", ago_s=5.1)}
    found = states(overview(flights, waits={1: ""}))
    assert found == {0: ("waits for rank 1 in train_step", LIKE_OTHERS), 1: ("runs", LATE)}
    flights = dict.fromkeys(range(2), flight(7, group="0-1", pending_s=3.0))
    assert set(states(overview(flights)).values()) == {("runs train_step", LIKE_OTHERS)}


def test_a_call_that_a_rank_has_entered_counts_although_it_is_not_known_which_it_is():
    inside = replace(flight(120, group="0-1", ago_s=9.0), entered=NOW - 4.0)
    found = take_samples(overview({0: inside, 1: flight(120, group="0-1", ago_s=9.0)}, waits={1: SLEEPS}))
    assert [(s.state, s.since_s, s.number, s.late_s) for s in found] == [
        ("waits for rank 1", 4.0, 121, None),
        ("sleeps", None, 120, 4.0),
    ]


def test_a_rank_that_others_are_ahead_of_for_a_moment_does_not_stand_out():
    flights = {0: flight(121, group="0-1", ago_s=0.2), 1: flight(120, group="0-1")}
    assert [s.late_s for s in take_samples(overview(flights), None, 50.0)] == [None, None]
    ahead = {0: flight(400, group="0-1", ago_s=0.2), 1: flight(120, group="0-1")}  # nobody waits, as on GPUs
    assert [s.standing_out for s in take_samples(overview(ahead), None, 50.0)] == [LIKE_OTHERS, LATE]


@pytest.mark.parametrize(
    ("wait", "busy_s", "state"),
    [
        (ProcessState.STOPPED, 0.0, ("stopped by a signal", STOPPED)),
        (ProcessState.DISK, 0.0, ("waits for a disk", LIKE_OTHERS)),
        ("do_wait", 0.0, ("waits for a process", LIKE_OTHERS)),
        ("", 0.9, ("works", LIKE_OTHERS)),
        ("", 0.0, ("idle", LIKE_OTHERS)),
        (FUTEX, 0.0, ("waits", LIKE_OTHERS)),
    ],
)
def test_between_calls_the_kernel_says_what_a_rank_does(wait, busy_s, state):
    flights = {0: flight(5, group="0")}
    before = overview(flights, time=NOW - 1.0, cpu_s=10.0)
    assert states(overview(flights, waits={0: wait}, cpu_s=10.0 + busy_s), before) == {0: state}


def test_ranks_that_have_ended_that_have_not_begun_and_that_do_not_answer():
    flights = {2: flight(1, group=GROUP), 4: Flight()}
    ends = {0: RankEnd("finished", is_failure=False), 1: RankEnd("raised ValueError")}
    now = overview(flights, hosts=dict.fromkeys(range(6), "h1"), ends=ends)
    now = replace(now, live=(2, 4, 5), phase="starting")
    assert states(now) == {
        0: ("finished", LIKE_OTHERS),
        1: ("raised ValueError", FAILED),
        2: ("waits for 2 ranks in train_step", LIKE_OTHERS),
        3: ("not started yet", LIKE_OTHERS),
        4: ("starts", LIKE_OTHERS),
        5: ("no answer", FAILED),
    }
    unrecorded = next(sample for sample in take_samples(now) if sample.rank == 4)
    assert (unrecorded.number, unrecorded.cpu_percent) == (None, None)


def test_a_lost_rank_that_was_started_again_is_not_compared_with_the_others_until_it_is_back():
    flights = {0: flight(300, group=GROUP), 1: flight(1, group=GROUP)}
    now = replace(overview(flights, hosts=dict.fromkeys(range(2), "h1")), returning=(1,))
    assert states(now)[1] == ("was lost, and comes back", LIKE_OTHERS)


def test_the_straggler_stands_out_by_its_average():
    slow = Straggler((1,), "0-1", "", 120, 100, 0.94, 0.038, 0.31, 0.3, True, "data.py:10 load")
    now = overview({rank: flight(120, group="0-1") for rank in range(2)}, straggler=slow)
    assert [(s.standing_out, s.late_s) for s in take_samples(now)] == [(LIKE_OTHERS, None), (SLOW, 0.038)]


# ---- rows


def sample(rank, host="h1", state="waits", **more):
    return RankSample(rank, host, state, **more)


def many(count=4096, per_host=8):
    return [sample(rank, f"h{rank // per_host:03}", number=50, cpu_percent=10.0) for rank in range(count)]


def test_each_rank_has_a_row_where_there_is_room_else_like_ranks_share_one_and_what_does_not_fit_is_counted():
    ranks = [sample(rank) for rank in range(6)] + [sample(6, state="sleeps", standing_out=LATE, late_s=3.0)]
    assert [row.ranks for row in group_samples(ranks, 7)[0]] == ["6", "0", "1", "2", "3", "4", "5"]
    rows = group_samples(ranks, 4)[0]
    assert [(row.ranks, row.summary.state) for row in rows] == [("6", "sleeps"), ("0-5", "waits")]
    rows, left_out = group_samples([sample(rank, state=f"state {rank}") for rank in range(10)], 4)
    assert (len(rows), left_out) == (3, 7)


def test_the_rows_of_thousands_of_ranks_are_hosts_and_those_that_stand_out():
    ranks = many()
    ranks[1234] = replace(ranks[1234], state="stopped by a signal", standing_out=STOPPED, number=49)
    rows = group_samples(ranks, 16)[0]
    assert [(row.ranks, row.summary.host) for row in rows] == [("1234", "h154"), ("0-1233, 1235-4095", "512 hosts")]
    few = group_samples(ranks[:96], 16)[0]
    assert [(row.ranks, row.summary.host) for row in few[:2]] == [("0-7", "h000"), ("8-15", "h001")] and len(few) == 12


def test_a_host_shows_the_state_of_most_of_its_ranks():
    ranks = many(80)
    ranks[3] = replace(ranks[3], state="sleeps", number=49, memory_bytes=7)
    first = group_samples(ranks, 16)[0][0]
    assert (first.summary.state, first.numbers, first.summary.memory_bytes) == ("waits (7 of 8)", "49-50", 7)


# ---- the screen

_SAMPLES = st.builds(
    RankSample,
    rank=st.integers(0, 9999),
    host=st.sampled_from(["h1", "h2", "a-host-with-a-long-name.example"]),
    state=st.sampled_from(["sleeps", "waits for rank 2 in train_step", "compiles jit(a_function_with_a_long_name)"]),
    since_s=st.none() | st.floats(0, 1e6),
    standing_out=st.integers(LIKE_OTHERS, FAILED),
    number=st.none() | st.integers(0, 10**7),
    behind=st.integers(0, 1000),
    late_s=st.none() | st.floats(0, 1e6),
    cpu_percent=st.none() | st.floats(0, 9999),
    memory_bytes=st.none() | st.integers(0, 2**41),
    gpu_percent=st.none() | st.floats(0, 100),
    gpu_bytes=st.none() | st.integers(0, 2**38),
)


def plain(lines):
    return [line.plain for line in lines]


def view(samples, **more):
    fields = {"pace": Pace(12.3, 1), "note": "", **more}
    return View("1123-0315-train", "running", 1, 133.0, tuple(samples), **fields)


@given(
    st.lists(_SAMPLES, max_size=70, unique_by=lambda sample: sample.rank),
    st.integers(60, 200),
    st.integers(10, 50),
    st.text(max_size=100),
)
def test_the_screen_is_never_exceeded(samples, width, height, line):
    line = "".join(filter(str.isprintable, line))
    lines = plain(render(view(samples, note="a note " * 30), width, height, lambda rank: line))
    assert len(lines) == height
    assert [line for line in lines if cell_len(line.rstrip()) > width] == []


def test_a_screen_of_80_columns_has_all_of_it():
    flights = {rank: flight(120, group=GROUP, pending_s=12.0) for rank in (0, 1, 3)}
    now = overview(flights | {2: flight(120, group=GROUP)}, waits={2: SLEEPS})
    shown = plain(render(view(take_samples(now)), 80, 24, lambda rank: f"step 120 loss 0.{rank}"))
    assert shown[0] == "jaxrun top  1123-0315-train  attempt 1, running 2 min 13 s"
    assert shown[1] == "12.3 steps/s  4 ranks"
    assert shown[3].split() == ["RANK", "STATE", "CALL", "LAG", "CPU", "MEM", "LAST", "LINE"]
    assert " ".join(shown[4].split()) == "! 2 sleeps 120 12.0 s - 256M step 120 loss 0.2"
    assert " ".join(shown[5].split()) == "0 waits 12.0 s for rank 2 in… 121 - 256M step 120 loss 0.0"
    assert shown[-1] == "s stacks   q quit"


def test_where_gpus_leave_no_room_the_last_line_has_one_of_its_own():
    ranks = [
        sample(rank, f"h{rank}", gpu_percent=97.0, gpu_bytes=2**34, memory_bytes=2**30, number=7) for rank in (0, 1)
    ]
    shown = [line.plain for line in lay_out(group_samples(ranks, 4)[0], 60, {0: "step 7", 1: "step 7"})]
    assert "GPU  GPUMEM" in shown[0] and "97%     16G" in shown[1] and shown[2] == "      step 7"
    assert len(shown) == 5


def test_what_is_not_known_is_a_hyphen():
    (row,) = group_samples([sample(0)], 4)[0]
    assert lay_out([row], 80, {})[1].plain.split() == ["0", "waits", "-", "-", "-"]


def test_long_texts_are_cut_and_say_so():
    shown = plain(render_pages("\n".join(f"  {n} {'x' * 100}" for n in range(40)), 80, 24))
    assert len(shown) == 24 and shown[-2] == "… 18 more lines: jaxrun stacks" and shown[0].endswith("x…")


# ---- rates


def test_the_pace_is_that_of_the_last_seconds_and_begins_anew_with_an_attempt():
    rate = CallRate()
    for second in range(30):
        rate.add(overview({0: flight(10 * second, group="0")}, time=NOW + second))
    assert rate.per_second() == pytest.approx(10.0)
    rate.add(overview({0: flight(1, group="0")}, time=NOW + 30))
    assert rate.per_second() is None


def test_a_job_that_records_nothing_has_no_pace():
    rate = CallRate()
    for second in range(3):
        rate.add(overview({0: Flight()}, time=NOW + second))
    assert rate.per_second() is None and format_pace(Pace()) == ""


@pytest.mark.parametrize(
    ("pace", "text"),
    [
        (Pace(12.34, 1), "12.3 steps/s"),
        (Pace(300.0, 3), "100 steps/s"),
        (Pace(0.04, 1), "a step in 25 s"),
        (Pace(7.0, 0), "7 calls/s"),
        (Pace(0.0, 2, 303, 31.0), "151 steps, none for 31.0 s"),
        (Pace(0.0, 0, 1, 31.0), "1 call, none for 31.0 s"),
        (Pace(0.0, 0, 0), "no calls yet"),
    ],
)
def test_the_pace_in_words(pace, text):
    assert format_pace(pace) == text


def test_how_many_calls_were_made_and_when_the_last_rank_came_to_one():
    now = overview({0: flight(302, group=GROUP, ago_s=21.0), 1: flight(301, group=GROUP, pending_s=20.0)})
    assert (now.calls_made, now.idle_s) == (301.5, 20.0)
    assert (overview({0: Flight()}).calls_made, overview({}).idle_s) == (None, None)


# ---- the first sentence


SLOW_RANK = Straggler((2,), GROUP, "", 120, 100, 0.99, 0.03, 0.82, 0.8, True, "train.py:12 load")


@pytest.mark.parametrize(
    ("wait", "late_s", "sentence"),
    [
        (SLEEPS, 21.0, "ranks 0, 2-3 have waited 21.0 s for rank 1, which sleeps"),
        ("do_signal_stop", 21.0, "ranks 0, 2-3 have waited 21.0 s for rank 1, which is stopped by a signal"),
        (SLEEPS, 1.5, "rank 2 came last to 99 % of calls, by 30 ms on average"),
    ],
)
def test_what_holds_the_job_up_now_comes_before_what_slowed_it_down_before(wait, late_s, sentence):
    flights = {rank: flight(302, group=GROUP, ago_s=late_s) for rank in (0, 2, 3)}
    flights[1] = flight(301, group=GROUP, ago_s=late_s)
    wait = ProcessState.STOPPED if wait == "do_signal_stop" else wait
    now = overview(flights, waits={1: wait}, straggler=SLOW_RANK)
    assert describe_finding(now, take_samples(now)).startswith(sentence)


def test_a_straggler_that_waits_itself_does_not_stand_out():
    flights = {rank: flight(302, group=GROUP, ago_s=21.0) for rank in (0, 2, 3)}
    flights[1] = flight(301, group=GROUP, ago_s=21.0)
    now = overview(flights, waits={1: SLEEPS}, straggler=SLOW_RANK)
    found = {one.rank: (one.standing_out, one.late_s) for one in take_samples(now)}
    assert found[2] == found[0] == found[3] == (LIKE_OTHERS, None) and found[1][0] > LIKE_OTHERS


def test_what_the_notice_of_a_stall_has_told_comes_first_and_a_lost_host_before_it():
    told = overview({0: flight(5, group=GROUP)}, stall="no progress for 31.0 s: rank 1 waits", straggler=SLOW_RANK)
    assert describe_finding(told, ()) == "no progress for 31.0 s: rank 1 waits"
    assert describe_finding(replace(told, awaited="waiting for h2"), ()) == "waiting for h2"
    assert describe_finding(overview({}), ()) == ""


def test_several_ranks_that_are_awaited_are_described_if_they_do_the_same():
    flights = {0: flight(302, group=GROUP, ago_s=9.0), 3: flight(302, group=GROUP, ago_s=8.0)}
    flights |= {rank: flight(301, group=GROUP, ago_s=9.0) for rank in (1, 2)}
    now = overview(flights, waits={1: SLEEPS, 2: SLEEPS})
    assert describe_finding(now, take_samples(now)) == "ranks 0, 3 have waited 9.0 s for ranks 1-2, which sleep"
    now = overview(flights, waits={1: SLEEPS, 2: ProcessState.STOPPED})
    assert describe_finding(now, take_samples(now)) == "ranks 0, 3 have waited 9.0 s for ranks 1-2"


def test_figures_are_short():
    sizes = (None, 5 * 2**10, 412 * 2**20, 1.25 * 2**30, 80 * 2**30, 2**41)
    assert [format_memory(size) for size in sizes] == ["-", "5K", "412M", "1.2G", "80G", "2.0T"]


def test_the_host_that_a_job_waits_for_stands_above_the_rows(tmp_path, monkeypatch):
    text = "waiting for h2 (rank 1), 53 s more (--wait-hosts)"
    monkeypatch.setattr(feed, "request_overview", lambda job: overview({}, hosts={0: "h1", 1: "h2"}, awaited=text))
    seen = feed.Feed(FollowedJob(tmp_path))
    seen.update()
    assert seen.view().note == text and text in "\n".join(line.plain for line in render(seen.view(), 80, None, str))


# ---- one vocabulary


def test_documents_and_the_page_have_the_words_of_the_vocabulary():
    (literal,) = (field.type for field in fields(TopRank) if field.name == "standing_out")
    assert get_args(literal) == tuple(one.words for one in StandingOut)
    script = (Path(jaxrun.__file__).parent / "frontends" / "job_page" / "ranks.js").read_text()
    table = script.partition("const KINDS = {")[2].partition("\n};")[0]
    words = dict(re.findall(r'(\w+): \["."\, "([^"]+)"\]', table))
    assert words.pop("late") == "others wait for it"
    assert words == {doing.value: doing.words for doing in Doing}
