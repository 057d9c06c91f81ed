"""The agents without ranks: they wait on spare hosts, or on a host that was left out and wants to be taken back.

Each reports once its host is ready:

    report ──▶ can the job use its host? ──▶ yes: a spare, told once which ranks it may have to take
                                         └─▶ no: excluded, or turned away
"""

from __future__ import annotations

from collections.abc import Callable

from jaxrun.controller.head.agent_registry import AgentRegistry
from jaxrun.controller.roster import Roster
from jaxrun.controller.seat import Action, LinkId, Seat, SeatState
from jaxrun.controller.supervisor.transport import Transport
from jaxrun.errors import NotUniformError, UnavailableError
from jaxrun.protocol.agent_messages import AgentReport, StartWorkers
from jaxrun.spec.job.plan import LaunchCommand
from jaxrun.text import UNKNOWN_HOST


class SpareAgents:
    """Checks the reports of agents without ranks, and prepares them for the ranks that they may have to take."""

    def __init__(
        self,
        roster: Roster,
        transport: Transport,
        registry: AgentRegistry,
        command: LaunchCommand,
        print_line: Callable[[str], object],
        *,
        by_hand: bool,
    ) -> None:
        """`registry` knows the ranks that an agent may have to take, once all agents with ranks have reported.

        command:  has started the agents
        by_hand:  people or pods have started each of them
        """
        self._roster, self._transport, self._registry = roster, transport, registry
        self._command, self._by_hand = command, by_hand
        self._print_line = print_line

    def add(self, link: LinkId, report: AgentReport) -> list[Action]:
        """Add the agent at this connection to those that wait, or print why the job cannot use its host."""
        reason = self._find_fault(report)
        if reason and self._by_hand:
            self._print_line(f"jaxrun: {report.host} cannot be taken back: {reason}")
            return self._roster.turn_away(link, f"the job cannot use {report.host}: {reason}")
        if reason:
            self._print_line(f"jaxrun: spare host {report.host} cannot be used: {reason}")
        self._roster.add_report(report, unusable=reason)
        self.prepare()
        return []

    def _find_fault(self, report: AgentReport) -> str:
        """Return why the job cannot use the host of an agent; empty if it can."""
        if report.check_failure:
            return f"failed --host-check: {report.check_failure}"
        try:
            self._registry.check_installation(report)
            if not self._command.agent_hosts:
                self._registry.check_command(report)
        except (UnavailableError, NotUniformError) as error:
            return str(error)
        return ""

    def prepare(self) -> None:
        """Tell the agents of each spare host what they have to prepare for, once, as soon as that is known."""
        if not self._registry.complete or not self._command.agent_hosts:
            return
        by_host: dict[str, list[Seat]] = {}
        for seat in self._roster.waiting():
            by_host.setdefault(seat.host, []).append(seat)
        for seats in by_host.values():
            reports = [seat.report for seat in seats if seat.report is not None and seat.state is SeatState.SPARE]
            if len(reports) < len(seats) or all(seat.is_prepared for seat in seats):
                continue
            self._roster.mark_prepared(seat.agent for seat in seats)
            try:
                prepared = self._registry.prepare(reports)
            except NotUniformError:  # the attempt in which it gets a rank reports why
                continue
            for seat, start in zip(seats, prepared, strict=True):
                self._transport.send(self._roster.links_of((seat.agent,)), StartWorkers((start,), waits=True))

    def print_loss(self, host: str, why: str) -> None:
        """Print that a spare host is lost, for the first of its agents that is."""
        if host == UNKNOWN_HOST:  # it has not reported, so nobody knows of it
            return
        if sum(seat.host == host and seat.state is SeatState.LOST for seat in self._roster.waiting()) == 1:
            self._print_line(f"jaxrun: spare host {host} is lost: {why}")
