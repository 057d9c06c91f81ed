"""Silence: how soon a host that is cut off is lost, on both sides, and whether a short disturbance counts as a loss.

Jobs have three ranks, one on each host of a testbed. When the link of a host is taken down for good, we measure the
seconds until the head reports the loss, and until the agent that is cut off has killed its worker. The same host is
disturbed in ways that must not end the job. Needs root (scripts/testbed) and the engines (scripts/engines).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from _bench import ROOT, Bench, Outcome, grouped, progress, shown, table

sys.path[:0] = [str(ROOT / "tests/cluster"), str(ROOT / "tests/process"), str(ROOT / "scripts/testbed.d")]

import hosts  # noqa: E402
from cluster_fixture import READY, RUNS, Bed, Job, JobRunner  # noqa: E402
from harness import is_alive  # noqa: E402
from kills import testbed  # noqa: E402
from launch_modes import LAUNCHED, OPEN_MPI_5, SLURM, LaunchMode  # noqa: E402
from links import BRIDGE  # noqa: E402
from state import CONTROLLER, Place  # noqa: E402

MODES = (LaunchMode(OPEN_MPI_5, LAUNCHED), LaunchMode(SLURM, LAUNCHED))
HOST, RANK = "h2", 1
PAUSE_S = 3.0  # after a disturbance, until everything is as before
STANDSTILL_S, STOPPED_S, LOADED_S, LOAD = 1.0, 5.0, 2.0, 50


@dataclass(frozen=True)
class Sample:
    """One disturbance of a host. `head`, `agent`: seconds until either side noticed the loss, if the host was lost.

    took:   how long it was disturbed, in seconds
    alarm:  why the job ended, though its host was not lost
    """

    engine: str
    kind: str
    load: float
    took: float
    head: float | None = None
    agent: float | None = None
    alarm: str = ""


class Link:
    """The link of the host, at the bridge's end."""

    def __init__(self, bed: Bed) -> None:
        self._place = Place(bed.root)
        keeper = hosts.keeper(self._place, CONTROLLER)
        assert keeper is not None
        self._enter = ("nsenter", f"--target={keeper.pid}", "--net", "ip", "link", "set", HOST)

    def set(self, *words: str) -> None:
        subprocess.run([*self._enter, *words], check=True)

    def processes(self) -> list[int]:
        return [process.pid for process in hosts.members(self._place, HOST)]


def stop_agent(job: Job, link: Link) -> None:
    with stopped([job.agent(RANK)]):
        time.sleep(STOPPED_S)


def load_host(job: Job, link: Link) -> None:
    loop = f"for i in $(seq {LOAD}); do timeout {LOADED_S:g} sh -c 'while :; do :; done' & done; wait"
    job.bed.inside(HOST, "sh", "-c", loop)


def cut_link(job: Job, link: Link) -> None:
    """Cut the link as if a cable were pulled: the host forgets its neighbours' addresses, too."""
    link.set("down")
    time.sleep(STANDSTILL_S)
    link.set("up")


def drop_packets(job: Job, link: Link) -> None:
    """Drop packets as an overloaded or restarting switch does: the host does not notice."""
    link.set("nomaster")
    time.sleep(STANDSTILL_S)
    link.set("master", BRIDGE)


def stand_still(job: Job, link: Link) -> None:
    """Stop the host like a virtual machine that gets no processor: neither its processes nor its kernel run."""
    with stopped(link.processes()):
        drop_packets(job, link)


KINDS: dict[str, Callable[[Job, Link], None]] = {
    f"agent stopped {STOPPED_S:g} s": stop_agent,
    f"load {LOAD} for {LOADED_S:g} s": load_host,
    f"link cut {STANDSTILL_S:g} s": cut_link,
    f"packets dropped {STANDSTILL_S:g} s": drop_packets,
    f"standstill {STANDSTILL_S:g} s": stand_still,
}
LOST = "lost"


