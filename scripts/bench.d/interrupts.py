"""Interrupts: Ctrl-C at random moments of jaxrun's start, from its first line on, and whether one is ever lost.

A job of two ranks is started, and gets the signal within SPAN seconds after jaxrun's first lines have made Python open
the next file. It must end with the status of that signal, without a traceback. Before these lines, the signal is
Python's, which may print a traceback or drop it. Run it beside busy cores, where the windows are longer, and run
nothing else from this checkout meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.util
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from _bench import ROOT, Bench, Outcome, grouped, progress, table

FIRST = importlib.util.cache_from_source(str(ROOT / "launcher/jaxrun/node/early_signals.py"))
COMMAND = (sys.executable, "-m", "jaxrun", "-n", "2", "--platform", "cpu", "--no-run-dir", "loop.py")
PROGRAM = "import time\nwhile True:\n    time.sleep(0.05)\n"
LIMIT_S = 30.0  # after the signal, in which a job ends that has got it
IN_OPEN = 0x20


@dataclass(frozen=True)
class Sample:
    """One signal, `moment` seconds after jaxrun's first lines. `ended`: jaxrun's status; None: it went on."""

    moment: float
    load: float
    took: float
    ended: int | None
    wrong: str = ""


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """Yield a descriptor that can be read once a process has opened the file."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_CLOEXEC)
    try:
        if watch < 0 or libc.inotify_add_watch(watch, os.fsencode(path), IN_OPEN) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
        yield watch
    finally:
        os.close(watch)


def start(directory: str) -> subprocess.Popen[str]:
    no, pipe, both = subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(COMMAND, cwd=directory, stdin=no, stdout=pipe, stderr=both, text=True)


def measure(signum: signal.Signals, moment: float, directory: str) -> Sample:
    with opened(FIRST) as watch, start(directory) as job:
        select.select([watch], [], [])
        time.sleep(moment)
        job.send_signal(signum)
        began, load = time.monotonic(), os.getloadavg()[0]
        try:
            said = job.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            job.kill()
            said = job.communicate()[0]
            return Sample(moment, load, LIMIT_S, None, f"it went on: {said[-300:]}")
    # Until a job has begun, a signal other than SIGINT ends jaxrun as it ends any program.
    good = job.returncode in (128 + signum, -signum if signum != signal.SIGINT else 130)
    wrong = "" if good and "Traceback" not in said else f"status {job.returncode}: {said[-300:]}"
    return Sample(moment, load, time.monotonic() - began, job.returncode, wrong)


def render(samples: Sequence[Sample]) -> str:
    rows = []
    for part, group in sorted(grouped(samples, lambda one: int(one.moment * 10)).items()):
        lost, wrong = sum(one.ended is None for one in group), sum(bool(one.wrong) for one in group)
        most = max(one.took for one in group)
        loads = f"{min(one.load for one in group):.0f}-{max(one.load for one in group):.0f}"
        rows.append((f"{part / 10:.1f}", str(len(group)), str(lost), str(wrong), f"{most:.1f}", loads))
    return table(("from s", "signals", "lost", "wrong", "most s", "load"), rows, left=1)


def run(options: argparse.Namespace) -> Outcome:
    samples: list[Sample] = []
    chosen = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        Path(directory, "loop.py").write_text(PROGRAM)
        for number in range(options.rounds):
            moment = chosen.uniform(0, options.span)
            samples.append(measure(signal.Signals[options.signal], moment, directory))
            if number % 100 == 99 or samples[-1].wrong:
                progress(f"{number + 1}: {samples[-1].wrong or 'ok'}")
    wrong = [f"{one.moment:.4f} s, load {one.load:.0f}: {one.wrong}" for one in samples if one.wrong]
    return Outcome(render(samples), samples, wrong)


if __name__ == "__main__":
    bench = Bench("interrupts", __doc__, rounds=1000)
    bench.add_option("--signal", default="SIGINT", help="SIGTERM or SIGHUP")
    bench.add_option(
        "--span", type=float, default=0.9, help="seconds (default: 0.9); beside busy cores a start takes longer"
    )
    bench.add_option("--seed", type=int, default=0, help="of the random moments")
    sys.exit(bench.main(run))
