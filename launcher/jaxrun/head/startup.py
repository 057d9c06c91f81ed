"""Brings the processes of a job together: all hellos, then the coordinator, then all proofs; no I/O.

hello of every rank ──▶ Lead to rank 0 ──Listening──▶ Join to the others ──▶ proof of every rank ──▶ Run

Where agents on other hosts start the workers, their reports come before all that (muster.py).
"""

from __future__ import annotations

from collections.abc import Collection

from jaxrun.errors import NotUniformError
from jaxrun.head import consistency
from jaxrun.head.actions import Action, PrintLine, Send
from jaxrun.head.agent_registry import AgentRegistry
from jaxrun.protocol.agent_messages import AgentReport
from jaxrun.protocol.worker_messages import CoordinatorReady, DeviceReport, Hello, Join, Run, StartCoordinator
from jaxrun.text import format_ranks_on_hosts


class Startup:
    """The start-up of one job; `hosts` maps each rank to its host.

    `interface` is the address of rank 0's host at which the coordinator is to listen. Both it and what is expected of
    the workers are decided by the `muster` where there is one.
    """

    def __init__(
        self, hosts: dict[int, str], expected: consistency.Expected, interface: str, muster: AgentRegistry | None = None
    ) -> None:
        self._hosts = hosts
        self._expected = expected
        self._interface = interface
        self._registry = muster
        self._hellos: dict[int, Hello] = {}
        self._proofs: dict[int, DeviceReport] = {}

    @property
    def complete(self) -> bool:
        """Every rank has proved that the job is what was asked for."""
        return len(self._proofs) == len(self._hosts)

    def has_hello(self, rank: int) -> bool:
        """Whether it has said hello."""
        return rank in self._hellos

    def handle(self, event: AgentReport | Hello | CoordinatorReady | DeviceReport) -> list[Action]:
        """What is to be done now. NotUniformError or UnavailableError if this is not the job that was asked for."""
        match event:
            case AgentReport():
                return self._on_report(event)
            case Hello():
                return self._on_hello(event)
            case CoordinatorReady():
                others = tuple(rank for rank in self._hosts if rank != event.rank)
                return [Send(others, Join(event.address))] if others else []
        self._proofs[event.rank] = event
        if not self.complete:
            return []
        _refuse(consistency.check_device_reports(self._proofs, self._hellos, self._expected))
        return [Send(tuple(self._hosts), Run())]

    def describe_progress(self, seconds: float) -> str:
        """Whom the start-up waits for after so many seconds, in one line."""
        step, present = self._step
        absent = format_ranks_on_hosts((rank for rank in self._hosts if rank not in present), self._hosts)
        count = f"{len(present)} of {len(self._hosts)} ranks"
        return f"{step[1]}: {count} after {seconds:.0f} s, waiting for {absent}"

    def describe_missing(self, limit: float) -> str:
        """Who has not come within the time limit (seconds), and what to do about it."""
        step, present = self._step
        if self._registry is not None and not self._registry.complete:
            return consistency.describe_missing_agents(
                self._hosts, present, limit, self._registry.spec.listen_addresses
            )
        return consistency.describe_missing_ranks(self._hosts, present, limit, step[0])

    @property
    def _step(self) -> tuple[tuple[str, str], Collection[int]]:
        """What the start-up is at, as a participle of either kind, and the ranks that have done it."""
        if self._registry is not None and not self._registry.complete:
            return ("reported", "starting agents"), self._registry.reports
        return (("joined", "joining"), self._proofs) if self._all_started else (("started", "starting"), self._hellos)

    @property
    def _all_started(self) -> bool:
        return len(self._hellos) == len(self._hosts)

    def _on_report(self, report: AgentReport) -> list[Action]:
        if self._registry is None:
            raise NotUniformError(f"an agent reports as rank {report.rank}, but this job has none; start it again")
        self._registry.add(report)
        self._hosts[report.rank] = report.host
        if not self._registry.complete:
            return []
        decision = self._registry.assign()
        self._expected, self._interface = decision.expected, decision.interface
        return [
            *(PrintLine(note) for note in decision.notes),
            *(Send((start.rank,), start) for start in decision.starts),
        ]

    def _on_hello(self, hello: Hello) -> list[Action]:
        known = self._hellos.setdefault(hello.rank, hello)
        if known is not hello:
            raise NotUniformError(consistency.describe_duplicate_rank(known, hello))
        if not self._all_started:
            return []
        _refuse(consistency.compare_hellos(self._hellos))
        return [Send((0,), StartCoordinator(self._interface))]


def _refuse(text: str) -> None:
    if text:
        raise NotUniformError(text)