@contextmanager
def stopped(pids: Sequence[int]) -> Iterator[None]:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextmanager
def started(bed: Bed, mode: LaunchMode, options: Sequence[str]) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as name:
        with JobRunner(bed, mode, Path(name)).by_hand(*options, code=RUNS + READY) as job:
            job.wait_for_output("ready")
            time.sleep(PAUSE_S * random.uniform(0.6, 1.0))
            yield job


def lose(bed: Bed, mode: LaunchMode, options: Sequence[str]) -> Sample:
    link = Link(bed)
    with started(bed, mode, options) as job:
        own = set(link.processes())
        (worker,) = (pid for pid in job.workers() if pid in own)
        load, began = os.getloadavg()[0], time.time()
        link.set("down")
        try:
            while is_alive(worker):
                time.sleep(0.005)
            killed = time.time() - began
            result = job.result()
        finally:
            link.set("up")
        (first, *_) = result.events("AgentLost")
    bed.end_slurmd(HOST)
    bed.run("up")
    alarm = "" if first["agent"] == RANK else f"agent {first['agent']} counts as lost: {first['reason']}"
    return Sample(mode.engine.label, LOST, load, killed, first["logged"] - began, killed, alarm)


def disturb(bed: Bed, mode: LaunchMode, kind: str, rounds: int, options: Sequence[str]) -> Iterator[Sample]:
    """Disturb a host `rounds` times, in one job for as long as it lives."""
    while rounds:
        with started(bed, mode, options) as job:
            alarm = ""
            while rounds and not alarm:
                load, began = os.getloadavg()[0], time.monotonic()
                KINDS[kind](job, Link(bed))
                took = time.monotonic() - began
                time.sleep(PAUSE_S * random.uniform(0.6, 1.0))
                lost = job.result(timeout=0).events("AgentLost")
                ended = job.process.poll() is not None or lost
                alarm = str(lost[:1] or job.result(timeout=0).err[-300:]) if ended else ""
                rounds -= 1
                yield Sample(mode.engine.label, kind, load, took, alarm=alarm)


def render(samples: Sequence[Sample]) -> str:
    rows = []
    for (engine, kind), group in grouped(samples, lambda one: (one.engine, one.kind)).items():
        sides = [[value for one in group if (value := getattr(one, side)) is not None] for side in ("head", "agent")]
        medians = [shown(statistics.median(values) if values else None) for values in sides]
        most = [shown(max(values, default=None)) for values in sides]
        loads = f"{min(one.load for one in group):.0f}-{max(one.load for one in group):.0f}"
        took = f"{min(one.took for one in group):.2f}-{max(one.took for one in group):.2f}"
        alarms = str(sum(bool(one.alarm) for one in group))
        rows.append((engine, kind, str(len(group)), alarms, *medians, *most, took, loads))
    header = ("engine", "host", "times", "alarms", "head s", "agent s", "most", "most", "took s", "load")
    return table(header, rows, left=2)


def run(options: argparse.Namespace) -> Outcome:
    samples: list[Sample] = []
    words = ("--host-timeout", options.host_timeout) if options.host_timeout else ()
    with testbed() as bed:
        for mode in (one for one in MODES if one.engine.label.startswith(options.only)):
            for kind in (one for one in (LOST, *KINDS) if one.startswith(options.kind)):
                if kind == LOST:
                    samples += (lose(bed, mode, words) for _ in range(options.rounds // 2))
                else:
                    samples += disturb(bed, mode, kind, options.rounds, words)
                progress(render(samples))
    wrong = [
        f"{one.engine}, {one.kind}, load {one.load:.0f}, {one.took:.2f} s: {one.alarm}" for one in samples if one.alarm
    ]
    return Outcome(render(samples), samples, wrong)


if __name__ == "__main__":
    bench = Bench("silence", __doc__, rounds=20)
    bench.add_option("--only", metavar="TEXT", default="", help="the engine whose name begins so")
    bench.add_option("--kind", metavar="TEXT", default="", help="the disturbances whose name in the table begins so")
    bench.add_option("--host-timeout", metavar="S", default="", help="as jaxrun has it")
    sys.exit(bench.main(run))
