"""When the faults on order are due, and whom they are done to: a state machine without I/O.

They come from --chaos or from the Python process that the launcher works for. What then happens to the job is what
would happen if they had come by themselves; only the verdict knows better.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxrun.diagnosis.worker_outcome import InjectedFault
from jaxrun.head.actions import Action, PrintLine, Send
from jaxrun.head.worker_table import WorkerTable
from jaxrun.job.fault_spec import CHAOS_OPTION, FaultSpec
from jaxrun.protocol.agent_messages import FaultNotInjected, InjectFault
from jaxrun.text import format_ranks, format_ranks_on_hosts
from jaxrun.verdict.injected_faults import PARTICIPLES, describe_fault


class FaultInjector:
    """The faults of one job. Times are seconds since the epoch."""

    def __init__(self, faults: Sequence[FaultSpec], roster: WorkerTable) -> None:
        self._waiting = sorted(faults, key=lambda fault: fault.after)
        self._roster = roster
        self._began: float | None = None

    def start(self, now: float) -> None:
        """The program runs."""
        self._began = now

    def deadline(self) -> float | None:
        if self._began is None or not self._waiting:
            return None
        return self._began + self._waiting[0].after

    def inject_due(self, now: float) -> list[Action]:
        """What is to be done because its time has come."""
        actions: list[Action] = []
        while (deadline := self.deadline()) is not None and deadline <= now:
            fault = self._waiting.pop(0)
            actions += self.inject(fault.kind, [rank for span in fault.ranks for rank in span], CHAOS_OPTION, now)
        return actions

    def inject(self, kind: str, ranks: Collection[int], by: str, now: float) -> list[Action]:
        """Do this to those of the ranks that live; `by`: who asks for it."""
        dealt = InjectedFault(kind, now, by)
        live = self._roster.live
        met = tuple(sorted(set(ranks).intersection(live)))
        missed = set(ranks).difference(live)
        for rank in met:
            self._roster.add_injected_fault(rank, dealt)
        actions: list[Action] = []
        if missed:
            it = "it does not run" if len(missed) == 1 else "they do not run"
            actions.append(PrintLine(f"{format_ranks(missed)} cannot be {describe_fault(dealt)}: {it}"))
        if met:
            are = "is" if len(met) == 1 else "are"
            actions += [
                PrintLine(f"{format_ranks_on_hosts(met, self._roster.hosts)} {are} {describe_fault(dealt)}"),
                Send(met, InjectFault(kind)),
            ]
        return actions

    def handle_not_injected(self, spared: FaultNotInjected) -> list[Action]:
        """It could not be done."""
        self._roster.remove_injected_fault(spared.rank, spared.kind)
        who = format_ranks_on_hosts([spared.rank], self._roster.hosts)
        return [PrintLine(f"{who} could not be {PARTICIPLES[spared.kind]}: {spared.reason}; the job goes on")]

    def report_remaining(self) -> list[Action]:
        """The job has ended well: whoever has ordered faults should know of those that were none."""
        texts = ", ".join(map(str, self._waiting))
        return [PrintLine(f"the job was over before {CHAOS_OPTION} {texts}")] if texts else []
