"""What the time of a job was worth, as a value and in words: the part of it in which the training went on.

Each microsecond of a job is in one part. docs/goodput.md has the table of the parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct, field

from jaxrun.analysis.lockstep import time_spent
from jaxrun.text import format_seconds, plural

HOSTS, PYTHON, JOINING, DEVICES = "hosts", "python", "joining", "devices"
REPEATED, STOPPING = "repeated", "stopping"
_US_PER_S = 1e6
_MIN_TOLD_S = 60.0  # a shorter job of one attempt ends without the line
_SHOWN_PARTS = 3
_MIN_SHOWN = 0.005  # of the time

# In the order of a job's life, productive time first. Each: how it is named in a line, and what it is.
MEANINGS: Mapping[str, tuple[str, str]] = {
    time_spent.STEPS: ("steps", "the program's steps went on, and were not repeated later"),
    HOSTS: ("waiting for hosts", "waiting for hosts or the queue, and starting an agent on each"),
    PYTHON: ("starting Python", "starting Python and importing jax, until the last rank has"),
    JOINING: ("joining", "meeting and joining the other ranks"),
    DEVICES: ("finding devices", "finding the devices, and waiting until all ranks have"),
    time_spent.SET_UP: ("set-up", "the program itself before its first step: its imports, data and model"),
    time_spent.COMPILING: ("compiling", "at least one rank compiled or loaded a program"),
    time_spent.RESTORING: ("restoring", "the program waited until its state was restored (orbax, restore)"),
    time_spent.SAVING: ("saving", "the program waited until its state was saved (orbax, snapshot)"),
    REPEATED: ("repeated steps", "steps after the last saved one, which the next attempt did again"),
    time_spent.DATA: ("waiting for a rank's data", "ranks waited in a call for one that came late from its own work"),
    time_spent.SLOWEST: ("waiting for the slowest rank", "ranks waited in a call for one that left the last one late"),
    time_spent.STALLED: ("stalled", "no rank made any progress (as in a stall notice)"),
    time_spent.SUSPENDED: ("suspended", "the job was suspended, or a person debugged it"),
    STOPPING: ("stopping", "the program had ended on some rank, or was being ended"),
    time_spent.UNKNOWN: ("unknown", "jaxrun saw nothing by which it could tell"),
}
PARTS = tuple(MEANINGS)


class Goodput(Struct, frozen=True):
    """The time of a job, over all its attempts.

    total_us:   microseconds from its first start to its end, or until now
    parts_us:   the same by part; they sum up to `total_us`
    attempts:   how many attempts there were
    steps:      steps that counted, as far as known
    repeated_steps: steps that were made again; 0 if unknown
    late_rank:  the rank for which others waited most; -1 if there is no such rank
    """

    total_us: int = 0
    parts_us: Mapping[str, int] = field(default_factory=dict)
    attempts: int = 0
    steps: int = 0
    repeated_steps: int = 0
    late_rank: int = -1

    @property
    def is_known(self) -> bool:
        """Whether steps were seen."""
        return self.parts_us.get(time_spent.STEPS, 0) > 0

    @property
    def share(self) -> float:
        """The share of the time in which steps went on."""
        return self.share_of(time_spent.STEPS)

    def share_of(self, part: str) -> float:
        return self.parts_us.get(part, 0) / self.total_us if self.total_us else 0.0


class Period(NamedTuple):
    """A period of a job: its start and end in seconds since the epoch, and microseconds by part within it."""

    start: float
    end: float
    parts: dict[str, int]


def sum_up(goodputs: Iterable[Goodput]) -> Goodput:
    """Sum up several jobs."""
    found = list(goodputs)
    parts = {part: sum(one.parts_us.get(part, 0) for one in found) for part in PARTS}
    return Goodput(
        total_us=sum(one.total_us for one in found),
        parts_us={part: spent for part, spent in parts.items() if spent},
        attempts=sum(one.attempts for one in found),
        steps=sum(one.steps for one in found),
        repeated_steps=sum(one.repeated_steps for one in found),
    )


def is_worth_a_line(goodput: Goodput) -> bool:
    """Whether the end of a job says what its time was worth."""
    return goodput.is_known and (goodput.attempts > 1 or goodput.total_us >= _MIN_TOLD_S * _US_PER_S)


def format_goodput(goodput: Goodput) -> str:
    """Write `goodput 93.1 % of 2 h 12 min: 3.2 % compiling, 1.9 % repeated steps after 2 restarts, 0.8 % other`."""
    lost = [(goodput.share_of(part), part) for part in PARTS if part != time_spent.STEPS]
    shown = sorted((one for one in lost if one[0] >= _MIN_SHOWN), reverse=True)[:_SHOWN_PARTS]
    words = [f"{_percent(share)} {_words(part, goodput)}" for share, part in shown]
    other = 1.0 - goodput.share - sum(share for share, _ in shown)
    if other >= 0.0005:
        words.append(f"{_percent(other)} other")
    of_what = f"goodput {_percent(goodput.share)} of {format_seconds(goodput.total_us / _US_PER_S)}"
    return f"{of_what}: {', '.join(words)}" if words else of_what


def _words(part: str, goodput: Goodput) -> str:
    if part == time_spent.DATA and goodput.late_rank >= 0:
        return f"rank {goodput.late_rank} late"
    if part == REPEATED and goodput.attempts > 1:
        return f"repeated steps after {plural(goodput.attempts - 1, 'restart')}"
    return MEANINGS[part][0]


def format_table(goodput: Goodput) -> list[str]:
    """Write one line for each part that took time: its share, its time, its name, what it is."""
    rows = [(part, goodput.parts_us[part]) for part in PARTS if goodput.parts_us.get(part)]
    width = max((len(MEANINGS[part][0]) for part, _ in rows), default=0)
    lines = []
    for part, spent in rows:
        name, meaning = MEANINGS[part]
        if part == time_spent.DATA and goodput.late_rank >= 0:
            meaning += f"; mostly for rank {goodput.late_rank}"
        time = format_seconds(spent / _US_PER_S)
        lines.append(f"  {_percent(goodput.share_of(part)):>7}  {time:>10}  {name:<{width}}  {meaning}")
    return lines


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
