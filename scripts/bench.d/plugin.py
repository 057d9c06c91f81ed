"""Tests on several processes: what a test costs with jaxrun's pytest plugin, and with other ways.

Each test of a suite has one collective of a few bytes. "a suite of one" is the time from command to exit. "each further
test" is the difference between suites of many tests and of one, divided by their number. All take turns in every round.
--program names the packages that the file of tests imports besides JAX.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from _bench import Bench, Outcome, grouped, median_ratio, progress, shown, table
from _imports import BARE, ENVIRON, IMPORTS, import_lines, why_not, with_imports
from _jobs import started

TIME_LIMIT_S = 180.0
CHECK = """\
import numpy as np
from jax.experimental import multihost_utils
def check(n):
    assert multihost_utils.process_allgather(np.ones(1)).sum() == n
"""
GANG = """\
import pytest
from common import check
@pytest.mark.processes({size})
@pytest.mark.parametrize("i", range({tests}))
def test(i):
    check({size})
"""
ALONE = """\
import pytest
@pytest.mark.parametrize("i", range({tests}))
def test(i):
    assert i + 1
"""
FRESH = """\
import socket, subprocess, sys
import pytest
BODY = '''
{imports}import sys, jax
jax.distributed.initialize(sys.argv[1], {size}, int(sys.argv[2]), cluster_detection_method="deactivate")
from common import check
check({size})
'''
@pytest.mark.parametrize("i", range({tests}))
def test(i):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = "127.0.0.1:%d" % probe.getsockname()[1]
    ranks = [subprocess.Popen([sys.executable, "-c", BODY, address, str(rank)]) for rank in range({size})]
    assert [rank.wait() for rank in ranks] == [0] * {size}
"""
HARNESS = """\
from absl.testing import parameterized
from jax._src import test_multiprocess
from common import check
class Test(test_multiprocess.MultiProcessTest, parameterized.TestCase):
    @parameterized.parameters(range({tests}))
    def test(self, i):
        check({size})
test_multiprocess.main()
"""


@dataclass(frozen=True)
class Suite:
    """One way to run `many` tests on a number of processes. `text`: the file of tests."""

    name: str
    text: str
    command: Callable[[int], list[str]]
    many: int


def run_pytest(*words: str) -> Callable[[int], list[str]]:
    return lambda size: [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *words, "test_suite.py"]


def run_harness(size: int) -> list[str]:
    return [sys.executable, "test_suite.py", f"--num_processes={size}"]


INSTALLED = importlib.metadata.entry_points(group="pytest11", name="jaxrun")
PLUGIN = () if INSTALLED else ("-p", "jaxrun.frontends.pytest_plugin.plugin")
WARM = "jaxrun, warm"
SUITES = (
    Suite("pytest alone, one process", ALONE, run_pytest(*PLUGIN), many=401),
    Suite(WARM, GANG, run_pytest(*PLUGIN), many=401),
    Suite(
        "jaxrun, fresh=True",
        GANG.replace("processes({size})", "processes({size}, fresh=True)"),
        run_pytest(*PLUGIN),
        many=6,
    ),
    Suite("fresh processes for each test", FRESH, run_pytest(), many=4),
    Suite("JAX's own harness", HARNESS, run_harness, many=401),
)


@dataclass(frozen=True)
class Sample:
    """Seconds for a suite of one test and for each further test. `wrong` is empty if both suites ended with 0."""

    suite: str
    size: int
    round: int
    one: float
    many: float
    further: float
    wrong: str


def measure(suite: Suite, size: int, number: int, program: str = BARE) -> Sample:
    one, wrong = _run(suite, size, 1, program)
    many, more = (0.0, "") if wrong else _run(suite, size, suite.many, program)
    return Sample(suite.name, size, number, one, many, (many - one) / (suite.many - 1), wrong or more)


def _run(suite: Suite, size: int, tests: int, program: str) -> tuple[float, str]:
    """Return how long a suite took, and what was wrong with it."""
    with tempfile.TemporaryDirectory(prefix="bench-suite-") as name:
        text = suite.text.replace("{size}", str(size)).replace("{tests}", str(tests))
        text = with_imports(text, program).replace("{imports}", import_lines(program))
        files = {"common.py": CHECK, "pytest.ini": "[pytest]\npythonpath = .\n", "test_suite.py": text}
        for file, content in files.items():
            Path(name, file).write_text(content)
        command = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', name, *suite.command(size)]
        with started(command, os.environ, ENVIRON) as job:
            ended = job.wait(TIME_LIMIT_S)
            if ended is None:
                return TIME_LIMIT_S, f"still running after {TIME_LIMIT_S:g} s"
            return ended - job.began, "" if job.status() == 0 else f"status {job.status()}: {job.last_words()}"


def render(samples: Sequence[Sample]) -> str:
    """Return a table of medians. The ratio of a further test to jaxrun's is taken within the rounds."""
    header = ("processes", "way", "a suite of one, s", "each further test, ms", "/ jaxrun, warm")
    groups = grouped((one for one in samples if not one.wrong), lambda one: (one.size, one.suite))
    further = {key: {one.round: one.further for one in group} for key, group in groups.items()}
    rows = []
    for (size, name), group in groups.items():
        of = further[size, name]
        times = (shown(statistics.median(one.one for one in group)), f"{statistics.median(of.values()) * 1e3:.1f}")
        rows.append((str(size), name, *times, shown(median_ratio(of, further.get((size, WARM), {})), ".2g")))
    return table(header, rows, left=2)


def run(options: argparse.Namespace) -> Outcome:
    if reason := why_not(options.program):
        return Outcome(reason, [], [reason])
    named = (WARM, *options.only) if options.only else ("",)
    samples = []
    for size in options.processes:
        for number in range(1, options.rounds + 1):
            for suite in (suite for suite in SUITES if suite.name.startswith(named)):
                one = measure(suite, size, number, options.program)
                samples.append(one)
                times = f"{one.one:.2f} s, {one.further * 1e3:.1f} ms {one.wrong}"
                progress(f"{size} x {suite.name}, round {number}: {times}")
    wrong = dict.fromkeys(f"{one.size} x {one.suite}: {one.wrong}" for one in samples if one.wrong)
    return Outcome(render(samples), samples, list(wrong))


if __name__ == "__main__":
    bench = Bench("plugin", __doc__, rounds=3, mine=("--only", "jaxrun"))
    bench.add_option("-n", "--processes", type=int, nargs="+", default=[2, 4], metavar="N")
    bench.add_option("--program", choices=tuple(IMPORTS), default=BARE, help="what the tests import (default: bare)")
    bench.add_option("--only", action="append", metavar="TEXT", help="ways whose name begins so, and jaxrun, warm")
    sys.exit(bench.main(run))
