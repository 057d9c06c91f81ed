"""The outcome of a phase from the results of all ranks, and the outcome in words."""

import pytest

from jaxrun.frontends.pytest_plugin.outcome import (
    decide_outcome,
    format_one_line,
    format_table,
    group_ranks,
)
from jaxrun.frontends.pytest_plugin.rank_results import PhaseState, RankResult, RunResult
from jaxrun.protocol.pytest_messages import PEER_LOST

GLOO = "ValueError: Gloo all-reduce failed: [pair.cc:547] Connection closed by peer [10.0.0.1]:4711"
STRICT = "[XPASS(strict)] known"


def report(when="call", outcome="passed", message="", **more):
    longrepr = None
    if message:
        crash = {"path": "/home/me/test_x.py", "lineno": 14, "message": message}
        longrepr = {"reprcrash": crash, "reprtraceback": {}, "sections": [], "chain": None}
    return {"when": when, "outcome": outcome, "longrepr": longrepr, **more}


def failed(message="assert 1 == 0", when="call", **more):
    return report(when, "failed", message, **more)


def result(*reports, at=None, cut_off=None, detail=""):
    """A rank whose setup passed, unless a report says otherwise."""
    found = {one["when"]: one for one in (report("setup"), *reports)}
    return RankResult(found, cut_off, detail, at)


PASSED = result(report(), report("teardown"))
FAILED = result(failed(), report("teardown"), at=0.5)
SKIPPED = result(report(outcome="skipped") | {"longrepr": ("f.py", 3, "Skipped: no gpu")})
XFAILED = result(report(outcome="skipped", wasxfail="known"))
XPASSED = result(report(wasxfail="known"))
XPASSED_STRICT = result(report(outcome="failed") | {"longrepr": STRICT})
PEER_LOST_RESULT = result(failed(**{PEER_LOST: "gang.barrier('x'): rank 1 has failed"}), at=0.6)
STUCK = result(cut_off=PhaseState.STUCK, detail="test_x.py:15 test_y   in JAX: process_allgather")
DIED = result(cut_off=PhaseState.DIED, detail="of SIGKILL (9)", at=0.3)
STOPPED = result(cut_off=PhaseState.STOPPED, detail="with the others", at=0.4)
VICTIM = result(failed(GLOO), at=0.2)


def table(results, rerun="", phase="call", hosts=None, **more):
    run = RunResult(results, dict.fromkeys(results, "h1") if hosts is None else hosts, **more)
    return format_table(decide_outcome(phase, results), run, f"{len(results)} processes", rerun)


@pytest.mark.parametrize(
    ("results", "outcome", "lead", "line"),
    [
        ([PASSED, PASSED], "passed", 0, ""),
        ([PASSED, FAILED], "failed", 1, "rank 1: assert 1 == 0"),
        ([FAILED, FAILED], "failed", 0, "all 2 ranks: assert 1 == 0"),
        ([STUCK, FAILED, STUCK], "failed", 1, "rank 1: assert 1 == 0"),
        ([PEER_LOST_RESULT, FAILED], "failed", 1, "rank 1: assert 1 == 0"),
        ([SKIPPED, SKIPPED], "skipped", 0, ""),
        ([PASSED, SKIPPED, PASSED], "failed", 1, "the ranks disagree: rank 1 skipped, ranks 0, 2 did not"),
        ([STUCK, SKIPPED], "failed", 0, "the ranks disagree: rank 1 skipped, rank 0 did not"),
        ([SKIPPED, FAILED], "failed", 1, "rank 1: assert 1 == 0"),
        ([XFAILED, XFAILED], "skipped", 0, ""),
        ([PASSED, XFAILED], "skipped", 1, ""),
        ([STUCK, XFAILED], "skipped", 1, ""),
        ([XPASSED_STRICT, XFAILED], "skipped", 1, ""),
        ([XFAILED, FAILED], "failed", 1, "rank 1: assert 1 == 0"),
        ([XPASSED, XPASSED], "passed", 0, ""),
        ([XPASSED_STRICT, XPASSED_STRICT], "failed", 0, f"all 2 ranks: {STRICT}"),
        ([STUCK, STUCK], "failed", 0, "all 2 ranks: stuck test_x.py:15 test_y   in JAX: process_allgather"),
        ([PASSED, STUCK], "failed", 1, "rank 1: stuck test_x.py:15 test_y   in JAX: process_allgather"),
        ([STOPPED, DIED], "failed", 1, "rank 1: died of SIGKILL (9)"),
        ([VICTIM, DIED, STOPPED], "failed", 1, "rank 1: died of SIGKILL (9)"),
        ([VICTIM, VICTIM], "failed", 0, f"all 2 ranks: {GLOO}"),
        ([PEER_LOST_RESULT, PASSED], "failed", 0, "rank 0: gang.barrier('x'): rank 1 has failed"),
    ],
)
def test_the_outcome_of_the_call(results, outcome, lead, line):
    by_rank = dict(enumerate(results))
    found = decide_outcome("call", by_rank)
    assert (found.outcome, found.lead) == (outcome, lead)
    if line:
        assert format_one_line(found, by_rank) == line


