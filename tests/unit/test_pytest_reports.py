"""One pytest report from the reports of all ranks: its content, and that pytest can read and write it."""

import copy
import json
from dataclasses import replace

import pytest

from jaxrun.frontends.pytest_plugin import reports
from jaxrun.frontends.pytest_plugin.rank_results import PhaseState, RankResult, RunResult
from jaxrun.frontends.pytest_plugin.reports import ItemInfo
from jaxrun.protocol.pytest_messages import PEER_LOST

ITEM = ItemInfo(
    "test_x.py::test_y[2p]",
    ("test_x.py", 11, "test_y[2p]"),
    ("test_y", "processes"),
    gang="2 processes x 1 device, local",
    rerun="pytest test_x.py",
)


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


def result(report, at=None, **cut_off):
    setup = of_rank(0, when="setup")
    return RankResult({"setup": setup, **({report["when"]: report} if report else {})}, failed_at=at, **cut_off)


def build(results, show_all=False):
    """The report of the call."""
    run = RunResult(dict(enumerate(results)), dict.fromkeys(range(len(results)), "h"), span=(99.0, 107.0))
    _, data, _ = reports.build_reports(replace(ITEM, show_all=show_all), run)
    json.dumps(data)  # as simple as execnet wants it
    return data


def shown(data):
    """What pytest writes for a failure."""
    report = pytest.TestReport._from_json(copy.deepcopy(data))
    again = pytest.TestReport._from_json(report._to_json() | {"$report_type": "TestReport"})
    assert again.longreprtext == report.longreprtext
    return report


def test_a_test_that_passed_everywhere_has_one_report_with_the_longest_time_of_all():
    data = build([result(of_rank(0)), result(of_rank(1))])
    assert (data["outcome"], data["longrepr"], data["nodeid"]) == ("passed", None, ITEM.nodeid)
    assert (data["start"], data["stop"], data["duration"]) == (100.0, 101.5, 0.2)


def test_a_failure_shows_the_table_then_the_traceback_of_the_first_failure():
    data = build([result(of_rank(0)), result(of_rank(1, "failed", text="assert 1 == 0\nmore"), at=0.5)])
    report = shown(data)
    text = report.longreprtext
    assert text.index("[2 processes x 1 device") < text.index("--- rank 1 ---") < text.index("traceback of 1")
    assert report.longrepr.reprcrash.message == "rank 1: assert 1 == 0\nmore"


def test_other_failures_are_shown_on_request_and_equal_ones_once():
    results = [result(of_rank(rank, "failed", text="ab"[rank == 2]), at=rank) for rank in range(3)]
    first, show_all = (shown(build(results, wanted)).longreprtext for wanted in (False, True))
    assert "traceback of 0" in first and "traceback of 2" not in first
    assert "--- ranks 0-1 ---\ntraceback of 0" in show_all and "--- rank 2 ---\ntraceback of 2" in show_all
    assert "traceback of 1" not in show_all


@pytest.mark.parametrize("longrepr", ["fixture 'nope' not found", None], ids=["text", "no text"])
def test_a_failure_without_a_traceback_is_shown(longrepr):
    data = build([result(of_rank(0, "failed") | {"longrepr": longrepr}, at=0.1), result(of_rank(1))])
    text = shown(data).longreprtext
    assert "rank 0:  FAILED" in text and (longrepr is None or text.count(longrepr) == 2)


def test_a_fixture_error_without_a_chain_keeps_its_traceback():
    data = of_rank(0, "failed", text="boo")
    data["longrepr"]["chain"] = None
    assert "traceback of 0" in shown(build([result(data, at=0.1), result(of_rank(1))])).longreprtext


def test_a_rank_that_died_has_a_report_with_its_captured_output():
    died = result(None, at=0.3, cut_off=PhaseState.DIED, detail="of SIGKILL (9)", captured={"out": "last output\n"})
    report = shown(build([result(of_rank(0)), died]))
    assert report.longrepr.reprcrash.message == "rank 1: died of SIGKILL (9)"
    assert report.sections == [("Captured stdout call (rank 1)", "last output\n")]
    assert (report.duration, report.stop) == (6.5, 107.0)  # since the end of the setup


def test_equal_output_is_shown_once_with_its_ranks_and_of_a_failure_only_the_leads():
    same = [("Captured stdout call", "same")]
    passed = build([result(of_rank(0, sections=same)), result(of_rank(1, sections=same))])
    assert passed["sections"] == [("Captured stdout call (ranks 0-1)", "same")]
    bad = result(of_rank(1, "failed", text="x", sections=[("Captured stderr call", "bad")]), at=0.1)
    assert build([result(of_rank(0, sections=same)), bad])["sections"] == [("Captured stderr call (rank 1)", "bad")]


def test_recorded_properties_are_kept_once_where_ranks_agree():
    results = [result(of_rank(rank, user_properties=[("loss", 1.5), ("rank_seen", rank)])) for rank in (0, 1)]
    assert build(results)["user_properties"] == [("loss", 1.5), ("rank_seen", 0), ("rank_seen", 1)]


def test_the_mark_of_a_lost_peer_does_not_stay_in_the_report():
    waited = of_rank(0, "failed", text="x", **{PEER_LOST: "gang.barrier()"})
    assert PEER_LOST not in build([result(waited, at=0.1), result(of_rank(1))])


def test_a_test_that_is_not_run_has_a_report_too():
    setup, teardown = map(shown, reports.not_run_reports(ITEM, "no gang:\nwhy"))
    assert (teardown.when, teardown.outcome) == ("teardown", "passed")
    assert (setup.when, setup.outcome) == ("setup", "failed")
    assert "no gang:\nwhy" in setup.longreprtext
