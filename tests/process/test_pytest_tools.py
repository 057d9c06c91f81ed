"""The pytest plugin beside other tools: xdist, coverage, hypothesis, pytest-timeout."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytest_runs import run

pytestmark = pytest.mark.extended
TWO = "import pytest, time\ntwo = pytest.mark.processes(2)\n"


@pytest.mark.parametrize("dist", ["loadgroup", "load"])
def test_workers_of_xdist_have_gangs_of_their_own(tmp_path: Path, dist: str) -> None:
    done = run(tmp_path, "fixtures.py", "outcomes.py", "-n2", f"--dist={dist}", "-k", "shape or one_ or passes")
    assert "2 failed, 2 passed, 1 xfailed" in done.out


@pytest.mark.parametrize("workers", [[], ["-n2"]], ids=["alone", "xdist"])
def test_code_that_only_one_rank_runs_is_covered(tmp_path: Path, workers: list[str]) -> None:
    branches = "def by_rank(rank):\n    if rank == 1:\n        return 'rank 1'\n    return 'rank 0'\n"
    (tmp_path / "covered.py").write_text(f"{branches}\n\ndef here():\n    return 'the parent'\n")
    tests = "@two\ndef test_ranks(gang): assert covered.by_rank(gang.rank)\ndef test_parent(): assert covered.here()\n"
    (tmp_path / "covering.py").write_text(f"import covered\n{TWO}{tests}")
    done = run(tmp_path, "covering.py", "--cov=covered", "--cov-report=term-missing", *workers)
    assert "covered.py       6      0   100%" in done.out, done.out
    assert [path.name for path in tmp_path.glob(".coverage*")] == [".coverage"]


def test_examples_of_hypothesis_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "examples.py").write_text(
        f"{TWO}from hypothesis import HealthCheck, given, settings, strategies\n"
        "quick = dict(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, database=None)\n"
        "@two\n@settings(max_examples=5, **quick)\n@given(number=strategies.integers())\n"
        "def test(gang, number): assert len(set(gang.allgather(number))) == 1\n"
    )
    assert run(tmp_path, "examples.py", "--strict-markers", with_hypothesis=True).code == 0


def test_a_limit_of_pytest_timeout_counts_for_the_whole_test(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(f"{TWO}@two\n@pytest.mark.timeout(1)\ndef test(): time.sleep(600)\n")
    done = run(tmp_path, "slow.py", "--timeout=100", "--strict-markers")
    assert "not over after 1.0 s" in done.cases["test"].text
