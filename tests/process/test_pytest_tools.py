"""The pytest plugin beside other tools: xdist, coverage, debuggers, pytest-timeout, mpirun."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from pytest_runs import TIME_LIMIT, prepare, run, started


@pytest.mark.extended
@pytest.mark.parametrize("dist", ["loadgroup", pytest.param("load", marks=pytest.mark.extended)])
def test_workers_of_xdist_have_gangs_of_their_own(tmp_path, dist):
    done = run(tmp_path, "fixtures.py", "outcomes.py", "-n2", f"--dist={dist}", "-k", "shape or one_ or passes")
    assert "3 failed, 2 passed, 1 xfailed" in done.out


@pytest.mark.extended
@pytest.mark.parametrize("workers", [[], pytest.param(["-n2"], marks=pytest.mark.extended)], ids=["alone", "xdist"])
def test_code_that_only_one_rank_runs_is_covered(tmp_path, workers):
    done = run(tmp_path, "covering.py", "--cov=covered", "--cov-report=term-missing", *workers)
    assert "covered.py       6      0   100%" in done.out, done.out
    assert [path.name for path in tmp_path.glob(".coverage*")] == [".coverage"]


def test_a_breakpoint_and_a_failure_open_a_debugger_on_one_rank(tmp_path):
    done = run(tmp_path, "debugged.py", "--pdb", stdin="p secret\nc\np secret\nq\np secret\nq\n")
    assert ">>> rank 1 is in its debugger" in done.out and "(Pdb) 41\n" in done.out
    assert done.out.count("is in its debugger") == 2
    assert "(Pdb) 70\n" in done.out or "(Pdb) 71\n" in done.out
    assert "1 failed, 2 passed" in done.out


@pytest.mark.extended
def test_a_limit_of_pytest_timeout_counts_for_the_whole_test(tmp_path):
    pytest.importorskip("pytest_timeout")
    marks = "@pytest.mark.processes(2)\n@pytest.mark.timeout(1)"
    (tmp_path / "slow.py").write_text(f"import pytest, time\n{marks}\ndef test(): time.sleep(60)\n")
    done = run(tmp_path, "slow.py", "--timeout=100", "--strict-markers")
    assert "not over after 1.0 s" in done.cases["test"].text


@pytest.mark.extended
def test_installed_as_a_wheel_it_warns_of_nothing(tmp_path):
    # pytest rewrites what the metadata of a plugin's distribution lists, and warns where it comes too late.
    metadata = tmp_path / "site" / "installed-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[pytest11]\njaxrun = jaxrun.pytest_plugin.plugin\n")
    (metadata / "RECORD").write_text("jaxrun/__init__.py,,\njaxrun_runtime/__init__.py,,\n")
    for name in ("jaxrun", "jaxrun_runtime"):
        (metadata.parent / name).symlink_to(Path(find_spec(name).origin).parent)
    env = {"PYTHONPATH": str(metadata.parent)}
    done = run(tmp_path, "outcomes.py", "-k", "test_passes and not unexpectedly", "-W", "error", env=env)
    assert done.code == 0, done.out


# ---- processes that mpirun has started


def among_two(tmp_path: Path, *words: str) -> list[tuple[int, str]]:
    """Status and output of two pytests that take each other for processes of one mpirun."""
    prepare(tmp_path)
    job = uuid.uuid4().hex
    done = []
    with ExitStack() as stack:
        pytests = []
        for rank in (0, 1):
            env = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": job}
            more = (f"--basetemp=temporary-{rank}", f"--junitxml=cases-{rank}.xml")
            pytests.append(stack.enter_context(started(tmp_path, *words, *more, env=env)))
        for process in pytests:
            out, _ = process.communicate(timeout=TIME_LIMIT)
            done.append((process.returncode, out))
    return done


@pytest.mark.extended
def test_the_processes_of_mpirun_become_the_ranks_and_one_reports(tmp_path):
    words = ("fixtures.py", "broken_gangs.py", "-k", "first or second or sizes or a_failure or fails_before")
    (code, out), silent = among_two(tmp_path, *words)
    assert silent == (0, "")
    assert code == 1 and "1 failed, 3 passed" in out, out
    assert "[2 processes x 1 device, Open MPI; first failure" in out
    assert "4 deselected: they want other processes than the 2 processes of Open MPI, in which pytest runs" in out


@pytest.mark.extended
def test_without_tests_for_a_gang_each_process_of_mpirun_is_a_pytest_of_its_own(tmp_path):
    for code, out in among_two(tmp_path, "outcomes.py", "-k", "has_no_mark and not asks"):
        assert code == 0 and "1 passed" in out
