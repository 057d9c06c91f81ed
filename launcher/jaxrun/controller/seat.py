"""A place in the job: its state, the table of everything that can happen to it, and the actions that follow.

            speaks             reports              the program runs
    CALLED ───────▶ CONNECTED ───────▶ REPORTED ──────────────────▶ RUNNING      an agent with ranks
                        └─────────────▶ SPARE, or EXCLUDED if it cannot be used  an agent that waits for ranks

    its connection ends ──▶ SUSPECTED ──the cause is known──▶ LOST ──its host is waited for──▶ AWAITED ──▶ CONNECTED …
    its pod goes away ────▶ DRAINED
    While the program runs (--keep-survivors), a SPARE whose host takes the place of a lost one is CALLED.

A host that falls silent takes this way: the transport gives its connections up (channel/silence.py), so its agents are
SUSPECTED. losses.py holds their losses until it is known whether the host, its agent or the launch command went first.
Then they are LOST, and the head decides what follows: it ends the attempt, or waits for the host (AWAITED). The loss of
an agent that waits is known at once. An agent that comes in the place of another CLAIMs its seat.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NewType

from msgspec import Struct

from jaxrun.protocol.agent_id import AgentId
from jaxrun.protocol.agent_messages import AgentReport, AgentToHead
from jaxrun.text import UNKNOWN_HOST

LinkId = NewType("LinkId", int)  # the transport's name for a connection


class SeatState(enum.Enum):
    """What has become of an agent; the module's docstring has the picture."""

    CALLED = "called"  # it is being started, or was told to begin this attempt
    CONNECTED = "connected"
    REPORTED = "reported"
    RUNNING = "running"
    SPARE = "spare"
    SUSPECTED = "suspected"
    LOST = "lost"
    AWAITED = "awaited"
    DRAINED = "drained"
    EXCLUDED = "excluded"


class SeatEvent(enum.Enum):
    """What can happen to a seat."""

    CALL = enum.auto()  # an attempt begins
    SPEAK = enum.auto()  # its agent has chosen a connection
    REPORT = enum.auto()
    RUN = enum.auto()
    VANISH = enum.auto()  # the connection that its agent uses is lost
    EXPLAIN = enum.auto()  # the head learns of the loss
    AWAIT = enum.auto()  # the job waits for its host
    TURN_AWAY = enum.auto()  # its agent does not fit the job
    DRAIN = enum.auto()
    SEAT = enum.auto()  # an agent that has waited gets ranks, while the program runs


class Claim(enum.Enum):
    """What becomes of a message from a connection other than the one that a seat's agent uses."""

    ADMIT = enum.auto()  # the seat is free: it belongs to this connection now
    CONTEND = enum.auto()  # the agent that has the seat may be lost: the message waits until that is known
    NAME = enum.auto()  # the program does not run, and needs the seat: the head names both agents
    REFUSE = enum.auto()  # the program runs, or has no rank for the seat
    IGNORE = enum.auto()  # a second path of an agent that speaks on the first one


_State, _Event = SeatState, SeatEvent
_THERE = (_State.CONNECTED, _State.REPORTED, _State.RUNNING, _State.SPARE, _State.EXCLUDED)
_TABLE: Mapping[SeatEvent, Mapping[SeatState, SeatState]] = {
    _Event.CALL: dict.fromkeys(_State, _State.CALLED),
    _Event.SPEAK: dict.fromkeys((_State.CALLED, _State.LOST, _State.AWAITED), _State.CONNECTED),
    _Event.REPORT: dict.fromkeys((_State.CALLED, _State.CONNECTED, _State.LOST, _State.AWAITED), _State.REPORTED),
    _Event.RUN: {_State.REPORTED: _State.RUNNING},
    _Event.VANISH: dict.fromkeys((*_THERE, _State.CALLED, _State.AWAITED), _State.SUSPECTED),
    _Event.EXPLAIN: {_State.SUSPECTED: _State.LOST},
    _Event.AWAIT: dict.fromkeys((*_THERE, _State.CALLED, _State.LOST, _State.AWAITED), _State.AWAITED),
    _Event.TURN_AWAY: dict.fromkeys((*_THERE, _State.AWAITED), _State.CALLED),
    _Event.DRAIN: dict.fromkeys(_State, _State.DRAINED),
    _Event.SEAT: {_State.SPARE: _State.CALLED},
}
# What differs for an agent that waits: no attempt calls it, its report makes it a spare, its loss needs no cause.
_WAITING: Mapping[SeatEvent, Mapping[SeatState, SeatState]] = {
    _Event.CALL: {},
    _Event.REPORT: dict.fromkeys((_State.CALLED, _State.CONNECTED, _State.LOST), _State.SPARE),
    _Event.VANISH: dict.fromkeys((*_THERE, _State.CALLED), _State.LOST),
}


