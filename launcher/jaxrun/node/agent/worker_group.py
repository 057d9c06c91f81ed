"""The workers of one host, from the request to start them until each has a process."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from jaxrun.errors import describe_failed_import
from jaxrun.files.shared_memory import (
    hold_directory,
    remove_abandoned,
    remove_shared_directory,
    shared_directory,
    snapshot_directory,
)
from jaxrun.node.agent import spawn
from jaxrun.node.agent.spawn import WorkerEnds, WorkerSetup
from jaxrun.node.agent.worker_process import WorkerProcess
from jaxrun.node.forkserver import prestart
from jaxrun.node.forkserver.client import ForkServer
from jaxrun.protocol.agent_messages import StartFailed, WorkerEvent, WorkerSpawned
from jaxrun.protocol.env import WorkerEnv
from jaxrun.protocol.forkserver_messages import Preloaded, WorkerForked

if TYPE_CHECKING:
    from jaxrun.node.forkserver.client import Answer

_CONCURRENT_FORKS = 16  # requests that the fork server's socket surely holds while it still imports jax


class WorkerGroup:
    """Workers by rank: forked where there is a fork server, unless it declines; else in fresh interpreters."""

    def __init__(
        self,
        setup: WorkerSetup,
        fork_server: ForkServer | None = None,
        on_forked: Callable[[int], None] | None = None,
        *,
        keep_server: bool = False,
    ) -> None:
        """`fork_server` was started for this set-up, if it exists; `on_forked` is called with the pid of each fork.

        keep_server:  the server stays for another attempt: its owner closes it
        """
        self.setup = setup
        self._fork_server = fork_server
        self._on_forked = on_forked
        self._keep_server = keep_server
        self._kept = fork_server if keep_server else None
        self._requests: deque[tuple[bytes, WorkerEnds]] = deque()
        self._workers: dict[int, WorkerProcess] = {}
        self._have_started = False  # each was forked once
        self.declined = ""  # why the fork server does not fork

    def __getitem__(self, rank: int) -> WorkerProcess:
        return self._workers[rank]

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(self._workers.values())

    @property
    def ranks(self) -> Collection[int]:
        """The ranks that have a worker, or will have one soon; not a rank whose worker could not be started."""
        return self._workers.keys()

    @property
    def fork_server(self) -> ForkServer | None:
        """The process that imports jax for all workers, as long as it is needed."""
        return self._fork_server

    def start(self) -> list[WorkerEvent]:
        """Start the workers, or ask the fork server for them; returns what the head is to know of it."""
        self.hold_snapshots()
        events = self._start()
        for job_id in {worker.job_id for worker in self.setup.workers}:
            remove_abandoned(job_id)
        return events

    def _start(self) -> list[WorkerEvent]:
        if self._fork_server is None:
            return self._start_fresh(self.setup.workers)
        try:
            for worker in self.setup.workers:
                pipes, message, ends = spawn.fork_request(self.setup, worker)
                self._workers[worker.rank] = WorkerProcess(worker.rank, pipes)
                self._requests.append((message, ends))
        except OSError as error:
            self._close_fork_server()
            return [self._start_failed(worker.rank, error)]
        if self._keep_server:
            with contextlib.suppress(OSError):  # it has gone: the end of its channel will say so
                self._fork_server.begin_attempt(len(self.setup.workers))
        self._send_requests(_CONCURRENT_FORKS)
        return []

    def start_again(self, rank: int) -> list[WorkerEvent]:
        """Start the worker of this rank again, as `start` does; its process has ended, and its pipes are read."""
        worker = next(each for each in self.setup.workers if each.rank == rank)
        self._workers.pop(rank).pipes.close()
        server = self._fork_server or self._kept
        if server is None or server.closed or server.has_gone:
            return self._start_one(worker)
        try:
            pipes, message, ends = spawn.fork_request(self.setup, worker)
        except OSError as error:
            return [self._start_failed(rank, error)]
        self._workers[rank] = WorkerProcess(rank, pipes)
        self._fork_server = server
        self._requests.append((message, ends))
        with contextlib.suppress(OSError):  # it has gone: the end of its channel will say so
            server.begin_attempt(1)
        self._send_requests(1)
        return []

    def receive_forked(self) -> list[WorkerEvent | Preloaded]:
        """Handle the answers of the fork server. If they set `declined`, `start_fresh` must replace those `waiting`."""
        assert self._fork_server is not None
        events: list[WorkerEvent | Preloaded] = []
        for answer in self._fork_server.receive():
            if self._fork_server is not None:  # else an answer before has settled everything
                events += self._on_answer(answer)
        return events

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks for whose workers the fork server was asked, and which have no process yet."""
        return tuple(process.rank for process in self if not process.pid)

    def start_fresh(self) -> list[WorkerEvent]:
        """Start those that are `waiting` in interpreters of their own."""
        waiting = self.waiting
        for rank in waiting:
            self._workers.pop(rank).pipes.close()
        return self._start_fresh(worker for worker in self.setup.workers if worker.rank in waiting)

    def _start_fresh(self, workers: Iterable[WorkerEnv]) -> list[WorkerEvent]:
        """Start these workers in interpreters of their own; not those after one that fails, if that ends the job."""
        events: list[WorkerEvent] = []
        for worker in workers:
            events += self._start_one(worker)
            if worker.rank not in self._workers and not self._have_started:
                break
        return events

    def _start_one(self, worker: WorkerEnv) -> list[WorkerEvent]:
        """Start one worker in an interpreter of its own; if that fails, the rank has no worker."""
        try:
            pid, pipes = spawn.spawn(self.setup, worker)
        except OSError as error:
            return [self._start_failed(worker.rank, error)]
        wrapper = pid if self.setup.wrap else 0
        self._workers[worker.rank] = WorkerProcess(worker.rank, pipes, pid, wrapper=wrapper)
        return [WorkerSpawned(worker.rank, pid)]

    def close(self) -> None:
        """Let go of the workers, which have ended, and remove what they have shared in memory."""
        self._close_fork_server()
        for process in self:
            process.pipes.close()
        for job in {(worker.job_id, worker.attempt, worker.host) for worker in self.setup.workers}:
            remove_shared_directory(shared_directory(*job))
        self.hold_snapshots()

    def hold_snapshots(self) -> None:
        """Be an owner of what the ranks leave in memory for the next attempt's ranks, if there is any. Repeatable."""
        for job_id, host in {(worker.job_id, worker.host) for worker in self.setup.workers}:
            hold_directory(snapshot_directory(job_id, host))

    def _on_answer(self, answer: Answer | None) -> list[WorkerEvent | Preloaded]:
        if isinstance(answer, WorkerForked):
            self._workers[answer.rank].pid = answer.pid
            if self._on_forked is not None:
                self._on_forked(answer.pid)
            self._send_requests(1)
            if all(process.pid for process in self):
                self._leave_fork_server()
            return [WorkerSpawned(answer.rank, answer.pid)]
        if isinstance(answer, Preloaded):
            return [answer]
        self._close_fork_server()
        if answer is not None and answer.traceback:
            text = describe_failed_import(answer.reason, self.setup.argv[0])
            return [StartFailed(text, answer.traceback, rank) for rank in self.waiting]
        reason = "the process that imports jax for all workers has ended" if answer is None else answer.reason
        if not self._have_started and len(self.waiting) < len(self._workers):  # too late for fresh interpreters
            return [StartFailed(reason, rank=rank) for rank in self.waiting]
        self.declined = reason
        return []

    def _send_requests(self, count: int) -> None:
        for _ in range(min(count, len(self._requests))):
            message, ends = self._requests.popleft()
            with contextlib.suppress(ConnectionError):  # it has gone: the end of its channel will say so
                assert self._fork_server is not None
                self._fork_server.send(message, ends.in_order())
            ends.close()

    def _start_failed(self, rank: int, error: OSError) -> StartFailed:
        return StartFailed(f"{error.strerror} ({error.filename or self.setup.argv[0]})", rank=rank)

    def _leave_fork_server(self) -> None:
        """All workers are forked: the server ends, unless it is kept."""
        self._have_started = True
        if self._keep_server:
            self._fork_server = None
        self._close_fork_server()

    def _close_fork_server(self) -> None:
        while self._requests:
            self._requests.popleft()[1].close()
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None


