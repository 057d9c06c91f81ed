"""Takes snapshots of the workers of one host: Python stacks, C frames, CPU time, output, flight recorders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxrun.agent.worker_group import WorkerGroup
from jaxrun.head.actions import TakeSnapshot
from jaxrun.output.drain import OutputSink
from jaxrun.protocol.env import STACKS_SIGNAL
from jaxrun.protocol.snapshot_messages import SnapshotPurpose, SnapshotReply

if TYPE_CHECKING:
    from jaxrun.agent.pyspy import NativeDump

_FAULT_HANDLER_WAIT_S = 0.1  # fault handlers answer within some milliseconds


class SnapshotReader:
    """Takes the snapshots that are requested, several at a time if need be. `clock` returns seconds since the epoch."""

    def __init__(self, workers: WorkerGroup, output: OutputSink, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._output = output
        self._clock = clock
        self._waiting: list[tuple[float, TakeSnapshot]] = []  # for fault handlers, until that time
        self._native_dumps: list[tuple[SnapshotReply, NativeDump]] = []

    def request(self, request: TakeSnapshot) -> list[SnapshotReply]:
        """Begin a snapshot; one without stacks is returned at once, any other by `poll`."""
        if request.purpose.recorders_only:
            return [self._read_recorders(request)]
        if request.purpose is SnapshotPurpose.PROGRESS:
            return [self._read_progress(request)]
        for rank in request.ranks:
            self._workers[rank].read_new_stacks()
            self._workers[rank].signal(STACKS_SIGNAL)
        self._waiting.append((self._clock() + _FAULT_HANDLER_WAIT_S, request))
        return []

    def deadline(self) -> float | None:
        """When `poll` is to be called at the latest."""
        times = [*(at for at, _ in self._waiting), *(dump.deadline for _, dump in self._native_dumps)]
        return min(times, default=None)

    def poll(self) -> list[SnapshotReply]:
        """Return the snapshots that are complete. To be called at the `deadline`, and when a child has ended."""
        now = self._clock()
        complete: list[SnapshotReply] = []
        for at, request in [item for item in self._waiting if item[0] <= now]:
            self._waiting.remove((at, request))
            reply = self._read_stacks(request)
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
        for _, dump in self._native_dumps:
            dump.close()

    def _start_native_dump(self, request: TakeSnapshot) -> NativeDump:
        from jaxrun.agent import pyspy  # rarely wanted, and slow to import

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
            bytes_written={worker.rank: self._output.bytes_written(worker.rank) for worker in workers},
            file_bytes={worker.rank: worker.file_bytes() for worker in workers},
            call_counters={worker.rank: worker.flight.progress_counters() for worker in workers},
        )

    def _read_recorders(self, request: TakeSnapshot) -> SnapshotReply:
        readers = {rank: self._workers[rank].flight for rank in request.ranks}
        whole = request.purpose is SnapshotPurpose.HISTORY
        flights = {rank: reader.history() if whole else reader.brief() for rank, reader in readers.items()}
        return SnapshotReply(request.purpose, {}, {}, {}, flights=flights)
