"""The outcome of a phase from the results of all ranks: as a value, in words, and as a report that pytest can read."""

import copy
import json

import pytest

from jaxrun.frontends.pytest_plugin.phase_outcome import decide_outcome, format_one_line, format_table, group_ranks
from jaxrun.frontends.pytest_plugin.rank_results import PhaseState, RankResult, RunResult
from jaxrun.frontends.pytest_plugin.reports import ItemInfo, build_reports, not_run_reports
from jaxrun.protocol.pytest_messages import PEER_LOST

GLOO = "ValueError: Gloo all-reduce failed: [pair.cc:547] Connection closed by peer [10.0.0.1]:4711"
STRICT = "[XPASS(strict)] known"


def report(outcome="passed", message="", when="call", rank=0, **more):
    """A report as a rank's session sends it."""
    longrepr = None
    if message:
        crash = {"path": "/home/me/test_x.py", "lineno": 14, "message": message}
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


def failed(message="assert 1 == 0", when="call", **more):
    return report("failed", message, when, **more)


def result(*reports, at=None, **cut_off):
    """A rank whose setup passed, unless a report says otherwise."""
    found = {one["when"]: one for one in (report(when="setup"), *reports)}
    return RankResult(found, failed_at=at, **cut_off)


PASSED = result(report(), report(when="teardown"))
FAILED = result(failed(), report(when="teardown"), at=0.5)
SKIPPED = result(report("skipped", longrepr=("f.py", 3, "Skipped: no gpu")))
XFAILED = result(report("skipped", wasxfail="known"))
XPASSED = result(report(wasxfail="known"))
XPASSED_STRICT = result(report("failed", longrepr=STRICT))
LOST = result(failed(**{PEER_LOST: "gang.barrier('x'): rank 1 has failed"}), at=0.6)
STUCK = result(cut_off=PhaseState.STUCK, detail="test_x.py:15 test_y   in JAX: process_allgather")
DIED = result(cut_off=PhaseState.DIED, detail="killed by SIGKILL (9)", at=0.3)
STOPPED = result(cut_off=PhaseState.STOPPED, detail="with the others", at=0.4)
VICTIM = result(failed(GLOO), at=0.2)


OUT_OF_STEP = {"in_step": False}
RANK_1_DIES = {"dies": frozenset({1})}


def table(results, rerun="", phase="call", hosts=None, **more):
    run = RunResult(results, dict.fromkeys(results, "h1") if hosts is None else hosts, **more)
    return format_table(decide_outcome(phase, results), run, f"{len(results)} processes", rerun)


