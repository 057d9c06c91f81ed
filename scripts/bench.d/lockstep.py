"""Lockstep: what record and strict add to a call, to a program's first call and to start-up, over off.

The modes take turns, a job each; in a job the kinds of calls take turns in short blocks, all ranks at once. A job
gives the least and the median of its blocks, and what a mode adds is taken within its round. "adds" is the best
that is known of it: for a local jit and for a global one without a collective it comes from their ratio to calls
beside them that have no hook, and else from the least. Each round has a second job that is off: what is no larger
than the difference of these two, or than half the span of the rounds, is "noise"; fewer than three rounds are no
result. Only a job that fails, or that does not record what its mode says, makes the exit status 1, never a price.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from _contenders import JAXRUN, ROOT
from _jobs import Job, started
from _price import AGAIN, MODES, Sample, summarize
from _price_report import draw, number, render
from _report import keep, this_machine

from jaxrun.protocol import flight_file

PROGRAM = Path(__file__).parent / "_programs" / "calls.py"
TIME_LIMIT = 60.0


@dataclass(frozen=True)
class Effort:
    """A job's most blocks of each kind, seconds for all of them, and programs that are called for the first time."""

    blocks: int
    seconds: float
    programs: int


FULL, QUICK = Effort(100, 1.5, 5), Effort(20, 0.5, 2)
ROUNDS, QUICK_ROUNDS = 4, 2
TIME_FOR_ROUNDS = 150.0  # seconds; where nobody said how many, a round that would end later is left out


def measure(mode: str, size: int, turn: int, effort: Effort, environ: Mapping[str, str]) -> Sample:
    """One job; `turn` is the number of its round."""
    lockstep = flight_file.LOCKSTEP_OFF if mode == AGAIN else mode
    arguments = map(str, (effort.blocks, effort.seconds, effort.programs))
    command = [str(JAXRUN.executable), "-n", str(size), "--lockstep", lockstep, str(PROGRAM), *arguments]
    with started(command, environ, {}) as job:
        if job.wait(TIME_LIMIT) is None:
            return Sample(mode, size, turn, wrong=f"still running after {TIME_LIMIT:g} s")
        told = [json.loads(path.read_text()) for path in sorted(job.directory.glob("calls-*.json"))]
        wrong = _wrong(job, size, told) or _misrecorded(job.directory, lockstep, told)
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


def _wrong(job: Job, size: int, told: Sequence[Any]) -> str:
    if job.status() == 0 and len(told) == size:
        return ""
    tail = " | ".join(job.output().strip().splitlines()[-3:])
    return f"status {job.status()}, {len(told)} of {size} ranks have measured: {tail}"


def _misrecorded(directory: Path, lockstep: str, told: Sequence[Any]) -> str:
    """Says in what the flight recorders of a job that has run in `directory` are not those of its mode."""
    for rank, one in enumerate(told):
        file = directory / "jaxrun-runs" / "latest" / flight_file.flight_file_name(rank)
        if file.exists() is (lockstep == flight_file.LOCKSTEP_OFF):
            return f"rank {rank} has {'a' if file.exists() else 'no'} flight recorder"
        if lockstep != flight_file.LOCKSTEP_OFF:
            header = struct.unpack_from(f"={flight_file.HEADER_WORDS}Q", file.read_bytes())
            expected = (flight_file.EVERY_CALL, int(lockstep == flight_file.LOCKSTEP_STRICT))
            if (header[flight_file.LEVEL_WORD], header[flight_file.STRICT_WORD]) != expected or header[
                flight_file.RECORD_COUNT_WORD
            ] < one["made"]:
                return (
                    f"rank {rank} recorded {header[flight_file.RECORD_COUNT_WORD]} of {one['made']} calls, at level "
                    f"{header[flight_file.LEVEL_WORD]} of {flight_file.EVERY_CALL}, strict: {header[flight_file.STRICT_WORD]}"
                )
    return ""


def run(
    sizes: Sequence[int], modes: Sequence[str], rounds: int, limit: float, effort: Effort, environ: Mapping[str, str]
) -> list[Sample]:
    """All jobs; no round is begun that would end more than `limit` seconds after the first began."""
    measure(flight_file.LOCKSTEP_OFF, sizes[0], 0, effort, environ)  # brings programs and libraries into memory
    samples: list[Sample] = []
    began = time.monotonic()
    for turn in range(1, rounds + 1):
        if turn > 1 and (time.monotonic() - began) * turn / (turn - 1) > limit:
            print(f"no time for round {turn}: the machine is slow or busy; --rounds {rounds} takes it", file=sys.stderr)
            break
        for size in sizes:
            for mode in modes if turn % 2 else reversed(modes):
                sample = measure(mode, size, turn, effort, environ)
                samples.append(sample)
                numbers = ", ".join(f"{kind} {number(kind, seconds)}" for kind, seconds in sample.least.items())
                print(f"{size} x {mode}, round {turn}: {sample.wrong or numbers}", file=sys.stderr, flush=True)
    return samples


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench lockstep", description=__doc__)
    parser.add_argument("-n", "--processes", type=_sizes, default=[2, 4], metavar="N,N")
    parser.add_argument(
        "--rounds",
        type=int,
        metavar="R",
        help=f"of all modes (default: {ROUNDS}, or as many as {TIME_FOR_ROUNDS:g} s allow)",
    )
    parser.add_argument("--only", choices=(flight_file.LOCKSTEP_RECORD, flight_file.LOCKSTEP_STRICT), help="beside off")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds of short jobs: a look, not a result"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "bench-results", metavar="DIR")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rounds, effort = (QUICK_ROUNDS, QUICK) if options.quick else (ROUNDS, FULL)
    modes = [mode for mode in MODES if options.only in (None, mode) or mode in (flight_file.LOCKSTEP_OFF, AGAIN)]
    machine = this_machine()
    print(machine, flush=True)
    limit = math.inf if options.rounds else TIME_FOR_ROUNDS
    samples = run(options.processes, modes, options.rounds or rounds, limit, effort, dict(os.environ))
    summaries = summarize(samples)
    print(f"\n{render(summaries)}")
    wrong = dict.fromkeys(f"{one.size} x {one.mode}: {one.wrong}" for one in samples if one.wrong)
    written = keep(options.out, "lockstep", machine, summaries, samples, partial(draw, summaries))
    print(*wrong, "", *written, sep="\n")
    return 1 if wrong else 0


def _sizes(text: str) -> list[int]:
    sizes = [int(part) for part in text.split(",")]
    if min(sizes) < 2:
        raise ValueError
    return sizes


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
