"""Who has which place in the job: a seat for each agent (seat.py), the connections of agents, and whose messages count.

The roster has no I/O, and lives as long as the job. The supervisor reports what happens to connections, and executes
the actions that a method returns; the head reports what it has learned from agents.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field
from msgspec.structs import replace

from jaxrun.controller.seat import (
    Action,
    Admit,
    AskHost,
    Claim,
    Close,
    Dismiss,
    LinkId,
    Lose,
    Name,
    Recall,
    Refuse,
    Seat,
    SeatEvent,
    SeatState,
    Take,
    Wait,
    decide_claim,
    next_state,
)
from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport, AgentSignalled, AgentToHead
from jaxrun.spec.job.plan import Plan
from jaxrun.spec.job.rank_placement import UNPLACED, Placement, replace_host
from jaxrun.text import UNKNOWN_HOST, format_ranks


class Link(Struct):
    """A connection of an agent.

    is_called:  what it sends belongs to an earlier attempt, until it reports for this one
    has_spoken: whether it has sent anything
    claims:     messages of an agent that claims the seat of another
    """

    agent: AgentId
    is_called: bool = False
    has_spoken: bool = False
    claims: list[AgentToHead] = field(default_factory=list)


class Roster:
    """All seats of a job. All operations that concern one agent are O(1) in the number of agents.

    attempt:  the attempt that runs
    waits:    whether the job waits for lost hosts
    runs:     whether the program runs
    seats:    by agent
    reports:  of the agents with ranks, in this attempt
    awaited:  the agents that are waited for, since when and for how long
    by_hand:  whether people, or a cluster, start agents

    suspected:   the agents whose loss the head does not know yet
    has_launch:  whether the launch command runs
    placement:   of the attempt, with the spare hosts that have taken the places of lost ones while it ran
    """

    def __init__(self, *, waits: bool = False) -> None:
        self.attempt = 0
        self.waits = waits
        self.runs = False
        self.seats: dict[AgentId, Seat] = {}
        self.reports: dict[AgentId, AgentReport] = {}
        self.awaited: dict[AgentId, Wait] = {}
        self.suspected: set[AgentId] = set()
        self.by_hand = False
        self.has_launch = True
        self.placement = UNPLACED
        self.agents: Mapping[AgentId, tuple[int, ...]] = {}  # with ranks
        self._spares: tuple[AgentId, ...] = ()  # all without ranks
        self._agent_of: dict[int, AgentId] = {}
        self._may_replace = self._share = False
        self._links: dict[LinkId, Link] = {}
        self._claims: dict[AgentId, list[LinkId]] = {}
        self._reported = 0

    @classmethod
    def of(cls, plan: Plan) -> Roster:
        """Return the roster of a job whose first attempt, or the first of this head, has this plan."""
        made = cls(waits=plan.job.host_wait > 0)
        made.begin(plan, anew=True)
        return made

    # ---- attempts

    def begin(self, plan: Plan, *, anew: bool) -> list[Action]:
        """Begin an attempt: its agents are CALLED, unless they are awaited, and those that wait go on waiting.

        anew:  other agents are started, on connections of their own
        """
        if anew:
            self.seats, self._links, self.has_launch = {}, {}, True
        earlier, actions = self.seats, self._dismiss(plan)
        links_of: dict[AgentId, list[LinkId]] = {}
        for link, one in self._links.items():
            links_of.setdefault(one.agent, []).append(link)
        self.attempt, self.runs, self.by_hand = plan.attempt, False, plan.is_started_by_hand
        placed, command = plan.placement.agents, plan.launch_command
        self._may_replace = command is not None and command.survive_host_loss
        self._share = command is not None and command.agents_stay
        self._place(plan.placement)
        self.reports, self.awaited, self.suspected, self._claims, self._reported = {}, {}, set(), {}, 0
        # Spare hosts that were lost are not used again, even if their agents are not in the plan any more.
        self.seats = {agent: seat for agent, seat in earlier.items() if seat.state is SeatState.LOST and not seat.ranks}
        self._spares = tuple(dict.fromkeys([*self.seats, *(agent for agent, ranks in placed.items() if not ranks)]))
        for agent in placed:
            before = earlier.get(agent)
            there, seat = links_of.get(agent, []), _seat_in(plan, agent, before)
            if before is not None and before.ranks and not seat.ranks and before.link in there:
                there.remove(before.link)
                actions += self._leave_out(before, before.link)
            self._put(replace(seat, link=seat.link if seat.link in there else next(iter(there), None)))
            if seat.ranks:
                for link in there:
                    self._links[link].is_called = True
                    actions.append(Recall(link, seat.ranks))
        return actions

    def _dismiss(self, plan: Plan) -> list[Action]:
        """Forget the connections of agents that this attempt has no place for."""
        drained = {agent for agent, seat in self.seats.items() if seat.state is SeatState.DRAINED}
        links, self._links = self._links, {}
        actions: list[Action] = []
        for link, one in links.items():
            if one.agent in drained or one.agent not in plan.placement.agents:
                actions.append(Dismiss(link, one.agent in drained))
            else:
                self._links[link] = Link(one.agent)
        return actions

    def _leave_out(self, seat: Seat, link: LinkId) -> list[Action]:
        """Send an agent away that had ranks, so that its command may be started again in this seat."""
        del self._links[link]
        return [Recall(link, ()), Refuse(link, seat.agent, _describe_left_out(seat), may_return=True)]

    def end_launch(self) -> None:
        """The launch command has ended; its agents may have outlived it."""
        self.has_launch = False

    def find_spare(self, rank: int) -> Placement | None:
        """Return the placement in which a spare host takes the place of this rank's host, which is lost.

        None if no spare host is ready, or if an agent of that host is still there.
        """
        host = self.of_rank(rank).host
        if not self._may_replace or self.is_host_there(rank):
            return None
        ready = {
            seat.agent: seat.host
            for seat in self.waiting()
            if seat.state is SeatState.SPARE and seat.link is not None and seat.report is not None
        }
        return replace_host(self.placement, host, ready, share=self._share)

    def seat_spare(self, placement: Placement) -> None:
        """The program runs, and agents that have waited get the ranks that they have in this placement."""
        left = self.agents.keys() - placement.agents.keys()
        taken = [seat.agent for seat in self.waiting() if placement.agents.get(seat.agent)]
        self._place(placement)
        self._spares = tuple(agent for agent in self._spares if agent not in taken)
        for agent in left:
            self._put(replace(self.seats[agent], ranks=()))
        for agent in taken:
            self._put(replace(self.seats[agent], ranks=self.agents[agent], has_reported=True))
            self._step(agent, SeatEvent.SEAT)

    def is_host_there(self, rank: int) -> bool:
        """Whether an agent with ranks is connected on the host of this rank."""
        return any(seat.link is not None for seat in self._on_host_of(rank))

    def ranks_beside(self, rank: int) -> list[int]:
        """Return all ranks on the host of this one, with itself."""
        return [each for seat in self._on_host_of(rank) for each in seat.ranks]

    def _on_host_of(self, rank: int) -> list[Seat]:
        host = self.of_rank(rank).host
        return [seat for seat in self.with_ranks() if seat.host == host]

    def _place(self, placement: Placement) -> None:
        self.placement = placement
        self.agents = {agent: ranks for agent, ranks in placement.agents.items() if ranks}
        self._agent_of = {rank: agent for agent, ranks in self.agents.items() for rank in ranks}

    def drain(self, agents: Iterable[AgentId]) -> None:
        """The attempt is over, and the pods of these agents go away."""
        for agent in agents:
            if agent in self.seats:
                self._step(agent, SeatEvent.DRAIN)

    def run(self) -> None:
        """The program begins: an agent whose place is taken is refused from now on."""
        self.runs = True
        for agent in self.agents:
            self._step(agent, SeatEvent.RUN)

    # ---- connections, as the transport sees them

    def arrive(self, link: LinkId, agent: AgentId, *, is_early: bool = False) -> list[Action]:
        """An agent has connected; `is_early`: before the job began."""
        seat = self.seats.get(agent)
        may_come = seat is not None and (self.waits or not seat.ranks)
        if self.runs and not may_come and not is_early:
            return [Refuse(link, agent)]
        self._links[link] = Link(agent)
        return [Admit(link, self.attempt if agent in self.agents or self.by_hand else 0)]

    def agent_at(self, link: LinkId) -> AgentId | None:
        """Return the agent of a connection; None once that is refused or lost."""
        one = self._links.get(link)
        return one.agent if one is not None else None

    def drop_earlier(self, link: LinkId, messages: Sequence[AgentToHead]) -> Sequence[AgentToHead]:
        """Return the messages that belong to this attempt: from the report on with which the agent begins it.

        A signal that a person or a cluster has sent to an agent is about the job, so it counts before that as well.
        A signal from an engine may be about the attempt before: an mpirun that ends sends one to all of its agents.
        """
        one = self._links[link]
        if not one.is_called:  # in the earlier attempt it may have had other ranks
            return messages
        signals: list[AgentToHead] = []
        for index, message in enumerate(messages):
            if isinstance(message, AgentReport) and message.attempt == self.attempt:
                one.is_called = False
                return [*signals, *messages[index:]]
            if self.by_hand and isinstance(message, AgentSignalled):
                signals.append(message)
        return signals

    def say(self, link: LinkId, message: AgentToHead) -> list[Action]:
        """An agent has sent a message of this attempt."""
        one = self._links.get(link)
        if one is None:
            return []
        one.has_spoken = True
        seat = self.seats.get(one.agent)
        if seat is None or seat.link == link:
            if seat is not None and seat.state is SeatState.CALLED and not isinstance(message, AgentReport):
                self._step(one.agent, SeatEvent.SPEAK)
            return [Take(link, one.agent, message)]
        is_report = isinstance(message, AgentReport)
        match decide_claim(seat, waits=self.waits, runs=self.runs, is_report=is_report):
            case Claim.ADMIT:
                return [*self._admit(seat, link), Take(link, one.agent, message)]
            case Claim.CONTEND:
                one.claims.append(message)
                if len(one.claims) > 1:
                    return []
                self._claims.setdefault(one.agent, []).append(link)
                return [AskHost(seat.link)] if seat.link is not None else []
            case Claim.REFUSE:
                del self._links[link]
                return [Refuse(link, one.agent)]
            case Claim.NAME if isinstance(message, AgentReport):
                return [Name(message)]
        return []

    def go(self, link: LinkId, why: str, *, is_silent: bool = False) -> list[Action]:
        """A connection is lost."""
        one = self._links.pop(link, None)
        if one is None:
            return []
        seat = self.seats.get(one.agent)
        if seat is None:
            return [Lose(one.agent, why, None)] if one.has_spoken else []
        if seat.link == link:
            return self.lose(one.agent, why, is_silent=is_silent)
        if one.claims:
            self._claims[one.agent].remove(link)
        return []

    def lose(self, agent: AgentId, why: str, *, is_silent: bool = False) -> list[Action]:
        """An agent is lost: its connection, or before it had one."""
        seat = self.seats[agent]
        self._put(replace(seat, link=None, why=why, is_silent=is_silent))
        after = self._step(agent, SeatEvent.VANISH)
        return [Lose(agent, why, seat), *(self._settle(after) if after.is_free else [])]

    def confirm(self, link: LinkId) -> list[Action]:
        """The host at the other end is alive: the claims to the seat of its agent are refused."""
        agent = self._links[link].agent if link in self._links else None
        seat = self.seats.get(agent) if agent is not None else None
        if seat is None or seat.link != link:
            return []
        return self._refuse_claims(seat.agent)

    def turn_away(self, link: LinkId, reason: str) -> list[Action]:
        """The agent at this connection, which has a seat or is a stranger, does not fit the job."""
        agent = self._links.pop(link).agent
        if agent not in self.seats:
            return [Refuse(link, agent, reason)]
        self._put(replace(self.seats[agent], link=None))
        seat = self._step(agent, SeatEvent.AWAIT if self.seats[agent].wait is not None else SeatEvent.TURN_AWAY)
        return [Refuse(link, agent, reason, may_return=not seat.ranks), *self._settle(seat)]

    # ---- what is learned of agents

    def add_report(self, report: AgentReport, *, unusable: str = "") -> None:
        """An agent with a seat has reported. `unusable`: why an agent that waits can take no ranks."""
        seat = self.seats[report.agent]
        host = report.host if seat.host == UNKNOWN_HOST else seat.host
        seat = replace(seat, host=host, report=report, has_reported=bool(seat.ranks), why=unusable, wait=None)
        self._put(seat if not unusable else replace(seat, state=SeatState.EXCLUDED))
        if not unusable:
            self._step(report.agent, SeatEvent.REPORT)

    def add_failure(self, rank: int) -> None:
        """A worker has reported why it fails."""
        seat = self.seats[self._agent_of[rank]]
        if not seat.has_failed:
            self._put(replace(seat, has_failed=True))

    def explain(self, agent: AgentId) -> None:
        """The head learns of the loss of an agent now."""
        if agent in self.seats:
            self._step(agent, SeatEvent.EXPLAIN)

    def settle(self) -> list[Action]:
        """Return what the explanation of losses means for agents that have come in the place of lost ones."""
        claimed = [self.seats[agent] for agent, links in self._claims.items() if links]
        return [action for seat in claimed if seat.is_free for action in self._settle(seat)]

    def wait_for(self, agent: AgentId, wait: Wait) -> None:
        """The job waits for the host of an agent: it, or another in its place, will report."""
        self._put(replace(self.seats[agent], report=None, wait=wait))
        self._step(agent, SeatEvent.AWAIT)

    def expect(self, agent: AgentId) -> None:
        """Another agent may come in the place of this lost one while the program runs, whenever that is."""
        self._step(agent, SeatEvent.AWAIT)

    def stop_waiting(self, agent: AgentId) -> Wait | None:
        """An agent reports in this place: the job waits no longer; returns the wait, if there was one."""
        wait = self.awaited.get(agent)
        if wait is not None:
            self._put(replace(self.seats[agent], wait=None))
        return wait

    def mark_prepared(self, agents: Iterable[AgentId]) -> None:
        for agent in agents:
            self._put(replace(self.seats[agent], is_prepared=True))

    # ---- questions

    @property
    def complete(self) -> bool:
        """Whether all agents with ranks have reported, and none of them is awaited."""
        return len(self.reports) == len(self.agents)

    @property
    def all_reported(self) -> bool:
        """Whether all agents with ranks have reported, even if they are lost by now."""
        return self._reported == len(self.agents)

    @property
    def any_reported(self) -> bool:
        return self._reported > 0

    def of_rank(self, rank: int) -> Seat:
        """Return the seat of a rank. Raises KeyError for a rank that the job does not have."""
        return self.seats[self._agent_of[rank]]

    def ranks_of(self, agent: AgentId) -> tuple[int, ...]:
        """Return the ranks of an agent; none for a stranger."""
        return self.agents.get(agent, ())

    def split(self, ranks: Iterable[int]) -> Iterator[tuple[LinkId, tuple[int, ...] | None]]:
        """Return the connections of these ranks' agents, with the ranks meant: None for all of an agent's ranks."""
        of_agents: dict[AgentId, list[int]] = {}
        for rank in ranks:
            if (agent := self._agent_of.get(rank)) is not None:
                of_agents.setdefault(agent, []).append(rank)
        for agent, some in of_agents.items():
            seat = self.seats[agent]
            if seat.link is not None:
                yield seat.link, None if len(some) == len(seat.ranks) else tuple(some)

    def links_of(self, agents: Iterable[AgentId]) -> list[LinkId]:
        """Return the connections that these agents use."""
        seats = (self.seats[agent] for agent in agents if agent in self.seats)
        return [seat.link for seat in seats if seat.link is not None]

    def waiting(self) -> list[Seat]:
        """Return the seats of agents that wait for ranks."""
        return [self.seats[agent] for agent in self._spares]

    def with_ranks(self) -> list[Seat]:
        return [self.seats[agent] for agent in self.agents]

    def usable(self, unanswered: Collection[int]) -> set[AgentId]:
        """Return the agents that another attempt can have: connected ones, whose ranks have all ended.

        unanswered:  the ranks that were killed, but whose end nobody reported in time
        """
        gone = {*unanswered}
        there = [seat for seat in self.seats.values() if seat.link is not None and seat.state is not SeatState.DRAINED]
        return {
            one.agent for one in there if gone.isdisjoint(one.ranks) and (one.ranks or one.state is SeatState.SPARE)
        }

    def missing(self) -> dict[AgentId, str]:
        """Return the agents that are waited for, and have not come, with the hosts on which they were lost."""
        return {seat.agent: seat.host for seat in self.with_ranks() if seat.state is SeatState.AWAITED}

    def unreported(self) -> list[Seat]:
        """Return the seats with ranks whose agents have not reported in this attempt."""
        return [seat for seat in self.with_ranks() if not seat.has_reported]

    def not_started(self) -> set[AgentId]:
        """Return the agents with ranks that the launch command has not started yet.

        Its output also says how agents ended that had come. It may do so late, when the job awaits their hosts or has
        other agents in their places.
        """
        called = (seat for seat in self.unreported() if seat.state is SeatState.CALLED)
        return {seat.agent for seat in called if seat.link is None}

    def lost_spares(self) -> dict[str, str]:
        """Return the spare hosts that were lost while they waited, with reasons."""
        return {seat.host: seat.why for seat in reversed(self.waiting()) if seat.state is SeatState.LOST}

    def replaced_hosts(self) -> dict[str, str]:
        """Return the lost hosts whose places spare ones have taken in this attempt, with reasons."""
        left = self.seats.keys() - self.agents.keys() - set(self._spares)
        return {self.seats[agent].host: self.seats[agent].why for agent in sorted(left)}

    def describe(self) -> str:
        """Write who is not as usual: `rank 1 (h2) lost: nothing was heard from its host for 2 s; h3 spare`.

        Empty if all agents with ranks have reported, or run, and there are no others.
        """
        usual = SeatState.RUNNING if self.runs else SeatState.REPORTED
        groups: dict[tuple[str, bool], list[Seat]] = {}
        for seat in self.seats.values():
            if seat.state is not usual:
                state = f"{seat.state.value}{f': {seat.why}' if seat.why else ''}"
                groups.setdefault((state, bool(seat.ranks)), []).append(seat)
        return "; ".join(f"{_format_places(seats)} {state}" for (state, _), seats in groups.items())

    # ---- the only places at which seats change

    def _step(self, agent: AgentId, event: SeatEvent) -> Seat:
        seat = self.seats[agent]
        state = next_state(seat.state, event, has_ranks=bool(seat.ranks))
        if state is not seat.state:
            seat = replace(seat, state=state)
            self._put(seat)
        return seat

    def _put(self, seat: Seat) -> None:
        """Set a seat, and all that is looked up by it."""
        agent, before, has_ranks = seat.agent, self.seats.get(seat.agent), bool(seat.ranks)
        self.seats[agent] = seat
        had_ranks = before is not None and bool(before.ranks)
        if not has_ranks and not had_ranks:
            return
        self._reported += (has_ranks and seat.has_reported) - (before is not None and had_ranks and before.has_reported)
        if has_ranks and seat.report is not None:
            self.reports[agent] = seat.report
        else:
            self.reports.pop(agent, None)
        if has_ranks and seat.state is SeatState.SUSPECTED:
            self.suspected.add(agent)
        else:
            self.suspected.discard(agent)
        if has_ranks and seat.wait is not None:
            self.awaited[agent] = seat.wait
        else:
            self.awaited.pop(agent, None)

    # ---- two agents that claim one seat

    def _admit(self, seat: Seat, link: LinkId) -> list[Action]:
        """Give a seat to the agent at this connection."""
        closed: list[Action] = []
        if seat.link is not None:
            self._links.pop(seat.link, None)
            closed.append(Close(seat.link))
        self._put(replace(seat, link=link))
        self._step(seat.agent, SeatEvent.SPEAK)
        return closed

    def _settle(self, seat: Seat) -> list[Action]:
        """A seat is free: the first that claims it gets it, and the others are refused."""
        links = self._claims.get(seat.agent, [])
        if not links:
            return []
        first = links.pop(0)
        messages, self._links[first].claims = self._links[first].claims, []
        taken: list[Action] = [Take(first, seat.agent, message) for message in messages]
        return [*self._admit(seat, first), *taken, *self._refuse_claims(seat.agent)]

    def _refuse_claims(self, agent: AgentId) -> list[Action]:
        refused: list[Action] = []
        for link in self._claims.pop(agent, []):
            del self._links[link]
            refused.append(Refuse(link, agent))
        return refused


def _seat_in(plan: Plan, agent: AgentId, earlier: Seat | None) -> Seat:
    """Return an agent's seat as an attempt begins. An agent that goes on waiting keeps its `earlier` one."""
    command, ranks, awaited = plan.launch_command, plan.placement.agents[agent], plan.placement.awaited
    link = earlier.link if earlier is not None else None
    if ranks:
        called = next_state(earlier.state if earlier is not None else SeatState.CALLED, SeatEvent.CALL, has_ranks=True)
        state = SeatState.AWAITED if agent in awaited else called
        host = awaited.get(agent, plan.workers[ranks[0]].host)
        is_prepared = earlier is not None and earlier.is_prepared
        return Seat(agent, host, ranks, state, link, is_prepared=is_prepared)
    if earlier is not None and not earlier.ranks:
        return earlier
    planned = command.agent_hosts if command is not None else ()
    return Seat(agent, planned[agent] if agent < len(planned) else UNKNOWN_HOST, link=link)


def _describe_left_out(seat: Seat) -> str:
    """Say why an agent that had this seat has no ranks any more."""
    failure = seat.report.check_failure if seat.report is not None else ""
    why = f"it failed --host-check: {failure}" if failure else f"{format_ranks(seat.ranks)} there did not end in time"
    return f"the job continues without {seat.report.host if seat.report is not None else seat.host}: {why}"


def _format_places(seats: Sequence[Seat]) -> str:
    """Write `ranks 1-2 (h2, h3)`, or the hosts alone of agents that wait."""
    ranks = [rank for seat in seats for rank in seat.ranks]
    hosts = ", ".join(dict.fromkeys(seat.host for seat in seats if seat.host != UNKNOWN_HOST))
    return " ".join([*([format_ranks(ranks)] if ranks else []), *([f"({hosts})" if ranks else hosts] if hosts else [])])
