"""Failure: how long until a launcher and all of its job have ended once one rank of four has failed.

The rank notes the time just before it fails; the launcher's exit, and the first look at the machine that
finds nothing of the job, are held against that. A launcher that waits for JAX's own time-outs, which are
minutes long, is stopped at a limit.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import _plots
from _contenders import JAXRUN, MPIRUN, PLAIN, ROOT, TORCHRUN, Contender, free_address, installed
from _jobs import Job, started
from _report import keep, table, this_machine

CONTENDERS = (PLAIN, MPIRUN, TORCHRUN, JAXRUN)
SIZE, STEPS = 4, 100
GOAL = 0.1
START_LIMIT = 60.0


@dataclass(frozen=True)
class Fault:
    """What `rank` does in the middle of its steps, and the exit status that says so."""

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
    """One run, in seconds after the fault (None: beyond the limit); `blamed` is the rank that was named.

    `wrong` says why the fault did not even come about.
    """

    contender: str
    fault: Fault
    exit: float | None = None
    gone: float | None = None
    status: int | None = None
    blamed: int | None = None
    wrong: str = ""


@dataclass(frozen=True)
class Summary:
    """The runs of one contender in which the fault came about; `exit` and `gone` are medians.

    A time that is as long as the limit was cut off there.
    """

    contender: str
    fault: Fault
    runs: int
    exit: float
    least: float
    most: float
    gone: float
    statuses: tuple[int | None, ...]
    right_rank: int
    goal: float | None


def measure(contender: Contender, fault: Fault, limit: float, environ: Mapping[str, str]) -> Sample:
    arguments = (str(STEPS), fault.kind, str(fault.rank))
    with started(contender.command(SIZE, arguments), environ, {"BENCH_ADDRESS": free_address()}) as job:
        failed_at = _wait_for_fault(job)
        if failed_at is None:
            tail = " | ".join(job.output().strip().splitlines()[-3:])
            return Sample(contender.name, fault, wrong=f"the fault did not come about: {tail}")
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


def _wait_for_fault(job: Job) -> float | None:
    """When the rank failed, by its own note; None if the launcher ended, or took very long, without that."""
    note = job.directory / "fault"
    for _ in range(int(START_LIMIT / 0.01)):
        ended = job.wait(0.01)
        if note.exists():
            return float(note.read_text())
        if ended is not None:
            return None
    return None


def _blamed(contender: Contender, output: str) -> int | None:
    found = contender.blames.search(output) if contender.blames else None
    return next((int(text) for text in found.groups() if text), None) if found else None


def summarize(samples: Sequence[Sample], limit: float) -> list[Summary]:
    groups: dict[tuple[Fault, str], list[Sample]] = {}
    for one in samples:
        if not one.wrong:
            groups.setdefault((one.fault, one.contender), []).append(one)
    return [_summary(group, limit) for group in groups.values()]


def _summary(group: Sequence[Sample], limit: float) -> Summary:
    exits = [limit if one.exit is None else one.exit for one in group]
    return Summary(
        contender=group[0].contender,
        fault=group[0].fault,
        runs=len(group),
        exit=statistics.median(exits),
        least=min(exits),
        most=max(exits),
        gone=statistics.median(limit if one.gone is None else one.gone for one in group),
        statuses=tuple(dict.fromkeys(one.status for one in group)),
        right_rank=sum(one.blamed == one.fault.rank for one in group),
        goal=GOAL if group[0].contender == JAXRUN.name else None,
    )


def render(summaries: Sequence[Summary], limit: float) -> str:
    header = (
        *("fault", "contender", "exit ms", "min-max", "all gone ms", "status", "should be", "rank named"),
        *("goal", "reached"),
    )
    rows = []
    for one in summaries:
        spread = f"{_ms(one.least, limit)}-{_ms(one.most, limit)}" if one.least < limit else ""
        statuses = " ".join("-" if status is None else str(status) for status in one.statuses)
        named = f"{one.right_rank} of {one.runs}"
        goal = ("", "") if one.goal is None else (f"< {_ms(one.goal, limit)}", "yes" if one.exit < one.goal else "no")
        times = (_ms(one.exit, limit), spread, _ms(one.gone, limit))
        rows.append((str(one.fault), one.contender, *times, statuses, str(one.fault.status), named, *goal))
    return table(header, rows, left=2)


def _ms(seconds: float, limit: float) -> str:
    return f"> {limit * 1000:.0f}" if seconds >= limit else f"{seconds * 1000:.0f}"


def run(options: argparse.Namespace, chosen: Sequence[Contender], environ: Mapping[str, str]) -> list[Sample]:
    samples = []
    for number in range(max(options.repeat, options.repeat_peers)):
        for fault in FAULTS:
            for contender in chosen:
                if number >= (options.repeat if contender is JAXRUN else options.repeat_peers):
                    continue
                sample = measure(contender, fault, options.limit, environ)
                samples.append(sample)
                after = "beyond the limit" if sample.exit is None else f"{sample.exit * 1000:.0f} ms"
                print(f"{fault}, {contender.name}: {after} {sample.wrong}", file=sys.stderr, flush=True)
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench failure", description=__doc__)
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="runs of jaxrun (default: 5)")
    parser.add_argument("--repeat-peers", type=int, default=2, metavar="N", help="of the others (default: 2)")
    parser.add_argument("--limit", type=float, default=20.0, metavar="SECONDS", help="after the fault (default: 20)")
    parser.add_argument("--only", metavar="TEXT", default="", help="the contender whose name begins so")
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results", metavar="DIR")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    chosen, missing = installed([one for one in CONTENDERS if one.name.startswith(options.only)])
    machine = this_machine()
    print("\n".join([str(machine), *missing]), flush=True)
    samples = run(options, chosen, dict(os.environ))
    summaries = summarize(samples, options.limit)
    print(f"\n{render(summaries, options.limit)}")
    drawn = partial(_plots.failure, summaries, GOAL, options.limit)
    print("", *keep(options.out, "failure", machine, summaries, samples, drawn), sep="\n")
    return 1 if any(one.wrong for one in samples) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
