"""Who waits for whom: one picture of a job, made from flight recorders, stacks and ends of ranks.

    flights ──▶ the calls that a rank has come to and others have not ─┐
    stacks  ──▶ what a rank does (rank_state.py) ──────────────────────┼──▶ WaitGraph: rank → (state, call, waits for)
    ends    ──▶ the ranks that will never come ────────────────────────┘

The stall notice, the early exit, the sentences about deadlocks, top and the tests' abandoned ranks all use it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from jaxrun.analysis.diagnosis.error_choice import HandledError
from jaxrun.analysis.diagnosis.helpers import Helpers
from jaxrun.analysis.diagnosis.job_stacks import JobStacks
from jaxrun.analysis.diagnosis.rank_state import IN_JAX, WAITING, Activity, RankState, find_rank_states
from jaxrun.analysis.lockstep.joint_waits import MissingRanks, find_missing_ranks
from jaxrun.analysis.lockstep.progress import GroupProgress, find_progress
from jaxrun.protocol.flight import Flight
from jaxrun.protocol.hidden_fields import HidesFields


class GroupCall(HidesFields, frozen=True):
    """A cross-process call that a rank has come to, and that other ranks of its group have not come to.

    progress:  how far the ranks of the group have come
    """

    hidden = frozenset({"progress"})

    group: str
    number: int
    progress: GroupProgress

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not come to the call."""
        return self.progress.behind(self.number)

    def missing_of(self, finished: Iterable[int]) -> tuple[int, ...]:
        """The missing ranks that have finished, so they will never make the call."""
        reached = self.progress.reached
        return tuple(rank for rank in sorted(finished) if reached.get(rank, self.number) < self.number)


AwaitedCall = MissingRanks | GroupCall


