"""Failure: how long until a launcher and all of its job have ended after one rank of four has failed.

The rank notes the time just before it fails. Measured from then are the launcher's exit, and the time when no process
of the job is left. A launcher that waits for JAX's own time-outs, which take minutes, is stopped at a limit.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from _bench import Bench, Outcome, grouped, progress, table
from _contenders import JAXRUN, MPIRUN, PLAIN, Contender, free_address, installed
from _jobs import started, wait_for_fault

CONTENDERS = (PLAIN, MPIRUN, JAXRUN)
SIZE, STEPS = 4, 100
PEER_ROUNDS = 2  # the others take up to a minute for each
GOAL_S = 0.1


@dataclass(frozen=True)
class Fault:
    """A fault of `rank` in the middle of its steps, and the exit status that it should cause."""

    kind: str
    rank: int
    status: int

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.kind}"


FAULTS = (
    Fault("raise", 2, 1),
    Fault("sys.exit(7)", 2, 7),
    Fault("os._exit(7)", 2, 7),
    Fault("SIGKILL", 2, 128 + signal.SIGKILL),
    Fault("SIGSEGV", 2, 128 + signal.SIGSEGV),
    Fault("SIGKILL", 0, 128 + signal.SIGKILL),
)


@dataclass(frozen=True)
class Sample:
    """One run; times in seconds after the fault (None: beyond the limit).

    blamed:  the rank that was named
    wrong:   why the fault did not happen; empty if it did
    """

    contender: str
    fault: Fault
    exit: float | None = None
    gone: float | None = None
    status: int | None = None
    blamed: int | None = None
    wrong: str = ""


def measure(contender: Contender, fault: Fault, limit: float) -> Sample:
    arguments = (str(STEPS), fault.kind, str(fault.rank))
    with started(contender.command(SIZE, arguments), os.environ, {"BENCH_ADDRESS": free_address()}) as job:
        failed_at = wait_for_fault(job)
        if failed_at is None:
            return Sample(contender.name, fault, wrong=f"the fault did not come about: {job.last_words()}")
        ended = job.wait(limit)
        if ended is None:
            return Sample(contender.name, fault)
        gone = job.wait_for_all(limit)
        return Sample(
            contender=contender.name,
            fault=fault,
            exit=ended - failed_at,
            gone=None if gone is None else gone - failed_at,
            status=job.status(),
            blamed=_blamed(contender, job.output()),
        )


def _blamed(contender: Contender, output: str) -> int | None:
    found = contender.blames.search(output) if contender.blames else None
    return next((int(text) for text in found.groups() if text), None) if found else None


def render(samples: Sequence[Sample], limit: float) -> str:
    """Return a table with a line for each fault and contender, from runs in which the fault happened; medians."""

    def ms(seconds: float) -> str:
        return f"> {limit * 1000:.0f}" if seconds >= limit else f"{seconds * 1000:.0f}"

    times = ("exit ms", "min-max", "all gone ms")
    header = ("fault", "contender", *times, "status", "should be", "rank named", "goal", "reached")
    rows = []
    for (fault, contender), group in grouped(samples, lambda one: (one.fault, one.contender)).items():
        exits, gone = ([getattr(one, name) or limit for one in group] for name in ("exit", "gone"))
        middle = statistics.median(exits)
        spread = f"{ms(min(exits))}-{ms(max(exits))}" if min(exits) < limit else ""
        statuses = " ".join(dict.fromkeys("-" if one.status is None else str(one.status) for one in group))
        named = f"{sum(one.blamed == fault.rank for one in group)} of {len(group)}"
        goal = (f"< {ms(GOAL_S)}", "yes" if middle < GOAL_S else "no") if contender == JAXRUN.name else ("", "")
        found = (ms(middle), spread, ms(statistics.median(gone)), statuses)
        rows.append((str(fault), contender, *found, str(fault.status), named, *goal))
    return table(header, rows, left=2)


def run(options: argparse.Namespace) -> Outcome:
    chosen, missing = installed([one for one in CONTENDERS if one.name.startswith(options.only)])
    print(*missing, sep="\n", flush=True)
    samples = []
    for number in range(options.rounds):
        for fault in FAULTS:
            for contender in (one for one in chosen if one is JAXRUN or number < PEER_ROUNDS):
                sample = measure(contender, fault, options.limit)
                samples.append(sample)
                after = "beyond the limit" if sample.exit is None else f"{sample.exit * 1000:.0f} ms"
                progress(f"{fault}, {contender.name}: {after} {sample.wrong}")
    wrong = [f"{one.fault}, {one.contender}: {one.wrong}" for one in samples if one.wrong]
    good = [one for one in samples if not one.wrong]
    return Outcome(render(good, options.limit), samples, wrong)


if __name__ == "__main__":
    bench = Bench("failure", __doc__, rounds=5, mine=("--only", "jaxrun"))
    bench.add_option("--limit", type=float, default=20.0, metavar="SECONDS", help="after the fault (default: 20)")
    bench.add_option("--only", metavar="TEXT", default="", help="the contender whose name begins so")
    sys.exit(bench.main(run))