@pytest.mark.parametrize(
    ("results", "given", "outcome", "lead", "line"),
    [
        ([PASSED, PASSED], {}, "passed", 0, ""),
        ([PASSED, FAILED], {}, "failed", 1, "rank 1: assert 1 == 0"),
        ([FAILED, FAILED], {}, "failed", 0, "all 2 ranks: assert 1 == 0"),
        ([STUCK, FAILED, STUCK], {}, "failed", 1, "rank 1: assert 1 == 0"),
        ([FAILED, result(failed("first"), at=0.1), FAILED], {}, "failed", 1, "rank 1: first"),
        ([LOST, FAILED], {}, "failed", 1, "rank 1: assert 1 == 0"),
        ([SKIPPED, SKIPPED], {}, "skipped", 0, ""),
        ([PASSED, SKIPPED, PASSED], {}, "failed", 1, "the ranks disagree: rank 1 skipped, ranks 0, 2 did not"),
        ([STUCK, SKIPPED], {}, "failed", 0, "the ranks disagree: rank 1 skipped, rank 0 did not"),
        ([SKIPPED, FAILED], {}, "failed", 1, "rank 1: assert 1 == 0"),
        ([XFAILED, XFAILED], {}, "skipped", 0, ""),
        ([PASSED, XFAILED], {}, "skipped", 1, ""),
        ([STUCK, XFAILED], {}, "skipped", 1, ""),
        ([VICTIM, XFAILED], {}, "skipped", 1, ""),
        ([XPASSED_STRICT, XFAILED], {}, "skipped", 1, ""),
        ([XFAILED, FAILED], {}, "failed", 1, "rank 1: assert 1 == 0"),
        ([XPASSED, XPASSED], {}, "passed", 0, ""),
        ([XPASSED_STRICT, XPASSED_STRICT], {}, "failed", 0, f"all 2 ranks: {STRICT}"),
        ([STUCK, STUCK], {}, "failed", 0, "all 2 ranks: stuck test_x.py:15 test_y   in JAX: process_allgather"),
        ([PASSED, STUCK], {}, "failed", 1, "rank 1: stuck test_x.py:15 test_y   in JAX: process_allgather"),
        ([STOPPED, DIED], {}, "failed", 1, "rank 1: killed by SIGKILL (9)"),
        ([VICTIM, DIED, STOPPED], {}, "failed", 1, "rank 1: killed by SIGKILL (9)"),
        ([VICTIM, VICTIM], {}, "failed", 0, f"all 2 ranks: {GLOO}"),
        ([LOST, PASSED], {}, "failed", 0, "rank 0: gang.barrier('x'): rank 1 has failed"),
        ([PASSED, PASSED], OUT_OF_STEP, "failed", 0, "the ranks fell out of step"),
        ([XPASSED, XPASSED], OUT_OF_STEP, "skipped", 0, "the ranks fell out of step"),
        ([PASSED, FAILED], OUT_OF_STEP, "failed", 1, "rank 1: assert 1 == 0"),
        ([SKIPPED, SKIPPED], OUT_OF_STEP, "skipped", 0, ""),
        ([STOPPED, STOPPED], OUT_OF_STEP, "failed", 0, "the ranks fell out of step"),
        ([PASSED, STOPPED], OUT_OF_STEP, "failed", 1, "the ranks fell out of step"),
        ([STOPPED, DIED], OUT_OF_STEP, "failed", 1, "rank 1: killed by SIGKILL (9)"),
        ([STOPPED, DIED], RANK_1_DIES, "passed", 1, ""),
        ([VICTIM, DIED], RANK_1_DIES, "passed", 0, ""),
        ([DIED, DIED], RANK_1_DIES, "passed", 0, ""),
        ([STUCK, DIED], RANK_1_DIES, "passed", 0, ""),
        ([LOST, DIED], RANK_1_DIES, "passed", 1, ""),
        ([PASSED, DIED], RANK_1_DIES, "passed", 0, ""),
        ([FAILED, DIED], RANK_1_DIES, "failed", 0, "rank 0: assert 1 == 0"),
        ([DIED, STOPPED], RANK_1_DIES, "failed", 0, "rank 0: killed by SIGKILL (9)"),
        ([PASSED, PASSED], RANK_1_DIES, "failed", 0, "rank 1 was to die, and did not"),
        ([SKIPPED, SKIPPED], RANK_1_DIES, "skipped", 0, ""),
        ([FAILED, PASSED], RANK_1_DIES, "failed", 0, "rank 0: assert 1 == 0"),
    ],
)
def test_the_outcome_of_the_call(results, given, outcome, lead, line):
    by_rank = dict(enumerate(results))
    found = decide_outcome("call", by_rank, **given)
    assert (found.outcome, found.lead) == (outcome, lead)
    if line:
        assert format_one_line(found, by_rank) == line


def test_ranks_out_of_step_do_not_fail_the_teardown():
    assert decide_outcome("teardown", {0: PASSED}, in_step=False).outcome == "passed"


# ---- ranks in different phases


def test_a_death_in_teardown_is_not_blamed_on_a_rank_that_was_stopped_in_the_call():
    results = {0: STOPPED, 1: result(report(), cut_off=PhaseState.DIED, detail="killed by SIGKILL (9)", at=0.3)}
    assert decide_outcome("call", results).outcome == "passed"
    found = decide_outcome("teardown", results)
    assert (found.outcome, found.lead) == ("failed", 1)
    assert "rank 0:  STOPPED  with the others" in table(results, phase="teardown")