def next_state(state: SeatState, event: SeatEvent, *, has_ranks: bool) -> SeatState:
    """Return the state of a seat after an event; events that are not in the table change nothing."""
    table = _TABLE if has_ranks or event not in _WAITING else _WAITING
    return table[event].get(state, state)


class Wait(Struct, frozen=True):
    """The job waits for a host that was lost; times are seconds since the epoch."""

    host: str
    since: float
    until: float


class Seat(Struct, frozen=True):
    """A place in the job.

    ranks:         empty for an agent that waits
    host:          its name in the plan; for an agent that waits and was started by hand, the name that it reports
    link:          the connection that its agent uses; None without one
    report:        the last report of its agent, since the attempt began or since it waits
    has_reported:  whether an agent with these ranks has reported in this attempt; also true after its loss
    has_failed:    whether one of its workers has reported why it fails
    is_prepared:   whether its agent knows the ranks that it may have to take
    is_silent:     whether it was lost because its host is silent
    why:           why it is lost, or excluded
    wait:          for how long the job waits for its host; until an agent reports in its place
    """

    agent: AgentId
    host: str = UNKNOWN_HOST
    ranks: tuple[int, ...] = ()
    state: SeatState = SeatState.CALLED
    link: LinkId | None = None
    report: AgentReport | None = None
    has_reported: bool = False
    has_failed: bool = False
    is_prepared: bool = False
    is_silent: bool = False
    why: str = ""
    wait: Wait | None = None

    @property
    def is_free(self) -> bool:
        """Whether no agent has it, as far as the head knows."""
        return self.link is None and self.state is not SeatState.SUSPECTED


def decide_claim(seat: Seat, *, waits: bool, runs: bool, is_report: bool) -> Claim:
    """Decide what becomes of a message from another connection than the seat's own.

    waits:      the job waits for lost hosts, so that an agent may come in the place of another
    runs:       the program runs
    is_report:  the message is the agent's report, its first claim to the place
    """
    if seat.state is SeatState.AWAITED:  # also if an agent has it that has not answered since the attempt before
        return Claim.ADMIT
    if waits and not seat.is_free:
        return Claim.CONTEND
    if seat.link is None:
        return Claim.ADMIT
    if not is_report:
        return Claim.IGNORE
    return Claim.REFUSE if runs or not seat.ranks else Claim.NAME


# ---- actions


class Admit(Struct, frozen=True):
    """Tell an agent that has connected which job and attempt this is."""

    link: LinkId
    attempt: int


class Recall(Struct, frozen=True):
    """Tell an agent that the next attempt begins, with these ranks."""

    link: LinkId
    ranks: tuple[int, ...]


class Dismiss(Struct, frozen=True):
    """Tell an agent to end, as there is no place for it any more. `leaves`: its pod goes away."""

    link: LinkId
    leaves: bool


class Refuse(Struct, frozen=True):
    """Tell an agent that its place is taken, or the `reason`, and close its connection.

    may_return:  the job has no rank for it now; if its command is started again, the job may take it back
    """

    link: LinkId
    agent: AgentId
    reason: str = ""
    may_return: bool = False


class Take(Struct, frozen=True):
    """A message of an agent that has its place."""

    link: LinkId
    agent: AgentId
    message: AgentToHead


class Name(Struct, frozen=True):
    """The report of a second agent: the head names both."""

    report: AgentReport


class AskHost(Struct, frozen=True):
    """Ask whether the host at the other end of this connection is alive; `Roster.confirm` follows if it is."""

    link: LinkId


class Close(Struct, frozen=True):
    """Close a connection: its agent has lost its place to another."""

    link: LinkId


class Lose(Struct, frozen=True):
    """An agent is lost; `seat` as it was, None for a stranger."""

    agent: AgentId
    why: str
    seat: Seat | None


Action = Admit | Recall | Dismiss | Refuse | Take | Name | AskHost | Close | Lose
