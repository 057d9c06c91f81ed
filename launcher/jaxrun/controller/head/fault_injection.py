"""Injects the faults of --chaos when they are due, and those that a gang asks for.

A fault then acts as if it had occurred by itself: only the verdict says that it was injected.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from jaxrun.analysis.diagnosis.job_outcome import FAULT_PARTICIPLES, InjectedFault
from jaxrun.controller.head.head_state import HeadState
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action, PrintLine, Send
from jaxrun.job_events.events import FaultRequested
from jaxrun.protocol.agent_messages import FaultNotInjected, InjectFault
from jaxrun.spec.job.fault_spec import CHAOS_OPTION, FaultSpec
from jaxrun.text import format_ranks, format_ranks_on_hosts


class FaultInjector:
    def __init__(self, state: HeadState, faults: Sequence[FaultSpec]) -> None:
        self._remaining = dict(enumerate(sorted(faults, key=lambda fault: fault.after)))
        self._state = state
        self._workers = state.workers

    @property
    def remaining(self) -> tuple[FaultSpec, ...]:
        return tuple(self._remaining.values())

    def start(self, now: float) -> None:
        """Start counting the times of the faults, because the program has started."""
        for number, fault in self._remaining.items():
            self._state.timers.set(Timer.FAULT, now + fault.after, partial(self._inject_next, number), of=number)

    def _inject_next(self, number: int, now: float) -> list[Action]:
        fault = self._remaining.pop(number)
        ranks = [rank for span in fault.ranks for rank in span] or self._draw_rank()
        return self._inject(fault.kind, ranks, CHAOS_OPTION, now)

    def _draw_rank(self) -> list[int]:
        """Return one of the live ranks, chosen at random."""
        import random  # takes 5 ms

        return [random.choice(self._workers.live)] if self._workers.live else []

    def handle_request(self, event: FaultRequested, now: float) -> list[Action]:
        return self._inject(event.kind, event.ranks, "its gang", now) if self._state.is_healthy else []

    def _inject(self, kind: str, ranks: Collection[int], requested_by: str, now: float) -> list[Action]:
        fault = InjectedFault(kind, now, requested_by)
        live = self._workers.live
        hit = tuple(sorted(set(ranks).intersection(live)))
        missed = set(ranks).difference(live)
        for rank in hit:
            self._workers.add_injected_fault(rank, fault)
        actions: list[Action] = []
        if missed:
            it = "it does not run" if len(missed) == 1 else "they do not run"
            actions.append(PrintLine(f"{format_ranks(missed)} cannot be {fault}: {it}"))
        if hit:
            are = "is" if len(hit) == 1 else "are"
            actions.append(PrintLine(f"{format_ranks_on_hosts(hit, self._workers.hosts)} {are} {fault}"))
            actions.append(Send(hit, InjectFault(kind)))
        return actions

    def handle_not_injected(self, event: FaultNotInjected, now: float) -> list[Action]:
        self._workers.remove_injected_fault(event.rank, event.kind)
        who = format_ranks_on_hosts([event.rank], self._workers.hosts)
        return [PrintLine(f"{who} could not be {FAULT_PARTICIPLES[event.kind]}: {event.reason}; the job continues")]

    def report_remaining(self) -> list[Action]:
        """Print the faults that were never due, after the job has ended well."""
        texts = ", ".join(map(str, self.remaining))
        return [PrintLine(f"the job was over before {CHAOS_OPTION} {texts}")] if texts else []
