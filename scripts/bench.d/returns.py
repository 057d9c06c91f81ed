"""Returns: ranks are killed at random moments of a job with --keep-survivors and --max-restarts; does it go on?

Each job has four ranks. From the moment when their processes exist, one to three times, one or two of them are killed:
while they join, compile, connect, make a step, or are on their way back. Every job must end with status 0 within a
limit, and leave no process. The table shows the longest time without a step of any rank, and how long it took until
ranks were back.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from _bench import Bench, Outcome, progress, shown, table
from _jobs import START_LIMIT_S, Job, started

PROGRAM = Path(__file__).parent / "_programs" / "returns.py"
RANKS, RUN_S, LIMIT_S = 4, 9.0, 60.0
OPTIONS = ("-n", str(RANKS), "--keep-survivors", "--max-restarts", "4", "--run-dir", "run")
_STEP = re.compile(r"at ([\d.]+) step")
_BACK = re.compile(r"is back, ([\d.]+) s")


@dataclass(frozen=True)
class Sample:
    kills: int
    backs: tuple[float, ...] = ()
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


def kill_some(job: Job, choose: random.Random) -> int:
    """Kill ranks other than 0 at random moments; returns how many."""
    killed = 0
    for _ in range(choose.choice((1, 1, 2, 3))):
        time.sleep(choose.uniform(0.0, 2.5))
        ours = set(job.processes())
        for rank in choose.sample(range(1, RANKS), choose.choice((1, 1, 2))):
            if (pid := pids(job).get(rank, 0)) in ours:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed += 1
    return killed


def measure(choose: random.Random) -> Sample:
    command = [sys.executable, "-m", "jaxrun", *OPTIONS, str(PROGRAM), str(time.time() + RUN_S)]
    with started(command, os.environ, {}) as job:
        limit = time.monotonic() + START_LIMIT_S
        while len(pids(job)) < RANKS and time.monotonic() < limit:
            time.sleep(0.02)
        kills = kill_some(job, choose)
        if job.wait(LIMIT_S) is None:
            return Sample(kills, wrong=f"it hangs: {job.last_words()}")
        output, status = job.output(), job.status()
        left = job.wait_for_all(5.0) is None
    steps = sorted(map(float, _STEP.findall(output)))
    gap = max((after - before for before, after in itertools.pairwise(steps)), default=0.0)
    wrong = "processes are left" if left else f"status {status}: {output[-300:]}" if status else ""
    return Sample(kills, tuple(map(float, _BACK.findall(output))), gap, 1 + output.count("; restarting"), wrong)


def render(samples: Sequence[Sample]) -> str:
    backs = [back for one in samples for back in one.backs]
    gaps = [one.gap for one in samples if one.attempts == 1 and not one.wrong]
    row = (
        *map(str, (len(samples), sum(one.kills for one in samples), len(backs))),
        str(sum(one.attempts > 1 for one in samples)),
        shown(statistics.median(backs) if backs else None),
        shown(max(backs, default=None)),
        shown(max(gaps, default=None)),
        str(sum(bool(one.wrong) for one in samples)),
    )
    header = ("jobs", "kills", "returns", "all again", "back s", "most", "longest gap s", "wrong")
    return table(header, [row], left=0)


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
