"""Brings the processes of a job together: all hellos, then the coordinator, then all proofs; no I/O.

hello of every rank ──▶ Lead to rank 0 ──Listening──▶ Join to the others ──▶ proof of every rank ──▶ Run
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxrun.contract import Hello, Join, Lead, Listening, Proof, Run
from jaxrun.errors import NotUniformError
from jaxrun.head import uniform
from jaxrun.head.events import Send
from jaxrun.ranks import locate


class Gathering:
    """The start-up of one job; `hosts` maps each rank to its host.

    `interface` is the address of rank 0's host at which the coordinator is to listen.
    """

    def __init__(self, hosts: Mapping[int, str], expected: uniform.Expected, interface: str) -> None:
        self._hosts = hosts
        self._expected = expected
        self._interface = interface
        self._hellos: dict[int, Hello] = {}
        self._proofs: dict[int, Proof] = {}

    @property
    def complete(self) -> bool:
        """Every rank has proved that the job is what was asked for."""
        return len(self._proofs) == len(self._hosts)

    def knows(self, rank: int) -> bool:
        """Whether it has said hello."""
        return rank in self._hellos

    def take(self, event: Hello | Listening | Proof) -> list[Send]:
        """What is to be sent now. NotUniformError if this is not the job that was asked for."""
        match event:
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
        step, present = ("joining", self._proofs) if self._met else ("starting", self._hellos)
        absent = locate((rank for rank in self._hosts if rank not in present), self._hosts)
        count = f"{len(present)} of {len(self._hosts)} ranks"
        return f"{step}: {count} after {seconds:.0f} s, waiting for {absent}"

    def missing(self, limit: float) -> str:
        """Who has not come within the time limit (seconds), and what to do about it."""
        step, present = ("joined", self._proofs) if self._met else ("started", self._hellos)
        return uniform.missing(self._hosts, present, limit, step)

    @property
    def _met(self) -> bool:
        return len(self._hellos) == len(self._hosts)

    def _on_hello(self, hello: Hello) -> list[Send]:
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
