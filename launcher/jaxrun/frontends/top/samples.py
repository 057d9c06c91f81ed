"""The content of one line of the screen: each rank's state in words, and its figures, from two overviews. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct, field

from jaxrun.analysis.diagnosis.doing import Doing, StandingOut
from jaxrun.analysis.diagnosis.overview import Overview
from jaxrun.analysis.diagnosis.rank_state import ACTIVITY_WORDS, Activity, find_kernel_activity
from jaxrun.analysis.diagnosis.wait_graph import WaitGraph, find_wait_graph
from jaxrun.analysis.lockstep.progress import GroupProgress, find_progress
from jaxrun.protocol.flight import Flight, parse_group
from jaxrun.protocol.flight_file import NOTHING
from jaxrun.protocol.query_messages import ProcessState, RankReply
from jaxrun.text import format_ranks

_LATE_S = 1.0  # less is no reason to look
_BUSY_PERCENT = 30.0  # of a core
_MAX_AWAITED = 16  # ranks that are named for which one rank waits
_STOPPED = (Activity.STOPPED, Activity.TRACED)


class _State(NamedTuple):
    """What a rank does: its kind, in words, for how long, and the ranks for which it waits."""

    doing: Doing
    text: str
    since_s: float | None = None
    waits_for: tuple[int, ...] = ()


class RankSample(Struct, frozen=True):
    """The values shown for one rank; None stands for an unknown value.

    state:        in words, the same for like ranks: "waits for rank 2 in train_step"; `doing` is its kind
    since_s:      for how long it has been in it
    waits_for:    the ranks for which it waits, the lowest ones if there are many
    standing_out: how much it needs to be looked at
    number:       of its last call
    behind:       how many calls it is behind the furthest rank
    late_s:       for how long others have been ahead of it, or, of a straggler, by how much it comes later on average
    cpu_percent:  of one core
    gpu_bytes:    of its GPUs' memory that are used
    """

    rank: int
    host: str
    state: str
    doing: Doing = Doing.IDLE
    since_s: float | None = None
    waits_for: tuple[int, ...] = ()
    standing_out: StandingOut = StandingOut.LIKE_OTHERS
    number: int | None = None
    behind: int = 0
    late_s: float | None = None
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    gpu_percent: float | None = None
    gpu_bytes: int | None = None


class _Position(Struct, frozen=True):
    """The place of a rank: in a call, or after it. `name` is the program's, empty if unknown."""

    group: str
    number: int
    since: float
    name: str
    is_inside: bool


class _Progress(Struct):
    """The progress of the ranks of a group; ranks that have ended have come to no call.

    ages_s:   by number of a call, for how long the first rank has been in it, or has made none after it
    """

    ranks: GroupProgress
    ages_s: Mapping[int, float]
    furthest: int
    _behind: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def behind(self, number: int) -> tuple[int, ...]:
        if number not in self._behind:
            self._behind[number] = self.ranks.behind(number)
        return self._behind[number]


def take_samples(now: Overview, before: Overview | None = None, rate: float | None = None) -> tuple[RankSample, ...]:
    """Return what to show for each rank; CPU use comes from `before`, an earlier overview.

    rate:  calls per second of the job, None if unknown
    """
    positions = {rank: found for rank, flight in now.flights.items() if (found := _position(flight)) is not None}
    progress = _progress_of_groups(now, positions)
    graph = find_wait_graph(now.flights, finished=now.ends)
    return tuple(_sample(rank, now, before, positions.get(rank), progress, graph, rate) for rank in sorted(now.hosts))


def _sample(
    rank: int,
    now: Overview,
    before: Overview | None,
    position: _Position | None,
    progress: Mapping[str, _Progress],
    graph: WaitGraph,
    rate: float | None,
) -> RankSample:
    host, vitals = now.hosts[rank], now.vitals.get(rank)
    if rank in now.ends:
        end = now.ends[rank]
        stands_out = StandingOut.FAILED if end.doing is Doing.FAILED else StandingOut.LIKE_OTHERS
        number = _number(now.flights[rank], position) if rank in now.flights else None
        return RankSample(rank, host, end.text, end.doing, standing_out=stands_out, number=number)
    if rank in now.returning:
        return RankSample(rank, host, "was lost, and comes back", Doing.STARTING)
    if rank not in now.live:
        return RankSample(rank, host, "not started yet", Doing.STARTING)
    if vitals is None:
        return RankSample(rank, host, "no answer", Doing.FAILED, standing_out=StandingOut.FAILED)
    flight = now.flights.get(rank, Flight())
    cpu = _cpu_percent(vitals, before.vitals.get(rank) if before is not None else None)
    others = progress[position.group] if position is not None else None
    activity = find_kernel_activity(rank, vitals.kernel_wait)
    state = _state(activity, now.phase, flight, vitals, cpu, position, others)
    call = graph.joint_call(rank)
    if activity not in _STOPPED and call is not None and flight.joint_wait is not None:
        name = call.function.removeprefix("jaxrun_runtime.")  # there is little room
        state = _waiting(call.missing, name, vitals.time - flight.joint_wait.since)
    if rank in now.debugged:
        state = _State(Doing.DEBUGGED, Doing.DEBUGGED.words)
    behind, late_s = _lateness(rank, flight, progress)
    if keeps_waiting := [waits.since for waits in graph.joint_waits if rank in waits.missing]:
        late_s = max(late_s or 0.0, vitals.time - min(keeps_waiting))
    standing_out = StandingOut.LATE
    if (late_s or 0.0) < _LATE_S and (not rate or behind < max(2.0, rate * _LATE_S)):
        behind, late_s, standing_out = 0, None, StandingOut.LIKE_OTHERS  # hosts do not answer at the same moment
    waits_itself = state.doing is Doing.WAITING and (state.since_s or 0.0) >= _LATE_S  # now, for somebody else
    if now.straggler is not None and rank in now.straggler.ranks and not waits_itself:
        late_s = now.straggler.late_s if late_s is None else late_s
        standing_out = max(StandingOut.SLOW, standing_out)
    return RankSample(
        rank=rank,
        host=host,
        state=state.text,
        doing=state.doing,
        since_s=state.since_s,
        waits_for=state.waits_for[:_MAX_AWAITED],
        standing_out=StandingOut.STOPPED if activity in _STOPPED else standing_out,
        number=_number(flight, position),
        behind=behind,
        late_s=late_s,
        cpu_percent=cpu,
        memory_bytes=vitals.memory_bytes or None,
        gpu_percent=vitals.gpu_percent if vitals.gpu_percent >= 0 else None,
        gpu_bytes=vitals.gpu_bytes if vitals.gpu_bytes >= 0 else None,
    )


