"""The workers of one host, from the request to start them until each has a process."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator

from jaxrun.agent.child import Child
from jaxrun.agent.forkserver import ForkServer
from jaxrun.agent.spawn import ForkRequest, Spawner
from jaxrun.contract import ForkDeclined, Forked
from jaxrun.head.events import Event, Spawned, Unavailable
from jaxrun.planning.plan import Plan

_ABREAST = 16  # forks asked for at a time: what the server's socket surely holds while it still imports jax


class Crew:
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
        self._server = server
        self._forked = forked
        self._requests: deque[ForkRequest] = deque()
        self._children: dict[int, Child] = {}
        self.declined = ""

    def __getitem__(self, rank: int) -> Child:
        return self._children[rank]

    def __iter__(self) -> Iterator[Child]:
        return iter(self._children.values())

    @property
    def server(self) -> ForkServer | None:
        """The process that imports jax for all of them, as long as it is needed."""
        return self._server

    def start(self) -> list[Event]:
        """Start the workers, or ask the fork server for them."""
        if self._server is None:
            return self.start_afresh()
        try:
            for worker in self._plan.workers:
                lines, request = self._spawner.fork_request(worker)
                self._children[worker.rank] = Child(worker.rank, lines)
                self._requests.append(request)
        except OSError as error:
            self._let_server_go()
            return [self._cannot_start(worker.rank, error)]
        self._ask(_ABREAST)
        return []

    def hear_server(self) -> list[Event]:
        """Take the fork server's answers. Once `declined` says why not: forget the children, start afresh."""
        assert self._server is not None
        events: list[Event] = []
        for answer in self._server.receive():
            if self._server is not None:  # else an answer before has settled everything
                events += self._on_answer(answer)
        return events

    def start_afresh(self) -> list[Event]:
        """Start every worker in an interpreter of its own, in place of those that were asked for."""
        for child in self:
            child.close()
        self._children.clear()
        events: list[Event] = []
        for worker in self._plan.workers:
            try:
                pid, lines = self._spawner.fresh(worker)
            except OSError as error:
                return [*events, self._cannot_start(worker.rank, error)]
            self._children[worker.rank] = Child(worker.rank, lines, pid)
            events.append(Spawned(worker.rank, pid))
        return events

    def close(self) -> None:
        self._let_server_go()
        for child in self:
            child.close()

    def _on_answer(self, answer: Forked | ForkDeclined | None) -> list[Event]:
        if isinstance(answer, Forked):
            self._children[answer.rank].pid = answer.pid
            self._forked(answer.pid)
            self._ask(1)
            if all(child.pid for child in self):
                self._let_server_go()
            return [Spawned(answer.rank, answer.pid)]
        self._let_server_go()
        if answer is None:
            text = "the process that imports jax for all workers has ended; --no-fork does without it"
            return [Unavailable(text)]
        if answer.traceback:
            text = f"jax could not be imported: {answer.reason}\nis it installed for {self._plan.argv[0]}?"
            return [Unavailable(text, answer.traceback)]
        self.declined = answer.reason
        return []

    def _ask(self, count: int) -> None:
        for _ in range(min(count, len(self._requests))):
            with contextlib.suppress(ConnectionError):  # it has gone: its channel's end will say so
                assert self._server is not None
                self._server.send(self._requests.popleft())

    def _cannot_start(self, rank: int, error: OSError) -> Unavailable:
        return Unavailable(f"rank {rank} could not be started: {error.strerror} ({self._plan.argv[0]})")

    def _let_server_go(self) -> None:
        while self._requests:
            self._requests.popleft().close()
        if self._server is not None:
            self._server.channel.close()
            self._server = None
