"""A job's trace as it is shown: as Chrome trace events, and as the chart of its page."""

import gzip
import json

import pytest
from chrome_format import check_events, check_trace
from hypothesis import given
from hypothesis import strategies as st

from jaxrun.frontends.job_page.page import to_json
from jaxrun.frontends.job_page.timeline import choose_rows, timeline_content
from jaxrun.records.history.chrome_trace import chrome_events, write_chrome_trace
from jaxrun.records.history.job_trace import AttemptTrace, JobTrace, Moment, RankTrace, Span, TracedCall

ZERO = 1_795_000_000.25


def at(*seconds):
    return [ZERO + second for second in seconds]


def call(number, entered, left, **more):
    return TracedCall("0-1", number, "jit(step)", "train.py:88 main", *at(entered, left), **more)


def rank(number, *calls, **more):
    phases = (Span("program", *at(1.0, 9.0)),)
    return RankTrace(number, f"h{number}", 100 + number, phases, calls, len(calls), **more)


def job(*ranks, **more):
    attempt = AttemptTrace(1, ZERO, ZERO + 10, {rank.rank: rank for rank in ranks})
    return JobTrace("train.py · 2 ranks", (attempt,), **more)


WAITING = job(
    rank(0, call(1, 2.0, 3.1, waited=1.0, last=1), call(2, 4.0, 4.1, waited=2.0, last=1)),
    rank(1, call(1, 3.0, 3.1, last=1, cost=1.0), call(2, 6.0, 6.1, last=1, cost=2.0), call(3, 7.0, 9.0, is_over=False)),
)


def slices(events, pid, category):
    wanted = [event for event in events if event["ph"] == "X" and (event["pid"], event["cat"]) == (pid, category)]
    return [(event["name"], *(pytest.approx(event[time], abs=0.5) for time in ("ts", "dur"))) for event in wanted]


def test_calls_and_waits_are_slices_of_their_rank():
    events = list(chrome_events(WAITING))
    check_events(events)
    assert slices(events, 1, "call") == [("jit(step)", 2e6, 1.1e6), ("jit(step)", 4e6, 0.1e6)]
    assert slices(events, 1, "wait") == [("waits for rank 1", 2e6, 1e6), ("waits for rank 1", 4e6, 2e6)]
    (never,) = [event["args"] for event in events if event["args"].get("call") == 3]
    assert never == {"call": 3, "ranks": "0-1", "at": "train.py:88 main", "never came back": True}
    names = {event["args"].get("name") for event in events if event["ph"] == "M"}
    assert {"rank 0 (h0)", "rank 1 (h1)", "phases", "calls"} <= names and "compilations" not in names


def test_a_trace_of_many_events_is_whole(tmp_path):
    many = job(rank(0, marks=tuple(Moment(ZERO + number, f"mark {number}") for number in range(2500))))
    count = write_chrome_trace(many, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(events) == count
    assert [event["name"] for event in events if event["ph"] == "i"] == [f"mark {number}" for number in range(2500)]


def test_what_overlaps_has_tracks_of_its_own():
    threads = rank(0, call(1, 2.0, 4.0), call(2, 3.0, 5.0), compilations=(Span("a", *at(2, 5)), Span("b", *at(3, 4))))
    events = list(chrome_events(job(threads)))
    check_events(events)
    assert len({event["tid"] for event in events if event["ph"] == "X" and event["cat"] == "call"}) == 2
    assert len({event["tid"] for event in events if event["ph"] == "X" and event["cat"] == "compilations"}) == 1


_SPANS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5)), max_size=12)


@given(_SPANS, _SPANS)
def test_whatever_the_times_are_the_format_is_kept(calls, spans):
    calls = tuple(call(n, begin, begin + took, waited=took * 2, last=1) for n, (begin, took) in enumerate(calls, 1))
    spans = tuple(Span("s", *at(begin, begin + took)) for begin, took in spans)
    check_events(list(chrome_events(job(rank(0, *calls, compilations=spans, marks=())))))


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_file_is_json_packed_or_not(tmp_path, name):
    trace = job(
        rank(0, marks=(Moment(ZERO + 8, "ValueError", "bad: \ud800 é", is_failure=True),)), headline="it failed"
    )
    count = write_chrome_trace(trace, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    content = json.loads(gzip.decompress(data) if name.endswith("gz") else data)
    assert len(check_trace(content)) == count
    assert content["otherData"] == {"job": "train.py · 2 ranks", "verdict": "it failed", "start": ZERO}


# ---- the page


def test_names_cannot_become_markup():
    nasty = "</script><script>alert(1)</script>"
    text = to_json(timeline_content(job(rank(0, marks=(Moment(ZERO, nasty, nasty),)))))
    assert "<" not in text and json.loads(text)["rows"][0]["marks"][0][1] == nasty


def test_calls_are_packed_as_the_page_unpacks_them():
    data = timeline_content(WAITING)
    first, second = data["rows"]
    assert first["calls"][:8] == [2_000_000, 1_100_000, 1_000_000, 0, 0, 1, 0, 1]
    assert first["calls"][8:] == [2_000_000, 100_000, 2_000_000, 0, 0, 2, 0, 1]
    assert second["calls"][16:] == [1_000_000, -1 - 2_000_000, 0, 0, 0, 3, 0, -1]
    assert data["sites"] == [("jit(step)", "train.py:88 main")]
    assert (data["costs"], data["lasts"], data["duration"]) == ([0.0, 3.0], [0.0, 1.0], 10.0)
    assert data["waited"] == 3.0


def test_who_never_came_is_waited_for_longest():
    """As the verdict says of a hang: what others waited in a call that is not over counts."""
    before = rank(0, call(1, 2.0, 3.1, last=0, cost=1.0), call(2, 4.0, 9.0, waited=5.0, is_over=False))
    never = [rank(number, call(1, 1.0, 3.1, last=0), awaited=ZERO + 4.0) for number in (1, 2)]
    data = timeline_content(job(before, *never))
    assert data["costs"] == [1.0, 5.0, 5.0]
    assert data["waited"] == 6.0  # for both at once
    assert data["lasts"] == [1.0, 0.5, 0.5]


def test_notes_say_what_is_not_shown():
    forgotten = RankTrace(0, calls=(call(9, 1, 2),), calls_made=5000, trouble="its recorder is full")
    page = " ".join(timeline_content(job(forgotten, clock_error=0.00031))["notes"])
    assert "Of 5,000 calls of all ranks the last 1 are known here" in page
    assert "rank 0: its recorder is full" in page and "to within 0.31 ms" in page
    assert "needs Python 3.12" in timeline_content(job(RankTrace(0, calls=(call(1, -ZERO, 2),))))["notes"][0]


def test_with_very_many_ranks_the_outliers_and_some_of_each_host_have_rows():
    ranks = {number: [RankTrace(number, f"h{number // 8}")] for number in range(4096)}
    ranks[2000] = [RankTrace(2000, "h250", calls=(call(1, 1, 2, last=2000, cost=3.0),))]
    ranks[3000] = [RankTrace(3000, "h375", awaited=ZERO)]
    rows = choose_rows(ranks, [4000])
    assert rows[:3] == [4000, 3000, 2000] and len(rows) == len(set(rows)) == 256
    assert {ranks[row][0].host for row in rows} >= {f"h{number}" for number in range(240)}
    assert choose_rows({number: ranks[number] for number in range(40)}, [7]) == list(range(40))
