"""The workers of one host, from the request to start them until each has a process."""

from __future__ import annotations

from collections.abc import Iterator

from .child import Child
from .contract import ForkDeclined
from .events import Event, Spawned, Unavailable
from .plan import Plan
from .spawn import ForkServer, Spawner


class Crew:
    """Children by rank. Started by forking where the plan says so, else, or where that is declined, afresh."""

    def __init__(self, plan: Plan, spawner: Spawner) -> None:
        self._plan = plan
        self._spawner = spawner
        self._server: ForkServer | None = None
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

    def begin(self) -> None:
        """Start the import of jax, if one process does it for all: everything else can happen in its shadow."""
        if self._plan.fork:
            self._server = self._spawner.fork_server()

    def start(self) -> list[Event]:
        """Start the workers, or ask the fork server for them."""
        if self._server is None:
            return self.start_afresh()
        for worker in self._plan.workers:
            self._children[worker.rank] = Child(worker.rank, self._spawner.fork(self._server, worker))
        return []

    def hear_server(self) -> list[Event]:
        """Take the fork server's next answer. If it is no, `declined` says why: forget the children and start afresh."""
        assert self._server is not None
        answer = self._server.receive()
        if isinstance(answer, ForkDeclined):
            self._let_server_go()
            if not answer.traceback:
                self.declined = answer.reason
                return []
            text = f"jax could not be imported: {answer.reason}\nis it installed for {self._plan.argv[0]}?"
            return [Unavailable(text, answer.traceback)]
        if answer is None:
            self._let_server_go()
            return [Unavailable("the process that imports jax for all workers has ended; --no-fork does without it")]
        self._children[answer.rank].pid = answer.pid
        if all(child.pid for child in self):
            self._let_server_go()
        return [Spawned(answer.rank, answer.pid)]

    def close(self) -> None:
        self._let_server_go()
        for child in self:
            child.close()

    def start_afresh(self) -> list[Event]:
        """Start every worker in an interpreter of its own, in place of those that were asked for."""
        for child in self:
            child.close()
        events: list[Event] = []
        for worker in self._plan.workers:
            pid, lines = self._spawner.fresh(worker)
            self._children[worker.rank] = Child(worker.rank, lines, pid)
            events.append(Spawned(worker.rank, pid))
        return events

    def _let_server_go(self) -> None:
        if self._server is not None:
            self._server.channel.close()
            self._server = None
