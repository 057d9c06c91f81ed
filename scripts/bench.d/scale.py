"""Scale: one head and up to 16,384 simulated agents, with real sockets: does any step grow faster than linearly?

The head is jaxrun's own, in a separate process. _crowd.py replaces mpirun and everything that it would start. All
agents connect at once. "go" is when the last agent got the order to run. Then one fails; "told" is the time until the
last of the others got the order to stop, of which 30 ms are the head's wait for a better cause. CPU, memory and files
are the head's. Memory and files are the increase from the first connection to go, without the kernel's memory for
sockets. The limit is the processor time of the head, one Python process: until go about 0.3 ms for each agent. An agent
sends a dozen messages; each costs a tag and a system call, and most of them a line in the event log.
The table has medians. Growth is computed from the least of each measure, which other work on the machine affects least.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import _crowd
from _bench import Bench, Outcome, grouped, progress, table

from jaxrun.controller.head.job_shutdown import SETTLE_S
from jaxrun.controller.supervisor.run_job import run as supervise

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STATUS = 1  # the culprit's
FILES_BESIDES = 64
FIT_FROM = 256  # agents; with fewer, constant costs hide the growth
LINEAR = 1.15  # an exponent up to this counts as linear: a measure varies as much between two runs
LIMIT_S = 120.0
MEASURES = {
    "handshake": "all connected and proved themselves",
    "orders": "… and were given their orders",
    "join": "… and told the coordinator's address",
    "go": "… and told to run",
    "told": f"from one failure until all others were told, less {SETTLE_S * 1000:.0f} ms",
    "leave": "from then until all were dismissed",
    "cpu_go": "processor time of the head until go",
    "cpu_end": "… and from the failure to the end",
    "grown": "memory of the head from the first connection to go",
}


@dataclass(frozen=True)
class Sample:
    """One job, or a summary of several. Times in seconds; times up to "go" are since the first connection.

    memory, grown:          bytes at go, and the increase since the first connection
    files, sent, received:  for each agent
    """

    size: int
    handshake: float
    orders: float
    join: float
    go: float
    told: float
    leave: float
    cpu_go: float
    cpu_end: float
    memory: float
    grown: float
    files: float
    sent: float
    received: float


def measure(size: int) -> Sample:
    """Run one job. Raises RuntimeError with the head's output if the job did not end as it should."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        head = multiprocessing.get_context("spawn").Process(target=_head, args=(size, directory))
        head.start()
        try:
            head.join(LIMIT_S)
            if head.exitcode != STATUS:
                wrong = "did not end" if head.exitcode is None else f"ended with {head.exitcode}"
                raise RuntimeError(f"the head of {size} agents {wrong}:\n{(directory / 'output').read_text()}")
            return _sample(json.loads((directory / "crowd.json").read_text()))
        finally:
            head.kill()
            head.join()


def _head(size: int, directory: Path) -> None:
    """Run a plan in the head's process, as `jaxrun` does."""
    output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.exit(supervise(_crowd.plan(size, size // 2, directory), os.environ))


def _sample(seen: Mapping[str, Any]) -> Sample:
    size, at, looks = seen["size"], seen["at"], seen["looks"]
    begin, go, end = looks["begin"], looks["go"], looks["dismissed"]
    return Sample(
        size=size,
        handshake=at["welcome"],
        orders=at["orders"],
        join=at["join"],
        go=at["go"],
        told=at["told"] - at["failure"],
        leave=at["dismissed"] - at["told"],
        cpu_go=go["cpu"] - begin["cpu"],
        cpu_end=end["cpu"] - go["cpu"],
        memory=go["memory"],
        grown=go["memory"] - begin["memory"],
        files=(go["files"] - begin["files"]) / size,
        sent=seen["sent"] / size,
        received=seen["received"] / size,
    )


def summarize(samples: Sequence[Sample], by: Callable[[Iterable[float]], float]) -> list[Sample]:
    """Return a summary for each size."""
    names = [one.name for one in fields(Sample) if one.name != "size"]
    groups = sorted(grouped(samples, lambda one: one.size).items())
    return [Sample(size, **{name: by(getattr(one, name) for one in group) for name in names}) for size, group in groups]


def growths(least: Sequence[Sample]) -> dict[str, float]:
    """Return each measure's exponent of growth with the number of agents, from FIT_FROM on: a slope of logarithms."""
    points = [one for one in least if one.size >= FIT_FROM]
    if len(points) < 2:
        return {}
    sizes = [math.log(one.size) for one in points]
    found = {}
    for name in MEASURES:
        values = [getattr(one, name) - (SETTLE_S if name == "told" else 0.0) for one in points]
        found[name] = statistics.linear_regression(sizes, list(map(math.log, values))).slope
    return found


def render(summaries: Sequence[Sample], growth: Mapping[str, float]) -> str:
    header = (
        *("agents", "handshake ms", "orders ms", "join ms", "go ms", "failure→told ms", "→dismissed ms"),
        *("CPU go ms", "CPU end ms", "memory MiB", "KiB/agent", "files/agent", "sent B/agent", "received"),
    )
    times = ("handshake", "orders", "join", "go", "told", "leave", "cpu_go", "cpu_end")
    rows = [
        (
            str(one.size),
            *(f"{getattr(one, name) * 1000:.0f}" for name in times),
            *(f"{one.memory / 2**20:.1f}", f"{one.grown / one.size / 2**10:.1f}"),
            *(f"{one.files:.2f}", f"{one.sent:.0f}", f"{one.received:.0f}"),
        )
        for one in summaries
    ]
    text = table(header, rows, left=0)
    grown = [(name, MEASURES[name], f"N^{exponent:.2f}") for name, exponent in growth.items()]
    return text + (
        f"\n\nfrom {FIT_FROM} agents on:\n{table(('measure', '', 'grows as'), grown, left=2)}" if grown else ""
    )


def possible(sizes: Sequence[int]) -> list[int]:
    """Return the sizes that the limit of open files allows; the head raises the limit as far as it may."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    fit = [size for size in sizes if limit == resource.RLIM_INFINITY or size + FILES_BESIDES <= limit]
    for size in sizes:
        if size not in fit:
            print(f"not measured: {size} agents, for a process may open {limit} files here (ulimit -Hn)", flush=True)
    return fit


def run(options: argparse.Namespace) -> Outcome:
    sizes = possible(options.sizes)
    samples = []
    for size in sizes * options.rounds:
        one = measure(size)
        samples.append(one)
        progress(f"{size} agents: go {one.go * 1000:.0f} ms, told {one.told * 1000:.0f} ms")
    summaries, growth = summarize(samples, statistics.median), growths(summarize(samples, min))
    wrong = [f"{name} does not grow linearly" for name, exponent in growth.items() if exponent > LINEAR]
    return Outcome(render(summaries, growth), samples, wrong)


if __name__ == "__main__":
    bench = Bench("scale", __doc__, rounds=3)
    bench.add_option("--sizes", type=int, nargs="+", default=SIZES, metavar="N", help="numbers of agents")
    sys.exit(bench.main(run))
