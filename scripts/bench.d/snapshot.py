"""Snapshot: what snapshots in memory cost the steps of a job on two hosts, compared with none and with orbax to disk.

Two ranks on two simulated hosts share a state, and take a snapshot every ten steps. The devices are the cores, so the
work in the background costs steps, too; on accelerators only the calls would. The goal is 3 % of the steps' time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _bench import Bench, Outcome, grouped, progress, shown, table
from _jobs import started

PROGRAM = Path(__file__).parent / "_programs" / "snapshots.py"
HOWS = ("nothing", "snapshot", "orbax")
STEPS, EVERY = 20, 10
LIMIT_S = 580.0
GOAL = 0.03


@dataclass(frozen=True)
class Sample:
    """One run: seconds of all steps, and of these in calls that save; CPU seconds of one rank for each save."""

    how: str
    total: float = 0.0
    in_calls: float = 0.0
    cpu: float = 0.0
    wrong: str = ""


def measure(how: str, options: argparse.Namespace, times: Path) -> Sample:
    numbers = (STEPS, EVERY, options.seconds, options.mib)
    command = [sys.executable, "-m", "jaxrun", "-n", "2", "--simulate-hosts", "2", "--lockstep", "off", str(PROGRAM)]
    with started([*command, how, *map(str, numbers), str(times)], os.environ, {}) as job:
        if job.wait(LIMIT_S) is None or job.status():
            return Sample(how, wrong=job.last_words())
        return Sample(how, **json.loads((job.directory / "notes").read_text()))


def render(samples: Sequence[Sample]) -> str:
    header = ("every 10 steps", "a step", "in a call", "CPU of a rank", "more than without", "3 % from steps of")
    groups = grouped(samples, lambda one: one.how)
    medians = {how: statistics.median(one.total for one in group) for how, group in groups.items()}
    saves, rows = STEPS // EVERY, []
    for how, group in groups.items():
        calls = statistics.median(one.in_calls for one in group) / saves
        cpu = statistics.median(one.cpu for one in group)
        more = medians[how] / medians["nothing"] - 1 if "nothing" in medians else None
        needed = more * medians["nothing"] / saves / EVERY / GOAL if more is not None else None
        step = f"{medians[how] / STEPS:.2f} s"
        rows.append((how, step, f"{calls:.2f} s", f"{cpu:.2f} s", shown(more, ".1%"), shown(needed, ".1f") + " s"))
    return table(header, rows, left=1)


def run(options: argparse.Namespace) -> Outcome:
    samples = []
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        for _ in range(options.rounds):
            for how in HOWS:
                samples.append(sample := measure(how, options, Path(directory) / "times"))
                progress(f"{how}: {sample.wrong or f'{sample.total:.1f} s, {sample.in_calls:.2f} s in calls'}")
    good = [one for one in samples if not one.wrong]
    return Outcome(render(good), samples, [f"{one.how}: {one.wrong}" for one in samples if one.wrong])


if __name__ == "__main__":
    bench = Bench("snapshot", __doc__, rounds=3)
    bench.add_option("--seconds", type=float, default=6.0, metavar="S", help="that a step takes (default: 6)")
    bench.add_option("--mib", type=int, default=1024, metavar="MIB", help="of the state (default: 1024)")
    sys.exit(bench.main(run))
