"""Whether all ranks may take a snapshot: what each one says before anybody writes, and the answer, equal for all."""

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
    """What one rank says.

    step:       of the snapshot; None if it is none
    wrong:      a line for each argument that is wrong
    layout:     a digest of the leaves and their regions, which must be equal on all ranks
    values:     a digest of the values that must be
    room:       of its host, if this rank speaks for it, and the snapshot may need more than its slot takes
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
    """Whether to go on, and why not.

    kind:  GO_ON, USAGE or NO_MEMORY; or COMPARE_LAYOUTS or COMPARE_VALUES: the ranks find out which leaves differ
    """

    kind: str
    text: str = ""


GO_ON, USAGE, NO_MEMORY = "go on", "usage", "no memory"
COMPARE_LAYOUTS, COMPARE_VALUES = "compare layouts", "compare values"


def answer(checks: Sequence[Check], slot: int, by_host: Mapping[str, int], hosts: Sequence[str]) -> CheckResult:
    """What all ranks do.

    slot:     that is written to
    by_host:  how many bytes the snapshot takes on each host
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
    """The step as a number, or a line about what is wrong."""
    try:
        number = operator.index(step)
    except TypeError:
        return None, [f"the step must be a whole number, not {step!r}"]
    if 0 <= number <= MAX_STEP:
        return number, []
    return None, [f"the step must be from 0 to 2**63 - 1, not {_shorten(number)}"]


def _shorten(number: int) -> str:
    return str(number) if abs(number) < 2**70 else f"a number of {number.bit_length()} bits"
