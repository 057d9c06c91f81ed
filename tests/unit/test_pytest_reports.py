"""One report of pytest's from those of all ranks: what it holds, and that pytest and its own serializer take it."""

import copy
import json

import pytest

from jaxrun.protocol.pytest_messages import PEER_LOST
from jaxrun.pytest_plugin import reports
from jaxrun.pytest_plugin.outcome import decide_outcome
from jaxrun.pytest_plugin.rank_results import PhaseState, RankResult
from jaxrun.pytest_plugin.reports import ItemInfo as Known
from jaxrun.pytest_plugin.summary import ReportContext

TEST = Known("test_x.py::test_y[2p]", ("test_x.py", 11, "test_y[2p]"), ("test_y", "processes"))
SCENE = ReportContext("2 processes x 1 device, local", {0: "h", 1: "h"}, rerun="pytest test_x.py")
DIED = PhaseState.DIED, "of SIGKILL (9)"


def of_rank(rank, outcome="passed", when="call", text="", **more):
    """A report as a rank's session sends it."""
    longrepr = None
    if text:
        crash = {"path": "test_x.py", "lineno": 14, "message": text}
        entry = {"type": "ReprEntryNative", "data": {"lines": [f"traceback of {rank}\n"]}}
        trace = {"reprentries": [entry], "extraline": None, "style": "native"}
        chain = [[copy.deepcopy(trace), dict(crash), None]]
        longrepr = {"reprcrash": crash, "reprtraceback": trace, "sections": [], "chain": chain}
    return {
        "$report_type": "TestReport",
        "nodeid": "test_x.py::test_y[2p]@gang",
        "location": ("test_x.py", 11, "test_y[2p]"),
        "keywords": {"test_y": 1},
        "outcome": outcome,
        "longrepr": longrepr,
        "when": when,
        "user_properties": [],
        "sections": [],
        "duration": 0.1 * (rank + 1),
        "start": 100.0 + rank,
        "stop": 100.5 + rank,
        **more,
    }


def part(report, at=None, **cut_off):
    setup = of_rank(0, when="setup")
    return RankResult({"setup": setup, **({report["when"]: report} if report else {})}, failed_at=at, **cut_off)


def build(parts, everything=False):
    test = Known(TEST.nodeid, TEST.location, TEST.keywords, everything)
    by_rank = dict(enumerate(parts))
    data = reports.build_report(test, decide_outcome("call", by_rank), by_rank, SCENE, 100.0, 107.0)
    json.dumps(data)  # as simple as execnet wants it
    return data


def shown(data):
    """What pytest writes for a failure."""
    report = pytest.TestReport._from_json(copy.deepcopy(data))
    again = pytest.TestReport._from_json(report._to_json() | {"$report_type": "TestReport"})
    assert again.longreprtext == report.longreprtext
    return report


def test_a_test_that_passed_everywhere_has_one_report_with_the_longest_time_of_all():
    data = build([part(of_rank(0)), part(of_rank(1))])
    assert (data["outcome"], data["longrepr"], data["nodeid"]) == ("passed", None, TEST.nodeid)
    assert (data["start"], data["stop"], data["duration"]) == (100.0, 101.5, 0.2)
    assert data["user_properties"] == [("gang", "2 processes x 1 device, local")]


def test_a_failure_shows_the_table_then_the_traceback_of_who_failed_first():
    data = build([part(of_rank(0)), part(of_rank(1, "failed", text="assert 1 == 0\nmore"), at=0.5)])
    report = shown(data)
    text = report.longreprtext
    assert text.index("[2 processes x 1 device") < text.index("--- rank 1 ---") < text.index("traceback of 1")
    assert report.longrepr.reprcrash.message == "rank 1: assert 1 == 0\nmore"
    assert ("rank", 1) in data["user_properties"]


def test_other_failures_are_shown_on_request_and_equal_ones_once():
    parts = [part(of_rank(rank, "failed", text="ab"[rank == 2]), at=rank) for rank in range(3)]
    first, everything = (shown(build(parts, wanted)).longreprtext for wanted in (False, True))
    assert "traceback of 0" in first and "traceback of 2" not in first
    assert "--- ranks 0-1 ---\ntraceback of 0" in everything and "--- rank 2 ---\ntraceback of 2" in everything
    assert "traceback of 1" not in everything


@pytest.mark.parametrize("longrepr", ["fixture 'nope' not found", None], ids=["text", "no text"])
def test_a_failure_without_a_traceback_is_told_all_the_same(longrepr):
    data = build([part(of_rank(0, "failed") | {"longrepr": longrepr}, at=0.1), part(of_rank(1))])
    text = shown(data).longreprtext
    assert "rank 0:  FAILED" in text and (longrepr is None or text.count(longrepr) == 2)


def test_a_fixture_error_without_a_chain_keeps_its_traceback():
    data = of_rank(0, "failed", text="boo")
    data["longrepr"]["chain"] = None
    assert "traceback of 0" in shown(build([part(data, at=0.1), part(of_rank(1))])).longreprtext


def test_a_rank_that_died_has_a_report_with_what_was_captured_of_it():
    end, what = DIED
    died = part(None, at=0.3, end=end, what=what, printed={"out": "last words\n"})
    report = shown(build([part(of_rank(0)), died]))
    assert report.longrepr.reprcrash.message == "rank 1: died of SIGKILL (9)"
    assert report.sections == [("Captured stdout call (rank 1)", "last words\n")]
    assert (report.duration, report.stop) == (7.0, 107.0)


def test_what_ranks_printed_is_shown_once_with_their_names_and_of_a_failure_the_first_ones_only():
    same = [("Captured stdout call", "same")]
    passed = build([part(of_rank(0, sections=same)), part(of_rank(1, sections=same))])
    assert passed["sections"] == [("Captured stdout call (ranks 0-1)", "same")]
    bad = part(of_rank(1, "failed", text="x", sections=[("Captured stderr call", "bad")]), at=0.1)
    assert build([part(of_rank(0, sections=same)), bad])["sections"] == [("Captured stderr call (rank 1)", "bad")]


def test_what_the_test_records_is_kept_once_where_ranks_agree():
    parts = [part(of_rank(rank, user_properties=[("loss", 1.5), ("rank_seen", rank)])) for rank in (0, 1)]
    assert build(parts)["user_properties"][:3] == [("loss", 1.5), ("rank_seen", 0), ("rank_seen", 1)]


def test_nothing_of_ours_stays_in_a_report():
    waited = of_rank(0, "failed", text="x", **{PEER_LOST: "gang.barrier()"})
    assert PEER_LOST not in build([part(waited, at=0.1), part(of_rank(1))])


@pytest.mark.parametrize(
    ("data", "outcome", "words"),
    [
        (reports.skipped_report(TEST, "Skipped: too large", 1.0), "skipped", "too large"),
        (reports.failed_report(TEST, "no gang:\nwhy", 1.0), "failed", "no gang:\nwhy"),
    ],
)
def test_a_test_that_is_not_run_has_a_report_too(data, outcome, words):
    report = pytest.TestReport._from_json(copy.deepcopy(data))
    assert (report.when, report.outcome) == ("setup", outcome)
    assert words in (report.longreprtext if outcome == "failed" else report.longrepr[2])