class RankWait(Struct, frozen=True):
    """One rank in the picture.

    state:  what the rank does; None if its stack was not taken
    calls:  calls that it has come to and others have not: first the joint function that it is in, then calls of groups
    """

    state: RankState | None = None
    calls: tuple[AwaitedCall, ...] = ()

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The ranks that have not come to its call; empty if recorders do not show them."""
        return self.calls[0].missing if self.calls else ()


class WaitGraph(Struct, frozen=True):
    """Who waits for whom in a job, at one moment.

    ranks:        by rank, all whose stack or flight is known
    finished:     the ranks whose program has ended
    joint_waits:  ranks that wait in joint functions; one entry for all that wait for the same ranks at the same place
    """

    ranks: Mapping[int, RankWait]
    finished: frozenset[int] = frozenset()
    joint_waits: tuple[MissingRanks, ...] = ()

    @property
    def states(self) -> dict[int, RankState]:
        """What each rank does whose stack was taken."""
        return {rank: wait.state for rank, wait in self.ranks.items() if wait.state is not None}

    @property
    def busy_states(self) -> dict[int, RankState]:
        """Like `states`, without the ranks of a gang that wait for their next call."""
        return {rank: state for rank, state in self.states.items() if state.activity is not Activity.IDLE}

    @property
    def some_are_behind(self) -> bool:
        """Whether recorders show that ranks have come to a call that others have not."""
        return any(wait.calls for wait in self.ranks.values())

    @property
    def all_in_one_call(self) -> bool:
        """Whether all ranks wait in JAX, and no recorder shows that a rank is behind."""
        kinds = {state.activity for state in self.busy_states.values()}
        return bool(kinds) and kinds <= set(IN_JAX) and not self.some_are_behind

    @property
    def unseen_errors(self) -> dict[int, HandledError]:
        """By rank, the exception that it handles, or a background save has left; empty if no rank is without one."""
        found = {rank: state.errors[0] for rank, state in self.busy_states.items() if state.errors}
        return found if self.finished or len(found) < len(self.busy_states) else {}

    def joint_call(self, rank: int) -> MissingRanks | None:
        """The joint function in which this rank waits for others; None if it is in none."""
        calls = self.ranks[rank].calls if rank in self.ranks else ()
        return next((call for call in calls if isinstance(call, MissingRanks)), None)

    def abandoned(self) -> Iterator[tuple[tuple[int, ...], AwaitedCall, tuple[int, ...]]]:
        """Yield the ranks that wait in vain, their call, and the finished ranks that never made that call.

        Joint functions come first, with one entry for all ranks that wait at the same place in one of them.
        """
        for waits in self.joint_waits:
            if never := waits.missing_of(self.finished):
                yield waits.waiting, waits, never
        waiting = ((rank, wait.calls) for rank, wait in self.ranks.items() if rank not in self.finished)
        calls = [(rank, call) for rank, found in waiting for call in found if isinstance(call, GroupCall)]
        for rank, call in sorted(calls, key=lambda one: (one[1].group, one[0])):
            if never := call.missing_of(self.finished):
                yield (rank,), call, never

    def waiting_s(self, rank: int, flight: Flight, time: float) -> float:
        """For how many seconds the rank had waited for others at `time`, by its own clock; 0 if it did not wait."""
        calls = self.ranks[rank].calls if rank in self.ranks else ()
        if not calls:
            return 0.0
        if isinstance(calls[0], MissingRanks):
            return time - (flight.joint_wait.since if flight.joint_wait is not None else time)
        return time - flight.came_at

    def awaited_by(self, rank: int) -> tuple[int, ...]:
        """The ranks that `rank` waits for: by recorders, else, by stacks, those that do not wait. Empty if unknown."""
        wait = self.ranks.get(rank, RankWait())
        if wait.calls or wait.state is None or wait.state.activity not in WAITING:
            return wait.waits_for
        return tuple(other for other, state in self.states.items() if state.activity not in WAITING)


def find_wait_graph(
    flights: Mapping[int, Flight],
    dumps: Mapping[int, str] | None = None,
    kernel_waits: Mapping[int, str] | None = None,
    helpers: Mapping[int, Helpers] | None = None,
    finished: Collection[int] = (),
) -> WaitGraph:
    """Return the picture of a job; all mappings are by rank, and any of them may lack ranks."""
    states = find_rank_states(dumps or {}, kernel_waits or {}, flights, helpers)
    joint = find_missing_ranks(flights)
    calls: dict[int, list[AwaitedCall]] = {rank: [] for rank in sorted(states.keys() | flights.keys())}
    for waits in joint:
        for rank in waits.waiting:
            calls[rank].append(waits)
    for rank, call in _find_group_calls(flights):
        calls[rank].append(call)
    ranks = {rank: RankWait(states.get(rank), tuple(found)) for rank, found in calls.items()}
    return WaitGraph(ranks, frozenset(finished), joint)


def wait_graph_of(stacks: JobStacks, finished: Collection[int] | None = None) -> WaitGraph:
    """Return the picture that these stacks show; `finished`, if given, replaces their finished ranks."""
    graph = find_wait_graph(
        stacks.flights,
        stacks.dumps,
        stacks.waits,
        stacks.helpers,
        stacks.finished if finished is None else finished,
    )
    if not stacks.by_signal:
        return graph
    ranks = {rank: _without_errors(wait, stacks.by_signal) for rank, wait in graph.ranks.items()}
    return replace(graph, ranks=ranks)


def _without_errors(wait: RankWait, types: Collection[str]) -> RankWait:
    """Leave out exceptions of these types that a rank handles."""
    if wait.state is None:
        return wait
    kept = tuple(handled for handled in wait.state.errors if handled.choice.chosen.error not in types)
    return replace(wait, state=replace(wait.state, errors=kept))


def _find_group_calls(flights: Mapping[int, Flight]) -> Iterator[tuple[int, GroupCall]]:
    """Yield the last call of each rank in each group, if not all ranks of the group have come to it."""
    complete = {rank: flight for rank, flight in flights.items() if flight.complete}
    size = max(complete, default=-1) + 1
    for group in sorted({group for flight in complete.values() for group in flight.call_counts}):
        progress = find_progress(complete, group, size)
        for rank in progress.ahead(progress.next_number):
            yield rank, GroupCall(group, progress.reached[rank], progress)
