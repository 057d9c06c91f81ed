"""Takes snapshots of the workers of one host: Python stacks, C frames, CPU time, output, flight recorders."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxrun.analysis.diagnosis.stacks import AIM_TIMEOUT_S
from jaxrun.analysis.lockstep.call_aim import next_moment, was_at
from jaxrun.node.agent.gpus import GpuWatch
from jaxrun.node.agent.worker_group import WorkerGroup
from jaxrun.protocol.env import STACKS_SIGNAL
from jaxrun.protocol.snapshot_messages import RankVitals, SnapshotPurpose, SnapshotReply
from jaxrun.records.event_log.actions import TakeSnapshot
from jaxrun.records.output.drain import OutputSink

if TYPE_CHECKING:
    from jaxrun.node.agent.pyspy import NativeDump

_ANY_MOMENT_S = 0.1  # within which a moment is chosen by chance
_FAULT_HANDLER_WAIT_S = 0.1  # fault handlers answer within some milliseconds


class SnapshotReader:
    """Takes the snapshots that are requested, several at a time if need be. `clock` returns seconds since the epoch."""

    def __init__(self, workers: WorkerGroup, output: OutputSink, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._output = output
        self._clock = clock
        self._aimed: list[tuple[float, TakeSnapshot]] = []  # to be begun at that time
        self._waiting: list[tuple[float, TakeSnapshot]] = []  # for fault handlers, until that time
        self._asked: dict[int, tuple[float, str]] = {}  # by rank, when, on its clock, and in what its kernel waited
        self._native_dumps: list[tuple[SnapshotReply, NativeDump]] = []
        self._gpus = GpuWatch(workers.plan)

    def request(self, request: TakeSnapshot) -> list[SnapshotReply]:
        """Begin a snapshot; one without stacks is returned at once, any other by `poll`."""
        if request.purpose.recorders_only:
            return [self._read_recorders(request)]
        if request.purpose is SnapshotPurpose.PROGRESS:
            return [self._read_progress(request)]
        if request.purpose is SnapshotPurpose.OVERVIEW:
            return [self._read_vitals(request)]
        if request.purpose is SnapshotPurpose.STRAGGLER:
            return self._aim(request)
        self._ask_for_stacks(request)
        return []

    def deadline(self) -> float | None:
        """When `poll` is to be called at the latest."""
        times = [*(at for at, _ in (*self._aimed, *self._waiting)), *(dump.deadline for _, dump in self._native_dumps)]
        return min(times, default=None)

    def poll(self) -> list[SnapshotReply]:
        """Return the snapshots that are complete. To be called at the `deadline`, and when a child has ended."""
        now = self._clock()
        complete: list[SnapshotReply] = []
        for at, request in [item for item in self._aimed if item[0] <= now]:
            self._aimed.remove((at, request))
            self._ask_for_stacks(request)
        for at, request in [item for item in self._waiting if item[0] <= now]:
            self._waiting.remove((at, request))
            reply = self._read_stacks(request)
            if request.purpose is SnapshotPurpose.STRAGGLER:
                reply = self._keep_hits(request, reply)
            if request.purpose is SnapshotPurpose.NATIVE:
                self._native_dumps.append((reply, self._start_native_dump(request)))
            else:
                complete.append(reply)
        for reply, dump in tuple(self._native_dumps):
            dump.poll(now)
            if dump.done:
                self._native_dumps.remove((reply, dump))
                complete.append(replace(reply, native_stacks=dump.texts))
        return complete

    def close(self) -> None:
        self._gpus.close()
        for _, dump in self._native_dumps:
            dump.close()

    def _ask_for_stacks(self, request: TakeSnapshot) -> None:
        for rank in request.ranks:
            self._workers[rank].read_new_stacks()
            self._asked[rank] = time.time(), self._workers[rank].kernel_wait()
            self._workers[rank].signal(STACKS_SIGNAL)
        self._waiting.append((self._clock() + _FAULT_HANDLER_WAIT_S, request))

    def _aim(self, request: TakeSnapshot) -> list[SnapshotReply]:
        """Begin a snapshot of one rank at the moment that is meant."""
        (rank,), aim, now = request.ranks, request.aim, time.time()
        assert aim is not None
        flight = self._workers[rank].flight.brief()
        wait_s = random.uniform(0.0, _ANY_MOMENT_S)
        if aim.site:
            wait_s = next_moment(flight, aim.site, aim.lead_s, now) - now
        if wait_s > AIM_TIMEOUT_S:
            return [SnapshotReply(request.purpose, {rank: ""}, {rank: ""}, {}, flights={rank: flight})]
        self._aimed.append((self._clock() + wait_s, request))
        return []

    def _keep_hits(self, request: TakeSnapshot, reply: SnapshotReply) -> SnapshotReply:
        """Empty the stacks that were not taken at the moment that was meant."""
        (rank,), aim = request.ranks, request.aim
        assert aim is not None
        moment, kernel_wait = self._asked[rank]
        is_hit = not aim.site or was_at(reply.flights[rank], aim.site, aim.lead_s, moment)
        return replace(reply, stacks=reply.stacks if is_hit else {rank: ""}, kernel_waits={rank: kernel_wait})

    def _start_native_dump(self, request: TakeSnapshot) -> NativeDump:
        from jaxrun.node.agent import pyspy  # rarely wanted, and slow to import

        workers = (self._workers[rank] for rank in request.ranks)
        targets = (pyspy.Target(worker.rank, worker.pid, worker.stopped) for worker in workers if worker.live)
        return pyspy.NativeDump(targets, self._clock())

    def _read_stacks(self, request: TakeSnapshot) -> SnapshotReply:
        workers = [self._workers[rank] for rank in request.ranks]
        return replace(
            self._read_progress(request),
            stacks={worker.rank: worker.read_new_stacks() for worker in workers},
            kernel_waits={worker.rank: worker.kernel_wait() for worker in workers},
            flights={worker.rank: worker.flight.brief() for worker in workers},
        )

    def _read_progress(self, request: TakeSnapshot) -> SnapshotReply:
        """What can be read without a signal to the workers."""
        workers = [self._workers[rank] for rank in request.ranks]
        return SnapshotReply(
            request.purpose,
            stacks={},
            kernel_waits={},
            cpu_seconds={worker.rank: worker.cpu_seconds() for worker in workers},
            bytes_written={worker.rank: self._output.logs.bytes_written(worker.rank) for worker in workers},
            file_bytes={worker.rank: worker.file_bytes() for worker in workers},
            call_counters={worker.rank: worker.flight.progress_counters() for worker in workers},
        )

    def _read_vitals(self, request: TakeSnapshot) -> SnapshotReply:
        """What every process may know of others, and how far the flight recorders say that they have come."""
        workers = [self._workers[rank] for rank in request.ranks]
        gpus = self._gpus.load_by_rank()
        vitals = {
            worker.rank: RankVitals(
                time.time(),
                worker.cpu_seconds(),
                worker.memory_bytes(),
                worker.kernel_wait(),
                *gpus.get(worker.rank, ()),
            )
            for worker in workers
        }
        flights = {worker.rank: worker.flight.position() for worker in workers}
        return SnapshotReply(request.purpose, {}, {}, {}, flights=flights, vitals=vitals)

    def _read_recorders(self, request: TakeSnapshot) -> SnapshotReply:
        readers = {rank: self._workers[rank].flight for rank in request.ranks}
        whole = request.purpose is SnapshotPurpose.HISTORY
        flights = {rank: reader.history() if whole else reader.brief() for rank, reader in readers.items()}
        timed = readers if request.purpose is SnapshotPurpose.LOCKSTEP else ()
        waits = {rank: self._workers[rank].core_wait_seconds() for rank in timed}
        return SnapshotReply(request.purpose, {}, {}, {}, flights=flights, core_waits=waits)
