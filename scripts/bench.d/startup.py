"""Start-up: from command to exit with one sum over all processes, jaxrun beside other launchers.

Measures wall and CPU seconds of all processes of a job, and the memory of its ranks once they have the sum: the private
pages of one rank, and the proportional share (PSS) of all processes. --program names the packages that the program
imports besides JAX. All contenders take turns in every round, and ratios are taken within a round, so that a machine
that is busy for a while does not favour one of them. "one" is a single process of the same program. Only a wrong result
makes the exit status 1, never a long time.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import _over_hosts
from _bench import Bench, Outcome, grouped, median_ratio, numbers, progress, shown, table
from _contenders import (
    JAX_SUM,
    JAXRUN,
    JAXRUN_NO_FORK,
    JAXRUN_PRELOAD_NONE,
    MPIRUN,
    PLAIN,
    Contender,
    free_address,
    installed,
)
from _imports import BARE, IMPORTS, importing, why_not
from _jobs import Job, started

CONTENDERS = (PLAIN, MPIRUN, JAXRUN, JAXRUN_PRELOAD_NONE, JAXRUN_NO_FORK)
# Goals as a fraction of the CPU seconds of plain subprocesses, by number of processes.
GOALS = {BARE: {4: 0.25, 8: 0.18, 16: 0.15}, "flax": {4: 0.30, 8: 0.18}}
TIME_LIMIT_S = 120.0
# What a launcher on one machine and an agent import before anything else happens.
_LEAN = "from jaxrun.msgspec_import import import_msgspec; import_msgspec()"
IMPORTED = {
    "a launcher's imports": "jaxrun.cli.main, jaxrun.controller.supervisor.attempts, "
    "jaxrun.controller.supervisor.local_job",
    "an agent's imports": "jaxrun.node.agent.agent_process",
}
_KIB = 1024


@dataclass(frozen=True)
class Sample:
    """One run. `wrong` is empty if every process had the right sum and the launcher ended with 0.

    cpu:      seconds of user and system time of all its processes
    private:  the median of the ranks' private pages, in MB; 0 if memory was not measured
    shared:   the proportional set size of all processes together, in MB
    """

    contender: str
    size: int
    round: int
    seconds: float
    cpu: float
    wrong: str
    private: float = 0.0
    shared: float = 0.0


def measure(contender: Contender, size: int, number: int, program: Path = JAX_SUM) -> Sample:
    """Measure the time of one run."""
    before = _cpu_seconds()
    with started(contender.command(size, (), program), os.environ, {"BENCH_ADDRESS": free_address()}) as job:
        ended = job.wait(TIME_LIMIT_S)
        if ended is None:
            wrong = f"still running after {TIME_LIMIT_S:g} s"
            return Sample(contender.name, size, number, TIME_LIMIT_S, 0.0, wrong)
        wrong = _wrong(job, size)
    return Sample(contender.name, size, number, ended - job.began, _cpu_seconds() - before, wrong)


def measure_imports(number: int) -> list[Sample]:
    """Measure the CPU seconds of the imports of each process of jaxrun, in an interpreter that does nothing else."""
    samples = []
    for name, modules in IMPORTED.items():
        code = (
            f"import time; began = time.process_time(); {_LEAN}; import {modules}; print(time.process_time() - began)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        took = float(done.stdout) if done.returncode == 0 else 0.0
        samples.append(Sample(name, 1, number, took, took, done.stderr[-200:] if done.returncode else ""))
    return samples


def measure_memory(contender: Contender, size: int, program: Path = JAX_SUM) -> tuple[float, float, str]:
    """Measure the memory of one run whose ranks wait once they have the sum.

    Returns the private MB of a rank, the PSS of all processes in MB, and what was wrong.
    """
    extra = {"BENCH_ADDRESS": free_address(), "BENCH_HOLD": "1"}
    with started(contender.command(size, (), program), os.environ, extra) as job:
        deadline = time.monotonic() + TIME_LIMIT_S
        while len(list(job.directory.glob("sum-*"))) < size:
            if job.wait(0.05) is not None or time.monotonic() > deadline:
                return 0.0, 0.0, f"not all ranks came to their sum: {job.last_words()}"
        ranks = [_memory(int(path.read_text()))[0] for path in job.directory.glob("pid-*")]
        shared = sum(_memory(pid)[1] for pid in job.processes())
        (job.directory / "go").touch()
        job.wait(TIME_LIMIT_S)
    return statistics.median(ranks), shared, ""


def _cpu_seconds() -> float:
    """Return the CPU seconds of all descendants of this process that have ended and were waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _memory(pid: int) -> tuple[float, float]:
    """Return the private pages and the proportional set size of a process, in MB; zeros if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0.0, 0.0
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return (kib["Private_Clean"] + kib["Private_Dirty"]) / _KIB, kib["Pss"] / _KIB


def _wrong(job: Job, size: int) -> str:
    """Return what is wrong with a run that has ended, with the end of its output; empty if nothing is wrong."""
    sums = {path.name: path.read_text() for path in job.directory.glob("sum-*")}
    right = {f"sum-{rank}": f"{size * (size + 1) // 2}" for rank in range(size)}
    if job.status() == 0 and sums == right:
        return ""
    return f"status {job.status()}, {len(sums.items() & right.items())} of {size} right sums: {job.last_words()}"


def render(samples: Sequence[Sample], program: str = BARE) -> str:
    """Return a table with a line for each size and contender. Each ratio is the median of the rounds' ratios."""
    header = (
        *("processes", "contender", "wall s", "min-max", "CPU s", "wall / plain", "CPU / plain", "CPU / one"),
        *("private MB", "all MB", "goal", "reached"),
    )
    groups = grouped((one for one in samples if not one.wrong), lambda one: (one.size, one.contender))
    wall = {key: {one.round: one.seconds for one in group if one.seconds} for key, group in groups.items()}
    cpu = {key: {one.round: one.cpu for one in group if one.seconds} for key, group in groups.items()}
    rows = []
    for key, of in wall.items():
        size, name = key
        plain, one = (size, PLAIN.name), (1, PLAIN.name)
        ratio = median_ratio(cpu[key], cpu.get(plain, {}))
        goal = GOALS.get(program, {}).get(size) if name == JAXRUN.name else None
        reached = ("", "") if goal is None or ratio is None else (f"<= {goal:.2f}", "yes" if ratio <= goal else "no")
        rows.append(
            (
                *(str(size), name, shown(statistics.median(of.values()))),
                *(f"{min(of.values()):.2f}-{max(of.values()):.2f}", shown(statistics.median(cpu[key].values()))),
                *(shown(median_ratio(of, wall.get(plain, {}))), shown(ratio)),
                *(shown(median_ratio(cpu[key], cpu.get(one, {}))), *_megabytes(groups[key]), *reached),
            )
        )
    return table(header, rows, left=2)


