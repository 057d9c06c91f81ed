"""Finds out what the workers of one host are doing: stacks, C frames, CPU time, output, flight recorders, NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.files.procfs import pid_in_namespace
from jaxrun.node.agent.child_processes import describe_children
from jaxrun.node.agent.gpus import GpuWatch
from jaxrun.node.agent.memory_watch import MemoryWatch
from jaxrun.node.agent.pipes import OutputSink
from jaxrun.node.agent.worker_group import WorkerGroup
from jaxrun.node.agent.worker_process import WorkerProcess
from jaxrun.node.channel.host_addresses import list_addresses
from jaxrun.protocol.env import FAULT_HANDLER_SIGNAL, STACKS_SIGNAL
from jaxrun.protocol.query_messages import RankDetail, RankQuery, RankReply
from jaxrun.records.output.noise import tells_of_sigterm

if TYPE_CHECKING:
    from jaxrun.node.agent.nccl_service import NcclInquiry
    from jaxrun.node.agent.pyspy import PySpy

# The signals that a worker gets for its stacks, and the seconds that each may take. It answers the first within
# milliseconds, unless C++ code holds the GIL. It gets more time (signal 0 is none) before its fault handler is asked,
# which needs no GIL.
_TRIES = ((STACKS_SIGNAL, 0.1), (0, 0.3), (FAULT_HANDLER_SIGNAL, 0.1))


class _StacksRequest(Struct):
    """A worker's answer that is read at `due`, for all queries that have come by then.

    time, kernel_wait:  when the worker was signalled, and the kernel function in which its main thread slept then
    """

    time: float
    kernel_wait: str
    queries: list[RankQuery]
    tries: Iterator[tuple[int, float]] = field(default_factory=lambda: iter(_TRIES))
    due: float = 0.0


class WorkerInspector:
    """Answers the queries of the head. `clock` returns seconds since the epoch."""

    def __init__(
        self, workers: WorkerGroup, output: OutputSink, memory: MemoryWatch, clock: Callable[[], float]
    ) -> None:
        self._workers = workers
        self._memory = memory
        self._output = output
        self._clock = clock
        self._requested: dict[int, _StacksRequest] = {}  # by rank
        self._native: list[tuple[RankReply, PySpy]] = []
        self._inquiries: list[tuple[RankReply, NcclInquiry]] = []
        self._gpus = GpuWatch(workers.setup)

    def request(self, rank: int, query: RankQuery) -> list[RankReply]:
        """Begin to answer a query; `poll` returns stacks and NCCL's report, other replies are returned at once."""
        worker = self._workers[rank]
        match query.detail:
            case RankDetail.PROGRESS:
                return [self._read_progress(worker, query)]
            case RankDetail.VITALS:
                return [self._read_vitals(worker, query)]
            case RankDetail.CALLS:
                wait_s = worker.core_wait_seconds()
                return [RankReply(rank, query.number, time.time(), core_wait_s=wait_s, flight=worker.flight.brief())]
            case RankDetail.HISTORY:
                return [RankReply(rank, query.number, time.time(), flight=worker.flight.history())]
            case RankDetail.IDENTITY:
                pid, addresses = pid_in_namespace(worker.pid), tuple(address.ip for address in list_addresses())
                return [RankReply(rank, query.number, time.time(), own_pid=pid, addresses=addresses)]
            case RankDetail.SIGTERM:
                got_sigterm = tells_of_sigterm(self._output.logs.stderr_tail(rank))
                return [RankReply(rank, query.number, time.time(), got_sigterm=got_sigterm)]
            case RankDetail.NCCL | RankDetail.NCCL_AT_END:
                self._begin_inquiry(worker, query)
                return self._poll_inquiries(self._clock())
        self._request_stacks(worker, query)
        return [] if worker.live else self.poll()

    def deadline(self) -> float | None:
        """The latest time at which to call `poll`."""
        times = [request.due for request in self._requested.values()] + [dump.deadline for _, dump in self._native]
        return min((*times, *(inquiry.due for _, inquiry in self._inquiries)), default=None)

    def poll(self) -> list[RankReply]:
        """Return the replies that are complete.

        Call it at the `deadline`, when a child has ended, and when a worker has ended, before another process can get
        its rank: the signals for stacks are for the process that was asked.
        """
        now = self._clock()
        complete: list[RankReply] = []
        for rank in [rank for rank, one in self._requested.items() if one.due <= now or self._has_ended(rank)]:
            worker = self._workers[rank]
            stacks = worker.read_new_stacks()
            can_answer = worker.live and not worker.stopped
            if not stacks and can_answer and self._try_next(worker, self._requested[rank], now):
                continue
            for query, reply in self._reply_with_stacks(worker, self._requested.pop(rank), stacks):
                if query.detail is RankDetail.NATIVE_STACKS and worker.live:
                    from jaxrun.node.agent.pyspy import PySpy  # rarely wanted, and slow to import

                    self._native.append((reply, PySpy(worker.pid, now, stopped=worker.stopped)))
                else:
                    complete.append(reply)
        for reply, dump in [item for item in self._native if item[1].has_ended(now) or self._has_ended(item[0].rank)]:
            self._native.remove((reply, dump))
            complete.append(replace(reply, native_stacks=dump.text()))
        return [*complete, *self._poll_inquiries(now)]

    def _has_ended(self, rank: int) -> bool:
        return not self._workers[rank].live

    def _begin_inquiry(self, worker: WorkerProcess, query: RankQuery) -> None:
        from jaxrun.node.agent.nccl_service import NcclInquiry  # rarely wanted

        is_end, environ = query.detail is RankDetail.NCCL_AT_END, self._workers.setup.environ
        inquiry = NcclInquiry(worker.pid, environ, self._clock(), whatever_it_costs=is_end)
        self._inquiries.append((RankReply(worker.rank, query.number, time.time()), inquiry))

    def _poll_inquiries(self, now: float) -> list[RankReply]:
        ended = [one for one in self._inquiries if one[1].has_ended(now)]
        self._inquiries = [one for one in self._inquiries if one not in ended]
        return [replace(reply, nccl=inquiry.report()) for reply, inquiry in ended]

    def close(self) -> None:
        self._gpus.close()
        for _, inquiry in self._inquiries:
            inquiry.close()
        for _, dump in self._native:
            dump.close()

    def _request_stacks(self, worker: WorkerProcess, query: RankQuery) -> None:
        if worker.rank in self._requested:
            self._requested[worker.rank].queries.append(query)
            return
        worker.read_new_stacks()
        request = self._requested[worker.rank] = _StacksRequest(time.time(), worker.kernel_wait(), [query])
        self._try_next(worker, request, self._clock())

    def _try_next(self, worker: WorkerProcess, request: _StacksRequest, now: float) -> bool:
        """Signal the worker, and set when its answer is due; False if there is nothing more to try."""
        signum, seconds = next(request.tries, (0, 0.0))
        request.due = now + seconds
        worker.signal(signum)
        return seconds > 0

    def _reply_with_stacks(
        self, worker: WorkerProcess, request: _StacksRequest, stacks: str
    ) -> list[tuple[RankQuery, RankReply]]:
        reply = replace(
            self._read_progress(worker, request.queries[0]),
            time=request.time,
            stacks=stacks,
            kernel_wait=request.kernel_wait,
            flight=worker.flight.brief(),
            children=describe_children(worker.pid) if worker.live else (),
        )
        return [(query, replace(reply, number=query.number)) for query in request.queries]

    def _read_progress(self, worker: WorkerProcess, query: RankQuery) -> RankReply:
        """Return what can be read without a signal to the worker."""
        return RankReply(
            worker.rank,
            query.number,
            time.time(),
            cpu_seconds=worker.cpu_seconds(),
            bytes_written=self._output.logs.bytes_written(worker.rank),
            file_bytes=worker.file_bytes(),
            call_counters=worker.flight.progress_counters(),
        )

    def _read_vitals(self, worker: WorkerProcess, query: RankQuery) -> RankReply:
        """Return its use of resources, and its progress according to the flight recorder."""
        gpu_percent, gpu_bytes = self._gpus.load_by_rank().get(worker.rank, (-1.0, -1))
        host_memory, host_limit = self._memory.last()
        return RankReply(
            worker.rank,
            query.number,
            time.time(),
            kernel_wait=worker.kernel_wait(),
            cpu_seconds=worker.cpu_seconds(),
            bytes_written=self._output.logs.bytes_written(worker.rank),
            flight=worker.flight.position(),
            memory_bytes=worker.memory_bytes(),
            gpu_percent=gpu_percent,
            gpu_bytes=gpu_bytes,
            host_memory_bytes=host_memory,
            host_memory_limit_bytes=host_limit,
        )
