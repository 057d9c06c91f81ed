"""The pytest plugin, as users run it: a pytest of its own on the files of pytest_cases/."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from pytest_runs import TIME_LIMIT, run, started

# ---- outcomes


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    words = ("outcomes.py", "-rA", "-W", "default")
    return run(tmp_path_factory.mktemp("outcomes"), *words)


@pytest.mark.parametrize(
    ("test", "outcome", "message"),
    [
        ("passes", "passed", ""),
        ("one_fails", "failure", "rank 1: assert 1 == 0"),
        ("all_fail_alike", "failure", "all 2 ranks: ValueError: the same"),
        ("all_fail_differently", "failure", "of rank "),
        ("all_skip", "skipped", "no GPU"),
        ("one_skips", "failure", "the ranks disagree: rank 1 skipped, rank 0 did not"),
        ("is_skipped_by_its_mark", "skipped", "not today"),
        ("one_fails_as_expected", "skipped", "known"),
        ("passes_unexpectedly", "failure", "all 2 ranks: [XPASS(strict)] known"),
        ("setup_fails", "error", "rank 1: RuntimeError: setup is broken"),
        ("teardown_fails", "error", "rank 1: RuntimeError: teardown is broken"),
        ("wants_no_such_fixture", "error", "all 2 ranks: fixture 'no_such_fixture' not found"),
        ("waits_for_who_fails", "failure", "rank 1: ValueError: boo"),
        (
            "meets_in_different_places",
            "failure",
            "rank 0 is at gang.barrier('there'), rank 1 is at gang.barrier('here')",
        ),
        ("warns", "passed", ""),
        ("has_a_wrong_mark", "error", "does not know tiemout"),
        ("has_no_mark_and_asks_for_a_gang", "error", "for tests marked @pytest.mark.processes(n)"),
        ("has_no_mark", "passed", ""),
    ],
)
def test_one_test_has_one_outcome(outcomes, test, outcome, message):
    case = outcomes.cases[f"test_{test}"]
    assert (case.outcome, message in f"{case.message}{case.text}") == (outcome, True), case


def test_the_summary_counts_each_test_once(outcomes):
    assert outcomes.code == 1
    assert "7 failed, 4 passed, 2 skipped, 1 xfailed, 1 warning, 5 errors" in outcomes.out


def test_a_failure_shows_its_rank_traceback_and_output(outcomes):
    text = outcomes.cases["test_one_fails"].text
    assert "rank 1:  FAILED  assert 1 == 0  outcomes.py:" in text and "rank 0:  passed" in text
    assert "rerun: pytest outcomes.py::test_one_fails" in text
    assert ">       assert" in outcomes.out or ">   assert" in outcomes.out
    assert "Captured stdout call (rank 1)" in outcomes.out and "rank 1 was here" in outcomes.out
    assert "rank 0 was here" not in outcomes.out


def test_a_rank_that_waits_at_a_barrier_gets_the_reason_why_nobody_comes(outcomes):
    assert (
        "rank 0:  WAITED  gang.barrier('all here'): rank 1 has failed"
        in outcomes.cases["test_waits_for_who_fails"].text
    )


def test_a_warning_of_several_ranks_is_in_the_summary_once(outcomes):
    assert outcomes.out.count("UserWarning: careful") == 1


def test_all_failures_are_shown_on_request_and_the_first_may_be_the_last(tmp_path):
    done = run(tmp_path, "outcomes.py", "-k", "passes or differently", "-x", "--gang-report=all")
    assert [case.outcome for case in done.cases.values()] == ["passed", "failure"]
    text = done.cases["test_all_fail_differently"].text
    assert "--- rank 0 ---" in text and "--- rank 1 ---" in text


# ---- fixtures and shapes


def test_ranks_have_what_tests_are_used_to(tmp_path):
    done = run(tmp_path, "fixtures.py", "--strict-markers", "--strict-config", "-p", "xdist")
    assert {name: case.outcome for name, case in done.cases.items() if case.outcome != "passed"} == {}
    assert {f"test_sizes[{size}p-{word}]" for size in (1, 3) for word in "ab"} <= done.cases.keys()
    left = [path.read_text() for path in tmp_path.glob("temporary/gang-*/session-*/rank-*/torn-down")]
    assert left == ["first\nsecond"] * 2


def test_jax_is_imported_for_the_ranks_while_the_tests_are(tmp_path):
    for words, outcomes in (
        (("early.py",), ["passed", "passed"]),
        (("early.py", "-k", "at_the_import"), ["passed"]),  # the server has to end though nobody has asked it
        (("not_early.py",), ["passed"]),
        (("early.py", "--no-gang"), ["failure", "passed"]),
    ):
        done = run(tmp_path, *words)
        assert [case.outcome for case in done.cases.values()] == outcomes, done


def test_examples_of_hypothesis_are_the_same_on_all_ranks(tmp_path):
    assert run(tmp_path, "examples.py", "--strict-markers", with_hypothesis=True).code == 0


def test_without_a_gang_tests_run_in_pytest_itself(tmp_path):
    done = run(tmp_path, "fixtures.py", "-k", "first or second or sizes", "--no-gang")
    assert "6 passed" in done.out and not list(tmp_path.glob("temporary/gang-*"))


# ---- tests that break their gang


@pytest.fixture(scope="module")
def broken_gangs(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("broken_gangs")
    return run(tmp_path, "broken_gangs.py"), tmp_path


def test_no_test_suffers_from_an_earlier_one(broken_gangs):
    done, _ = broken_gangs
    passed = [name for name, case in done.cases.items() if case.outcome == "passed"]
    assert passed == [
        "test_after_a_failure",
        "test_after_a_limit",
        "test_after_an_end",
        "test_after_a_stray_call",
        "test_survives",
        "test_kills_from_outside",
    ]


@pytest.mark.parametrize(
    ("test", "message", "rows"),
    [
        (
            "fails_before_a_collective",
            "rank 1: assert 1 == 0",
            ["rank 1:  FAILED", "rank 0:  STUCK", "process_allgather"],
        ),
        ("takes_too_long", "stuck", ["not over after 3.0 s", "rank 0:  STUCK", "rank 1:  STUCK", "broken_gangs.py:"]),
        ("ends_its_process", "rank 1: died with exit status 3", ["rank 1:  DIED", "rank 0:  STOPPED"]),
        ("is_out_of_step", "rank 1: stuck", ["rank 0:  passed", "and rank 0 finished the test without it"]),
        ("kills", "rank 1: died of SIGKILL (9)", ["as its gang asked"]),
        ("should_die", "rank 1 was to die, and did not", []),
    ],
)
def test_the_report_shows_what_became_of_each_rank(broken_gangs, test, message, rows):
    case = broken_gangs[0].cases[f"test_{test}"]
    assert case.outcome == "failure" and message in case.message
    assert [row for row in rows if row not in case.text] == [], case.text


def test_the_output_of_a_rank_that_died_is_kept(broken_gangs):
    assert "printed before the exit" in broken_gangs[0].out


def test_a_test_that_was_cut_off_has_the_duration_that_it_took(broken_gangs):
    assert broken_gangs[0].cases["test_takes_too_long"].seconds >= 3


def test_files_that_a_rank_wrote_before_its_death_are_kept(broken_gangs):
    assert len(list(broken_gangs[1].glob("temporary/shared-test_survives0/checkpoint-*"))) == 2


# ---- ranks out of step


@pytest.fixture(scope="module")
def out_of_step(tmp_path_factory):
    return run(tmp_path_factory.mktemp("out_of_step"), "out_of_step.py")


@pytest.mark.parametrize(
    ("test", "outcome", "message", "lines"),
    [
        ("stays_in_step", "passed", "", []),
        (
            "crosses_known_programs",
            "failure",
            "the ranks fell out of step",
            ["ranks 0-1:  passed", "different functions", "out_of_step.py:"],
        ),
        ("after_programs_were_crossed", "passed", "", []),
        (
            "differs",
            "failure",
            "the ranks fell out of step",
            ["ranks 0-1:  passed", "baked in differs", "out_of_step.py:"],
        ),
        ("differs_as_expected", "skipped", "known", []),
        ("is_refused", "failure", "all 2 ranks: jaxrun_runtime.DivergenceError: the processes disagree", []),
        ("is_not_watched", "passed", "", []),
    ],
)
def test_ranks_that_make_different_calls_fail_the_test(out_of_step, test, outcome, message, lines):
    case = out_of_step.cases[f"test_{test}"]
    assert case.outcome == outcome and message in case.message, out_of_step.out
    assert [line for line in lines if line not in case.text] == [], case.text


# ---- trouble


def test_a_session_without_marked_tests_loads_next_to_nothing():
    code = "import pytest, sys; import jaxrun.pytest_plugin.plugin; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    heavy = {"jax", "numpy", "cloudpickle", "click", "jaxrun.gang", "jaxrun.verdict"}
    heavy |= {"jaxrun.protocol.worker_messages", "jaxrun.protocol.pytest_messages"}
    assert loaded & heavy == set()


def test_an_interrupt_ends_a_test_and_leaves_nothing(tmp_path):
    test = "import pytest, time\n@pytest.mark.processes(2)\ndef test():\n    print('run', 'ning')\n    time.sleep(60)\n"
    (tmp_path / "slow.py").write_text(test)
    with started(tmp_path, "slow.py", "-s") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "run ning" in line:
                break
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 2 and "KeyboardInterrupt" in out


def test_a_file_that_breaks_on_the_ranks_only_says_so(tmp_path):
    (tmp_path / "broken.py").write_text(
        "import os, pytest\nassert 'JAXRUN_RANK' not in os.environ, 'not on a rank'\n"
        "@pytest.mark.processes(2)\ndef test(): pass\n"
    )
    case = run(tmp_path, "broken.py").cases["test"]
    assert case.outcome == "error" and "not on a rank" in case.text


@pytest.mark.extended
def test_a_test_that_is_found_in_the_parent_only_says_so(tmp_path):
    (tmp_path / "varies.py").write_text(
        "import os, pytest\n@pytest.mark.processes(2)\n"
        "@pytest.mark.parametrize('pid', [os.getpid()])\ndef test(pid): pass\n"
    )
    (case,) = run(tmp_path, "varies.py").cases.values()
    assert case.outcome == "error" and "was not collected on rank 0" in case.text


def test_a_gang_that_cannot_start_fails_its_tests_with_the_reason(tmp_path):
    done = run(tmp_path, "outcomes.py", "-k", "passes or alike", "--gang-backend=slurm")
    assert [case.outcome for case in done.cases.values()] == ["error"] * 3
    assert "an allocation of Slurm" in done.cases["test_passes"].text
    assert "as for an earlier test" in done.cases["test_all_fail_alike"].text
