"""The pytest plugin, as users run it: a pytest of its own on the files of pytest_cases/."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from harness import TIME_LIMIT, kill, wait_until

from jaxrun.node.agent.guard import find_marked

PYTEST_CASES = Path(__file__).parent / "pytest_cases"
INSTALLED = bool(entry_points(group="pytest11", name="jaxrun"))
_MARK = "PYTEST_CASES_RUN"


@dataclass(frozen=True)
class Case:
    """One test's result, as the JUnit report has it."""

    outcome: str
    message: str
    text: str
    seconds: float


@dataclass(frozen=True)
class Run:
    """A pytest that has ended."""

    code: int
    out: str
    cases: dict[str, Case]


def prepare(tmp_path: Path) -> None:
    """Put the files of pytest_cases/ there."""
    shutil.copytree(PYTEST_CASES, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pytest.ini").touch()


@contextmanager
def started(
    tmp_path: Path, *words: str, launcher: Sequence[str] = (), with_hypothesis: bool = False, **popen: object
) -> Iterator[subprocess.Popen[str]]:
    """pytest in `tmp_path`, perhaps as the program of a `launcher`; none of its processes outlives the block."""
    prepare(tmp_path)
    mark = f"{_MARK}={uuid.uuid4().hex}"
    plugin = () if INSTALLED else ("-p", "jaxrun.frontends.pytest_plugin.plugin")
    if not with_hypothesis:
        # Plugins of other packages that take longer to import than all the rest, or import numpy.
        plugin += ("-p", "no:hypothesispytest", "-p", "no:jaxtyping")
    process = subprocess.Popen(
        [sys.executable, "-m", *launcher, "pytest", *plugin, "-p", "no:cacheprovider", "--junitxml=cases.xml", *words],
        cwd=tmp_path,
        env={**os.environ, _MARK: mark.partition("=")[2]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        **{"stdin": subprocess.DEVNULL, **popen},  # type: ignore[call-overload]
    )
    try:
        yield process
        wait_until(lambda: not list(find_marked(mark)), "end of all processes")
    finally:
        kill(find_marked(mark))
        process.communicate()


def run(tmp_path: Path, *words: str, stdin: str = "", **more: Any) -> Run:
    with started(tmp_path, "--basetemp=temporary", *words, stdin=subprocess.PIPE, **more) as process:
        out, _ = process.communicate(stdin, timeout=TIME_LIMIT)
        return Run(process.returncode, out, _cases(tmp_path / "cases.xml"))


def _cases(path: Path) -> dict[str, Case]:
    found = {}
    for case in ElementTree.parse(path).iter("testcase"):
        children = {child.tag: child for child in case}
        outcome = next((tag for tag in ("error", "failure", "skipped") if tag in children), "passed")
        child = children.get(outcome)
        message, text = (child.get("message", ""), child.text or "") if child is not None else ("", "")
        found[case.get("name", "")] = Case(outcome, message, text, float(case.get("time", "0")))
    return found


# ---- the runs

MARKED_FILES = ("fixtures.py", "outcomes.py", "broken_gangs.py", "breaks_on_ranks.py")
STRICT = ("--strict-markers", "--strict-config", "-p", "xdist")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("all")


@pytest.fixture(scope="module")
def done(folder: Path) -> Run:
    """One run of all files with marked tests; a rank that is stuck has 5 s after another one has failed."""
    (folder / "breaks_on_ranks.py").write_text(
        "import os, pytest\nassert 'JAXRUN_RANK' not in os.environ, 'not on a rank'\n"
        "@pytest.mark.processes(1)\ndef test_of_a_file_that_breaks_on_ranks(): pass\n"
    )
    return run(folder, *MARKED_FILES, *STRICT, "-rA", "-W", "default", "--gang-grace=5")


@pytest.mark.extended
def test_the_summary_counts_each_test_once(done: Run) -> None:
    assert done.code == 1
    assert "16 failed, 22 passed, 2 skipped, 1 xfailed, 1 warning, 9 errors" in done.out


@pytest.mark.extended
def test_those_that_pass_on_all_ranks_have_passed_and_no_others(done: Run) -> None:
    assert {name.removeprefix("test_") for name, case in done.cases.items() if case.outcome == "passed"} == {
        *("the_fork_server_was_there_at_the_import", "old_style", "directories", "gang", "sizes[1p-a]", "sizes[1p-b]"),
        *("sizes[2p-a]", "sizes[2p-b]", "shape", "warm", "between_runs_in_the_parent", "fresh"),
        *("warm_again_sees_what_the_first_left", "gangs", "passes", "warns", "has_no_mark"),
        *("stays_in_step", "after_programs_were_crossed", "is_not_watched", "survives"),
    }


@pytest.mark.extended
@pytest.mark.parametrize(
    ("test", "outcome", "message", "lines"),
    [
        ("one_fails", "failure", "rank 1: assert 1 == 0", ["rank 0:  passed", "rerun: pytest outcomes.py::test_one"]),
        ("all_skip", "skipped", "no GPU", []),
        ("is_skipped_by_its_mark", "skipped", "not today", []),
        ("one_fails_as_expected", "skipped", "known", []),
        ("passes_unexpectedly", "failure", "all 2 ranks: [XPASS(strict)] known", []),
        ("setup_fails", "error", "rank 1: RuntimeError: setup is broken", []),
        ("teardown_fails", "error", "rank 1: RuntimeError: teardown is broken", []),
        ("wants_no_such_fixture", "error", "all 2 ranks: fixture 'no_such_fixture' not found", []),
        (
            "waits_for_who_fails",
            "failure",
            "rank 1: ValueError: boo",
            ["rank 0:  WAITED  gang.barrier('all here'): rank 1 has failed"],
        ),
        ("has_a_wrong_mark", "error", "does not know tiemout", []),
        ("has_no_mark_and_asks_for_a_gang", "error", "", ["for tests marked @pytest.mark.processes(n)"]),
        ("is_in_the_parent_only", "error", "", ["was collected in the process that runs pytest, but not on rank "]),
        ("of_a_file_that_breaks_on_ranks", "error", "AssertionError: not on a rank", []),
        ("has_more_hosts_than_processes", "error", "the gang did not start", ["--simulate-hosts"]),
        ("has_more_hosts_again", "error", "as for an earlier test: the gang did not start", ["--simulate-hosts"]),
        (
            "crosses_known_programs",
            "failure",
            "the ranks fell out of step",
            ["ranks 0-1:  passed", "different functions", "outcomes.py:"],
        ),
        ("is_refused", "failure", "all 2 ranks: jaxrun_runtime.DivergenceError: the processes disagree", []),
        (
            "is_stopped",
            "failure",
            "the ranks fell out of step",
            ["ranks 0-1:  STOPPED", "--lockstep fail ended the job"],
        ),
        (
            "fails_before_a_collective",
            "failure",
            "rank 1: assert 1 == 0",
            ["rank 1:  FAILED", "rank 0:  STUCK", "process_allgather"],
        ),
        (
            "takes_too_long",
            "failure",
            "rank 1: stuck",
            ["not over after 5.0 s", "rank 0:  STUCK", "rank 1:  STUCK", "broken_gangs.py:"],
        ),
        (
            "waits_in_a_barrier",
            "failure",
            "rank 1: stuck",
            ["test_waits_in_a_barrier   in gang.barrier", "for rank 1, which has not", "rank 1 sleeps at"],
        ),
        ("ends_its_process", "failure", "rank 1: exited with status 3", ["rank 1:  DIED", "rank 0:  STOPPED"]),
        ("ends_by_os_exit_with_status_0", "failure", "all 2 ranks: exited with status 0", ["os._exit(0)"]),
        ("calls_pytest_exit", "failure", "its pytest session was ended by pytest.exit('no more')", ["DIED"]),
        ("is_interrupted", "failure", "its pytest session was ended by KeyboardInterrupt", ["DIED"]),
        ("is_out_of_step", "failure", "rank 1: stuck", ["rank 0:  passed", "and rank 0 finished the test without it"]),
        ("kills", "failure", "rank 1: killed by SIGKILL (9)", ["as its gang asked"]),
        ("should_die", "failure", "rank 1 was to die, and did not", []),
    ],
)
def test_one_that_does_not_pass_says_why(done: Run, test: str, outcome: str, message: str, lines: list[str]) -> None:
    case = done.cases[f"test_{test}"]
    assert (case.outcome, message in case.message) == (outcome, True), case
    assert [line for line in lines if line not in case.text] == [], case.text


@pytest.mark.extended
def test_a_failure_shows_its_traceback_and_output(done: Run) -> None:
    assert "rank 1:  FAILED  assert 1 == 0  outcomes.py:" in done.cases["test_one_fails"].text
    assert ">       assert" in done.out or ">   assert" in done.out
    assert "Captured stdout call (rank 1)" in done.out and "rank 1 was here" in done.out
    assert "rank 0 was here" not in done.out


@pytest.mark.extended
def test_a_warning_of_several_ranks_is_in_the_summary_once(done: Run) -> None:
    assert done.out.count("UserWarning: careful") == 1


@pytest.mark.extended
def test_fixtures_of_a_session_are_torn_down(done: Run, folder: Path) -> None:
    left = [path.read_text() for path in folder.glob("temporary/gang-*/session-*/rank-*/torn-down")]
    assert left == ["first\nsecond"]


@pytest.mark.extended
def test_of_a_rank_that_died_the_output_and_the_files_are_kept(done: Run, folder: Path) -> None:
    assert "printed before the exit" in done.out
    assert len(list(folder.glob("temporary/shared-test_survives0/checkpoint-*"))) == 2


@pytest.mark.extended
def test_a_test_that_was_cut_off_has_the_duration_that_it_took(done: Run) -> None:
    assert done.cases["test_takes_too_long"].seconds >= 5


# ---- other runs


@pytest.mark.extended
def test_a_breakpoint_and_a_failure_open_a_debugger_on_one_rank(tmp_path: Path) -> None:
    done = run(tmp_path, "debugged.py", "--pdb", stdin="p secret\nc\np secret\nq\np secret\nq\n")
    assert ">>> rank 1 is in its debugger" in done.out and "(Pdb) 41\n" in done.out
    assert done.out.count("is in its debugger") == 2
    assert "(Pdb) 70\n" in done.out or "(Pdb) 71\n" in done.out
    assert "1 failed, 2 passed" in done.out
    text = done.cases["test_fails_on_both_ranks"].text
    assert ("--- rank 0 ---" in text) != ("--- rank 1 ---" in text)


@pytest.mark.extended
def test_ranks_at_a_breakpoint_before_a_collective_have_the_terminal_in_turn(tmp_path: Path) -> None:
    (tmp_path / "collective.py").write_text(
        "import gc, pytest\ngc.disable()  # JAX has a callback for it, in which a step may end\n"
        "@pytest.mark.parametrize('first', ['c', 'n'])\n@pytest.mark.processes(2, timeout=60)\n"
        "def test(gang, first):\n    from jax.experimental import multihost_utils\n"
        "    breakpoint()\n    multihost_utils.sync_global_devices('after')\n"
    )
    done = run(tmp_path, "collective.py", stdin="c\nc\nn\nn\nc\nc\n")
    # Once is for the step to the collective; a rank that is late in another one is said to be away, too.
    assert "2 passed" in done.out and done.out.count("has not come back from that step") >= 1, done.out


def test_a_session_without_marked_tests_loads_and_starts_next_to_nothing(tmp_path: Path) -> None:
    assert "1 passed" in run(tmp_path, "unmarked.py").out


def test_without_a_gang_tests_run_in_pytest_itself(tmp_path: Path) -> None:
    done = run(tmp_path, "alone.py", "--no-gang")
    assert "4 passed" in done.out and not list(tmp_path.glob("temporary/gang-*")), done.out


def test_as_the_program_of_a_job_plain_tests_run_on_each_rank_and_marked_ones_say_how_they_are_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "spmd.py").write_text(
        "import jax, pytest\ndef test_plain(): assert jax.process_count() == 2\n"
        "@pytest.mark.processes(2)\ndef test_marked(gang): pass\n"
    )
    launcher = ("jaxrun", "-n", "2", "-m")
    with started(tmp_path, "spmd.py", "-rpE", launcher=launcher) as process:
        out, _ = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 1
    assert "PASSED spmd.py::test_plain" in out and "ERROR spmd.py::test_marked - pytest runs as the program of" in out
    assert "run them with plain `pytest`, and leave them out here with -m 'not processes'" in out


def test_an_interrupt_ends_a_test_and_leaves_nothing(tmp_path: Path) -> None:
    test = (
        "import pytest, time\n@pytest.mark.processes(1)\ndef test():\n    print('run', 'ning')\n    time.sleep(600)\n"
    )
    (tmp_path / "slow.py").write_text(test)
    # Where these tests run in the background, SIGINT is ignored, and would be so in their children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with started(tmp_path, "slow.py", "-s") as process:
        signal.signal(signal.SIGINT, before)
        assert process.stdout is not None
        for line in process.stdout:
            if "run ning" in line:
                break
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=TIME_LIMIT)
    assert process.returncode == 2 and "KeyboardInterrupt" in out


