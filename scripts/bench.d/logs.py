"""Log throughput: N writers through pipes into jaxrun's Output, against one `cat` of the same bytes.

The variants alternate in one run; the table has the median of each. "MB/s" counts the writers' bytes; "ratio" compares
it with cat; "CPU" is the reader's processor time as a share of one core; "CPU s/GB" is its processor time per gigabyte.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import resource
import selectors
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from _bench import Bench, Outcome, grouped, table

from jaxrun.node.agent.pipes import Pipe, drain_ready
from jaxrun.records.output.output import Output

PIPE_SIZE = 2**20
LINE = b"step 123 loss 0.123456 ".ljust(99, b"x") + b"\n"
# The writers wait for a byte on stdin, so that starting them is not measured.
WRITER = """
import os, sys, time
line, lines, at_once, pause = sys.argv[1].encode() + b"\\n", *map(int, sys.argv[2:4]), float(sys.argv[4])
os.read(0, 1)
block = line * at_once
for _ in range(lines // at_once):
    view = memoryview(block)
    while view:
        view = view[os.write(1, view):]
    if pause:
        time.sleep(pause)
"""


@dataclass(frozen=True)
class Load:
    """The output of each writer: `lines` lines, `at_once` in one write, `pause` seconds between writes."""

    name: str
    lines: int
    at_once: int
    pause: float = 0.0


@dataclass(frozen=True)
class Sample:
    """Wall and processor time in seconds, from the first byte until everything was delivered; `size` in bytes."""

    load: str
    contender: str
    size: int
    round: int
    wall: float
    cpu: float


Reader = Callable[[list[int], Path], None]


def through_cat(pipes: list[int], directory: Path) -> None:
    """All writers share one pipe, which `cat` copies into a file."""
    with open(directory / "cat", "wb") as file:
        subprocess.run(["cat"], stdin=pipes[0], stdout=file, check=True)


def into_file(pipes: list[int], directory: Path) -> None:
    """Every writer has its own pipe; the screen is a file."""
    with open(directory / "screen", "wb") as file:
        pump(pipes, directory, file.fileno())


def into_reader(pipes: list[int], directory: Path) -> None:
    """Every writer has its own pipe; the screen is a pipe with a fast reader."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as cat:
        assert cat.stdin is not None
        pump(pipes, directory, cat.stdin.fileno())


def pump(pipes: list[int], directory: Path, screen: int) -> None:
    """The agent's loop, reduced to its pipes."""
    output = Output(len(pipes), log_dir=Path(tempfile.mkdtemp(dir=directory)), stdout_fd=screen, stderr_fd=screen)
    selector = selectors.DefaultSelector()
    for rank, fd in enumerate(pipes):
        os.set_blocking(fd, False)
        selector.register(fd, selectors.EVENT_READ, Pipe(fd, rank, "out"))
    while selector.get_map():
        ready = [key.data for key, _ in selector.select(output.flush_due())]
        for pipe in drain_ready(ready, output):
            selector.unregister(pipe.fd)
    selector.close()
    output.close()


CAT = "cat > file"
READERS: dict[str, Reader] = {
    CAT: through_cat,
    "jaxrun > file, logs": into_file,
    "jaxrun | reader, logs": into_reader,
}


def measure(load: Load, writers: int, name: str, turn: int, directory: Path) -> Sample:
    """Starts the writers, lets them go, and reads until all have ended."""
    pairs = [os.pipe() for _ in range(1 if name == CAT else writers)]
    for pair in pairs:
        fcntl.fcntl(pair[0], fcntl.F_SETPIPE_SZ, PIPE_SIZE)
    go_read, go_write = os.pipe()
    options = [LINE[:-1].decode(), str(load.lines), str(load.at_once), str(load.pause)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", WRITER, *options],
            stdin=go_read,
            stdout=pairs[i % len(pairs)][1],
        )
        for i in range(writers)
    ]
    for _, end in pairs:
        os.close(end)
    time.sleep(0.3)
    cpu, wall = _cpu(name == CAT), time.perf_counter()
    os.write(go_write, b"g" * writers)
    READERS[name]([pair[0] for pair in pairs], directory)
    wall, cpu = time.perf_counter() - wall, _cpu(name == CAT) - cpu
    for process in processes:
        process.wait()
    for fd in (go_read, go_write, *(pair[0] for pair in pairs)):
        os.close(fd)
    return Sample(load.name, name, writers * load.lines * len(LINE), turn, wall, cpu)


def _cpu(of_children: bool) -> float:
    """Return the processor time of `cat`, the only child that is reaped meanwhile, or of this process."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN if of_children else resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def render(samples: Sequence[Sample]) -> str:
    base = {one.load: one for one in _middle(samples) if one.contender == CAT}
    rows = [
        (
            *(one.load, one.contender, f"{one.size / one.wall / 1e6:.0f}", f"{one.size / len(LINE) / one.wall:,.0f}"),
            *(f"{base[one.load].wall / one.wall:.2f}", f"{one.cpu / one.wall:.0%}", f"{one.cpu / one.size * 1e9:.2f}"),
        )
        for one in _middle(samples)
    ]
    return table(("load", "through", "MB/s", "lines/s", "ratio", "CPU", "CPU s/GB"), rows, left=2)


def _middle(samples: Sequence[Sample]) -> list[Sample]:
    """Return the medians of each load and reader."""
    return [
        replace(of[0], wall=statistics.median(one.wall for one in of), cpu=statistics.median(one.cpu for one in of))
        for of in grouped(samples, lambda one: (one.load, one.contender, one.size)).values()
    ]


def run(options: argparse.Namespace) -> Outcome:
    lines = options.megabytes * 2**20 // len(LINE)
    loads = (
        Load("burst", lines, 2**16 // len(LINE)),
        Load("line by line", lines // 8, 1),
        Load("10,000 lines/s", 3 * 10_000 // options.writers, 1, options.writers / 10_000),
    )
    samples = []
    for load in loads:
        for turn in range(1, options.rounds + 1):
            for name in READERS:
                with tempfile.TemporaryDirectory(dir=options.dir) as directory:
                    samples.append(measure(load, options.writers, name, turn, Path(directory)))
    return Outcome(render(samples), samples)


if __name__ == "__main__":
    bench = Bench("logs", __doc__, rounds=5)
    bench.add_option("--writers", type=int, default=8, metavar="N")
    bench.add_option("--megabytes", type=int, default=64, metavar="N", help="per writer in the burst")
    bench.add_option("--dir", type=Path, metavar="DIR", help="for the files (default: the temporary one)")
    sys.exit(bench.main(run))
