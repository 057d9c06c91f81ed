"""--compile once changes no bit of any result: tests of tests/ranks are run with it and with --compile each.

All of them take minutes beside other tests, and so run only where JAXRUN_WHOLE_CORPUS is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import extended
from result_recorder import RESULTS, read_results

HERE = Path(__file__).parent
PLUGIN = () if entry_points(group="pytest11", name="jaxrun") else ("-p", "jaxrun.pytest_plugin.plugin")


class Results(NamedTuple):
    """What the ranks have executed in each test, and how many programs they have loaded of those of another rank."""

    executed: Mapping[tuple[str, int], Mapping[str, int]]
    loaded: int


def run_both(tmp_path: Path, *words: str, of_once: Sequence[str] = ()) -> tuple[Results, Results]:
    """Run tests of tests/ranks with --compile each and with --compile once."""
    return _run(tmp_path / "each", "each", *words), _run(tmp_path / "once", "once", *words, *of_once)


def _run(directory: Path, how: str, *words: str) -> Results:
    directory.mkdir()
    options = ("-q", "-p", "no:cacheprovider", "-p", "result_recorder", f"--gang-options=--compile {how}")
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, *options, str(HERE.parent / "ranks"), *words],
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": path, RESULTS: str(directory)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return Results(*read_results(directory))


def differing(each: Results, once: Results) -> list[tuple[str, int]]:
    """The tests, with the ranks, that have not had the same results."""
    assert each.executed.keys() == once.executed.keys()
    return [test for test, executed in each.executed.items() if once.executed[test] != executed]


@pytest.mark.parametrize(
    ("words", "ranks", "loaded"),
    [
        pytest.param(("-k", "test_results or 2x2"), 10, 20, id="some", marks=pytest.mark.jax_version),
        *([extended((), 200, 200, id="all")] if "JAXRUN_WHOLE_CORPUS" in os.environ else []),
    ],
)
def test_results_are_bit_for_bit_those_of_each(tmp_path: Path, words: Sequence[str], ranks: int, loaded: int) -> None:
    each, once = run_both(tmp_path, "-m", "not extended", *words)
    assert not differing(each, once)
    assert len(each.executed) >= ranks and each.loaded == 0 and once.loaded >= loaded


@pytest.mark.extended
def test_a_loaded_program_that_is_another_one_is_seen(tmp_path: Path) -> None:
    words = ("-m", "not extended", "-k", "record and local_on_rank_0-2")
    each, once = run_both(tmp_path, *words, of_once=("-p", "alike_by_type"))
    assert 0 in [rank for _, rank in differing(each, once)]
