"""Kills: `kill -9` of jaxrun at random moments of its start, on three hosts with each engine, and what is left.

Jobs with three ranks, one on each host of a testbed, are killed at moments between jaxrun's first instruction and the
program's first step. Any process on the hosts 10 s later, except Slurm's daemons, was left behind by jaxrun or by the
engine. Needs root (scripts/testbed) and the engines (scripts/engines).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from _bench import ROOT, Bench, Outcome, grouped, progress, shown, table

sys.path[:0] = [str(ROOT / "tests/cluster"), str(ROOT / "tests/process"), str(ROOT / "scripts/testbed.d")]

import hosts  # noqa: E402
import processes  # noqa: E402
from cluster_fixture import ENGINE, HOSTS, Bed, Job  # noqa: E402
from harness import MISBEHAVE  # noqa: E402
from launch_modes import LAUNCHED, MPI, OPENSSH, SLURM, Engine, LaunchMode  # noqa: E402
from processes import Process  # noqa: E402
from state import Place  # noqa: E402

ONE_HOST = Engine("one host", "none")  # neither MPI nor Slurm
LIMIT_S = 10.0  # after the kill
_PAUSE_S = 0.05  # between two looks
_EMPTY_LOOKS = 10  # in a row, without any process: one look may miss a process that starts another and ends
_STARTED = ("nothing", "agents", "workers")  # by the time of the kill
_WORDS = ("--init-timeout", "60", MISBEHAVE, "--rank", "-1", "--hang")
_ON_ONE_HOST = (sys.executable, "-m", "jaxrun", "-n", str(len(HOSTS)), "--platform", "cpu")
# The allocation outlives jaxrun, as in a shell of salloc; otherwise Slurm would end the step with it.
_IN_ALLOCATION = 'echo $$ >keeper; sh -c \'echo $$ >pid; exec "$@"\' sh "$@"; exec sleep 600'


@dataclass(frozen=True)
class Sample:
    """One kill, `moment` seconds after the start. `gone`: seconds until nothing was left; None: beyond the limit."""

    engine: str
    moment: float
    started: str
    gone: float | None
    left: tuple[str, ...] = ()
    left_by_engine: tuple[str, ...] = ()
    wrong: str = ""


class Launch:
    """A starting jaxrun on three hosts. `pid`: its process id."""

    def __init__(self, bed: Bed, engine: Engine, directory: Path) -> None:
        self._bed, self._directory = bed, directory
        mode = LaunchMode(engine, LAUNCHED)
        words = ("--run-dir", str(directory / "run"), *_WORDS)
        command = [*_ON_ONE_HOST, *words] if engine is ONE_HOST else mode.command(HOSTS, *words)
        if engine is SLURM:
            first = command.index(sys.executable)
            command[first:first] = ["sh", "-c", _IN_ALLOCATION, "sh"]
        keeper = hosts.keeper(Place(bed.root), mode.host)
        assert keeper is not None
        with open(directory / "out", "w") as out, open(directory / "err", "w") as err:
            self._process = subprocess.Popen(
                hosts.enter(keeper.pid, str(directory), command),
                env=hosts.environment(Place(bed.root), {**os.environ, **engine.env()}),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        self.pid = self._wait_for_pid("pid") if engine is SLURM else self._process.pid
        self.began = time.monotonic()
        self._allocation = self._process.pid if engine is SLURM else None

    def _wait_for_pid(self, name: str) -> int:
        file = self._directory / name
        while not (file.exists() and (text := file.read_text()).endswith("\n")):
            assert self._process.poll() is None, (self._directory / "err").read_text()
            time.sleep(0.002)
        return int(text)

    def wait_until_ready(self) -> None:
        """Wait until all ranks have made a step."""
        Job(self._bed, self._process, self._directory).wait_for_output("ready")

    def signal(self, signum: signal.Signals) -> str:
        """Send a signal to jaxrun alone. Returns an error text if it had already ended."""
        own = processes.inspect(self.pid)
        if own is None:
            return f"jaxrun had ended: {(self._directory / 'err').read_text()[-300:]}"
        os.kill(self.pid, signum)
        return ""

    def watch(self, limit: float) -> tuple[float | None, list[Process]]:
        """Return the seconds until nothing is left, checked for a while; or None, and the processes that are left."""
        killed = seen = time.monotonic()
        empty = 0
        while True:
            left, now = self.left(), time.monotonic()
            seen, empty = (now, 0) if left else (seen, empty + 1)
            if empty == _EMPTY_LOOKS:
                return seen - killed, []
            if left and now > killed + limit:
                return None, left
            time.sleep(_PAUSE_S)

    def left(self) -> list[Process]:
        """Return all processes on the hosts, except Slurm's daemons and the process that keeps the allocation."""
        own = set()
        if self._allocation is not None:
            own = {self._allocation, self._wait_for_pid("keeper")}
        return [one for one in self._bed.job_processes() if one.pid not in own]

    def started(self) -> str:
        """Return what has started by now, one of _STARTED."""
        running = self._bed.job_processes()
        if any(one.argv[0].startswith("jaxrun rank ") or _runs_worker(one) for one in running):
            return "workers"
        return "agents" if any(one.argv[1:3] == ("-m", "jaxrun.node.agent") for one in running) else "nothing"

    def end(self) -> None:
        """Kill all processes of the job on the hosts."""
        if self._allocation is not None:
            self._bed.inside("ctl", "scancel", "--user=root")
        while left := self._bed.job_processes():
            for one in left:
                with suppress(ProcessLookupError):
                    os.kill(one.pid, signal.SIGKILL)
            time.sleep(0.05)
        self._process.wait()


