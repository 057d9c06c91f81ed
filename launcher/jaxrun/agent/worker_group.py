"""The workers of one host, from the request to start them until each has a process."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from jaxrun.agent.spawn import ForkRequest, Spawner
from jaxrun.agent.worker_process import WorkerProcess
from jaxrun.forkserver.client import ForkServer
from jaxrun.head.events import Event
from jaxrun.job.plan import Plan
from jaxrun.protocol.agent_messages import StartFailed, WorkerSpawned
from jaxrun.protocol.worker_messages import ForkDeclined, WorkerForked

_CONCURRENT_FORKS = 16  # forks asked for at a time: what the server's socket surely holds while it still imports jax


class WorkerGroup:
    """Children by rank, started by forking where the plan says so; afresh else, or where that is declined."""

    def __init__(
        self,
        plan: Plan,
        spawner: Spawner,
        server: ForkServer | None = None,
        forked: Callable[[int], None] = lambda pid: None,
    ) -> None:
        """`server`, if there is one, has been started for this plan; `forked` is told of each process it has made."""
        self._plan = plan
        self._spawner = spawner
        self._fork_server = server
        self._on_forked = forked
        self._requests: deque[ForkRequest] = deque()
        self._workers: dict[int, WorkerProcess] = {}
        self.declined = ""

    def __getitem__(self, rank: int) -> WorkerProcess:
        return self._workers[rank]

    def __iter__(self) -> Iterator[WorkerProcess]:
        return iter(self._workers.values())

    @property
    def fork_server(self) -> ForkServer | None:
        """The process that imports jax for all of them, as long as it is needed."""
        return self._fork_server

    def start(self) -> list[Event]:
        """Start the workers, or ask the fork server for them."""
        if self._fork_server is None:
            return self.start_fresh()
        try:
            for worker in self._plan.workers:
                lines, request = self._spawner.fork_request(worker)
                self._workers[worker.rank] = WorkerProcess(worker.rank, lines)
                self._requests.append(request)
        except OSError as error:
            self._close_fork_server()
            return [self._cannot_start(worker.rank, error)]
        self._send_requests(_CONCURRENT_FORKS)
        return []

    def receive_forked(self) -> list[Event]:
        """Take the fork server's answers. Once `declined` says why not: forget the children, start afresh."""
        assert self._fork_server is not None
        events: list[Event] = []
        for answer in self._fork_server.receive():
            if self._fork_server is not None:  # else an answer before has settled everything
                events += self._on_answer(answer)
        return events

    def start_fresh(self) -> list[Event]:
        """Start every worker in an interpreter of its own, in place of those that were asked for."""
        for child in self:
            child.close()
        self._workers.clear()
        events: list[Event] = []
        for worker in self._plan.workers:
            try:
                pid, lines = self._spawner.spawn(worker)
            except OSError as error:
                return [*events, self._cannot_start(worker.rank, error)]
            self._workers[worker.rank] = WorkerProcess(worker.rank, lines, pid)
            events.append(WorkerSpawned(worker.rank, pid))
        return events

    def close(self) -> None:
        self._close_fork_server()
        for child in self:
            child.close()

    def _on_answer(self, answer: WorkerForked | ForkDeclined | None) -> list[Event]:
        if isinstance(answer, WorkerForked):
            self._workers[answer.rank].pid = answer.pid
            self._on_forked(answer.pid)
            self._send_requests(1)
            if all(child.pid for child in self):
                self._close_fork_server()
            return [WorkerSpawned(answer.rank, answer.pid)]
        self._close_fork_server()
        if answer is None:
            text = "the process that imports jax for all workers has ended; --no-fork does without it"
            return [StartFailed(text)]
        if answer.traceback:
            text = f"jax could not be imported: {answer.reason}\nis it installed for {self._plan.argv[0]}?"
            return [StartFailed(text, answer.traceback)]
        self.declined = answer.reason
        return []

    def _send_requests(self, count: int) -> None:
        for _ in range(min(count, len(self._requests))):
            with contextlib.suppress(ConnectionError):  # it has gone: its channel's end will say so
                assert self._fork_server is not None
                self._fork_server.send(self._requests.popleft())

    def _cannot_start(self, rank: int, error: OSError) -> StartFailed:
        return StartFailed(f"rank {rank} could not be started: {error.strerror} ({self._plan.argv[0]})")

    def _close_fork_server(self) -> None:
        while self._requests:
            self._requests.popleft().close()
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None