@pytest.mark.parametrize(
    ("first", "second"), [(PhaseState.DIED, PhaseState.STOPPED), (PhaseState.STUCK, PhaseState.STUCK)]
)
def test_a_cut_off_in_setup_while_another_rank_is_in_the_call_counts_as_in_the_call(first, second):
    results = {0: result(cut_off=second, detail="there"), 1: RankResult({}, first, "here", 0.1)}
    assert decide_outcome("setup", results).outcome == "passed"
    found = decide_outcome("call", results)
    assert (found.outcome, found.states) == ("failed", {0: second, 1: first})
    assert "rank 1:  " in table(results) and "here" in format_one_line(found, results)


def test_a_failure_in_setup_leads_and_a_rank_that_waits_in_the_call_is_shown_as_stuck():
    results = {
        0: STUCK,
        1: RankResult({"setup": failed("broken", "setup"), "teardown": report(when="teardown")}, failed_at=0.1),
    }
    found = decide_outcome("setup", results)
    assert (found.outcome, found.lead) == ("failed", 1)
    text = table(results, phase="setup")
    assert "rank 1:  FAILED in setup  broken" in text and "rank 0:  STUCK            test_x.py:15" in text


def test_of_ranks_that_are_stuck_one_that_does_not_wait_for_others_leads():
    waits = result(cut_off=PhaseState.STUCK, detail="t.py:6 test_y   in gang.barrier", waits_for=(1,))
    found = decide_outcome("call", {0: waits, 1: result(cut_off=PhaseState.STUCK, detail="t.py:5 test_y"), 2: waits})
    assert found.lead == 1


@pytest.mark.parametrize(
    ("reports", "phase"),
    [
        ([], "setup"),
        ([report(when="setup")], "call"),
        ([report(when="setup"), report()], "teardown"),
        ([failed(when="setup")], "teardown"),
        ([report(when="setup"), report(), report(when="teardown")], "teardown"),
    ],
)
def test_a_rank_is_cut_off_in_the_phase_that_it_has_not_reported(reports, phase):
    cut = RankResult({one["when"]: one for one in reports}, PhaseState.STUCK)
    assert cut.cut_off_in == phase
    assert cut.state(phase) is PhaseState.STUCK


# ---- as text


def test_the_table_has_one_line_for_equal_ranks_and_the_first_failure_on_top():
    notes = ("ranks 0, 2-3 ended 1.5 s after the first failure; the next test gets a new gang",)
    results = {0: STUCK, 1: FAILED, 2: STUCK, 3: STUCK}
    assert table(results, "pytest 'test_x.py::test_y[4p]'", notes=notes) == (
        "[4 processes; first failure after 0.50 s]\n"
        "rank 1:        FAILED  assert 1 == 0                                    test_x.py:14\n"
        "ranks 0, 2-3:  STUCK   test_x.py:15 test_y   in JAX: process_allgather\n"
        "ranks 0, 2-3 ended 1.5 s after the first failure; the next test gets a new gang\n"
        "rerun: pytest 'test_x.py::test_y[4p]'"
    )


def test_the_table_names_several_hosts_and_the_timeout_that_was_reached():
    text = table({0: PASSED, 1: STUCK}, hosts={0: "h1", 1: "h2"}, timeout=30.0)
    assert text.splitlines()[0] == "[2 processes; not over after 30.0 s]"
    assert "rank 1 (h2):  STUCK" in text


def test_equal_errors_at_different_places_are_different_groups():
    other = failed()
    other["longrepr"]["reprcrash"]["lineno"] = 20
    results = {0: FAILED, 1: result(other, at=0.7), 2: FAILED}
    assert group_ranks(decide_outcome("call", results), results) == [[0, 2], [1]]


def test_a_long_message_is_cut_in_the_table():
    results = {0: result(failed("x" * 300 + "\nmore"), at=0.0), 1: PASSED}
    rows = table(results).splitlines()
    assert max(map(len, rows)) < 130 and "more" not in rows[1]


def test_the_error_of_a_missing_fixture_is_found_below_the_source_that_pytest_shows():
    text = "file test_x.py, line 3\n  def test(nope): pass\nE       fixture 'nope' not found\n>   available: x"
    broken = RankResult({"setup": report("failed", when="setup", longrepr=text)}, failed_at=0.0)
    assert broken.headline("setup") == "fixture 'nope' not found"


# ---- as pytest's reports