def _start_server(setup: WorkerSetup) -> ForkServer | None:
    """A new fork server for these workers, with what they import first; None if it cannot be started."""
    server = prestart.server_for(setup.argv, setup.environ)
    if server is not None:
        prestart.preload(server, setup.preload, setup.argv, torch_env=any(each.torch_env for each in setup.workers))
    return server


class OwnForkServer:
    """The fork server of one agent, from attempt to attempt.

    first:  was started for the first attempt
    """

    def __init__(self, first: ForkServer | None = None) -> None:
        self._server = first
        self._environ: Mapping[str, str] | None = None  # of its workers; None: of any

    @property
    def pids(self) -> tuple[int, ...]:
        """The server's process id; empty if there is none, or if it has been told to end."""
        return (self._server.pid,) if self._server is not None and not self._server.closed else ()

    def get(self, setup: WorkerSetup) -> ForkServer | None:
        """Return the server, if it lives and its workers get the environment of this set-up; or else a new one.

        None if that cannot be started.
        """
        if self._server is None or self._server.has_gone or self._environ not in (None, setup.environ):
            self.close()
            self._server = _start_server(setup)
        self._environ = setup.environ
        return self._server

    def close(self) -> None:
        """End the server. Repeatable."""
        if self._server is not None:
            self._server.close()
