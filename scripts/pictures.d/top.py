"""Makes the pictures of `jaxrun top`: top.py RUN_DIR DOCS. One shows the job that runs there, one shows 4,096 ranks."""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

from rich.console import Console

from jaxrun.analysis.diagnosis.overview import Overview
from jaxrun.frontends.top.feed import INTERVAL_S, Feed
from jaxrun.frontends.top.finding import describe_finding
from jaxrun.frontends.top.samples import take_samples
from jaxrun.frontends.top.view import LastLine, Pace, View, render
from jaxrun.frontends.top.watch import join_lines
from jaxrun.job_client.running_job import RunningJob, find_running_job
from jaxrun.protocol.flight import DispatchedCall, Flight, PendingCall, ProgramInfo
from jaxrun.protocol.flight_file import EVERY_CALL
from jaxrun.protocol.query_messages import RankReply

WIDTH, HEIGHT = 96, 14
LOOKS = 40
RANKS, PER_HOST, LATE = 4096, 8, 1234


def draw(view: View, last_line: LastLine, file: Path) -> None:
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    console.print(join_lines(render(view, WIDTH, HEIGHT, last_line)))
    svg = console.export_svg(title="jaxrun top")
    # Remove fonts from other sites, and names that differ each time.
    svg = re.sub(r"\s*@font-face \{.*?\}\n", "\n", svg, flags=re.DOTALL)
    svg = re.sub(r"terminal-\d+", "terminal", svg).replace("Fira Code", "DejaVu Sans Mono, Menlo, Consolas")
    file.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
    print(f"made {file}")


def look(job: RunningJob) -> Feed:
    """Follow the job until it has a straggler, and for some seconds more."""
    feed = Feed(job)
    for _ in range(LOOKS):
        feed.update()
        time.sleep(INTERVAL_S)
    return feed


def made_up() -> View:
    """Return a view of a job with 4,096 ranks, one of which sleeps while the others wait in a call."""
    now, group = 1000.0, f"0-{RANKS - 1}"
    programs = {1: ProgramInfo("train_step", "", "")}

    def flight(rank: int) -> Flight:
        made = DispatchedCall(now - 12.4, group, 1203, 1, 1, 1)
        pending = PendingCall(group, 1204, 1, 1, now - 12.3) if rank != LATE else None
        return Flight(EVERY_CALL, pending=pending, calls=(made,), call_counts={group: 1203}, programs=programs)

    def vitals(rank: int, time: float) -> RankReply:
        wait = "hrtimer_nanosleep" if rank == LATE else "futex_wait_queue"
        busy = 0.2 if rank == LATE else 1.0
        return RankReply(
            rank,
            time=time,
            kernel_wait=wait,
            cpu_seconds=time * busy,
            memory_bytes=3 * 2**30 + rank * 2**16,
            gpu_percent=0.0 if rank == LATE else 100.0,
            gpu_bytes=61 * 2**30,
        )

    ranks = range(RANKS)
    hosts = {rank: f"gpu{rank // PER_HOST:03}" for rank in ranks}
    flights = {rank: flight(rank) for rank in ranks}
    then, here = (
        Overview(at, "running", hosts, tuple(ranks), flights, {rank: vitals(rank, at) for rank in ranks})
        for at in (now - 1.0, now)
    )
    samples = take_samples(here, then, 0.0)
    return View(
        "1123-0402-pretrain", "running", 1, 5233.0, samples, Pace(0.0, 1, 48_210, 12.4), describe_finding(here, samples)
    )


def main(run_dir: str, docs: str) -> None:
    feed = look(find_running_job(Path(run_dir), "jaxrun top"))
    draw(feed.view(), feed.last_line, Path(docs) / "top.svg")
    lines = {LATE: "waiting for shard 88 of c4-en"}
    draw(made_up(), lambda rank: lines.get(rank, "step 1203  loss 2.418"), Path(docs) / "top-4096.svg")


main(*sys.argv[1:])
