"""One job of a gang: its launcher, the connections to its ranks, and the ranks' properties."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.errors import JaxrunError, UnavailableError, UsageError
from jaxrun.frontends.gang.gang_errors import GangError, GangStartError, WorkerDied
from jaxrun.frontends.gang.launcher_process import LauncherProcess
from jaxrun.frontends.gang.main_imports import folder_of_main, imports_of_main
from jaxrun.frontends.gang.rank_connections import RankConnections, RankListener
from jaxrun.frontends.gang.spec import GangSpec
from jaxrun.job_client.job_requests import format_stacks, request_overview, request_stacks
from jaxrun.node.forkserver.launcher_pool import pool_for
from jaxrun.protocol.agent_messages import WorkerExited
from jaxrun.protocol.forkserver_messages import ImportedName, Preloaded
from jaxrun.protocol.gang_messages import GangMessage, GangMessageKind, pack
from jaxrun.protocol.job_messages import OrderedSignal, SignalOrder
from jaxrun.protocol.query_messages import ProcessState
from jaxrun.protocol.worker_messages import Done
from jaxrun.records.rundir.recorded_files import read_job_events
from jaxrun.spec.backends import LOCAL
from jaxrun.text import format_ranks, has_several_hosts, plural

_SHUTDOWN_TIMEOUT_S = 5.0  # for the ranks to end by themselves
_PAUSE_TIMEOUT_S = 5.0
_EXIT_POLL_S = 0.1  # between two checks of how ranks have exited
_NO_VERDICT = 2  # exit status of a launcher without a verdict: its command line was wrong


class GangWorker(Struct, frozen=True):
    """One rank of a gang; `devices` counts its own."""

    rank: int
    host: str
    pid: int
    local_rank: int
    devices: int
    platform: str


def check_start(spec: GangSpec) -> None:
    """Let the launcher plan a gang without starting it. Raises GangStartError with its output if it refuses."""
    run_dir = spec.run_dir or Path(tempfile.gettempdir(), "jaxrun-dry-run")
    words = (sys.executable, "-P", "-m", "jaxrun", "--dry-run", *spec.command_line(Path(run_dir)))
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise GangStartError(f"the gang did not start:\n{done.stderr.strip()}", done.returncode)


class GangJob:
    """A job that was started for a gang, until it is stopped; the next start makes another one.

    broken:      why the ranks can no longer be used; empty as long as they can
    interrupts:  how many interrupts were sent, so a rank can wait for those that have not arrived
    """

    def __init__(self, spec: GangSpec, run_dir: Path | None) -> None:
        """Start the job; without a `run_dir` its files are temporary.

        Raises UsageError, UnavailableError, and GangStartError with the launcher's output.
        """
        environ = dict(os.environ)
        named = spec.named_modules
        pool = pool_for({**environ, **(spec.env or {})}, with_jax=spec.may_fork, preloads=named != ())
        if spec.may_fork and named != ():
            pool.preload(imports_of_main() if named is None else map(ImportedName, named), folder_of_main())
        self.spec = spec
        self.broken = ""
        self.stopped = False
        self._stop_lock = threading.RLock()
        self.interrupts = 0
        self.shares_memory = spec.backend == LOCAL
        self._listener = RankListener(remote=not self.shares_memory, interface=spec.interface)
        try:
            run_dir = run_dir or self._listener.directory / "run"
            environ |= self._listener.environ
            self.launcher = LauncherProcess(pool, spec.command_line(run_dir, pool.modules), environ, run_dir)
        except BaseException:
            self._listener.close()
            raise
        self.connections = RankConnections(self.launcher)
        try:
            self.workers = self._accept_ranks()
            self._warn_of_left_out(set(named or ()))
        except BaseException:
            self.stop()
            raise

    def __str__(self) -> str:
        """Write `4 processes x 2 devices (cpu) on this machine`."""
        hosts = {worker.rank: worker.host for worker in self.workers}
        where = f"on {len(set(hosts.values()))} hosts" if has_several_hosts(hosts) else f"on {hosts[0]}"
        if self.spec.backend == LOCAL:
            where = f"on {plural(self.spec.hosts, 'simulated host')}" if self.spec.hosts else "on this machine"
        first = self.workers[0]
        return f"{plural(len(hosts), 'process')} x {plural(first.devices, 'device')} ({first.platform}) {where}"

    @property
    def usable(self) -> bool:
        """Whether the next call uses the same ranks."""
        return not self.broken and not self.stopped

    def mark_broken(self, reason: str) -> None:
        """Make the next call restart the gang. The first reason is kept."""
        self.broken = self.broken or reason

    def check_connections(self) -> None:
        """Notice ranks that have ended between two calls."""
        for rank, message in self.connections.poll(0):
            if message is None:
                death = str(self.explain_death(_SHUTDOWN_TIMEOUT_S, (rank,)))
                self.mark_broken(f"between two calls, {death}".partition("\n")[0])

    def pack_call(
        self, number: int, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> GangMessage:
        """Return the message that makes the ranks call `fn(*args, **kwargs)` as call `number`."""
        cells = None
        if "IPython" in sys.modules:  # outside IPython there are no cells
            from jaxrun.frontends.gang.ipython import find_sources

            cells = find_sources()
        reduce = cells.reduce if cells is not None else None
        task = pack(GangMessageKind.CALL, number, (fn, args, kwargs), share=self.shares_memory, reduce=reduce)
        note = {
            "interrupts": self.interrupts,
            "cells": cells.lines if cells is not None else {},
            "path": [os.path.abspath(entry) for entry in sys.path],
        }
        return replace(task, note=json.dumps(note).encode())

    def interrupt(self) -> None:
        self.interrupts += 1
        self.launcher.job.send(SignalOrder(OrderedSignal.SIGINT))

    def wait_until_paused(self, rank: int) -> None:
        """Wait until a signal has stopped the rank, or it has ended. Raises GangError if neither comes."""
        job, deadline = self.launcher.job, time.monotonic() + _PAUSE_TIMEOUT_S
        with contextlib.suppress(UsageError, UnavailableError):  # the job is ending; the next call reports it
            while time.monotonic() < deadline:
                overview = request_overview(job)
                vitals = overview.vitals.get(rank)
                if rank not in overview.live or (vitals and vitals.kernel_wait == ProcessState.STOPPED):
                    return
            raise GangError(f"rank {rank} was not stopped within {_PAUSE_TIMEOUT_S:g} s")

    def find_compiling(self, ranks: Collection[int]) -> list[int]:
        """Return those of the ranks in which JAX is compiling, by their flight recorders."""
        with contextlib.suppress(UsageError, UnavailableError):  # the job is ending
            flights = request_overview(self.launcher.job).flights
            return [rank for rank in ranks if rank in flights and flights[rank].compiling is not None]
        return []

    def rank_stacks(self) -> JobStacks:
        """Return where all ranks are. Raises GangError, UnavailableError or UsageError without an answer."""
        if self.stopped:
            raise GangError("their job is stopped")
        return request_stacks(self.launcher.job)

    def stacks(self, *, full: bool = False, raised: Mapping[int, str] | None = None) -> str:
        """Return the same as text, in groups; with `full`, all frames of each. `raised`: see JobStacks."""
        try:
            return format_stacks(replace(self.rank_stacks(), raised=raised or {}), full=full)
        except JaxrunError as error:
            return f"cannot find out where they are: {error}"

    def explain_death(self, timeout: float, ranks: Collection[int]) -> WorkerDied:
        """Return why `ranks` have ended; the launcher has `timeout` seconds to report it."""
        if self.stopped:
            hosts = {worker.rank: worker.host for worker in self.workers}
            return WorkerDied(f"this gang was stopped while {format_ranks(ranks)} ran", sorted(ranks), hosts, 1)
        deadline = time.monotonic() + timeout
        verdict, quiet = None, set[int]()
        while verdict is None and (left := deadline - time.monotonic()) > 0:
            was_quiet = quiet  # check again, because other ranks may be about to do the same
            has_ended = self.launcher.has_ended  # before the verdict is read: no later one comes then
            verdict, quiet = self.launcher.wait_for_verdict(min(_EXIT_POLL_S, left)), self._find_quiet_exits()
            if has_ended or was_quiet.issuperset(ranks):
                break
        if verdict is None or not verdict.headline:  # for the launcher, a rank that exits with 0 has finished
            return self._unexplained_death(ranks, quiet, launcher_failed=verdict is None and self.launcher.has_ended)
        self.launcher.wait(timeout)
        parts = (verdict.headline, verdict.means, *verdict.details, verdict.traceback, verdict.divergence)
        return WorkerDied.from_verdict(verdict, "\n".join(filter(None, parts)))

    def _warn_of_left_out(self, named: Set[str]) -> None:
        """Warn of the `named` modules that were not imported before the fork."""
        events = read_job_events(self.launcher.run_dir) if named else ()
        for preloaded in (event.message for event in events if isinstance(event.message, Preloaded)):
            for name in sorted(named & preloaded.left_out.keys()):
                warnings.warn(f"preload of a gang: {name}: {preloaded.left_out[name]}; left to its ranks", stacklevel=2)

    def _find_quiet_exits(self) -> set[int]:
        """Return the ranks that exited with status 0 while their program was still running, as the launcher saw it."""
        with contextlib.suppress(UsageError):
            messages = [event.message for event in read_job_events(self.launcher.run_dir)]
            exits = {one.rank for one in messages if isinstance(one, WorkerExited) and one.status == 0}
            return exits - {one.rank for one in messages if isinstance(one, Done)}
        return set()

    def _unexplained_death(self, ranks: Collection[int], quiet: Set[int], *, launcher_failed: bool) -> WorkerDied:
        """Return the error for `ranks` whose end no verdict explains; `quiet` are the ones with status 0.

        launcher_failed: it has ended without a verdict
        """
        hosts = {worker.rank: worker.host for worker in self.workers}
        if not quiet >= set(ranks):
            text = f"{format_ranks(ranks)} of this gang ended, and its launcher does not say why"
            if launcher_failed:
                text = "the launcher of this gang was killed or failed, and its ranks ended with it"
            return WorkerDied(f"{text}\n{self.launcher.all_output}".rstrip(), sorted(ranks), hosts, 1)
        which = f"all {len(hosts)} ranks" if len(quiet) == len(hosts) > 1 else format_ranks(quiet)
        text = (
            f"{which} of this gang ended with os._exit(0) (exit status 0, no exception), which also loses "
            "their state; a function that a gang runs should return, or raise"
        )
        return WorkerDied(text, sorted(quiet), hosts, 0)

    def shut_down(self) -> None:
        """Let the ranks end by themselves, and with them the job."""
        self.connections.send(GangMessage(GangMessageKind.SHUTDOWN, 0), self.connections.ranks)
        deadline = time.monotonic() + _SHUTDOWN_TIMEOUT_S
        while self.connections.ranks and time.monotonic() < deadline:
            self.connections.poll(deadline - time.monotonic())
        self.launcher.wait(deadline - time.monotonic())

    def stop(self) -> None:
        """Stop the rest of the job, at once. May be called again."""
        self.stopped = True
        with self._stop_lock:
            self.connections.close()
            self.launcher.stop()
            self._listener.close()

    def _accept_ranks(self) -> tuple[GangWorker, ...]:
        """Wait until all ranks have reported. Raises GangStartError if the launcher ends before."""
        workers: dict[int, GangWorker] = {}
        size = None
        self.connections.accept(self._listener.listener, expected=self.spec.processes or 0)
        while len(workers) != size:
            for rank, message in self.connections.poll(None):
                if message is None:
                    workers.pop(rank, None)  # the launcher will report the reason
                else:
                    about: dict[str, Any] = message.load()
                    size = about.pop("size")
                    workers[rank] = GangWorker(**about)
            if len(workers) != size and self.launcher.has_ended:
                raise self._start_error()
        self.connections.stop_accepting()
        self._listener.listener.close()
        self.connections.read_launcher_output()  # the job's first line
        self.launcher.forget_output()
        return tuple(workers[rank] for rank in sorted(workers))

    def _start_error(self) -> GangStartError:
        verdict = self.launcher.wait_for_verdict(0)
        code = verdict.exit_code if verdict is not None else _NO_VERDICT
        said = self.launcher.all_output or "its launcher ended silently; is the machine out of processes or memory?"
        return GangStartError(f"the gang did not start:\n{said}", code)
