"""Checks regularly whether a running program makes progress: notices, the end of the job, and limits that are learned.

stall_detector.py decides; this asks the ranks, and turns what it decides into actions.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.job_end import Stalled
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.wait_graph import wait_graph_of
from jaxrun.analysis.verdict.stack_text import describe_stall
from jaxrun.controller.head.head_state import HeadState, ToldStall
from jaxrun.controller.head.job_shutdown import JobShutdown
from jaxrun.controller.head.queries import RankQueries, Replies
from jaxrun.controller.head.stall_detector import StallCheck, StallDetector
from jaxrun.controller.head.time_accounting import TimeAccounting
from jaxrun.controller.head.timers import Timer
from jaxrun.job_events.actions import Action, PrintStallNotice
from jaxrun.protocol.nccl_report import NcclReport
from jaxrun.protocol.query_messages import RankDetail
from jaxrun.text import format_seconds

_MIN_LEARNED_CALLS = 20  # of each rank, before --stall-timeout auto knows what is usual


class StallChecks(Struct):
    """The checks of one program, from its first moment on."""

    _state: HeadState
    _queries: RankQueries
    _shutdown: JobShutdown
    _time: TimeAccounting
    _detector: StallDetector
    _has_begun: bool = False

    def start_if_needed(self, now: float) -> None:
        """Begin to check, where a limit or a notice needs it."""
        if self._detector.is_needed:
            self._start(now)

    def discount(self, seconds: float) -> None:
        """Discount a time in which someone suspended the whole job."""
        self._detector.discount(seconds)

    def learn_limit(self, replies: Replies, now: float) -> None:
        """With --stall-timeout auto, adapt the limit once all ranks have made some calls."""
        least_s = self._state.limits.learns_stall
        if least_s is None:
            return
        flights = [reply.flight for reply in replies.values() if reply.number]
        if flights and min(sum(flight.call_counts.values()) for flight in flights) >= _MIN_LEARNED_CALLS:
            self._detector.learn_limit(max(flight.totals.longest for flight in flights), least_s)
            self._start(now)

    def _start(self, now: float) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._check_later(now)

    def _check_later(self, now: float) -> None:
        self._state.timers.set(Timer.STALL_CHECK, now + self._detector.next_check_s, self._look_for_progress)

    def _look_for_progress(self, now: float) -> list[Action]:
        working = self._state.workers.working
        if self._detector.wants_stacks:
            return self._queries.ask_stacks(working, self._check_progress, now)
        return self._queries.ask(working, RankDetail.PROGRESS, self._check_progress, now)

    def _check_progress(self, replies: Replies, now: float) -> list[Action]:
        if not self._state.is_healthy:
            return []
        stall = self._state.stall
        is_held = not self._state.debugged.isdisjoint(replies)
        check = self._detector.update(replies, now, self._queries.helpers(replies, now), is_held=is_held)
        if check.is_over or check.is_half or check.is_told:
            self._time.note_stall(check.idle_s)
        if stall is not None and now - check.idle_s > stall.told_at:  # there was progress
            self._state.stall = None
        if check.is_over:
            return self._end(check, replies, now)
        self._check_later(now)
        if check.is_half or check.is_told or check.is_in_doubt:
            return self._queries.ask_nccl(replies, partial(self._tell, check, replies), now)
        return []

    def _end(self, check: StallCheck, replies: Replies, now: float) -> list[Action]:
        """End the job, once NCCL has said what it knows."""
        text = ""
        if self._detector.longest_s is not None:
            idle, longest = format_seconds(check.idle_s), format_seconds(self._detector.longest_s)
            text = f"no rank has made a call for {idle}; the longest before was {longest}."
        end = Stalled(self._queries.stacks(replies, now), text=text)
        self._shutdown.prepare_abort(end, now)
        return self._queries.ask_nccl(replies, partial(self._end_stalled, end), now, at_end=True)

    def _end_stalled(self, end: Stalled, nccl: NcclReport | None, now: float) -> list[Action]:
        if self._state.end is not end:  # something else has ended the job meanwhile
            return []
        stacks = replace(end.stacks, nccl=nccl)
        self._state.refine(replace(end, stacks=stacks, is_explained=have_explained(self._state, stacks)))
        return self._shutdown.kill_all(now)

    def _tell(self, check: StallCheck, replies: Replies, nccl: NcclReport | None, now: float) -> list[Action]:
        """Report who waits for whom; if that is in doubt, only if NCCL confirms it."""
        if not self._state.is_healthy or (check.is_in_doubt and not (nccl and nccl.differing)):
            return []
        stacks, before = self._queries.stacks(replies, now, nccl=nccl), self._state.stall
        who_waits = _who_waits(stacks)
        self._state.stall = ToldStall(describe_stall(stacks), who_waits, now - check.idle_s, now)
        limit_s = self._detector.limit if check.is_half else 0.0
        is_as_before = before is not None and before.who_waits == who_waits
        return [PrintStallNotice(stacks, check.idle_s, limit_s, is_as_before)]


def have_explained(state: HeadState, stacks: JobStacks) -> bool:
    """Whether the last notice has told who waits for whom, and these stacks still show it."""
    told = state.stall
    return told is not None and told.who_waits == _who_waits(stacks)


def _who_waits(stacks: JobStacks) -> Hashable:
    """Return what each rank does, and NCCL's finding, to compare them with what others show."""
    states, nccl = wait_graph_of(stacks).states, stacks.nccl
    return (
        tuple((rank, state.activity, state.place, state.errors) for rank, state in sorted(states.items())),
        nccl.differing if nccl is not None else (),
    )
