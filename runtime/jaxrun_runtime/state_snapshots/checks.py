"""Checks whether all ranks may take a snapshot, before any rank writes: facts of each rank, and the joint answer."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrun.text import format_bytes, format_ranks, group_alike
from jaxrun_runtime.state_snapshots import placement, structure
from jaxrun_runtime.state_snapshots.placement import Room

MAX_STEP = 2**63 - 1
SNAPSHOT_START, RESTORE_START = "snapshot cannot keep this state", "restore cannot use this `like`"
_MAX_HOSTS = 3


class Check(NamedTuple):
    """The facts of one rank.

    step:       the step's number; None if it is not valid
    wrong:      a line for each wrong argument
    layout:     a digest of the leaves and their regions, which must be equal on all ranks
    values:     a digest of the values that must be equal on all ranks
    room:       the memory of its host, if this rank reports for the host and the snapshot may need more
    """

    step: int | None = None
    wrong: Sequence[str] = ()
    layout: str = ""
    values: str = ""
    room: Room | None = None

    @classmethod
    def from_json(cls, told: Sequence[Any]) -> Check:
        step, wrong, layout, values, room = told
        return cls(step, wrong, layout, values, None if room is None else Room(*room))


class CheckResult(NamedTuple):
    """Whether all ranks may continue.

    kind:  GO_ON; USAGE or NO_MEMORY, with the error as `text`; COMPARE_LAYOUTS or COMPARE_VALUES: the ranks must find
           out which leaves differ
    """

    kind: str
    text: str = ""


GO_ON, USAGE, NO_MEMORY = "go on", "usage", "no memory"
COMPARE_LAYOUTS, COMPARE_VALUES = "compare layouts", "compare values"


def answer(checks: Sequence[Check], slot: int, by_host: Mapping[str, int], hosts: Sequence[str]) -> CheckResult:
    """Decide for all ranks.

    slot:     the slot to write to
    by_host:  number of bytes that the snapshot takes on each host
    """
    if wrong := structure.merge_lines([check.wrong for check in checks]):
        return CheckResult(USAGE, structure.join_lines(SNAPSHOT_START, wrong))
    steps = group_alike({rank: check.step for rank, check in enumerate(checks)})
    if len(steps) > 1:
        said = ", ".join(f"step {step} on {format_ranks(ranks)}" for step, ranks in steps)
        return CheckResult(USAGE, f"all ranks must call snapshot for the same step, not {said}")
    for kind, digests in (
        (COMPARE_LAYOUTS, {check.layout for check in checks}),
        (COMPARE_VALUES, {check.values for check in checks}),
    ):
        if len(digests) > 1:
            return CheckResult(kind)
    rooms = {hosts[rank]: check.room for rank, check in enumerate(checks) if check.room is not None}
    return _answer_about_room(rooms, slot, by_host)


def _answer_about_room(rooms: Mapping[str, Room], slot: int, by_host: Mapping[str, int]) -> CheckResult:
    lacking = [
        f"{format_bytes(lack[0])} of memory on {host}, in /dev/shm, but {format_bytes(lack[1])} are free there"
        for host, room in rooms.items()
        if (lack := placement.lacks_room(room, slot, by_host.get(host, 0)))
    ]
    if not lacking:
        return CheckResult(GO_ON)
    more = f", and too much on {len(lacking) - _MAX_HOSTS} more" if len(lacking) > _MAX_HOSTS else ""
    taken = ", and ".join(lacking[:_MAX_HOSTS])
    return CheckResult(
        NO_MEMORY, f"snapshots of this state take {taken}{more}; use more hosts, or checkpoints on disk instead"
    )


def step_number(step: Any) -> tuple[int | None, list[str]]:
    """Return the step as a number, or None and a line about what is wrong."""
    try:
        number = operator.index(step)
    except TypeError:
        return None, [f"the step must be a whole number, not {step!r}"]
    if 0 <= number <= MAX_STEP:
        return number, []
    return None, [f"the step must be from 0 to 2**63 - 1, not {_shorten(number)}"]


def _shorten(number: int) -> str:
    return str(number) if abs(number) < 2**70 else f"a number of {number.bit_length()} bits"
