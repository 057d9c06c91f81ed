"""Tests on several processes: what a test costs with jaxrun's pytest plugin, and with the ways that others have.

"a suite of one" is the time from command to exit; "each further test" the difference to a suite of many, divided by
their number. A test makes one collective of a few bytes. All take turns in every round.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _contenders import ROOT
from _jobs import started
from _report import keep, table, this_machine
from _suites import INSTALL, SUITES, Suite, install_peers

TIME_LIMIT = 180.0
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


@dataclass(frozen=True)
class Summary:
    """Medians of the good samples; `ratio` of a further test to that of jaxrun's, within the rounds."""

    suite: str
    size: int
    one: float | None
    further: float | None
    ratio: float | None
    wrong: tuple[str, ...]


def measure(suite: Suite, size: int, number: int, environ: Mapping[str, str]) -> Sample:
    one, wrong = _run(suite, size, suite.few, environ)
    many, more = (0.0, "") if wrong else _run(suite, size, suite.many, environ)
    return Sample(suite.name, size, number, one, many, (many - one) / (suite.many - suite.few), wrong or more)


def _run(suite: Suite, size: int, tests: int, environ: Mapping[str, str]) -> tuple[float, str]:
    """How long a suite took, and what was wrong with it."""
    with tempfile.TemporaryDirectory(prefix="bench-suite-") as name:
        suite.write(Path(name), size, tests)
        command = ["/bin/sh", "-c", 'cd "$0" && exec "$@"', name, *suite.command(size)]
        with started(command, environ, suite.environ) as job:
            ended = job.wait(TIME_LIMIT)
            if ended is None:
                return TIME_LIMIT, f"still running after {TIME_LIMIT:g} s"
            tail = " | ".join(job.output().strip().splitlines()[-3:])
            return ended - job.began, "" if job.status() == 0 else f"status {job.status()}: {tail}"


def summarize(samples: Sequence[Sample]) -> list[Summary]:
    warm = {(one.size, one.round): one.further for one in samples if one.suite == WARM and not one.wrong}
    groups: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.size, sample.suite), []).append(sample)
    found = []
    for (size, name), group in groups.items():
        good = [one for one in group if not one.wrong]
        ratios = [one.further / warm[size, one.round] for one in good if warm.get((size, one.round), 0) > 0]
        found.append(
            Summary(
                name,
                size,
                statistics.median(one.one for one in good) if good else None,
                statistics.median(one.further for one in good) if good else None,
                statistics.median(ratios) if ratios else None,
                tuple(dict.fromkeys(one.wrong for one in group if one.wrong)),
            )
        )
    return found


def render(summaries: Sequence[Summary]) -> str:
    header = ("processes", "way", "a suite of one, s", "each further test, ms", "/ jaxrun, warm")
    rows = []
    for one in summaries:
        times = ("-", "-") if one.one is None or one.further is None else (f"{one.one:.2f}", f"{one.further * 1e3:.1f}")
        rows.append((str(one.size), one.suite, *times, "-" if one.ratio is None else f"{one.ratio:.2g}"))
    wrong = [f"{one.size} x {one.suite}: {text}" for one in summaries for text in one.wrong]
    return "\n".join([table(header, rows, left=2), *wrong])


def draw(summaries: Sequence[Summary], pyplot: Any) -> Any:
    """A bar for each way and size: a further test."""
    figure, axes = pyplot.subplots(figsize=(9, 4.2), layout="constrained")
    good = [one for one in summaries if one.further is not None and one.further > 0]
    names, sizes = list(dict.fromkeys(one.suite for one in good)), sorted({one.size for one in good})
    for place, size in enumerate(sizes):
        of = {one.suite: one.further * 1e3 for one in good if one.size == size and one.further is not None}
        heights = [of.get(name, 0.0) for name in names]
        axes.barh(
            [row + 0.8 * place / len(sizes) for row in range(len(names))], heights, 0.7 / len(sizes), label=str(size)
        )
    axes.set_yticks([row + 0.4 for row in range(len(names))], names)
    axes.set(title="each further test", xlabel="ms", xscale="log")
    axes.legend(title="processes", fontsize="small")
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench plugin", description=__doc__)
    parser.add_argument("-n", "--processes", type=int, nargs="+", default=[2, 4], metavar="N")
    parser.add_argument("--rounds", type=int, default=3, metavar="R", help="of each (default: 3)")
    parser.add_argument("--only", action="append", metavar="TEXT", help="ways whose name begins so, and jaxrun, warm")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results", metavar="DIR")
    parser.add_argument("--install-peers", action="store_true", help="make .venv-bench-tests with the other plugins")
    options = parser.parse_args(argv)
    if options.install_peers:
        return install_peers()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    named = (WARM, *options.only) if options.only else ("",)
    wanted = [suite for suite in SUITES if suite.name.startswith(named)]
    chosen = [suite for suite in wanted if suite.is_installed()]
    missing = [f"{suite.name}: not installed; to have it: {INSTALL}" for suite in wanted if suite not in chosen]
    machine = this_machine()
    print("\n".join([str(machine), *missing]), flush=True)
    samples = []
    for size in options.processes:
        for number in range(1, options.rounds + 1):
            for suite in chosen:
                samples.append(measure(suite, size, number, dict(os.environ)))
                one = samples[-1]
                line = f"{size} x {suite.name}, round {number}: {one.one:.2f} s, {one.further * 1e3:.1f} ms {one.wrong}"
                print(line, file=sys.stderr, flush=True)
    summaries = summarize(samples)
    print(f"\n{render(summaries)}")
    written = keep(options.out, "plugin", machine, summaries, samples, lambda pyplot: draw(summaries, pyplot))
    print("", *written, sep="\n")
    return 1 if any(one.wrong for one in samples) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
