"""Returns: ranks are killed at random moments of a job with --keep-survivors and --max-restarts; does it go on?

Each job has four ranks. From the moment when their processes exist, one to three times, one or two of them are killed:
while they join, compile, connect, make a step, or are on their way back. Every job must end with status 0 within a
limit, and leave no process. The table shows how long it took after a kill until all survivors had made a step without
the ranks that were killed, until all ranks had made a step together again, and until ranks were back; and the longest
time without a step since anything else has happened. What another kill has interrupted does not count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from _bench import Bench, Outcome, progress, shown, table
from _jobs import START_LIMIT_S, Job, started

PROGRAM = Path(__file__).parent / "_programs" / "returns.py"
RANKS, RUN_S, LIMIT_S = 4, 9.0, 60.0
OPTIONS = ("-n", str(RANKS), "--keep-survivors", "--max-restarts", "4", "--run-dir", "run")
_STEP = re.compile(r"\[(\d+)\] at ([\d.]+) step \d+ on (\d+)")
_SLACK_S = 0.005  # a step that ends so soon after a kill had ended before
_BACK = re.compile(r"is back, ([\d.]+) s")


class Kill(NamedTuple):
    """Ranks that were killed together at a time (seconds since the epoch)."""

    time: float
    ranks: tuple[int, ...]


class Step(NamedTuple):
    """A step that a rank has ended at a time, on so many devices."""

    rank: int
    time: float
    size: int


@dataclass(frozen=True)
class Sample:
    """Times in seconds.

    survivors, everybody:  from kills to the first step of all survivors, and of all ranks
    """

    kills: int
    backs: tuple[float, ...] = ()
    survivors: tuple[float, ...] = ()
    everybody: tuple[float, ...] = ()
    gap: float = 0.0
    attempts: int = 1
    wrong: str = ""


def pids(job: Job) -> dict[int, int]:
    """Return the process of each rank, as far as the event log has it."""
    found: dict[int, int] = {}
    with suppress(OSError, ValueError):
        for line in (job.directory / "run" / "events.jsonl").read_text().splitlines()[1:]:
            event = json.loads(line)["event"]
            if event["type"] == "WorkerSpawned":
                found[event["rank"]] = event["pid"]
    return found


def kill_some(job: Job, choose: random.Random) -> list[Kill]:
    """Kill ranks other than 0 at random moments."""
    kills: list[Kill] = []
    for _ in range(choose.choice((1, 1, 2, 3))):
        time.sleep(choose.uniform(0.0, 2.5))
        ours, killed = set(job.processes()), []
        for rank in choose.sample(range(1, RANKS), choose.choice((1, 1, 2))):
            if (pid := pids(job).get(rank, 0)) in ours:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(rank)
        if killed:
            kills.append(Kill(time.time(), tuple(killed)))
    return kills


def first_steps(kill: Kill, until: float, steps: Sequence[Step]) -> tuple[float | None, float | None]:
    """Return how long after a kill all survivors had made a step without the killed ranks, and all ranks one together.

    None if not before `until`, or if they made none before the kill.
    """

    def took(ranks: Iterable[int], is_wanted: Callable[[int], bool]) -> float | None:
        after = [step for step in steps if kill.time + _SLACK_S < step.time < until and is_wanted(step.size)]
        firsts = [min((step.time for step in after if step.rank == rank), default=None) for rank in ranks]
        return max(firsts) - kill.time if firsts and None not in firsts else None  # type: ignore[type-var, operator]

    others = {step.rank for step in steps if kill.time - 1.0 < step.time <= kill.time} - {*kill.ranks}
    without = took(others, lambda size: size <= RANKS - len(kill.ranks))
    return without, took(range(RANKS), lambda size: size == RANKS) if without is not None else None


def measure(choose: random.Random) -> Sample:
    command = [sys.executable, "-m", "jaxrun", *OPTIONS, str(PROGRAM), str(time.time() + RUN_S)]
    with started(command, os.environ, {}) as job:
        limit = time.monotonic() + START_LIMIT_S
        while len(pids(job)) < RANKS and time.monotonic() < limit:
            time.sleep(0.02)
        kills = kill_some(job, choose)
        number = sum(len(kill.ranks) for kill in kills)
        if job.wait(LIMIT_S) is None:
            return Sample(number, wrong=f"it hangs: {job.last_words()}")
        output, status = job.output(), job.status()
        left = job.wait_for_all(5.0) is None
        marks = happenings(job)
    steps = sorted((Step(int(rank), float(at), int(size)) for rank, at, size in _STEP.findall(output)), key=_time_of)
    ends = [*(kill.time for kill in kills[1:]), math.inf]
    found = [first_steps(kill, end, steps) for kill, end in zip(kills, ends, strict=True)]
    times = [step.time for step in steps]
    gap = max((at - max(mark for mark in (*marks, *times) if mark < at) for at in times[1:]), default=0.0)
    return Sample(
        number,
        tuple(map(float, _BACK.findall(output))),
        tuple(one for one, _ in found if one is not None),
        tuple(one for _, one in found if one is not None),
        gap,
        1 + output.count("; restarting"),
        "processes are left" if left else f"status {status}: {output[-300:]}" if status else "",
    )


def happenings(job: Job) -> list[float]:
    """Return when processes of ranks began or ended, or ranks came back."""
    lines = map(json.loads, (job.directory / "run" / "events.jsonl").read_text().splitlines()[1:])
    return [
        line["time"] for line in lines if line["event"]["type"] in ("WorkerSpawned", "WorkerExited", "RecordReturn")
    ]


def _time_of(step: Step) -> float:
    return step.time


def render(samples: Sequence[Sample]) -> str:
    backs = [back for one in samples for back in one.backs]
    survivors = [time for one in samples for time in one.survivors]
    everybody = [time for one in samples for time in one.everybody]
    gaps = [one.gap for one in samples if one.attempts == 1 and not one.wrong]
    row = (
        *map(str, (len(samples), sum(one.kills for one in samples), len(backs))),
        str(sum(one.attempts > 1 for one in samples)),
        *map(spread, (survivors, everybody, backs)),
        shown(max(gaps, default=None)),
        str(sum(bool(one.wrong) for one in samples)),
    )
    times = ("survivors s", "all s", "back s")
    header = ("jobs", "kills", "returns", "all again", *times, "longest pause s", "wrong")
    return table(header, [row], left=0)


def spread(times: Sequence[float]) -> str:
    """Write median, 95th percentile and maximum."""
    ordered = sorted(times)
    if not ordered:
        return shown(None)
    return " / ".join(
        shown(one) for one in (statistics.median(ordered), ordered[round(0.95 * (len(ordered) - 1))], ordered[-1])
    )


def run_all(rounds: int, choose: random.Random) -> Iterator[Sample]:
    for number in range(rounds):
        yield measure(choose)
        progress(f"{number + 1} of {rounds}")


def run(options: argparse.Namespace) -> Outcome:
    samples = list(run_all(options.rounds, random.Random(options.seed)))
    return Outcome(render(samples), samples, [one.wrong for one in samples if one.wrong])


if __name__ == "__main__":
    bench = Bench("returns", __doc__, rounds=20)
    bench.add_option("--seed", metavar="N", type=int, default=0, help="of the random moments")
    sys.exit(bench.main(run))