# ---- beside other tools: xdist, coverage, hypothesis, pytest-timeout

TWO = "import pytest, time\ntwo = pytest.mark.processes(2)\n"


@pytest.mark.extended
def test_workers_of_xdist_have_gangs_of_their_own(tmp_path: Path) -> None:
    done = run(tmp_path, "fixtures.py", "outcomes.py", "-n2", "--dist=loadgroup", "-k", "shape or one_ or passes")
    assert "2 failed, 2 passed, 1 xfailed" in done.out


@pytest.mark.extended
@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["alone", "xdist"])
def test_code_that_only_one_rank_runs_is_covered(tmp_path: Path, workers: list[str]) -> None:
    branches = "def by_rank(rank):\n    if rank == 1:\n        return 'rank 1'\n    return 'rank 0'\n"
    (tmp_path / "covered.py").write_text(f"{branches}\n\ndef here():\n    return 'the parent'\n")
    tests = "@two\ndef test_ranks(gang): assert covered.by_rank(gang.rank)\ndef test_parent(): assert covered.here()\n"
    (tmp_path / "covering.py").write_text(f"import covered\n{TWO}{tests}")
    done = run(tmp_path, "covering.py", "--cov=covered", "--cov-report=term-missing", *workers)
    assert "covered.py       6      0   100%" in done.out, done.out
    assert [path.name for path in tmp_path.glob(".coverage*")] == [".coverage"]


@pytest.mark.extended
def test_examples_of_hypothesis_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "examples.py").write_text(
        f"{TWO}from hypothesis import HealthCheck, given, settings, strategies\n"
        "quick = dict(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, database=None)\n"
        "@two\n@settings(max_examples=5, **quick)\n@given(number=strategies.integers())\n"
        "def test(gang, number): assert len(set(gang.allgather(number))) == 1\n"
    )
    assert run(tmp_path, "examples.py", "--strict-markers", with_hypothesis=True).code == 0


@pytest.mark.extended
def test_a_limit_of_pytest_timeout_counts_for_the_whole_test(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(f"{TWO}@two\n@pytest.mark.timeout(1)\ndef test(): time.sleep(600)\n")
    done = run(tmp_path, "slow.py", "--timeout=100", "--strict-markers")
    assert "not over after 1.0 s" in done.cases["test"].text
