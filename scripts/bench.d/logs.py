"""Log throughput: N writers through pipes into jaxrun's Output, against one `cat` of the same bytes.

The variants alternate in one run; the table has the median of each. "MB/s" counts the writers' bytes, "ratio"
is that against cat, "CPU" the reader's processor time as a share of one core, "CPU s/GB" that per gigabyte.
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
from dataclasses import dataclass
from pathlib import Path

from jaxrun.output.drain import Pipe, drain_ready
from jaxrun.output.output import Output

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
    """What each writer writes: `lines` lines, `at_once` in one write, `pause` seconds between writes."""

    name: str
    lines: int
    at_once: int
    pause: float = 0.0


@dataclass(frozen=True)
class Sample:
    """Seconds of wall and of processor time from the first byte until all was delivered."""

    wall: float
    cpu: float


Reader = Callable[[list[int], Path], None]


def through_cat(pipes: list[int], directory: Path) -> None:
    """All writers share one pipe, which `cat` copies into a file."""
    with open(directory / "cat", "wb") as file:
        subprocess.run(["cat"], stdin=pipes[0], stdout=file, check=True)


def through_output(pipes: list[int], directory: Path, *, piped: bool, logs: bool) -> None:
    """Every writer has its own pipe; the screen is a file, or a pipe that is read fast."""
    logs_at = Path(tempfile.mkdtemp(dir=directory)) if logs else None
    with open(directory / "screen", "wb") as file:
        cat = None
        if piped:
            cat = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        screen = cat.stdin.fileno() if cat is not None and cat.stdin is not None else file.fileno()
        output = Output(len(pipes), log_dir=logs_at, stdout_fd=screen, stderr_fd=screen)
        pump(pipes, output)
        output.close()
        if cat is not None:
            cat.communicate()


def pump(pipes: list[int], output: Output) -> None:
    """The agent's loop, reduced to its pipes."""
    selector = selectors.DefaultSelector()
    for rank, fd in enumerate(pipes):
        os.set_blocking(fd, False)
        selector.register(fd, selectors.EVENT_READ, Pipe(fd, rank, "out"))
    while selector.get_map():
        ready = [key.data for key, _ in selector.select(output.flush_due())]
        for pipe in drain_ready(ready, output):
            selector.unregister(pipe.fd)
    selector.close()


def measure(load: Load, writers: int, read: Reader, *, shared: bool, directory: Path) -> Sample:
    """Starts the writers, lets them go, and reads until all have ended."""
    pairs = [os.pipe() for _ in range(1 if shared else writers)]
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
    cpu, wall = _cpu(shared), time.perf_counter()
    os.write(go_write, b"g" * writers)
    read([pair[0] for pair in pairs], directory)
    wall, cpu = time.perf_counter() - wall, _cpu(shared) - cpu
    for process in processes:
        process.wait()
    for fd in (go_read, go_write, *(pair[0] for pair in pairs)):
        os.close(fd)
    return Sample(wall, cpu)


def _cpu(of_children: bool) -> float:
    """Of `cat`, the only child that is reaped meanwhile, or of this process with its threads."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN if of_children else resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def readers() -> dict[str, tuple[Reader, bool]]:
    """Name → (reader, whether the writers share one pipe); `cat` is what the others are compared with."""
    return {
        "cat > file": (through_cat, True),
        "jaxrun > file": (lambda p, d: through_output(p, d, piped=False, logs=False), False),
        "jaxrun > file, logs": (lambda p, d: through_output(p, d, piped=False, logs=True), False),
        "jaxrun | reader, logs": (lambda p, d: through_output(p, d, piped=True, logs=True), False),
    }


def report(load: Load, writers: int, samples: dict[str, list[Sample]]) -> None:
    size, lines = writers * load.lines * len(LINE), writers * load.lines
    print(f"\n{load.name}: {writers} writers, {size / 1e6:.0f} MB in lines of {len(LINE)} bytes")
    print(f"{'':24}{'MB/s':>8}{'lines/s':>12}{'ratio':>8}{'CPU':>7}{'CPU s/GB':>10}")
    base = statistics.median(sample.wall for sample in samples["cat > file"])
    for name, of_reader in samples.items():
        wall = statistics.median(sample.wall for sample in of_reader)
        cpu = statistics.median(sample.cpu for sample in of_reader)
        print(
            f"{name:24}{size / wall / 1e6:8.0f}{lines / wall:12,.0f}{base / wall:8.2f}"
            f"{cpu / wall:7.0%}{cpu / size * 1e9:10.2f}",
            flush=True,
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench logs", description=__doc__)
    parser.add_argument("--writers", type=int, default=8, metavar="N")
    parser.add_argument("--repeat", type=int, default=5, metavar="N", help="runs of each (default: 5)")
    parser.add_argument("--megabytes", type=int, default=64, metavar="N", help="per writer in the burst")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="for the files (default: the temporary one)")
    options = parser.parse_args(argv)
    burst = 2**16 // len(LINE)
    loads = (
        Load("burst", options.megabytes * 2**20 // len(LINE), burst),
        Load("line by line", options.megabytes * 2**20 // len(LINE) // 8, 1),
        Load("10,000 lines/s", 3 * 10_000 // options.writers, 1, options.writers / 10_000),
    )
    for load in loads:
        samples: dict[str, list[Sample]] = {name: [] for name in readers()}
        for _ in range(options.repeat):
            for name, (read, shared) in readers().items():
                with tempfile.TemporaryDirectory(dir=options.dir) as directory:
                    samples[name].append(measure(load, options.writers, read, shared=shared, directory=Path(directory)))
        report(load, options.writers, samples)
    return 0


if __name__ == "__main__":
    sys.exit(main())
