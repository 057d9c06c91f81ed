"""Lockstep: what record and strict add to a call, to a program's first call and to start-up, compared with off.

The modes take turns, with a job for each. In a job the kinds of calls take turns in short blocks, on all ranks at once.
A job yields the least and the median of its blocks, and the cost of a mode is taken within a round. "adds" is the best
estimate: for a local jit, and a global jit without a collective, from the ratio to calls beside them without a hook;
for other calls, from the least. "min..max" over the rounds shows the noise. Only a job that fails, or does not record
what its mode should, makes the exit status 1, never a cost.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from _bench import Bench, Outcome, grouped, numbers, progress, table
from _jobs import started

from jaxrun.protocol.flight_file import (
    EVERY_CALL,
    HEADER_WORDS,
    LEVEL_WORD,
    LOCKSTEP_OFF,
    LOCKSTEP_RECORD,
    LOCKSTEP_STRICT,
    RECORD_COUNT_WORD,
    STRICT_WORD,
    flight_file_name,
)

PROGRAM = Path(__file__).parent / "_programs" / "calls.py"
TIME_LIMIT_S = 60.0
MODES = (LOCKSTEP_OFF, LOCKSTEP_RECORD, LOCKSTEP_STRICT)
EACH_CALL = {  # in microseconds
    "local": "local jit, 8x8",
    "global": "global jit, no collective",
    "psum": "psum",
    "state": "step of 100 arrays",
}
ONCE = {"first": "first call, 100 arguments", "start": "start-up"}  # in milliseconds


@dataclass(frozen=True)
class Effort:
    """Limits of a job: blocks of each kind, seconds for all blocks, and programs that are called for the first time."""

    blocks: int
    seconds: float
    programs: int


FULL, QUICK = Effort(100, 1.5, 5), Effort(20, 0.5, 2)


@dataclass(frozen=True)
class Sample:
    """One job: by kind of call, the least and the median of what a call took in seconds, over the blocks of all ranks.

    `ratio` is the median of calls against the calls of `pace` beside them, whose own median that is; only for kinds
    that have a pace. `wrong` is empty if the job ended well and its ranks recorded what the mode says.
    """

    mode: str
    size: int
    round: int
    least: Mapping[str, float] = field(default_factory=dict)
    median: Mapping[str, float] = field(default_factory=dict)
    ratio: Mapping[str, float] = field(default_factory=dict)
    pace: Mapping[str, float] = field(default_factory=dict)
    wrong: str = ""


def measure(mode: str, size: int, turn: int, effort: Effort) -> Sample:
    """Measure one job. `turn`: the number of its round."""
    arguments = map(str, (effort.blocks, effort.seconds, effort.programs))
    command = [sys.executable, "-m", "jaxrun", "-n", str(size), "--lockstep", mode, str(PROGRAM), *arguments]
    with started(command, os.environ, {}) as job:
        if job.wait(TIME_LIMIT_S) is None:
            return Sample(mode, size, turn, wrong=f"still running after {TIME_LIMIT_S:g} s")
        told = [json.loads(path.read_text()) for path in sorted(job.directory.glob("calls-*.json"))]
        if job.status() or len(told) != size:
            wrong = f"status {job.status()}, {len(told)} of {size} ranks have measured: {job.last_words()}"
        else:
            wrong = misrecorded(job.directory, mode, told)
    if wrong:
        return Sample(mode, size, turn, wrong=wrong)
    slices = {kind: [slice for one in told for slice in one["slices"][kind]] for kind in told[0]["slices"]}
    slices["start"] = [(max(one["entered"] for one in told) - job.began, 0.0)]
    paced = {kind: of for kind, of in slices.items() if all(pace for _, pace in of)}
    return Sample(
        mode=mode,
        size=size,
        round=turn,
        least={kind: min(seconds for seconds, _ in of) for kind, of in slices.items()},
        median={kind: statistics.median(seconds for seconds, _ in of) for kind, of in slices.items()},
        ratio={kind: statistics.median(seconds / pace for seconds, pace in of) for kind, of in paced.items()},
        pace={kind: statistics.median(pace for _, pace in of) for kind, of in paced.items()},
    )


def misrecorded(directory: Path, mode: str, told: Sequence[Any]) -> str:
    """Return how the flight recorders of the job in `directory` differ from its mode, as text; "" if they do not."""
    for rank, one in enumerate(told):
        file = directory / "jaxrun-runs" / "latest" / flight_file_name(rank)
        if file.exists() is (mode == LOCKSTEP_OFF):
            return f"rank {rank} has {'a' if file.exists() else 'no'} flight recorder"
        if mode != LOCKSTEP_OFF:
            header = struct.unpack_from(f"={HEADER_WORDS}Q", file.read_bytes())
            expected = (EVERY_CALL, int(mode == LOCKSTEP_STRICT))
            if (header[LEVEL_WORD], header[STRICT_WORD]) != expected or header[RECORD_COUNT_WORD] < one["made"]:
                return (
                    f"rank {rank} recorded {header[RECORD_COUNT_WORD]} of {one['made']} calls, at level "
                    f"{header[LEVEL_WORD]} of {EVERY_CALL}, strict: {header[STRICT_WORD]}"
                )
    return ""


def render(samples: Sequence[Sample]) -> str:
    """Return two tables: the cost of each call in microseconds, and one-time costs in milliseconds."""
    good = grouped((one for one in samples if not one.wrong), lambda one: (one.size, one.mode))
    tables = []
    for title, kinds, unit in (("each call, us", EACH_CALL, 1e6), ("once, ms", ONCE, 1e3)):
        rows = [
            (name, str(size), mode, *_cells(kind, good[size, mode], good.get((size, LOCKSTEP_OFF), []), unit))
            for kind, name in kinds.items()
            for size in dict.fromkeys(size for size, _ in good)
            for mode in MODES
            if (size, mode) in good
        ]
        tables.append(table((title, "ranks", "mode", "least", "median", "ratio", "adds", "min..max"), rows, left=1))
    return "\n\n".join(tables)


def _cells(kind: str, group: Sequence[Sample], off: Sequence[Sample], unit: float) -> tuple[str, ...]:
    """Return the cells for one kind of call in one mode and size: its time, and the time that the mode adds."""
    mode, bases = group[0].mode, {one.round: one for one in off}
    takes = [statistics.median(getattr(one, name)[kind] for one in group) * unit for name in ("least", "median")]
    pairs = [(one, bases[one.round]) for one in group if one.round in bases]
    if mode == LOCKSTEP_OFF or not pairs:
        return (*map(_digits, takes), "", "", "")
    best = _best_measure(kind, mode, off)
    adds = [(best(one) - best(base)) * unit for one, base in pairs]
    ratio = statistics.median(one.median[kind] / base.median[kind] for one, base in pairs)
    middle, least, most = (_digits(of(adds), "+") for of in (statistics.median, min, max))
    return (*map(_digits, takes), f"{ratio:.2f}", middle, f"{least}..{most}")


def _best_measure(kind: str, mode: str, off: Sequence[Sample]) -> Callable[[Sample], float]:
    """Seconds for a call: by its ratio to the pace, at the usual pace of the jobs `off`; the least where it waits."""
    waits = mode == LOCKSTEP_STRICT and kind != "local"
    if waits or any(kind not in one.pace for one in off):
        return lambda one: one.least[kind]
    pace = statistics.median(one.pace[kind] for one in off)
    return lambda one: one.ratio[kind] * pace


def _digits(value: float, sign: str = "") -> str:
    """Format a number with about three digits."""
    return f"{value:{sign}.{2 if abs(value) < 10 else 1 if abs(value) < 100 else 0}f}"


def run(options: argparse.Namespace) -> Outcome:
    effort = QUICK if options.quick else FULL
    modes = [mode for mode in MODES if options.only in (None, mode) or mode == LOCKSTEP_OFF]
    measure(LOCKSTEP_OFF, options.processes[0], 0, effort)  # brings programs and libraries into memory
    samples: list[Sample] = []
    for turn in range(1, options.rounds + 1):
        for size in options.processes:
            for mode in modes if turn % 2 else reversed(modes):
                sample = measure(mode, size, turn, effort)
                samples.append(sample)
                least = ", ".join(f"{kind} {_digits(1e6 * seconds)} us" for kind, seconds in sample.least.items())
                progress(f"{size} x {mode}, round {turn}: {sample.wrong or least}")
    wrong = dict.fromkeys(f"{one.size} x {one.mode}: {one.wrong}" for one in samples if one.wrong)
    return Outcome(render(samples), samples, list(wrong))


if __name__ == "__main__":
    bench = Bench("lockstep", __doc__, rounds=4)
    bench.add_option("-n", "--processes", type=partial(numbers, least=2), default=[2, 4], metavar="N,N")
    bench.add_option("--only", choices=(LOCKSTEP_RECORD, LOCKSTEP_STRICT), help="beside off")
    bench.add_option("--quick", action="store_true", help="short jobs, for a first impression")
    sys.exit(bench.main(run))
