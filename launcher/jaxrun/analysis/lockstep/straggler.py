"""Decides whether one rank slows the others down, by how long they waited for it over many calls. No I/O.

A rank is a straggler if it comes last to most calls of one line of the program, and the others wait for it for more
than a twentieth of the time. Where ranks are late by chance, for example on a host that is short of cores, they take
turns. So the time for which others were waited for is subtracted, and the rest must be far larger than its variation
between rounds of calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from math import sqrt

from msgspec import Struct, field

from jaxrun.analysis.lockstep.call_waits import CallWait, Party
from jaxrun.protocol.codec import Message


class Straggler(Message, frozen=True):
    """How long the others waited for a party (a rank, or all ranks of a host).

    ranks:      the party's ranks
    group:      the ranks that make the calls together, as text
    place:      the place of the calls, `train.py:88 main`; empty if the group makes all its calls at one place
    number:     the number of the last call that was compared
    calls:      how many calls were compared
    last:       the share of them to which the party came last
    late_s:     its average lateness in seconds
    share:      the share of the time in which the others waited for it
    net_share:  `share` minus the share of the time in which other parties were waited for
    is_proven:  whether the others certainly waited: they were inside the call most of that time
    frame:      where the party was meanwhile, `data.py:10 load`; empty if unknown
    """

    ranks: tuple[int, ...]
    group: str
    place: str
    number: int
    calls: int
    last: float
    late_s: float
    share: float
    net_share: float
    is_proven: bool
    frame: str = ""


MIN_SHARE = 0.05  # of the time
_MIN_LATE_S = 0.001  # on average: less is scheduling noise
_MIN_LAST = 0.5  # of the calls
_ROUND_CALLS = 10  # calls of one line
_MIN_ROUNDS = 3
# Number of standard errors by which the mean over rounds must exceed 0: more if few rounds show the variation.
_MIN_SIGNIFICANCE, _FEW_ROUNDS = 4.0, 12.0


class _PartyTotals(Struct):
    """Sums over the calls, in complete rounds, to which a party came last."""

    last: int = 0
    late_s: float = 0.0
    waited_s: float = 0.0
    blocked_s: float = 0.0
    # Sums over rounds: of the square of the party's cost, and of its product with the cost of all parties.
    squares: float = 0.0
    products: float = 0.0


class _PlaceTotals(Struct):
    """The calls of one line in complete rounds; `round` holds the calls of the next, incomplete one."""

    rounds: int = 0
    seconds: float = 0.0
    waited_s: float = 0.0
    squares: float = 0.0
    number: int = 0  # the last call's
    round: list[CallWait] = field(default_factory=list)
    parties: defaultdict[Party, _PartyTotals] = field(default_factory=lambda: defaultdict(_PartyTotals))


class WaitTotals:
    """Sums up the waits in a job's calls in bounded memory."""

    def __init__(self) -> None:
        self.last_numbers: dict[str, int] = {}  # by group, of the last call that was added
        self._places: dict[tuple[str, str], _PlaceTotals] = {}

    def add(self, waits: Mapping[str, Iterable[CallWait]]) -> None:
        """Add calls by group, as `find_waits` returns them; each call must be added only once."""
        for group, calls in waits.items():
            for wait in calls:
                self.last_numbers[group] = wait.number
                totals = self._places.setdefault((group, wait.place), _PlaceTotals())
                totals.round.append(wait)
                if len(totals.round) == _ROUND_CALLS:
                    _add_round(totals)

    def find_straggler(self, clock_error_s: Callable[[Party], float] = lambda party: 0.0) -> Straggler | None:
        """Return the party for which the others waited most; None if there is no straggler.

        `clock_error_s`: the error of a party's times relative to the times of the others, in seconds.
        """
        found = (
            straggler
            for (group, place), totals in self._places.items()
            for party in totals.parties
            if (straggler := self._straggler(group, place, party, clock_error_s(party))) is not None
        )
        return max(found, key=lambda straggler: straggler.share, default=None)

    def _straggler(self, group: str, place: str, party: Party, clock_error_s: float) -> Straggler | None:
        totals = self._places[group, place]
        own, calls = totals.parties[party], totals.rounds * _ROUND_CALLS
        late_s = own.late_s / own.last
        if own.last <= _MIN_LAST * calls or late_s < _MIN_LATE_S + clock_error_s:
            return None
        places = [other for (of_group, _), other in self._places.items() if of_group == group and other.rounds]
        seconds, net_s = sum(other.seconds for other in places), 2 * own.waited_s - totals.waited_s
        if net_s - own.last * clock_error_s <= MIN_SHARE * seconds or not _is_significant(totals, own, net_s):
            return None
        return Straggler(
            ranks=party,
            group=group,
            place=place if len(places) > 1 else "",
            number=totals.number,
            calls=calls,
            last=own.last / calls,
            late_s=late_s,
            share=own.waited_s / seconds,
            net_share=net_s / seconds,
            is_proven=own.blocked_s >= own.waited_s / 2,
        )


def _add_round(totals: _PlaceTotals) -> None:
    waited: defaultdict[Party, float] = defaultdict(float)
    for wait in totals.round:
        totals.seconds += wait.period_s
        if not wait.last:
            continue
        own = totals.parties[wait.last]
        own.last += 1
        own.late_s += wait.late_s
        own.waited_s += wait.waited_s
        own.blocked_s += wait.blocked_s
        waited[wait.last] += wait.waited_s
    whole = sum(waited.values())
    for party, waited_s in waited.items():
        totals.parties[party].squares += waited_s**2
        totals.parties[party].products += waited_s * whole
    totals.rounds += 1
    totals.number = totals.round[-1].number
    totals.waited_s += whole
    totals.squares += whole**2
    totals.round.clear()


def _is_significant(totals: _PlaceTotals, own: _PartyTotals, net_s: float) -> bool:
    """Whether a party's excess over the cost of all others, in each round, is more than chance (Student's t)."""
    rounds = totals.rounds
    if rounds < _MIN_ROUNDS:
        return False
    mean = net_s / rounds
    variance = (4 * own.squares - 4 * own.products + totals.squares) / rounds - mean**2
    error = sqrt(max(0.0, variance) / (rounds - 1))
    return mean > (_MIN_SIGNIFICANCE + _FEW_ROUNDS / rounds) * error