def _megabytes(samples: Sequence[Sample]) -> tuple[str, str]:
    measured = [one for one in samples if one.private]
    return (shown(measured[0].private, ".0f"), shown(measured[0].shared, ".0f")) if measured else ("", "")


def run(options: argparse.Namespace) -> Outcome:
    if reason := why_not(options.program):
        return Outcome(reason, [], [reason])
    named = ("plain", *options.only) if options.only else ("",)
    chosen, missing = installed([one for one in CONTENDERS if one.name.startswith(named)])
    print(*missing, sep="\n", flush=True)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="bench-program-") as name:
        with importing(JAX_SUM, options.program, Path(name)) as program:
            for contender in chosen:  # brings programs and libraries into memory
                measure(contender, options.processes[0], 0, program)
            for size in options.processes:
                memory = {one.name: measure_memory(one, size, program) for one in chosen}
                for number in range(1, options.rounds + 1):
                    samples += _round(chosen, size, number, program, memory)
            for number in range(1, options.rounds + 1):
                samples += measure_imports(number)
    wrong = dict.fromkeys(f"{one.size} x {one.contender}: {one.wrong}" for one in samples if one.wrong)
    if options.program == BARE and not options.only:
        return _add_hosts(Outcome(render(samples, options.program), samples, list(wrong)), options.rounds)
    return Outcome(render(samples, options.program), samples, list(wrong))


def _add_hosts(outcome: Outcome, rounds: int) -> Outcome:
    """Measure over the hosts of a testbed as well, if one is up."""
    if reason := _over_hosts.why_not():
        print(reason, flush=True)
        return outcome
    samples = _over_hosts.run_rounds(rounds)
    wrong = dict.fromkeys(f"3 hosts x {one.contender}: {one.wrong}" for one in samples if one.wrong)
    text = f"{outcome.text}\n\n{_over_hosts.render(samples)}"
    return Outcome(text, [*outcome.samples, *samples], [*outcome.wrong, *wrong])


def _round(
    chosen: Sequence[Contender],
    size: int,
    number: int,
    program: Path,
    memory: Mapping[str, tuple[float, float, str]],
) -> list[Sample]:
    samples = []
    for contender in chosen:
        sample = measure(contender, size, number, program)
        private, shared, wrong = memory[contender.name]
        samples.append(
            Sample(contender.name, size, number, sample.seconds, sample.cpu, sample.wrong or wrong, private, shared)
        )
        progress(
            f"{size} x {contender.name}, round {number}: {sample.seconds:.2f} s, CPU {sample.cpu:.2f} {sample.wrong}"
        )
    return samples


if __name__ == "__main__":
    bench = Bench("startup", __doc__, rounds=5, mine=("--only", "jaxrun"))
    bench.add_option("-n", "--processes", type=numbers, default=[1, 2, 4, 8, 16], metavar="N,N")
    bench.add_option("--program", choices=tuple(IMPORTS), default=BARE, help="what it imports (default: bare)")
    bench.add_option("--only", action="append", metavar="TEXT", help="contenders whose name begins so, and plain")
    sys.exit(bench.main(run))