ITEM = ItemInfo(
    "test_x.py::test_y[2p]",
    ("test_x.py", 11, "test_y[2p]"),
    ("test_y", "processes"),
    gang="2 processes x 1 device, local",
    rerun="pytest test_x.py",
)


def build(results):
    """The report of the call."""
    run = RunResult(dict(enumerate(results)), dict.fromkeys(range(len(results)), "h"), span=(99.0, 107.0))
    _, data, _ = build_reports(ITEM, run)
    json.dumps(data)  # as simple as execnet wants it
    return data


def shown(data):
    """What pytest writes for a failure."""
    report = pytest.TestReport._from_json(copy.deepcopy(data))
    again = pytest.TestReport._from_json(report._to_json() | {"$report_type": "TestReport"})
    assert again.longreprtext == report.longreprtext
    return report


def test_a_test_that_passed_everywhere_has_one_report_with_the_longest_time_of_all():
    data = build([result(report()), result(report(rank=1))])
    assert (data["outcome"], data["longrepr"], data["nodeid"]) == ("passed", None, ITEM.nodeid)
    assert (data["start"], data["stop"], data["duration"]) == (100.0, 101.5, 0.2)


def test_a_failure_shows_the_table_then_the_traceback_of_the_first_failure():
    data = build([result(report()), result(failed("assert 1 == 0\nmore", rank=1), at=0.5)])
    found = shown(data)
    text = found.longreprtext
    assert text.index("[2 processes x 1 device") < text.index("--- rank 1 ---") < text.index("traceback of 1")
    assert found.longrepr.reprcrash.message == "rank 1: assert 1 == 0\nmore"


@pytest.mark.parametrize("longrepr", ["fixture 'nope' not found", None], ids=["text", "no text"])
def test_a_failure_without_a_traceback_is_shown(longrepr):
    data = build([result(failed(longrepr=longrepr), at=0.1), result(report(rank=1))])
    text = shown(data).longreprtext
    assert "rank 0:  FAILED" in text and (longrepr is None or text.count(longrepr) == 2)


def test_a_fixture_error_without_a_chain_keeps_its_traceback():
    data = failed("boo")
    data["longrepr"]["chain"] = None
    assert "traceback of 0" in shown(build([result(data, at=0.1), result(report(rank=1))])).longreprtext


def test_a_rank_that_died_has_a_report_with_its_captured_output():
    died = result(at=0.3, cut_off=PhaseState.DIED, detail="killed by SIGKILL (9)", captured={"out": "last output\n"})
    found = shown(build([result(report()), died]))
    assert found.longrepr.reprcrash.message == "rank 1: killed by SIGKILL (9)"
    assert found.sections == [("Captured stdout call (rank 1)", "last output\n")]
    assert (found.duration, found.stop) == (6.5, 107.0)  # since the end of the setup


def test_equal_output_is_shown_once_with_its_ranks_and_of_a_failure_only_the_leads():
    same = [("Captured stdout call", "same")]
    passed = build([result(report(sections=same)), result(report(rank=1, sections=same))])
    assert passed["sections"] == [("Captured stdout call (ranks 0-1)", "same")]
    bad = result(failed("x", rank=1, sections=[("Captured stderr call", "bad")]), at=0.1)
    assert build([result(report(sections=same)), bad])["sections"] == [("Captured stderr call (rank 1)", "bad")]


def test_recorded_properties_are_kept_once_where_ranks_agree():
    results = [result(report(rank=rank, user_properties=[("loss", 1.5), ("rank_seen", rank)])) for rank in (0, 1)]
    assert build(results)["user_properties"] == [("loss", 1.5), ("rank_seen", 0), ("rank_seen", 1)]


def test_the_mark_of_a_lost_peer_does_not_stay_in_the_report():
    waited = failed("x", **{PEER_LOST: "gang.barrier()"})
    assert PEER_LOST not in build([result(waited, at=0.1), result(report(rank=1))])


def test_a_test_that_is_not_run_has_a_report_too():
    setup, teardown = map(shown, not_run_reports(ITEM, "no gang:\nwhy"))
    assert (teardown.when, teardown.outcome) == ("teardown", "passed")
    assert (setup.when, setup.outcome) == ("setup", "failed")
    assert "no gang:\nwhy" in setup.longreprtext
