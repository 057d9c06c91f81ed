"""Brings the processes of a job together: all hellos, then the coordinator, then all proofs; no I/O.

hello of every rank ──▶ Lead to rank 0 ──Listening──▶ Join to the others ──▶ proof of every rank ──▶ Run

Where agents on other hosts start the workers, their reports come before all that (muster.py).
"""

from __future__ import annotations

from collections.abc import Collection

from jaxrun.contract import Hello, Join, Lead, Listening, Proof, Run
from jaxrun.errors import NotUniformError
from jaxrun.head import uniform
from jaxrun.head.events import Action, Report, Say, Send
from jaxrun.head.muster import Muster
from jaxrun.ranks import locate


class Gathering:
    """The start-up of one job; `hosts` maps each rank to its host.

    `interface` is the address of rank 0's host at which the coordinator is to listen. Both it and what is expected of
    the workers are decided by the `muster` where there is one.
    """

    def __init__(
        self, hosts: dict[int, str], expected: uniform.Expected, interface: str, muster: Muster | None = None
    ) -> None:
        self._hosts = hosts
        self._expected = expected
        self._interface = interface
        self._muster = muster
        self._hellos: dict[int, Hello] = {}
        self._proofs: dict[int, Proof] = {}

    @property
    def complete(self) -> bool:
        """Every rank has proved that the job is what was asked for."""
        return len(self._proofs) == len(self._hosts)

    def knows(self, rank: int) -> bool:
        """Whether it has said hello."""
        return rank in self._hellos

    def take(self, event: Report | Hello | Listening | Proof) -> list[Action]:
        """What is to be done now. NotUniformError or UnavailableError if this is not the job that was asked for."""
        match event:
            case Report():
                return self._on_report(event)
            case Hello():
                return self._on_hello(event)
            case Listening():
                others = tuple(rank for rank in self._hosts if rank != event.rank)
                return [Send(others, Join(event.address))] if others else []
        self._proofs[event.rank] = event
        if not self.complete:
            return []
        _refuse(uniform.check_proofs(self._proofs, self._hellos, self._expected))
        return [Send(tuple(self._hosts), Run())]

    def waiting(self, seconds: float) -> str:
        """Whom the start-up waits for after so many seconds, in one line."""
        step, present = self._step
        absent = locate((rank for rank in self._hosts if rank not in present), self._hosts)
        count = f"{len(present)} of {len(self._hosts)} ranks"
        return f"{step[1]}: {count} after {seconds:.0f} s, waiting for {absent}"

    def missing(self, limit: float) -> str:
        """Who has not come within the time limit (seconds), and what to do about it."""
        step, present = self._step
        if self._muster is not None and not self._muster.complete:
            return uniform.missing_agents(self._hosts, present, limit, self._muster.terms.offered)
        return uniform.missing(self._hosts, present, limit, step[0])

    @property
    def _step(self) -> tuple[tuple[str, str], Collection[int]]:
        """What the start-up is at, as a participle of either kind, and the ranks that have done it."""
        if self._muster is not None and not self._muster.complete:
            return ("reported", "starting agents"), self._muster.reports
        return (("joined", "joining"), self._proofs) if self._met else (("started", "starting"), self._hellos)

    @property
    def _met(self) -> bool:
        return len(self._hellos) == len(self._hosts)

    def _on_report(self, report: Report) -> list[Action]:
        if self._muster is None:
            raise NotUniformError(f"an agent reports as rank {report.rank}, but this job has none; start it again")
        self._muster.take(report)
        self._hosts[report.rank] = report.host
        if not self._muster.complete:
            return []
        decision = self._muster.decide()
        self._expected, self._interface = decision.expected, decision.interface
        return [*(Say(note) for note in decision.notes), *decision.orders]

    def _on_hello(self, hello: Hello) -> list[Action]:
        known = self._hellos.setdefault(hello.rank, hello)
        if known is not hello:
            raise NotUniformError(uniform.duplicate(known, hello))
        if not self._met:
            return []
        _refuse(uniform.compare_hellos(self._hellos))
        return [Send((0,), Lead(self._interface))]


def _refuse(text: str) -> None:
    if text:
        raise NotUniformError(text)
