"""Tests on several processes: what a test costs with jaxrun's pytest plugin, and with the ways that others have.

"a suite of one" is the time from command to exit; "each further test" the difference to a suite of many, divided by
their number. A test makes one collective of a few bytes. All take turns in every round.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _bench import Bench, Outcome, grouped, median_ratio, progress, shown, table
from _jobs import started
from _suites import INSTALL, SUITES, Suite, install_peers

TIME_LIMIT_S = 180.0
WARM = "jaxrun, warm"


@dataclass(frozen=True)
class Sample:
    """A suite of one and one of many, in seconds; `wrong` is empty if both ended with 0."""

    suite: str
    size: int
    round: int
    one: float
    many: float
    further: float
    wrong: str


def measure(suite: Suite, size: int, number: int) -> Sample:
    one, wrong = _run(suite, size, suite.few)
    many, more = (0.0, "") if wrong else _run(suite, size, suite.many)
    return Sample(suite.name, size, number, one, many, (many - one) / (suite.many - suite.few), wrong or more)


def _run(suite: Suite, size: int, tests: int) -> tuple[float, str]:
    """How long a suite took, and what was wrong with it."""
    with tempfile.TemporaryDirectory(prefix="bench-suite-") as name:
        suite.write(Path(name), size, tests)
        command = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', name, *suite.command(size)]
        with started(command, os.environ, suite.environ) as job:
            ended = job.wait(TIME_LIMIT_S)
            if ended is None:
                return TIME_LIMIT_S, f"still running after {TIME_LIMIT_S:g} s"
            return ended - job.began, "" if job.status() == 0 else f"status {job.status()}: {job.last_words()}"


def render(samples: Sequence[Sample]) -> str:
    """Medians of the good samples; the ratio of a further test to that of jaxrun's is taken within the rounds."""
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
    named = (WARM, *options.only) if options.only else ("",)
    wanted = [suite for suite in SUITES if suite.name.startswith(named)]
    chosen = [suite for suite in wanted if suite.is_installed()]
    print(*(f"{suite.name}: not installed; to have it: {INSTALL}" for suite in wanted if suite not in chosen), sep="\n")
    samples = []
    for size in options.processes:
        for number in range(1, options.rounds + 1):
            for suite in chosen:
                one = measure(suite, size, number)
                samples.append(one)
                times = f"{one.one:.2f} s, {one.further * 1e3:.1f} ms {one.wrong}"
                progress(f"{size} x {suite.name}, round {number}: {times}")
    wrong = dict.fromkeys(f"{one.size} x {one.suite}: {one.wrong}" for one in samples if one.wrong)
    return Outcome(render(samples), samples, list(wrong))


if __name__ == "__main__":
    bench = Bench("plugin", __doc__, rounds=3, mine=("--only", "jaxrun"))
    bench.add_option("-n", "--processes", type=int, nargs="+", default=[2, 4], metavar="N")
    bench.add_option("--only", action="append", metavar="TEXT", help="ways whose name begins so, and jaxrun, warm")
    bench.add_option("--install-peers", action="store_true", help="make .venv-bench-tests with the other plugins")
    sys.exit(install_peers() if "--install-peers" in sys.argv else bench.main(run))