def _state(
    activity: Activity,
    phase: str,
    flight: Flight,
    vitals: RankReply,
    cpu: float | None,
    position: _Position | None,
    others: _Progress | None,
) -> _State:
    """Return what the rank does, and for how long, in seconds."""
    if activity in _STOPPED:
        return _State(Doing.STOPPED, ACTIVITY_WORDS[activity].brief)
    if vitals.kernel_wait == ProcessState.ENDED:
        return _State(Doing.FINISHED, "ends")
    if flight.compiling is not None:
        name, since = flight.compiling
        return _State(Doing.COMPILING, f"{Doing.COMPILING.words} {name}", vitals.time - since)
    if position is not None and others is not None and (position.is_inside or activity is Activity.ASLEEP):
        since_s = vitals.time - position.since
        if behind := others.behind(position.number):
            return _waiting(behind, position.name, since_s)
        if position.is_inside:
            return _State(Doing.WORKING, f"runs {position.name or 'a call'}", since_s)
    if phase == "starting":
        return _State(Doing.STARTING, Doing.STARTING.words)
    if activity is Activity.DISK:
        return _State(Doing.IDLE, ACTIVITY_WORDS[activity].brief)
    if cpu is not None and cpu >= _BUSY_PERCENT:
        return _State(Doing.WORKING, Doing.WORKING.words)
    if activity in ACTIVITY_WORDS:
        return _State(Doing.IDLE, ACTIVITY_WORDS[activity].brief)
    return _State(Doing.WORKING, "runs") if cpu is None else _State(Doing.IDLE, Doing.IDLE.value)


def _waiting(ranks: Sequence[int], call: str, since_s: float) -> _State:
    who = format_ranks(ranks) if len(ranks) == 1 else f"{len(ranks)} ranks"
    text = f"waits for {who}" + (f" in {call}" if call else "")
    return _State(Doing.WAITING, text, since_s, tuple(ranks))


def _lateness(rank: int, flight: Flight, progress: Mapping[str, _Progress]) -> tuple[int, float | None]:
    """Return by how many calls the rank is behind others, and how long they have been ahead; None if it is not."""
    behind, late_s = 0, None
    for group in flight.call_counts:
        others = progress[group]
        number = others.ranks.reached.get(rank, 0)
        behind = max(behind, others.furthest - number)
        ages = [age_s for ahead, age_s in others.ages_s.items() if ahead > number]
        late_s = max([late_s or 0.0, *ages]) if ages else late_s
    return behind, late_s


def _progress_of_groups(now: Overview, positions: Mapping[int, _Position]) -> dict[str, _Progress]:
    """Return the progress of the ranks of each group."""
    groups = dict.fromkeys(group for flight in now.flights.values() for group in flight.call_counts)
    groups |= dict.fromkeys(position.group for position in positions.values())
    found = {}
    for group in groups:
        ranks = sorted(parse_group(group, len(now.hosts)))
        numbers = dict(find_progress(now.flights, group, len(now.hosts)).reached)
        numbers |= {rank: 0 for rank in ranks if rank in now.ends}
        ages_s: dict[int, float] = {}
        for rank in ranks:
            position = positions.get(rank)
            if position is not None and position.group == group and rank in now.vitals and rank not in now.ends:
                numbers[rank] = max(position.number, numbers[rank])
                age_s = now.vitals[rank].time - position.since
                ages_s[position.number] = max(age_s, ages_s.get(position.number, 0.0))
        progress = GroupProgress(numbers)
        found[group] = _Progress(progress, ages_s, progress.furthest)
    return found


def _position(flight: Flight) -> _Position | None:
    """Return the position of a rank; None if it has made no call."""
    pending, last = flight.pending, flight.last_call
    if pending is not None:
        return _Position(pending.group, pending.number, pending.since, flight.program(pending).name, True)
    if last is None:
        return None
    if flight.entered:  # which call that is stands nowhere yet
        return _Position(last.group, last.number + 1, flight.entered, "", True)
    return _Position(last.group, last.number, last.time, flight.program(last).name, False)


def _number(flight: Flight, position: _Position | None) -> int | None:
    """Return the number of its last call in the group in which it makes most; None if none is recorded."""
    if flight.level == NOTHING:
        return None
    counts = {group: flight.last_number(group) for group in flight.call_counts}
    if position is not None:
        counts[position.group] = position.number
    return max(counts.values(), default=0)


def _cpu_percent(now: RankReply, before: RankReply | None) -> float | None:
    if before is None or now.time <= before.time:
        return None
    return max(0.0, 100 * (now.cpu_seconds - before.cpu_seconds) / (now.time - before.time))