def _runs_worker(process: Process) -> bool:
    """Whether a process is an interpreter of a rank: `python …/jaxrun_runtime PROGRAM`."""
    return any(os.path.basename(word) == "jaxrun_runtime" for word in process.argv[1:3])


@contextmanager
def launched(bed: Bed, engine: Engine) -> Iterator[Launch]:
    """Start jaxrun on the three hosts, and leave nothing there."""
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        launch = Launch(bed, engine, Path(name))
        try:
            yield launch
        finally:
            launch.end()


@contextmanager
def testbed() -> Iterator[Bed]:
    with tempfile.TemporaryDirectory(prefix="jrtb-", ignore_cleanup_errors=True) as name:
        bed = Bed(Path(name, "bed"))
        try:
            bed.run("up", "-H", str(len(HOSTS)))
            yield bed
        finally:
            bed.run("down")


def seconds_to_start(bed: Bed, engine: Engine) -> float:
    """Return the seconds from the start of jaxrun until all ranks have made a step."""
    with launched(bed, engine) as launch:
        launch.wait_until_ready()
        return time.monotonic() - launch.began


def measure(bed: Bed, engine: Engine, moment: float, signum: signal.Signals = signal.SIGKILL) -> Sample:
    """Signal a jaxrun `moment` seconds after its start, and watch which processes are left."""
    with launched(bed, engine) as launch:
        time.sleep(max(0.0, launch.began + moment - time.monotonic()))
        started = launch.started()
        wrong = launch.signal(signum)
        gone, left = launch.watch(LIMIT_S)
        own = tuple(str(one) for one in left if one.command not in ENGINE)
        engines = tuple(str(one) for one in left if one.command in ENGINE)
    return Sample(engine.label, moment, started, gone, own, engines, wrong)


def render(samples: Sequence[Sample]) -> str:
    """Return a table with a line for each engine."""
    header = ("engine", "kills", *(f"{kind} started" for kind in _STARTED), "left", "by engine", "gone s", "most")
    rows = []
    for engine, group in grouped(samples, lambda one: one.engine).items():
        counts = [sum(one.started == kind for one in group) for kind in _STARTED]
        seconds = sorted(one.gone for one in group if one.gone is not None)
        times = (shown(seconds[len(seconds) // 2]), shown(seconds[-1])) if seconds else ("-", "-")
        left = sum(bool(one.left) for one in group), sum(bool(one.left_by_engine and not one.left) for one in group)
        rows.append((engine, *map(str, (len(group), *counts, *left)), *times))
    return table(header, rows, left=1)


def run(options: argparse.Namespace) -> Outcome:
    chosen = [one for one in (ONE_HOST, *MPI, OPENSSH, SLURM) if one.label.startswith(options.only)]
    missing = [one for one in chosen if one is not ONE_HOST and one.missing()]
    print(*(one.missing() for one in missing), sep="\n", flush=True)
    seed = options.seed if options.seed is not None else random.randrange(2**32)
    progress(f"seed {seed}")
    chance = random.Random(seed)
    samples: list[Sample] = []
    with ExitStack() as stack:
        lanes = [stack.enter_context(testbed()) for _ in range(options.lanes)]
        pool = stack.enter_context(ThreadPoolExecutor(len(lanes)))
        free: SimpleQueue[Bed] = SimpleQueue()
        for bed in lanes:
            free.put(bed)

        def kill(engine: Engine, moment: float) -> Sample:
            bed = free.get()
            try:
                sample = measure(bed, engine, moment, signal.Signals[options.signal])
            finally:
                free.put(bed)
            for text in (*sample.left, *sample.left_by_engine, *([sample.wrong] if sample.wrong else [])):
                progress(f"{engine.label}, {moment:.2f} s, {sample.started} started: {text}")
            return sample

        for engine in (one for one in chosen if one not in missing):
            spans = list(pool.map(seconds_to_start, lanes, [engine] * len(lanes)))
            progress(f"{engine.label}: all ranks have made a step after {max(spans):.2f} s")
            share = max(spans) / options.rounds
            moments = [share * (number + chance.random()) for number in range(options.rounds)]
            chance.shuffle(moments)
            samples += pool.map(kill, [engine] * len(moments), moments)
            progress(render(samples))
    wrong = [f"{one.engine}, {one.moment:.2f} s: {one.wrong or one.left}" for one in samples if one.wrong or one.left]
    return Outcome(render(samples), samples, wrong)


if __name__ == "__main__":
    bench = Bench("kills", __doc__, rounds=200)
    bench.add_option("--only", metavar="TEXT", default="", help="the engine whose name begins so")
    bench.add_option("--lanes", type=int, default=3, metavar="N", help="testbeds that are used at once (default: 3)")
    bench.add_option("--signal", default="SIGKILL", help="another signal than SIGKILL; jaxrun itself may then survive")
    bench.add_option("--seed", type=int, metavar="N", help="of the moments (default: another each time)")
    sys.exit(bench.main(run))