def test_the_failure_that_came_first_leads():
    results = {0: result(failed("late"), at=0.9), 1: result(failed("first"), at=0.1), 2: result(failed("then"), at=0.5)}
    assert decide_outcome("call", results).lead == 1


def test_a_phase_that_no_rank_reached_has_no_outcome():
    assert decide_outcome("call", {0: RankResult({"setup": failed(when="setup")})}) is None


@pytest.mark.parametrize(
    ("results", "outcome", "reason"),
    [
        ([PASSED, PASSED], "failed", "the ranks fell out of step"),
        ([XPASSED, XPASSED], "skipped", "the ranks fell out of step"),
        ([PASSED, FAILED], "failed", ""),
        ([SKIPPED, SKIPPED], "skipped", ""),
    ],
)
def test_ranks_out_of_step_fail_what_would_have_passed(results, outcome, reason):
    found = decide_outcome("call", dict(enumerate(results)), in_step=False)
    assert (found.outcome, found.reason) == (outcome, reason)
    assert decide_outcome("teardown", {0: PASSED}, in_step=False).outcome == "passed"


# ---- deaths that belong to the test


@pytest.mark.parametrize(
    ("results", "outcome", "reason"),
    [
        ([STOPPED, DIED], "passed", ""),
        ([VICTIM, DIED], "passed", ""),
        ([STUCK, DIED], "passed", ""),
        ([PEER_LOST_RESULT, DIED], "passed", ""),
        ([PASSED, DIED], "passed", ""),
        ([FAILED, DIED], "failed", ""),
        ([DIED, STOPPED], "failed", ""),
        ([PASSED, PASSED], "failed", "rank 1 was to die, and did not"),
        ([SKIPPED, SKIPPED], "skipped", ""),
        ([FAILED, PASSED], "failed", ""),
    ],
)
def test_a_death_that_belongs_to_the_test_is_no_failure_and_its_absence_is_one(results, outcome, reason):
    found = decide_outcome("call", dict(enumerate(results)), frozenset({1}))
    assert (found.outcome, found.reason) == (outcome, reason)


# ---- ranks in different phases


def test_a_death_in_teardown_is_not_blamed_on_a_rank_that_was_stopped_in_the_call():
    results = {0: STOPPED, 1: result(report(), cut_off=PhaseState.DIED, detail="of SIGKILL (9)", at=0.3)}
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
        1: RankResult({"setup": failed("broken", "setup"), "teardown": report("teardown")}, failed_at=0.1),
    }
    found = decide_outcome("setup", results)
    assert (found.outcome, found.lead) == ("failed", 1)
    text = table(results, phase="setup")
    assert "rank 1:  FAILED in setup  broken" in text and "rank 0:  STUCK            test_x.py:15" in text


@pytest.mark.parametrize(
    ("reports", "phase"),
    [
        ([], "setup"),
        ([report("setup")], "call"),
        ([report("setup"), report("call")], "teardown"),
        ([failed(when="setup")], "teardown"),
        ([report("setup"), report("call"), report("teardown")], "teardown"),
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
    broken = RankResult({"setup": report("setup", "failed") | {"longrepr": text}}, failed_at=0.0)
    assert broken.headline("setup") == "fixture 'nope' not found"
