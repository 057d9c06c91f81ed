"""--compile auto changes no bit of any result: tests of tests/ranks are run with it and with --compile each.

All of them take minutes beside other tests, and so run only where JAXRUN_WHOLE_CORPUS is set.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import extended
from result_recorder import ALIKE_BY_TYPE, RESULTS, read_results

HERE = Path(__file__).parent
PLUGIN = () if entry_points(group="pytest11", name="jaxrun") else ("-p", "jaxrun.frontends.pytest_plugin.plugin")


class Results(NamedTuple):
    """What the ranks have executed in each test, and how many programs they have loaded of those of another rank."""

    executed: Mapping[tuple[str, int], Mapping[str, int]]
    loaded: int


def run(directory: Path, how: str, *words: str, **variables: str) -> Results:
    """Run tests of tests/ranks with --compile `how`, in an environment with these variables."""
    directory.mkdir()
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "result_recorder")
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGIN, *options, f"--gang-options=--compile {how}", "tests/ranks", *words],
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": path, RESULTS: str(directory), **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return Results(*read_results(directory))


def differing(each: Results, shared: Results) -> list[tuple[str, int]]:
    """The tests, with the ranks, that have not had the same results."""
    assert each.executed.keys() == shared.executed.keys()
    return [test for test, executed in each.executed.items() if shared.executed[test] != executed]


@pytest.mark.parametrize(
    ("words", "ranks", "loaded"),
    [
        pytest.param(("-k", "2x2 and (selfcheck or parallel_eval)"), 4, 20, id="some", marks=pytest.mark.jax_version),
        *([extended((), 200, 200, id="all")] if "JAXRUN_WHOLE_CORPUS" in os.environ else []),
    ],
)
def test_results_are_bit_for_bit_those_of_each(tmp_path: Path, words: tuple[str, ...], ranks: int, loaded: int) -> None:
    each, shared = (run(tmp_path / how, how, "-m", "not extended", *words) for how in ("each", "auto"))
    assert not differing(each, shared)
    assert len(each.executed) >= ranks and each.loaded == 0 and shared.loaded >= loaded


@pytest.mark.extended
def test_a_loaded_program_that_is_another_one_is_seen(tmp_path: Path) -> None:
    words = ("-m", "not extended", "-k", "record-local_on_rank_0-40")
    each = run(tmp_path / "each", "each", *words)
    shared = run(tmp_path / "auto", "auto", *words, **{ALIKE_BY_TYPE: "1"})
    assert 0 in [rank for _, rank in differing(each, shared)]
